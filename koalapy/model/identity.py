"""Authenticated callers, their roles, and the OpenID provider that issues their tokens."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal

from annotated_types import MinLen


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
    """The users that may do what others may not; the settings ``high_priority`` and ``reservations``."""

    role: Literal[Role.USER, Role.OPERATOR] = Role.OPERATOR
    """The lowest role that may: ``operator``, or ``user`` for all users."""
    users: list[str] = field(default_factory=list)
    """Additional users that may."""
    groups: list[str] = field(default_factory=list)
    """Groups of the setting ``users``; their members may, too."""

    def is_allowed_to(self, caller: Identity) -> bool:
        """Return whether a caller may do it."""
        return caller.has_role(self.role) or caller.user in self.users or not set(self.groups).isdisjoint(caller.groups)


MAX_CLAIM_LENGTH = 200
"""Characters of a claim that names a user."""
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""User names that a pattern may extract from a claim. A name with ``@`` could be mistaken for ``ACCOUNT@CLUSTER``."""

Claim = Literal["sub", "email", "preferred_username"]


@dataclass(frozen=True)
class Provider:
    """An OpenID provider and the mapping of its claims to users and roles; the section ``oidc``."""

    issuer: Annotated[str, MinLen(1)]
    """The claim ``iss`` of its tokens."""
    audience: Annotated[str, MinLen(1)]
    """The claim ``aud`` of its tokens: the client ID of this daemon at the provider."""
    jwks_uri: str | None = None
    """The URL of the provider's keys: https, or http on a loopback address."""
    jwks_file: str | None = None
    """A file with the provider's keys, instead of ``jwks_uri``."""
    claim: Claim = "sub"
    """The claim that identifies the user; ``email`` counts only if the provider has verified it."""
    users: dict[str, str] = field(default_factory=dict)
    """Value of that claim -> user."""
    pattern: str | None = None
    """Pattern for other values, matched as a whole; its group is the user: ``(.+)@example\\.org``."""
    role_claim: str | None = None
    """A claim with a text, or a list of texts, that may give a role."""
    roles: dict[str, Role] = field(default_factory=dict)
    """Text of ``role_claim`` -> role. The highest role counts, including the one in ``users`` of the configuration."""
    authorization_endpoint: str | None = None
    """The URL where browsers log in to the dashboard; needs ``token_endpoint``. Without it users log in by token."""
    token_endpoint: str | None = None
    """The URL where the daemon fetches ID tokens: https, or http on a loopback address."""
    client_secret: str | None = field(default=None, repr=False)
    """The secret of the daemon at the provider, if the provider needs one; the client ID is the ``audience``."""

    def user_of(self, claims: Mapping[str, Any]) -> str | None:
        """Return the user that a token's claims identify; None if there is no such user."""
        value = claims.get(self.claim)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_CLAIM_LENGTH:
            return None
        if self.claim == "email" and claims.get("email_verified") is not True:
            return None
        if value in self.users:
            return self.users[value]
        match = re.fullmatch(self.pattern, value) if self.pattern else None
        user = match[1] if match else None
        return user if user and USER.fullmatch(user) else None

    def role_of(self, claims: Mapping[str, Any]) -> Role | None:
        """Return the highest role that a token's claims give; None if they give none."""
        value = claims.get(self.role_claim) if self.role_claim else None
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        roles = {self.roles[text] for text in texts if isinstance(text, str) and text in self.roles}
        return highest_role(roles) if roles else None

    def possible_role(self, user: str) -> Role:
        """Return the highest role that a token may give a user before its claims are known."""
        may_be_named = user in self.users.values() or (self.pattern is not None and USER.fullmatch(user))
        return highest_role(self.roles.values()) if may_be_named else Role.USER


@dataclass(frozen=True, slots=True)
class Verified:
    """The user, role and expiry of a valid token; seconds since the epoch, None for a token that gives no role."""

    user: str
    role: Role | None
    expires_at: float


def is_provider_token(token: str) -> bool:
    """Return whether a token has the form of a JWT, which the tokens of the daemon never have."""
    return token.count(".") == 2
