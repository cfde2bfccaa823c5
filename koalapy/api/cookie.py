"""How a browser shows a login: by a cookie, which counts for pages, and of the API for what only reads."""

from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.types import Scope

LOGIN = "/login"
"""Where a form may be sent without being logged in."""


def cookie_name(scope: Scope, headers: Headers) -> str:
    """One for each daemon: browsers do not tell the ports of a host apart."""
    prefix = "__Host-" if scope["scheme"] == "https" else ""
    port = headers.get("host", "").rpartition(":")[2]
    return f"{prefix}koala_{port}" if port.isdecimal() else f"{prefix}koala"


def shown_by_cookie(scope: Scope, headers: Headers) -> str:
    """The token of a browser's login; empty without one, and of two."""
    given = headers.getlist("cookie")
    if len(given) != 1:
        return ""
    try:
        morsel = SimpleCookie(given[0]).get(cookie_name(scope, headers))
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def login_cookie(scope: Scope, headers: Headers, token: str, seconds: float) -> str:
    """The header that gives a browser a login; with no seconds left, the one that takes it away."""
    secure = "; Secure" if scope["scheme"] == "https" else ""
    name = cookie_name(scope, headers)
    return f"{name}={token}; Max-Age={int(seconds)}; Path=/; HttpOnly; SameSite=Strict{secure}"
