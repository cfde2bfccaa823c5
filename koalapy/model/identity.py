"""Who is behind a request, and what they may do."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal

from annotated_types import MinLen


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


MAX_CLAIM_LENGTH = 200
"""Characters of a claim that names a user."""
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""What a pattern may make of a claim: with an ``@`` it could be taken for somebody's account on a cluster."""

Claim = Literal["sub", "email", "preferred_username"]


@dataclass(frozen=True)
class Provider:
    """Whose tokens are taken, for whom they must be made out, and whose they are; the section ``oidc``."""

    issuer: Annotated[str, MinLen(1)]
    """As it stands in the tokens (``iss``)."""
    audience: Annotated[str, MinLen(1)]
    """For whom they must be made out (``aud``): this daemon's name at the provider."""
    jwks_uri: str | None = None
    """Where its keys are fetched: https, or http on a loopback address."""
    jwks_file: str | None = None
    """Or the file that has them."""
    claim: Claim = "sub"
    """What of a token names the user; an ``email`` only where the provider has verified it."""
    users: dict[str, str] = field(default_factory=dict)
    """That claim's value -> user."""
    pattern: str | None = None
    """For all others: the whole claim, with one group that is the user (``(.+)@example\\.org``)."""
    role_claim: str | None = None
    """A claim with a text or a list of texts that may give a role."""
    roles: dict[str, Role] = field(default_factory=dict)
    """Such a text -> role; the highest counts, and none gives less than the configuration's ``users`` do."""
    authorization_endpoint: str | None = None
    """Where browsers are sent to log in to the dashboard; with ``token_endpoint``, else they log in by tokens only."""
    token_endpoint: str | None = None
    """Where the daemon asks for their ID tokens: https, or http on a loopback address."""
    client_secret: str | None = field(default=None, repr=False)
    """By which the daemon shows there who it is, where the provider wants that; its name is the ``audience``."""

    def user_of(self, claims: Mapping[str, Any]) -> str | None:
        """Whose token it is; None of somebody who is not known."""
        named = claims.get(self.claim)
        if not isinstance(named, str) or not 0 < len(named) <= MAX_CLAIM_LENGTH:
            return None
        if self.claim == "email" and claims.get("email_verified") is not True:
            return None
        if named in self.users:
            return self.users[named]
        match = re.fullmatch(self.pattern, named) if self.pattern else None
        user = match[1] if match else None
        return user if user and USER.fullmatch(user) else None

    def role_of(self, claims: Mapping[str, Any]) -> Role | None:
        """The highest role that its claim gives, if any."""
        told = claims.get(self.role_claim) if self.role_claim else None
        texts = [told] if isinstance(told, str) else told if isinstance(told, list) else []
        given = {self.roles[text] for text in texts if isinstance(text, str) and text in self.roles}
        return highest_role(given) if given else None

    def possible_role(self, user: str) -> Role:
        """Return the highest role that a token may give a user whose claims are not known."""
        may_be_named = user in self.users.values() or (self.pattern is not None and USER.fullmatch(user))
        return highest_role(self.roles.values()) if may_be_named else Role.USER


@dataclass(frozen=True, slots=True)
class Verified:
    """Whose a token is, the role that its claims give if any, and until when (seconds since the epoch)."""

    user: str
    role: Role | None
    expires_at: float


def is_provider_token(token: str) -> bool:
    """Whether it has the form of a provider's tokens, which those of the daemon's own never have."""
    return token.count(".") == 2
