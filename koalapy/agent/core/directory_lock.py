"""A lock that allows one agent per directory."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import structlog

from koalapy.model.errors import ConflictError

log = structlog.get_logger()

RETRY_DELAY = 0.1
"""Seconds between two attempts."""


@contextmanager
def lock_directory(directory: Path, timeout: float = 0.0) -> Iterator[None]:
    """Lock a directory for this process. Raise ``ConflictError`` with the holder after ``timeout`` seconds.

    The kernel releases the lock when the process ends. It holds between hosts if the file system supports locks, as NFS
    does; otherwise nothing is locked.
    """
    file = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock_file(file, directory, time.monotonic() + timeout)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):  # the lock holds even if the disk is full
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode(), 0)
        yield
    finally:
        os.close(file)


def _lock_file(file: int, directory: Path, deadline: float) -> None:
    """Lock an open file, or log that locks are unsupported. Raise ``ConflictError`` at the deadline (monotonic)."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(RETRY_DELAY)
                continue
            raise ConflictError(
                f"{directory} is in use by another agent: {_holder(file)}",
                field="--directory",
                value=str(directory),
                hint="stop that agent, or give this one another directory with --directory",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            log.warning(
                "the file system supports no locks: make sure that only one agent uses the directory",
                action="no-locks",
                directory=str(directory),
            )
            return


def _holder(file: int) -> str:
    """Return the process that holds a lock, as text, from the content of the lock file."""
    try:
        holder = json.loads(os.pread(file, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "an agent that is starting"
