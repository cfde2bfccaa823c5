"""Errors of the client, and the exit codes of commands."""

from enum import IntEnum
from http import HTTPStatus

from koalapy.model.errors import (
    BusyError,
    ConflictError,
    FullError,
    KoalaError,
    LeaseLost,
    NotFoundError,
    ProblemCode,
    UsageError,
)


class Exit(IntEnum):
    """The documented exit codes. ``--wait`` and ``koala wait`` exit with the code of the job instead."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    UNREACHABLE = 5
    TIMEOUT = 6
    INTERRUPTED = 130


class GridError(Exception):
    """An error of a request to a grid: its message, what to do (``hint``) and the ``field`` of the job that is wrong.

    ``code`` is the exit code that the same command would have; ``problem`` the code of the daemon's response and
    ``status`` its HTTP status, None and 0 without one. ``retry_after``: pause in seconds that the daemon requests.
    """

    status = 0
    problem: ProblemCode | None = None
    retry_after = 0.0

    def __init__(self, message: str, code: Exit, hint: str = "", field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint
        self.field = field

    def __str__(self) -> str:
        return printable(f"{self.message}; {self.hint}" if self.hint else self.message)

    @property
    def may_recover(self) -> bool:
        """Return whether a later retry may succeed: the daemon or its database is unreachable, or limits the rate."""
        busy = self.status == HTTPStatus.SERVICE_UNAVAILABLE or self.problem is ProblemCode.RATE_LIMIT_EXCEEDED
        return self.code is Exit.UNREACHABLE or (busy and self.retry_after > 0)


def printable(text: str) -> str:
    """Return a text as one line without control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def of_koala(error: KoalaError) -> GridError:
    """Convert an error of koalapy to an error of a command."""
    code = next((code for kind, code in CODE_OF_ERROR.items() if isinstance(error, kind)), Exit.FAILED)
    return GridError(error.message, code, error.hint)


CODE_OF_ERROR: dict[type[KoalaError], Exit] = {
    UsageError: Exit.USAGE,
    NotFoundError: Exit.NOT_FOUND,
    ConflictError: Exit.NOT_ALLOWED,
    BusyError: Exit.NOT_ALLOWED,
    FullError: Exit.NOT_ALLOWED,
    LeaseLost: Exit.NOT_ALLOWED,
}

CODE_OF_STATUS = {
    400: Exit.USAGE,
    401: Exit.NOT_ALLOWED,
    403: Exit.NOT_ALLOWED,
    404: Exit.NOT_FOUND,
    409: Exit.NOT_ALLOWED,
    413: Exit.USAGE,
    421: Exit.USAGE,
    422: Exit.USAGE,
    429: Exit.NOT_ALLOWED,
    507: Exit.NOT_ALLOWED,
}
