"""Who shows a token: one that is known, or what is said to who shows none that is good."""

from math import ceil

from fastapi.responses import JSONResponse

from koalapy.api.problems import problem
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.pace import Pace
from koalapy.model.errors import ProblemCode, SiteUnavailable, TokenRefused
from koalapy.model.identity import Identity


class ShownTokens:
    """Whoever guesses is not listened to after a while. That keeps none out whose token cannot be guessed."""

    def __init__(self, identities: Identities, pace: Pace) -> None:
        self._identities, self._pace = identities, pace

    async def identity(self, address: str, shown: str) -> Identity | JSONResponse:
        """Who shows a token, from an address."""
        if not shown:
            return unauthorized()
        why = ""
        identity = self._identities.of(shown)
        if identity is None:
            try:
                identity = await self._identities.verify(shown)
            except TokenRefused as error:
                why = error.message
            except SiteUnavailable as error:
                return problem(error.code, error.message, hint=error.hint, headers={"Retry-After": "10"})
        if identity is not None and not identity.guessable:
            return identity
        if wait := self._pace.guessing(address):
            return problem(
                ProblemCode.TOO_MANY_WRONG_TOKENS,
                f"too many tokens that nobody has were shown from {address}",
                hint="see that no program there shows an old one",
                headers={"Retry-After": str(ceil(wait))},
            )
        if identity is None:
            self._pace.failed(address)
            return unauthorized(why)
        return identity

    def of_browser(self, shown: str) -> Identity | None:
        """Who shows a token by a cookie: of those that were made for browsers no one can guess any."""
        identity = self._identities.of(shown) if shown else None
        return identity if identity is not None and identity.token is not None else None


def unauthorized(why: str = "") -> JSONResponse:
    return problem(
        ProblemCode.NOT_LOGGED_IN,
        f"no valid token was shown: {why}" if why else "no valid token was shown",
        hint="set KOALA_TOKEN, or send Authorization: Bearer TOKEN",
        headers={"WWW-Authenticate": "Bearer"},
    )
