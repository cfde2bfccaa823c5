"""Codes by which somebody who is logged in at a terminal logs a browser in: each once, and for a minute."""

import secrets
import time
from collections.abc import Callable

from koalapy.model.errors import BusyError
from koalapy.model.identity import Identity

SPAN = 60.0
"""Seconds for which a code holds."""
MAX_CODES = 1000
"""That hold at once."""


class LoginCodes:
    """Kept in memory only: a daemon that begins anew knows none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._codes: dict[str, tuple[Identity, float]] = {}

    def make(self, identity: Identity) -> str:
        """A code that logs its user in, who can do no more than by what he shows now; ``BusyError``."""
        now = self._clock()
        self._codes = {code: (who, until) for code, (who, until) in self._codes.items() if until > now}
        if len(self._codes) >= MAX_CODES:
            raise BusyError("too many log in at once", retry_after=SPAN, hint="try again in a minute")
        code = secrets.token_urlsafe(24)
        self._codes[code] = (identity, now + SPAN)
        return code

    def whose(self, code: str) -> Identity | None:
        """Who would be logged in; the code still holds after that."""
        who, until = self._codes.get(code, (None, 0.0))
        return who if until > self._clock() else None

    def take(self, code: str) -> Identity | None:
        """Who is logged in, once."""
        who = self.whose(code)
        self._codes.pop(code, None)
        return who
