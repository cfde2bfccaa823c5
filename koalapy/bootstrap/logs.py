"""How processes of ours tell what they do."""

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog


class Unfailing:
    """Standard error, though its disk be full or its reader gone: a line that is lost costs less than a daemon."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_logging(level: int = logging.INFO) -> None:
    """One line per event, on standard error."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Unfailing())),
    )
