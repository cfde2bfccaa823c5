"""How a browser shows a login: by a cookie, which counts for pages, and of the API for what only reads."""

from starlette.datastructures import Headers
from starlette.types import Scope

LOGIN = "/login"
"""Where a form may be sent without being logged in."""
STATE_SPAN = 600.0
"""Seconds that somebody has at a provider."""


def _name(scope: Scope, what: str) -> str:
    """One for each daemon: browsers do not tell the ports of a host apart."""
    prefix = "__Host-" if scope["scheme"] == "https" else ""
    port = Headers(scope=scope).get("host", "").rpartition(":")[2]
    return "_".join(filter(None, (f"{prefix}koala", what, port if port.isdecimal() else "")))


def cookie_of(scope: Scope, what: str = "") -> str:
    """A cookie of this daemon's: of a browser's login, or ``what`` is named; empty without one, and of two.

    Whatever others of the same host have the browser keep, in whatever form, neither hides it nor stands for it.
    """
    given = Headers(scope=scope).getlist("cookie")
    if len(given) != 1:
        return ""
    pairs = (each.partition("=") for each in given[0].split(";"))
    found = [value.strip() for name, _, value in pairs if name.strip() == _name(scope, what)]
    return found[0] if len(found) == 1 else ""


def login_cookie(scope: Scope, token: str, seconds: float) -> str:
    """The header that gives a browser a login; with no seconds left, the one that takes it away."""
    return _cookie(scope, "", token, seconds, "Strict")


def state_cookie(scope: Scope, state: str) -> str:
    """The header by which a browser is known again that comes back from a provider, whose page leads it here."""
    return _cookie(scope, "state", state, STATE_SPAN, "Lax")


def _cookie(scope: Scope, what: str, value: str, seconds: float, site: str) -> str:
    secure = "; Secure" if scope["scheme"] == "https" else ""
    return f"{_name(scope, what)}={value}; Max-Age={int(seconds)}; Path=/; HttpOnly; SameSite={site}{secure}"
