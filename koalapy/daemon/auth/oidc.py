"""Bearer tokens of an OpenID provider: signature, issuer, audience and times are verified, and whose they are."""

import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jws import JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from koalapy.daemon.auth.provider_keys import Fetch, ProviderKeys, source_of
from koalapy.model.errors import TokenRejected
from koalapy.model.identity import Provider, Role, Verified

ALGORITHMS = ("RS256", "ES256", "EdDSA", "Ed25519")
"""Those by which a provider alone can sign: never ``none``, and no secret that both sides know."""
LEEWAY = 30
"""Seconds by which clocks may differ."""
MAX_TOKEN_LENGTH = 16 * 1024
"""Characters."""
MAX_HEADER_LENGTH = 2048
MAX_KNOWN = 10_000
"""Verified tokens that are remembered."""
MAX_SPAN = 86400.0
"""Seconds after which a token that says to be good for longer is verified again, and what is open by it ends."""


class Oidc:
    """Verifies tokens, each once: until it expires, or the provider's keys change, it is known by its digest."""

    def __init__(
        self,
        provider: Provider,
        fetch: Fetch | None = None,
        clock: Callable[[], float] = time.time,
        keys_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.provider = provider
        self.keys = ProviderKeys(fetch or source_of(provider), self._forget, keys_clock)
        self._clock = clock
        self._known: dict[bytes, Verified] = {}
        self._latest: dict[str, Verified] = {}
        """By user: of the tokens that hold, the one with the highest role; of those that have expired, the last."""
        self._registry = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
        self._registry.max_header_length = MAX_HEADER_LENGTH

    def known(self, token: str) -> Verified | None:
        """Of a token that was verified before, and has not expired."""
        found = self._known.get(digest := sha256(token.encode()).digest())
        if found is not None and found.expires_at <= self._clock():
            del self._known[digest]
            return None
        return found

    def role_of(self, user: str) -> Role:
        """Return the role that a user's tokens gave, or the highest that they may give if the user has shown none."""
        seen = self._latest.get(user)
        return self.provider.possible_role(user) if seen is None else seen.role or Role.USER

    async def verify(self, token: str) -> Verified:
        """``TokenRejected``, and ``SiteUnavailable`` while the provider's keys cannot be had."""
        if found := self.known(token):
            return found
        if len(token) > MAX_TOKEN_LENGTH:
            raise TokenRejected(f"it has more than {MAX_TOKEN_LENGTH} characters")
        try:
            header = jws.extract_compact(token.encode(), registry=self._registry).headers()
            if header.get("alg") not in ALGORITHMS:
                raise TokenRejected(f"it is signed by {str(header.get('alg'))[:20]}, not by one of {_LISTED}")
            kid = header.get("kid")
            keys = await self.keys.for_id(kid if isinstance(kid, str) else None)
            claims = jwt.decode(token, keys, registry=self._registry).claims
            self._check(claims)
        except JoseError as error:
            raise TokenRejected(error.description or error.error.replace("_", " ")) from error
        # What it holds is not ours: joserfc stumbles over some of what is no token at all.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TokenRejected("it is no signed token") from error
        return self._remember(token, claims)

    def _check(self, claims: dict[str, Any]) -> None:
        """Raises ``JoseError``."""
        now = int(self._clock())
        JWTClaimsRegistry(
            now=now,
            leeway=LEEWAY,
            iss={"essential": True, "value": self.provider.issuer},
            aud={"essential": True, "value": self.provider.audience},
            exp={"essential": True},
        ).validate(claims)

    def _remember(self, token: str, claims: dict[str, Any]) -> Verified:
        user = self.provider.user_of(claims)
        if user is None:
            raise TokenRejected(f"its {self.provider.claim} is nobody who is known here")
        verified = Verified(user, self.provider.role_of(claims), min(claims["exp"], self._clock() + MAX_SPAN))
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[sha256(token.encode()).digest()] = verified
        self._note_role(verified)
        return verified

    def _note_role(self, verified: Verified) -> None:
        seen = self._latest.get(verified.user)
        role = verified.role or Role.USER
        if seen is None or seen.expires_at <= self._clock() or role.includes(seen.role or Role.USER):
            if seen is None and len(self._latest) >= MAX_KNOWN:
                del self._latest[next(iter(self._latest))]
            self._latest[verified.user] = verified

    def _forget(self) -> None:
        self._known.clear()


_LISTED = ", ".join(ALGORITHMS)
