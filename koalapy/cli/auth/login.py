"""``koala login``, ``logout``, ``whoami`` and ``limits``: the identity and the limits of a user."""

import os
import sys
from datetime import datetime
from typing import Annotated

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Url, print_answer, show_json
from koalapy.cli.terminal.tables import format_table
from koalapy.client import logins
from koalapy.client.access import Access
from koalapy.client.agent_socket import Login
from koalapy.client.answers import Json
from koalapy.client.client import Client
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.wording import format_bytes


def log_in(url: Url = None, as_json: AsJson = False) -> None:
    """Log in by your account on this head node, through the agent there.

    Every command logs in by itself if needed.
    """
    new_login = logins.log_in(url and url.rstrip("/"), Daemon().timeouts)
    if new_login is None:
        ending = f" leads to {url}" if url else " is on this host"
        hint = "log in on a head node, or set KOALA_TOKEN; commands of the daemon's own account need no login"
        raise CliError(f"no cluster's agent{ending}", Exit.UNREACHABLE, hint)
    if as_json:
        names = ("url", "user", "role", "cluster")
        show_json({name: getattr(new_login, name) for name in names} | {"expires_at": new_login.ends_at})
    else:
        identity = f"{new_login.user} ({new_login.role}), attested by {new_login.cluster}"
        print(printable(f"logged in at {new_login.url} as {identity}, until {_expiry_text(new_login)}"))
    if os.environ.get("KOALA_TOKEN"):
        print("koala: KOALA_TOKEN is set and takes precedence over the login", file=sys.stderr)


def log_out(
    url: Url = None, every: Annotated[bool, Option("--all", help="at every daemon")] = False, as_json: AsJson = False
) -> int:
    """Log out. The next command on a head node logs in again."""
    saved_logins = [login for login in logins.list_valid() if every or url is None or url.rstrip("/") == login.url]
    if len(saved_logins) > 1 and not every:
        urls = " and ".join(login.url for login in saved_logins)
        raise CliError(f"you are logged in at {urls}", Exit.USAGE, "choose one with --url, or use --all")
    if not saved_logins and not as_json:
        print("you are not logged in")
    worst, ended = Exit.OK, []
    for login in saved_logins:
        logins.forget_login(login.url)
        try:
            Client(login.url, None, Access(login.url, login.token, login.ca)).post("/api/v1/logout")
        except CliError as error:
            if error.status != 401:  # otherwise it has expired already
                until = f"it was not told, and takes the login until {_expiry_text(login)}"
                print(f"koala: {printable(error.message)}: {until}", file=sys.stderr)
                worst = error.code
                continue
        ended.append(login.url)
        if not as_json:
            print(printable(f"logged out at {login.url}"))
    if as_json:
        show_json({"logged_out": ended})
    return worst


def show_identity(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show your user, role, authentication and its expiry."""
    from koalapy.cli.terminal.tables import format_moment

    client = daemon.client()
    identity = client.get("/api/v1/whoami")
    if as_json:
        show_json(identity)
        return
    until = f", until {format_moment(identity['expires_at'])}" if identity["expires_at"] else ""
    groups = f", in {', '.join(identity['groups'])}" if identity["groups"] else ""
    print(
        printable(f"{identity['user']}, {identity['role']}{groups}, known by {identity['how']}{until}, at {client.url}")
    )


def _expiry_text(login: Login) -> str:
    return datetime.fromtimestamp(login.ends_at).astimezone().strftime("%Y-%m-%d %H:%M")


def show_limits(
    user: Annotated[str | None, Option(help="another user, for operators; default: you", completes="users")] = None,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show your limits and their use."""
    print_answer(daemon.client().get("/api/v1/limits", user=user), as_json, _format_limits)


def _format_limits(answer: Json) -> str:
    rows = [_limit_row(scope, limit) for scope in answer["scopes"] for limit in scope["limits"]]
    if not rows:
        return printable(f"nothing is limited of {answer['user']}")
    contact = "\n\n" + printable(f"more: {answer['contact']}") if answer["contact"] else ""
    return format_table(["OF", "LIMIT", "USED", "AT MOST"], rows) + contact


def _limit_row(scope: Json, limit: Json) -> list[object]:
    """Return the table cells of a limit: its user or group, name, current use and maximum."""

    def text(amount: float | None) -> str:
        if amount is None:
            return "-"
        return format_bytes(int(amount)) if limit["name"].endswith("_bytes") else f"{amount:g}"

    owner = f"group {scope['name']}" if scope["kind"] == "group" else scope["name"]
    return [owner, limit["name"], text(limit["used"]), text(limit["limit"])]
