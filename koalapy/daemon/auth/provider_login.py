"""Log browsers in at an OpenID provider by the authorization code flow with PKCE (RFC 7636)."""

import base64
import json
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import urlencode

import httpx2

from koalapy.daemon.auth.identities import Identities
from koalapy.model.errors import ProblemCode, SiteUnavailable, TokenRejected
from koalapy.model.identity import Identity, Provider
from koalapy.system.tls import require_tls_1_2

SPAN = 600.0
"""Seconds within which a user must complete a login at the provider."""
MAX_LOGINS = 1000
"""Maximum number of unfinished logins; the oldest ones are dropped."""
TIMEOUT = 10.0
MAX_ANSWER = 256 * 1024
"""Maximum size of the provider's answer in bytes."""


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

    def __init__(self, provider: Provider, identities: Identities, clock: Callable[[], float] = time.monotonic) -> None:
        self._provider, self._identities, self._clock = provider, identities, clock
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
        identity = await self._identities.verify_token(token)
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
            content = await _post_form(self._provider.token_endpoint or "", form, auth)
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


async def _post_form(uri: str, form: dict[str, str], auth: httpx2.BasicAuth | None) -> bytes:
    """Post a form without redirects and proxies. Raise ``ValueError`` if the answer is too large."""
    async with (
        httpx2.AsyncClient(
            verify=require_tls_1_2(ssl.create_default_context()), trust_env=False, timeout=TIMEOUT
        ) as client,
        client.stream("POST", uri, data=form, auth=auth, headers={"Accept": "application/json"}) as answer,
    ):
        content = bytearray()
        async for piece in answer.aiter_raw():
            content += piece
            if len(content) > MAX_ANSWER:
                raise ValueError("it is too large")
        return bytes(content)


def _read_claims(token: str) -> dict[str, Any]:
    """Return the claims of a token without any verification; empty if they are not an object."""
    part = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return claims if isinstance(claims, dict) else {}
