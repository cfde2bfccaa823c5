"""Who is behind a request, and what they may do."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


class Role(Enum):
    """What somebody may do; each may do what those before it may."""

    USER = "user"
    """Has jobs and files of their own."""
    OPERATOR = "operator"
    """Looks after the clusters, and everybody's jobs."""
    ADMIN = "admin"
    """Says who may come in, and sees who did what."""

    def __str__(self) -> str:
        return self.value

    def includes(self, other: "Role") -> bool:
        """Whether this role may do what the other may."""
        return _ORDER.index(self) >= _ORDER.index(other)


_ORDER = tuple(Role)


def highest_role(roles: Iterable[Role]) -> Role:
    """Return the highest of several roles, `user` where there is none."""
    return max(roles, key=_ORDER.index, default=Role.USER)


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody who has shown who they are."""

    user: str
    role: Role
    how: str
    """By what they are known, for people: ``token 3``, ``alice on north``."""
    groups: tuple[str, ...] = ()
    token: int | None = None
    """The number of the stored token that was shown, if it was one."""
    expires_at: float | None = None
    """When that ends, in seconds since the epoch."""
    site: str = ""
    """The cluster whose agent has vouched for them; empty of those who did not come by one."""
    guessable: bool = False
    """Whether people have thought of the token, which may be a poor one."""

    def has_role(self, role: Role) -> bool:
        return self.role.includes(role)

    def owns(self, owner: str) -> bool:
        """Whether what is ``owner``'s is theirs."""
        return self.user == owner


@dataclass(frozen=True)
class HighPriority:
    """Who may submit jobs of high priority, which preempt others; the setting ``high_priority``."""

    role: Literal[Role.USER, Role.OPERATOR] = Role.OPERATOR
    """The least role: ``operator``, or ``user`` for every user."""
    users: list[str] = field(default_factory=list)
    """Users who may as well."""
    groups: list[str] = field(default_factory=list)
    """Groups of the setting ``users`` whose members may as well."""

    def is_allowed_to(self, caller: Identity) -> bool:
        """Return whether a caller may give jobs high priority."""
        return caller.has_role(self.role) or caller.user in self.users or not set(self.groups).isdisjoint(caller.groups)
