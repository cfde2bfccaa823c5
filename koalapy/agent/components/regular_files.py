"""Files of ours in folders where programs may write, too: what took the place of one keeps nobody waiting.

A pipe would be waited at for its other end, and a link leads elsewhere.
"""

import errno
import os
import stat
from pathlib import Path

from koalapy.runner.collected import CONTENT

_WRITING = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_CHUNK = 1024 * 1024


def read_regular(path: Path, most: int, *, end: bool = False) -> bytes:
    """A file; ``end``: the last of it. What is no file, or has more bytes, is an ``OSError``."""
    descriptor = os.open(path, CONTENT)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or (found.st_size > most and not end):
            raise _odd(path)
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            if end:
                file.seek(max(0, found.st_size - most))
            pieces, left = [], most
            while left and (data := file.read(min(left, _CHUNK))):
                pieces.append(data)
                left -= len(data)
            return b"".join(pieces)
    finally:
        os.close(descriptor)


def open_regular(path: Path, flags: int = 0) -> int:
    """The descriptor of a file to write, only ours to read where it is made; what is no file is an ``OSError``."""
    descriptor = os.open(path, _WRITING | os.O_CREAT | flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _odd(path)
    return descriptor


def _odd(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is nothing that we or a runner leave", str(path))
