"""One agent to a directory: what it keeps there, two would spoil for each other."""

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
"""Seconds."""


@contextmanager
def lock_directory(directory: Path, timeout: float = 0.0) -> Iterator[None]:
    """Hold a directory for this process alone; ``ConflictError`` names who has it, after ``timeout`` seconds.

    The kernel lets go of it when the process ends, however that happens. It holds between hosts, too, where the file
    system knows locks (NFS does); where it does not, nothing is held.
    """
    file = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(file, directory, time.monotonic() + timeout)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):  # where there is no room it is held all the same
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode(), 0)
        yield
    finally:
        os.close(file)


def _lock(file: int, directory: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(RETRY_DELAY)
                continue
            raise ConflictError(
                f"{directory} is the directory of another agent: {_holder(file)}",
                field="--directory",
                value=str(directory),
                hint="stop that one, or give this one a directory of its own with --directory",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            log.warning(
                "the file system knows no locks: see to it that there is one agent only",
                action="no-locks",
                directory=str(directory),
            )
            return


def _holder(file: int) -> str:
    try:
        known = json.loads(os.pread(file, 4096, 0))
        return f"process {known['pid']} on {known['host']}, since {known['since']}"
    except (ValueError, KeyError, TypeError):
        return "one that is just starting"
