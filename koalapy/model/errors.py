"""The errors koalapy raises on purpose.

KoalaError
├── UsageError        the request is wrong; says which field, which value, and the way out
│   └── TooLargeError   more bytes than are taken
├── NotFoundError     no such job, cluster or policy
├── ConflictError     the thing exists but is in no state for this (cancel a finished job, …)
│   └── LimitReached    a user or group has as much as they may have
├── TokenRefused      a token is not believed
├── ForbiddenError    who asks may not do that
│   ├── NotLoggedIn     it is not known who asks
│   └── NeverAllowed    more is asked for at once than a user or group may ever have
├── BusyError         refused for now; may be tried again after ``retry_after`` seconds
├── FullError         there is no room for what was sent
├── StoreUnavailable  the database did not answer; may be tried again
│   └── DatabaseDamaged the database cannot be read
├── LeaseLost         another daemon has taken over this database
└── SiteError         a cluster said no or did not answer
    ├── SiteUnavailable   may be tried again
    └── SiteRejected      will not work again as asked
"""

from typing import NoReturn


class KoalaError(Exception):
    """Base of everything koalapy raises on purpose; ``field``, ``value`` and ``hint`` say where and the way out."""

    def __init__(self, message: str, *, field: str = "", value: object = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = value
        self.hint = hint


class UsageError(KoalaError):
    """The caller asked for something that cannot be; nothing was stored."""


def reject(field: str, value: object, problem: str, hint: str) -> NoReturn:
    """``UsageError`` for a field, whose name begins the message."""
    raise UsageError(f"{field} {problem}", field=field, value=value, hint=hint)


class TooLargeError(UsageError):
    """More bytes were sent than are taken; nothing of them was kept."""


class NotFoundError(KoalaError):
    """There is no such thing."""


class ConflictError(KoalaError):
    """The thing is not in a state that allows this."""


class ForbiddenError(KoalaError):
    """Who asks is known, and may not do that; nothing was done."""


class NotLoggedIn(ForbiddenError):
    """It is not known who asks."""


class TokenRefused(KoalaError):
    """A token that is not believed; the text says why, for whoever shows it."""


class LimitReached(ConflictError):
    """A user or group has as much as they may have; it works again when they have less."""


class NeverAllowed(ForbiddenError):
    """More is asked for at once than a user or group may ever have."""


class BusyError(KoalaError):
    """Refused for now."""

    def __init__(self, message: str, *, retry_after: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class FullError(KoalaError):
    """No room is left for what was sent; nothing of it was kept."""


class StoreUnavailable(KoalaError):
    """The database is locked, full or away; nothing of the transaction was kept."""


class DatabaseDamaged(StoreUnavailable):
    """The database is damaged and cannot be read; an operator has to put a backup back."""


class LeaseLost(KoalaError):
    """Another daemon serves this database; this one must end."""


class SiteError(KoalaError):
    """A cluster's local resource manager failed or refused."""


class SiteUnavailable(SiteError):
    """The resource manager did not answer; the same call may work later."""


class SiteRejected(SiteError):
    """The cluster refused; the same call will be refused again. ``fault`` is an error code, if it gave one."""

    def __init__(self, message: str, *, field: str = "", value: object = None, hint: str = "", fault: str = "") -> None:
        super().__init__(message, field=field, value=value, hint=hint)
        self.fault = fault
