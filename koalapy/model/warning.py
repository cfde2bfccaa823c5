"""The warning that a program gets before it is stopped, so that it can save itself."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from koalapy.model.field import Bounds

MAX_GRACE = 86400
"""Seconds that no configuration can allow more of."""


class WarningSignal(StrEnum):
    """What a program can catch, and what does not stop it in its tracks if it does not: then it could not end."""

    TERM = "TERM"
    INT = "INT"
    HUP = "HUP"
    QUIT = "QUIT"
    USR1 = "USR1"
    USR2 = "USR2"
    ALRM = "ALRM"
    XCPU = "XCPU"
    CONT = "CONT"
    URG = "URG"
    WINCH = "WINCH"


@dataclass(frozen=True, slots=True)
class StopWarning:
    """A signal to all processes of a program, and the grace in seconds that they have from then on."""

    signal: WarningSignal
    grace: Annotated[float, Bounds(above=0, maximum=MAX_GRACE, hint=f"give more than 0 and up to {MAX_GRACE} seconds")]

    def __str__(self) -> str:
        return f"{self.signal}@{int(self.grace) if self.grace == int(self.grace) else self.grace}"
