"""How processes of ours tell what they do: a line for each event on standard error, for people or for programs."""

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
"""Characters of it: the last, where it went wrong."""
FIRST = ("timestamp", "level", "action", "event")
Event = MutableMapping[str, Any]


class Unfailing:
    """Standard error, though its disk be full or its reader gone: a line that is lost costs less than a daemon."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_logging(level: LogLevel = "info", form: LogFormat = "console", **always: str) -> None:
    """``always``: fields of every line, such as the cluster of an agent."""
    least = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            lambda _, __, event: _complete(event, always),
            _as_json
            if form == "json"
            else structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Unfailing())),
    )
    logging.basicConfig(handlers=[Libraries()], level=max(least, logging.WARNING), force=True)
    logging.captureWarnings(True)
    # That a duty is still under way when it is due again is nothing to tell of every two seconds.
    logging.getLogger("apscheduler.scheduler").setLevel(logging.ERROR)
    # That a collector is away is told once, by us.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def watch_out_for_crashes() -> None:
    """Tell where every thread is, if this process is ended for a crash, or by a watchdog (SIGABRT)."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error
        faulthandler.enable()


class Libraries(logging.Handler):
    """What libraries log, as lines like ours."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            said = record.getMessage()
        except Exception:  # noqa: BLE001 - whatever a library gave its own words
            said = str(record.msg)
        error = record.exc_info[1] if record.exc_info else None
        more = {} if error is None else {"exc_info": error}
        structlog.get_logger().log(record.levelno, said, action="library", library=record.name, **more)


def _complete(event: Event, always: Mapping[str, str]) -> Event:
    """With the job of what is told of by a token, and an error with where it came from."""
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
    """One object in one line, whatever the values are."""
    ordered = {name: event[name] for name in FIRST if name in event} | dict(event)
    try:
        return json.dumps(ordered, default=repr, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps({str(name): _plain(value) for name, value in ordered.items()})


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | bool) or value is None else repr(value)


def warn_of_unknown_variables() -> None:
    """Log the ``KOALA_`` variables of the environment that nothing reads."""
    if names := unknown_variables():
        log = structlog.get_logger()
        log.warning("nothing reads these variables", action="variables-unknown", variables=", ".join(names))
