"""Configure logging: one line per event on standard error, as text or JSON."""

import contextlib
import faulthandler
import json
import logging
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO, cast

import structlog

from koalapy.config.settings import LogFormat, LogLevel, unknown_variables
from koalapy.model.job import parse_token

MAX_TRACEBACK_LENGTH = 10_000
"""Characters of a traceback in a log line; the last ones are kept."""
FIRST = ("timestamp", "level", "action", "event")
Event = MutableMapping[str, Any]


class Unfailing:
    """Standard error that ignores write errors: losing a line is better than ending the daemon."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_logging(level: LogLevel = "info", form: LogFormat = "console", **always: str) -> None:
    """Configure the logging of this process.

    ``level`` is the lowest level that is logged. ``always`` are fields of every line, such as the cluster of an agent.
    """
    min_level = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            lambda _, __, event: _add_fields(event, always),
            _as_json
            if form == "json"
            else structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Unfailing())),
    )
    logging.basicConfig(handlers=[Libraries()], level=max(min_level, logging.WARNING), force=True)
    logging.captureWarnings(True)
    # It warns every two seconds while a periodic task is still running when it is due again.
    logging.getLogger("apscheduler.scheduler").setLevel(logging.ERROR)
    # The tracing code reports an unreachable collector itself, once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def watch_out_for_crashes() -> None:
    """Write the stack of every thread when this process crashes or a watchdog ends it (SIGABRT)."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error
        faulthandler.enable()


class Libraries(logging.Handler):
    """A handler that logs the records of libraries in the format of koalapy."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - a library may pass any objects as arguments
            message = str(record.msg)
        error = record.exc_info[1] if record.exc_info else None
        details = {} if error is None else {"exc_info": error}
        structlog.get_logger().log(record.levelno, message, action="library", library=record.name, **details)


def _add_fields(event: Event, always: Mapping[str, str]) -> Event:
    """Add the fields of every line, the job of a token, and the traceback of an error."""
    for name, value in always.items():
        event.setdefault(name, value)
    token = event.get("token", event.get("component"))
    if isinstance(token, str) and "job" not in event:
        with contextlib.suppress(ValueError):
            event["job"] = parse_token(token).job
    error = event.pop("exc_info", None)
    if isinstance(error, BaseException):
        event.setdefault("error", repr(error))
        event["traceback"] = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_LENGTH:]
    return event


def _as_json(_: object, __: str, event: Event) -> str:
    """Format an event as a JSON object in one line. Values that JSON cannot hold are written as ``repr``."""
    ordered = {name: event[name] for name in FIRST if name in event} | dict(event)
    try:
        return json.dumps(ordered, default=repr, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps({str(name): _plain_value(value) for name, value in ordered.items()})


def _plain_value(value: object) -> object:
    return value if isinstance(value, str | int | bool) or value is None else repr(value)


def warn_of_unknown_variables() -> None:
    """Log the ``KOALA_`` variables of the environment that nothing reads."""
    if names := unknown_variables():
        log = structlog.get_logger()
        log.warning("nothing reads these variables", action="variables-unknown", variables=", ".join(names))
