"""The OpenID provider that issues bearer tokens, and its mapping of claims to users and roles."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from koalapy.config.types import AbsolutePath, ProviderUri, Secret, UserName, UserPattern
from koalapy.model.identity import Role, highest_role

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
    jwks_uri: ProviderUri | None = None
    """The URL of the provider's keys: https, or http on a loopback address."""
    jwks_file: AbsolutePath | None = None
    """A file with the provider's keys, instead of ``jwks_uri``."""
    claim: Claim = "sub"
    """The claim that identifies the user; ``email`` counts only if the provider has verified it."""
    users: dict[str, UserName] = field(default_factory=dict)
    """Value of that claim -> user."""
    pattern: UserPattern | None = None
    """Pattern for other values, matched as a whole; its group is the user: ``(.+)@example\\.org``."""
    role_claim: str | None = None
    """A claim with a text, or a list of texts, that may give a role."""
    roles: dict[str, Role] = field(default_factory=dict)
    """Text of ``role_claim`` -> role. The highest role counts, including the one in ``users`` of the configuration."""
    authorization_endpoint: ProviderUri | None = None
    """The URL where browsers log in to the dashboard; needs ``token_endpoint``. Without it users log in by token."""
    token_endpoint: ProviderUri | None = None
    """The URL where the daemon fetches ID tokens: https, or http on a loopback address."""
    client_secret: Secret | None = field(default=None, repr=False)
    """The secret of the daemon at the provider, if the provider needs one; the client ID is the ``audience``."""

    def __post_init__(self) -> None:
        if (self.authorization_endpoint is None) != (self.token_endpoint is None):
            raise ValueError("give authorization_endpoint and token_endpoint, or neither")
        if (self.jwks_uri is None) == (self.jwks_file is None):
            raise ValueError("give jwks_uri or jwks_file: where the provider's keys are")
        if not self.users and self.pattern is None:
            raise ValueError("give users or pattern, which map the provider's claim to a user")
        if bool(self.roles) != (self.role_claim is not None):
            raise ValueError("give role_claim and roles, or neither")

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
