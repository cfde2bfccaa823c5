"""Verify bearer tokens of an OpenID provider: signature, issuer, audience and times, with the provider's keys.

Log browsers in at the provider by the authorization code flow with PKCE (RFC 7636).
"""

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import structlog
from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, Key, KeySet, OKPKey, RSAKey, import_key
from joserfc.jws import JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from koalapy.config.provider import Provider
from koalapy.model.errors import ProblemCode, SiteUnavailable, TokenRejected
from koalapy.model.identity import Identity, Role, Verified
from koalapy.system.tls import SYSTEM_TRUST

log = structlog.get_logger()

MAX_AGE = 3600.0
"""Seconds for which keys are used after the last successful fetch."""
MIN_PAUSE = 10.0
"""Minimum seconds between two fetches for unknown key ids, since any caller can invent an id."""
FETCH_TIMEOUT = 5.0
"""Timeout of a whole fetch in seconds."""
MAX_SIZE = 256 * 1024
"""Maximum size of a key set, or of the answer to a login, in bytes."""
TIMEOUT = 10.0
"""Seconds for each step of a request to the provider."""
MIN_RSA_BITS = 2048

Fetch = Callable[[], Awaitable[bytes]]


class ProviderKeys:
    """The provider's public signing keys, fetched again when an unknown key id is requested."""

    def __init__(self, fetch: Fetch, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Call ``changed`` whenever the keys change, since earlier verifications may no longer be valid."""
        self._fetch, self._changed, self._clock = fetch, changed, clock
        self._keys = KeySet([])
        self._fetched_at = self._tried_at = -float("inf")
        self._fetching = asyncio.Lock()
        self._problem = ""

    async def for_id(self, kid: str | None) -> KeySet:
        """Return all keys; fetch them first if none has the id ``kid``, at most once in ``MIN_PAUSE``.

        Raise ``SiteUnavailable`` if there are no keys.
        """
        if not self._has_key(kid):
            async with self._fetching:
                if not self._has_key(kid) and self._clock() - self._tried_at >= MIN_PAUSE:
                    await self._fetch_keys()
        if not self._keys:
            raise SiteUnavailable(
                f"the signing keys of the OpenID provider cannot be read: {self._problem}",
                hint="try again in a while",
                code=ProblemCode.PROVIDER_UNAVAILABLE,
            )
        return self._keys

    async def refresh_keys(self) -> None:
        """Fetch the keys again. If that fails, drop keys that are older than ``MAX_AGE``."""
        async with self._fetching:
            await self._fetch_keys()

    def _has_key(self, kid: str | None) -> bool:
        return any(kid in (None, key.kid) for key in self._keys)

    async def _fetch_keys(self) -> None:
        """Replace the keys by those of the provider.

        After a failure, keep them until they are ``MAX_AGE`` seconds old.
        """
        self._tried_at = self._clock()
        try:
            async with asyncio.timeout(FETCH_TIMEOUT):
                keys = parse_signing_keys(await self._fetch())
        except (OSError, ValueError, RecursionError, httpx2.HTTPError, JoseError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
            if not self._problem:
                log.error("the keys of the OpenID provider cannot be had", action="oidc-keys-missing", error=problem)
            self._problem = problem
            if self._clock() - self._fetched_at >= MAX_AGE:
                self._replace_keys(KeySet([]))
            return
        self._fetched_at, self._problem = self._clock(), ""
        self._replace_keys(keys)

    def _replace_keys(self, keys: KeySet) -> None:
        if keys.as_dict() != self._keys.as_dict():
            self._keys = keys
            self._changed()


def parse_signing_keys(content: bytes) -> KeySet:
    """Return the usable signing keys of a JSON key set. Raise ``ValueError`` if it is invalid or has none."""
    if len(content) > MAX_SIZE:
        raise ValueError(f"they are more than {MAX_SIZE} bytes")
    document = json.loads(content)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("it is not a JSON key set: it has no list named keys")
    keys: list[Key] = [key for entry in listed if (key := _parse_signing_key(entry)) is not None]
    if not keys:
        raise ValueError("it has no public key for RS256, ES256 or EdDSA")
    return KeySet(keys)


def _parse_signing_key(entry: Any) -> Key | None:
    """Return a public signing key, or None if it is invalid, too weak or of an unsupported type.

    Symmetric keys are never accepted.
    """
    if (
        not isinstance(entry, dict)
        or entry.get("use", "sig") != "sig"
        or "verify" not in entry.get("key_ops", ["verify"])
    ):
        return None
    if entry.get("kty") not in ("RSA", "EC", "OKP") or entry.get("crv") not in (None, "P-256", "Ed25519"):
        return None
    try:
        key = import_key({name: entry[name] for name in _PUBLIC if name in entry})
    except (JoseError, ValueError, TypeError, KeyError):
        return None
    if isinstance(key, RSAKey):
        return key if key.raw_value.key_size >= MIN_RSA_BITS else None
    kinds = {"P-256": ECKey, "Ed25519": OKPKey}
    return key if isinstance(key, kinds[entry["crv"]]) else None


_PUBLIC = ("kty", "kid", "alg", "use", "n", "e", "crv", "x", "y")


def key_source(provider: Provider) -> Fetch:
    """Return the function that fetches a provider's key set, from its file or its URI."""
    if provider.jwks_file is not None:
        path = Path(provider.jwks_file)
        return lambda: asyncio.to_thread(_read_key_file, path)
    uri = provider.jwks_uri or ""
    return lambda: fetch_content(uri)


def _read_key_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_SIZE + 1)


async def fetch_content(uri: str, form: dict[str, str] | None = None, auth: httpx2.BasicAuth | None = None) -> bytes:
    """Get a URI, or post a form to it, without redirects and proxies.

    Stop reading once the content is larger than ``MAX_SIZE``. Raise ``ValueError`` for any status but 200 of a URI that
    is read; the answer to a form says itself what is wrong.
    """
    async with (
        httpx2.AsyncClient(verify=SYSTEM_TRUST.create_context(), trust_env=False, timeout=TIMEOUT) as client,
        client.stream(
            "GET" if form is None else "POST",
            uri,
            data=form,
            auth=auth,
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        ) as answer,
    ):
        if form is None and answer.status_code != 200:
            raise ValueError(f"{uri} answers {answer.status_code}")
        content = bytearray()
        async for piece in answer.aiter_raw():
            content += piece
            if len(content) > MAX_SIZE:
                break
        return bytes(content)


ALGORITHMS = ("RS256", "ES256", "EdDSA", "Ed25519")
"""Accepted signature algorithms: asymmetric ones only, so that only the provider can sign."""
LEEWAY = 30
"""Tolerated difference of clocks in seconds."""
MAX_TOKEN_LENGTH = 16 * 1024
"""Maximum length of a token in characters."""
MAX_HEADER_LENGTH = 2048
MAX_KNOWN = 10_000
"""Maximum number of cached verifications."""
MAX_SPAN = 86400.0
"""Maximum seconds for which a verification is valid; then the token's running requests are cancelled."""


class Oidc:
    """A verifier of provider tokens that caches each result by digest until the token expires or the keys change."""

    def __init__(
        self,
        provider: Provider,
        fetch: Fetch | None = None,
        clock: Callable[[], float] = time.time,
        keys_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.provider = provider
        self.keys = ProviderKeys(fetch or key_source(provider), lambda: self._cached.clear(), keys_clock)
        self._clock = clock
        self._cached: dict[bytes, Verified] = {}
        self._latest_by_user: dict[str, Verified] = {}
        """By user, the valid token with the highest role; if none is valid, the last one."""
        self._registry = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
        self._registry.max_header_length = MAX_HEADER_LENGTH

    def cached_result(self, token: str) -> Verified | None:
        """Return the cached verification of a token, or None if there is none or it has expired."""
        verified = self._cached.get(digest := sha256(token.encode()).digest())
        if verified is not None and verified.expires_at <= self._clock():
            del self._cached[digest]
            return None
        return verified

    def role_of(self, user: str) -> Role:
        """Return the role that a user's tokens gave, or the highest possible role if none was verified yet."""
        latest = self._latest_by_user.get(user)
        return self.provider.possible_role(user) if latest is None else latest.role or Role.USER

    async def verify_token(self, token: str) -> Verified:
        """Verify a token, or return the cached result.

        Raise ``TokenRejected`` for an invalid token, and ``SiteUnavailable`` while the provider's keys are unavailable.
        """
        if verified := self.cached_result(token):
            return verified
        if len(token) > MAX_TOKEN_LENGTH:
            raise TokenRejected(f"it has more than {MAX_TOKEN_LENGTH} characters")
        try:
            header = jws.extract_compact(token.encode(), registry=self._registry).headers()
            if header.get("alg") not in ALGORITHMS:
                raise TokenRejected(f"it is signed by {str(header.get('alg'))[:20]}, not by one of {_LISTED}")
            kid = header.get("kid")
            keys = await self.keys.for_id(kid if isinstance(kid, str) else None)
            claims = jwt.decode(token, keys, registry=self._registry).claims
            self._check_claims(claims)
        except JoseError as error:
            raise TokenRejected(error.description or error.error.replace("_", " ")) from error
        # The content is untrusted, and joserfc raises these errors for some malformed tokens.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TokenRejected("it is not a signed token") from error
        return self._cache_result(token, claims)

    def _check_claims(self, claims: dict[str, Any]) -> None:
        """Check issuer, audience and times. Raise ``JoseError`` if one does not match."""
        now = int(self._clock())
        JWTClaimsRegistry(
            now=now,
            leeway=LEEWAY,
            iss={"essential": True, "value": self.provider.issuer},
            aud={"essential": True, "value": self.provider.audience},
            exp={"essential": True},
        ).validate(claims)

    def _cache_result(self, token: str, claims: dict[str, Any]) -> Verified:
        """Return the identity in verified claims, and keep it for the token.

        Raise ``TokenRejected`` for an unknown user.
        """
        user = self.provider.user_of(claims)
        if user is None:
            raise TokenRejected(
                f"its claim {self.provider.claim} names no configured "
                "user: add it to oidc.users, or change oidc.pattern"
            )
        verified = Verified(user, self.provider.role_of(claims), min(claims["exp"], self._clock() + MAX_SPAN))
        if len(self._cached) >= MAX_KNOWN:
            del self._cached[next(iter(self._cached))]
        self._cached[sha256(token.encode()).digest()] = verified
        self._note_role(verified)
        return verified

    def _note_role(self, verified: Verified) -> None:
        """Remember the highest role in a user's valid tokens, for requests that look up the user without a token."""
        latest = self._latest_by_user.get(verified.user)
        role = verified.role or Role.USER
        if latest is None or latest.expires_at <= self._clock() or role.includes(latest.role or Role.USER):
            if latest is None and len(self._latest_by_user) >= MAX_KNOWN:
                del self._latest_by_user[next(iter(self._latest_by_user))]
            self._latest_by_user[verified.user] = verified


_LISTED = ", ".join(ALGORITHMS)


SPAN = 600.0
"""Seconds within which a user must complete a login at the provider."""
MAX_LOGINS = 1000
"""Maximum number of unfinished logins; the oldest ones are dropped."""


@dataclass(frozen=True, slots=True)
class LoginUnderWay:
    """An unfinished login of a browser that was sent to the provider."""

    nonce: str
    verifier: str
    back: str
    """The URL to which the provider redirects the browser."""
    then: str
    """The page to show after the login."""
    until: float


class ProviderLogins:
    """Logins of browsers at a provider, each identified by its ``state``, which the browser also has in a cookie."""

    def __init__(
        self,
        provider: Provider,
        verify: Callable[[str], Awaitable[Identity | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``verify`` returns the identity of a token of the provider."""
        self._provider, self._verify, self._clock = provider, verify, clock
        self._under_way: dict[str, LoginUnderWay] = {}

    def begin_login(self, back: str, then: str) -> tuple[str, str]:
        """Begin a login; return the provider's URL and the state that the browser must send back."""
        now = self._clock()
        self._under_way = {state: login for state, login in self._under_way.items() if login.until > now}
        while len(self._under_way) >= MAX_LOGINS:
            del self._under_way[next(iter(self._under_way))]
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        self._under_way[state] = LoginUnderWay(nonce, verifier, back, then, now + SPAN)
        challenge = base64.urlsafe_b64encode(sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": self._provider.audience,
            "redirect_uri": back,
            "scope": "openid email profile",
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        endpoint = self._provider.authorization_endpoint or ""
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}", state

    async def finish_login(self, state: str, code: str) -> tuple[Identity, str]:
        """Finish a login; return the user's identity and the page to show.

        Raise ``TokenRejected`` if the state or the ID token is invalid, and ``SiteUnavailable`` if the provider does
        not answer.
        """
        login = self._under_way.pop(state, None)
        if login is None or login.until <= self._clock():
            raise TokenRejected("this login has expired, or was begun at another daemon: log in again")
        token = await self._fetch_id_token(login, code)
        identity = await self._verify(token)
        # The claims can be trusted, since the token was verified above.
        if identity is None or _read_claims(token).get("nonce") != login.nonce:
            raise TokenRejected("the provider's ID token belongs to another login attempt: log in again")
        return identity, login.then

    async def _fetch_id_token(self, login: LoginUnderWay, code: str) -> str:
        """Exchange the code of a browser login for an ID token of the provider.

        Raise ``SiteUnavailable`` if the provider does not answer, ``TokenRejected`` if it refuses.
        """
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": login.back,
            "client_id": self._provider.audience,
            "code_verifier": login.verifier,
        }
        secret = self._provider.client_secret
        auth = httpx2.BasicAuth(self._provider.audience, secret) if secret else None
        try:
            content = await fetch_content(self._provider.token_endpoint or "", form, auth)
            answer = json.loads(content)
        except (OSError, httpx2.HTTPError) as error:
            raise SiteUnavailable(
                f"the OpenID provider does not answer: {error or type(error).__name__}",
                code=ProblemCode.PROVIDER_UNAVAILABLE,
            ) from error
        except (ValueError, RecursionError) as error:
            raise TokenRejected("the OpenID provider's answer is not JSON: check oidc.token_endpoint") from error
        token = answer.get("id_token") if isinstance(answer, dict) else None
        if not isinstance(token, str):
            error_code = str(answer.get("error", ""))[:100] if isinstance(answer, dict) else ""
            raise TokenRejected(f"the OpenID provider gives no ID token{f': {error_code}' if error_code else ''}")
        return token


def _read_claims(token: str) -> dict[str, Any]:
    """Return the claims of a token without any verification; empty if they are not an object."""
    part = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return claims if isinstance(claims, dict) else {}
