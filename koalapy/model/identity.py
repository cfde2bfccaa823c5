"""Authenticated callers, their roles and permissions."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


class Role(Enum):
    """The role of a caller; each role includes the permissions of the roles before it."""

    USER = "user"
    """May manage the caller's own jobs and files."""
    OPERATOR = "operator"
    """May manage clusters and the jobs of all users."""
    ADMIN = "admin"
    """May manage tokens and read the audit log."""

    def __str__(self) -> str:
        return self.value

    def includes(self, role: "Role") -> bool:
        """Return whether this role has all permissions of the other role."""
        return _ORDER.index(self) >= _ORDER.index(role)


_ORDER = tuple(Role)


def highest_role(roles: Iterable[Role]) -> Role:
    """Return the highest of several roles, or ``user`` if there is none."""
    return max(roles, key=_ORDER.index, default=Role.USER)


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated caller and its role."""

    user: str
    role: Role
    how: str
    """By what the caller was authenticated: ``token 3``, ``alice on north``."""
    groups: tuple[str, ...] = ()
    token: int | None = None
    """The number of the stored token; None if the caller used no stored token."""
    expires_at: float | None = None
    """When the authentication expires, in seconds since the epoch; None: never."""
    site: str = ""
    """The cluster with the agent that attested the account; empty for other kinds of login."""
    guessable: bool = False
    """Whether a person chose the token, so that it may be easy to guess."""

    def has_role(self, role: Role) -> bool:
        """Return whether the caller has a role or a higher one."""
        return self.role.includes(role)

    def owns(self, owner: str) -> bool:
        """Return whether the caller is the owner of an object."""
        return self.user == owner


@dataclass(frozen=True)
class Permission:
    """The users that have an additional right; the settings ``high_priority`` and ``reservations``."""

    role: Literal[Role.USER, Role.OPERATOR] = Role.OPERATOR
    """The lowest role that may: ``operator``, or ``user`` for all users."""
    users: list[str] = field(default_factory=list)
    """Additional users that may."""
    groups: list[str] = field(default_factory=list)
    """Groups of the setting ``users``; their members may, too."""

    def is_allowed_to(self, caller: Identity) -> bool:
        """Return whether a caller may do it."""
        return caller.has_role(self.role) or caller.user in self.users or not set(self.groups).isdisjoint(caller.groups)


@dataclass(frozen=True, slots=True)
class Verified:
    """The user, role and expiry of a valid token; seconds since the epoch, None for a token that gives no role."""

    user: str
    role: Role | None
    expires_at: float


def is_provider_token(token: str) -> bool:
    """Return whether a token has the form of a JWT, which the tokens of the daemon never have."""
    return token.count(".") == 2
