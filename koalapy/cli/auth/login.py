"""``koala login``, ``logout``, ``whoami`` and ``limits``: the identity and the limits of a user."""

import os
import sys
from datetime import datetime
from typing import Annotated

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Url, print_answer, show_json
from koalapy.cli.terminal.tables import table
from koalapy.client import logins
from koalapy.client.access import Access
from koalapy.client.agent_socket import Login
from koalapy.client.answers import Json
from koalapy.client.client import Client
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.wording import format_bytes


def login(url: Url = None) -> None:
    """Log in by your account on this head node, through the agent there.

    Every command logs in by itself if needed.
    """
    made = logins.log_in(url and url.rstrip("/"), Daemon().timeouts)
    if made is None:
        where = f" leads to {url}" if url else " is on this host"
        hint = "log in on a head node, or set KOALA_TOKEN; commands of the daemon's own account need no login"
        raise CliError(f"no cluster's agent{where}", Exit.UNREACHABLE, hint)
    who = f"{made.user} ({made.role}), attested by {made.cluster}"
    print(printable(f"logged in at {made.url} as {who}, until {_moment(made)}"))
    if os.environ.get("KOALA_TOKEN"):
        print("koala: KOALA_TOKEN is set and takes precedence over the login", file=sys.stderr)


def logout(url: Url = None, every: Annotated[bool, Option("--all", help="at every daemon")] = False) -> int:
    """Log out. The next command on a head node logs in again."""
    kept = [login for login in logins.valid() if every or url is None or url.rstrip("/") == login.url]
    if len(kept) > 1 and not every:
        urls = " and ".join(login.url for login in kept)
        raise CliError(f"you are logged in at {urls}", Exit.USAGE, "choose one with --url, or use --all")
    if not kept:
        print("you are not logged in")
    worst = Exit.OK
    for login in kept:
        logins.forget(login.url)
        try:
            Client(login.url, None, Access(login.url, login.token, login.ca)).post("/api/v1/logout")
        except CliError as error:
            if error.status != 401:  # otherwise it has expired already
                until = f"it was not told, and takes the login until {_moment(login)}"
                print(f"koala: {printable(error.message)}: {until}", file=sys.stderr)
                worst = error.code
                continue
        print(printable(f"logged out at {login.url}"))
    return worst


def whoami(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show your user, role, authentication and its expiry."""
    from koalapy.cli.terminal.tables import moment_text

    client = daemon.client()
    found = client.get("/api/v1/whoami")
    if as_json:
        show_json(found)
        return
    until = f", until {moment_text(found['expires_at'])}" if found["expires_at"] else ""
    groups = f", in {', '.join(found['groups'])}" if found["groups"] else ""
    print(printable(f"{found['user']}, {found['role']}{groups}, known by {found['how']}{until}, at {client.url}"))


def _moment(made: Login) -> str:
    return datetime.fromtimestamp(made.ends_at).astimezone().strftime("%Y-%m-%d %H:%M")


def limits(
    user: Annotated[str | None, Option(help="another user, for operators; default: you", completes="users")] = None,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show your limits and their use."""
    print_answer(daemon.client().get("/api/v1/limits", user=user), as_json, _page)


def _page(answer: Json) -> str:
    rows = [_row(scope, limit) for scope in answer["scopes"] for limit in scope["limits"]]
    if not rows:
        return printable(f"nothing is limited of {answer['user']}")
    contact = "\n\n" + printable(f"more: {answer['contact']}") if answer["contact"] else ""
    return table(["OF", "LIMIT", "USED", "AT MOST"], rows) + contact


def _row(scope: Json, limit: Json) -> list[object]:
    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return format_bytes(int(value)) if limit["name"].endswith("_bytes") else f"{value:g}"

    of = f"group {scope['name']}" if scope["kind"] == "group" else scope["name"]
    return [of, limit["name"], text(limit["used"]), text(limit["limit"])]
