"""Write output to a file that the user has named, or to one for each rank."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable

from koalapy.runner.settings import Failure

MAX_OPEN_FILES = 64
"""Files of ranks that stay open at a time."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""Follow no link that another account may have made there, and wait for no reader of a named pipe."""
_PATTERN = re.compile("%([r%])")


def has_file_per_rank(name: str) -> bool:
    return "r" in _PATTERN.findall(name)


class OutputFile:
    """A file in the program's working directory, in whose name ``%r`` is the rank and ``%%`` a percent sign."""

    def __init__(self, name: str, node: str, say: Callable[[str], None]) -> None:
        """``say`` is called with the first error of writing. ``node``: name of this node in messages."""
        self._name, self._node, self._say = name, node, say
        self.is_per_rank = has_file_per_rank(name)
        self._open: dict[int | None, int] = {}
        self._failed = False

    def path(self, rank: int | None) -> str:
        return _PATTERN.sub(lambda match: str(rank) if match[1] == "r" else "%", self._name)

    def open(self, rank: int | None) -> None:
        """Open the file, that of a rank if it has one for each. Raise ``Failure`` if that is not possible."""
        try:
            self._descriptor_of(rank)
        except OSError as error:
            self._failed = True
            raise Failure(f"cannot write {self.path(rank)} on {self._node}: {_reason(error)}", 126) from error

    def write(self, rank: int | None, data: bytes) -> None:
        """Append to the file. Lines without a rank are in no rank's file. Report the first error to the user."""
        if self.is_per_rank and rank is None:
            return
        try:
            descriptor = self._descriptor_of(rank)
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._say(f"{self.path(rank)} on {self._node} is incomplete: {_reason(error)}")

    def _descriptor_of(self, rank: int | None) -> int:
        """Return the descriptor of a file, opened if needed. Close the one that was opened first if there are many."""
        key = rank if self.is_per_rank else None
        if key not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[key] = os.open(self.path(rank), _FLAGS, 0o666)
        return self._open[key]


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a symbolic link; name the file itself"
    if error.errno == errno.ENXIO:
        return "it is a pipe or device that nothing reads"
    return error.strerror or str(error)
