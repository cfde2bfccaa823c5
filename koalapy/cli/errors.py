"""How the command ends: exit codes, and errors in one line."""

from enum import IntEnum


class Exit(IntEnum):
    """Documented exit codes; ``--wait`` and ``koala wait`` exit with the job's own."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    UNREACHABLE = 5
    TIMEOUT = 6
    INTERRUPTED = 130


EPILOG = (
    "Exit codes: 0 done · 1 failed · 2 wrong usage or a request that can never work · 3 not found · "
    "4 not allowed now · 5 daemon unreachable · 6 timeout · 130 interrupted. "
    "With --wait, and for koala wait: the job's own exit code."
)


class CliError(Exception):
    """Ends the command with a line on standard error: what is wrong, and the way out."""

    def __init__(self, message: str, code: Exit, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.args[0]}; {self.hint}" if self.hint else str(self.args[0])
        return " ".join(text.split())


CODE_OF_STATUS = {
    400: Exit.USAGE,
    401: Exit.NOT_ALLOWED,
    403: Exit.NOT_ALLOWED,
    404: Exit.NOT_FOUND,
    409: Exit.NOT_ALLOWED,
    413: Exit.USAGE,
    422: Exit.USAGE,
    429: Exit.NOT_ALLOWED,
}
