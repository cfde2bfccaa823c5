"""Why a stage cannot be brought, in the words of the protocol."""

import errno
from typing import Literal

Fault = Literal["site", "source", "file"]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StageError(Exception):
    """It will not go on: ``fault`` says whom to blame, ``source`` and ``file`` which cluster and logical file."""

    def __init__(self, message: str, fault: Fault, *, source: str = "", file: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fault: Fault = fault
        self.source = source
        self.file = file


def site_error(cluster: str, error: OSError) -> StageError:
    """A file of ours could not be made or written."""
    what = "there is no room left" if error.errno in FULL else "a file cannot be written"
    return StageError(f"{what} on {cluster}: {error.strerror or error}", "site")
