"""A user's identity: ``koala login``, ``logout``, ``whoami``, ``limits``, ``token`` and ``dashboard``."""

import os
import sys
import webbrowser
from datetime import datetime
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import (
    ADDRESS,
    DAEMON,
    Address,
    AsJson,
    Daemon,
    current_timeouts,
    print_answer,
    refuse_together,
    show_json,
)
from koalapy.cli.terminal.tables import format_columns, format_moment, format_table
from koalapy.client import logins
from koalapy.client.access import Access
from koalapy.client.client import Client
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.logins import Login
from koalapy.client.tables import Columns
from koalapy.model.identity import Role
from koalapy.model.wording import format_bytes
from koalapy.system.files import open_own_folder, write_private_file
from koalapy.system.local_token import account_directory
from koalapy.system.tls import without_password


def log_in(address: Address = ADDRESS, as_json: AsJson = False) -> None:
    """Log in by your account on this head node, through the agent there.

    Every command logs in by itself if needed.
    """
    urls = address.urls
    new_login = logins.log_in(urls, current_timeouts())
    if new_login is None:
        ending = f" leads to {' or '.join(map(without_password, urls))}" if urls else " is on this host"
        hint = "log in on a head node, or set KOALA_TOKEN; commands of the daemon's own account need no login"
        raise GridError(f"no cluster's agent{ending}", Exit.UNREACHABLE, hint)
    if as_json:
        names = ("url", "user", "role", "cluster")
        show_json({name: getattr(new_login, name) for name in names} | {"expires_at": new_login.ends_at})
    else:
        identity = f"{new_login.user} ({new_login.role}), attested by {new_login.cluster}"
        print(printable(f"logged in at {new_login.url} as {identity}, until {_expiry_text(new_login)}"))
    if os.environ.get("KOALA_TOKEN"):
        print("koala: KOALA_TOKEN is set and takes precedence over the login", file=sys.stderr)


def log_out(
    address: Address = ADDRESS,
    every: Annotated[bool, Option("--all", help="at every daemon")] = False,
    as_json: AsJson = False,
) -> int:
    """Log out. The next command on a head node logs in again."""
    urls = address.urls
    saved_logins = [login for login in logins.list_valid() if every or not urls or login.url in urls]
    if len(saved_logins) > 1 and not (every or urls):
        known = " and ".join(login.url for login in saved_logins)
        raise GridError(f"you are logged in at {known}", Exit.USAGE, "choose one with --url, or use --all")
    if not saved_logins and not as_json:
        print("you are not logged in")
    worst, ended = Exit.OK, []
    for login in saved_logins:
        logins.forget_login(login.url)
        try:
            Client(login.url, None, Access(login.url, login.token, login.ca)).post("/api/v1/logout")
        except GridError as error:
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
    client = daemon.client()
    identity = client.get("/api/v1/whoami")
    until = f", until {format_moment(identity['expires_at'])}" if identity["expires_at"] else ""
    groups = f", in {', '.join(identity['groups'])}" if identity["groups"] else ""
    text = f"{identity['user']}, {identity['role']}{groups}, known by {identity['how']}{until}, at {client.url}"
    print_answer(identity, as_json, lambda _: printable(text))


def _expiry_text(login: Login) -> str:
    return datetime.fromtimestamp(login.ends_at).astimezone().strftime("%Y-%m-%d %H:%M")


def show_limits(
    user: Annotated[str | None, Option(help="another user, for operators; default: you", completes="users")] = None,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show your limits and their use."""
    print_answer(daemon.client().get("/api/v1/limits", user=user), as_json, _format_limits)


def show_shares(
    user: Annotated[str | None, Option(help="set the weight of this user, for operators", completes="users")] = None,
    weight: Annotated[float | None, Option(help="the new weight; without it, as configured")] = None,
    reason: Annotated[str, Option(help="why it is set")] = "",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show the use of the grid by groups and users, compared with their weights, or set the weight of a user."""
    if user is None and (weight is not None or reason):
        raise GridError("--weight and --reason are of one user", Exit.USAGE, "give --user, too")
    client, path, order = daemon.client(), "/api/v1/limits/shares", Json({"weight": weight, "reason": reason})
    answer = client.get(path) if user is None else client.post(f"{path}/{quote(user, safe='')}", order)
    print_answer(answer, as_json, _format_shares)


def _format_shares(answer: Json) -> str:
    if not answer["shares"]:
        return "no fair shares: rules.queue_order is not fair-share, or no job has started since"
    rows = [
        [
            line["group"] or "-",
            line["user"] or "(all)",
            f"{line['weight']:g}" + (f" (by {line['set_weight']['by']})" if line["set_weight"] else ""),
            f"{100 * line['target']:.1f} %",
            f"{100 * line['share']:.1f} %",
            f"{line['node_hours']:.1f}",
            line["nodes"],
        ]
        for line in answer["shares"]
    ]
    return format_table(["GROUP", "USER", "WEIGHT", "TARGET", "USE", "NODE-HOURS", "NODES"], rows)


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


def create_token(
    user: Annotated[
        str | None, Option(help="user of the token, for administrators; default: you", completes="users")
    ] = None,
    role: Annotated[Role | None, Option(help="role of the token; default: yours, for other users user")] = None,
    expires: Annotated[str | None, Option(help="lifetime, e.g. 8h or 2-00:00:00, or never; default: 30d")] = None,
    note: Annotated[str, Option(help="description of its purpose", may_be_empty=True)] = "",
    quiet: Annotated[bool, Option("-q", "--quiet", help="print the token only")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Create a token for the API and the commands. It is shown once and stored as a digest."""
    refuse_together(json=as_json, quiet=quiet)
    owner_fields = {"user": user, "role": role and str(role)}
    body: Json = {"note": note, **{name: value for name, value in owner_fields.items() if value is not None}}
    if expires is not None:
        body["expires"] = None if expires == "never" else expires
    token = daemon.client().post("/api/v1/tokens", body)
    if as_json:
        show_json(token)
    elif quiet:
        print(token["token"])
    else:
        ends = f"until {token['expires_at']}" if token["expires_at"] else "until it is revoked"
        message = f"token {token['id']} of {token['user']}, {token['role']}, holds {ends}; it is not shown again"
        print(f"koala: {printable(message)}", file=sys.stderr)
        print(token["token"])


TOKENS: Columns = {
    "ID": itemgetter("id"),
    "USER": itemgetter("user"),
    "ROLE": itemgetter("role"),
    "BY": itemgetter("created_by"),
    "CREATED": lambda token: format_moment(token["created_at"]),
    "EXPIRES": lambda token: format_moment(token["expires_at"]),
    "LAST USE": lambda token: format_moment(token["last_used_at"]),
    "REVOKED": lambda token: format_moment(token["revoked_at"]),
    "NOTE": lambda token: token["note"] or token["how"] or "-",
}


def list_tokens(
    user: Annotated[str | None, Option(help="only tokens of this user", completes="users")] = None,
    every: Annotated[bool, Option("--all", help="include tokens that expired or were revoked within a week")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """List valid tokens: your own, and for administrators all."""
    answer = daemon.client().get("/api/v1/tokens", user=user, all="true" if every else None)
    if as_json:
        show_json(answer)
        return
    columns = {name: cell for name, cell in TOKENS.items() if every or name != "REVOKED"}
    print(format_columns(columns, answer["tokens"]))
    if not answer["tokens"]:
        print(printable(f"koala: there are no tokens{f' of {user}' if user else ''}"), file=sys.stderr)


def revoke_tokens(
    tokens: Annotated[list[int] | None, Argument(help="numbers of tokens", completes="tokens")] = None,
    every: Annotated[bool, Option("--all", help="all tokens, for administrators")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Revoke tokens at once, with all tokens created from them and their open connections."""
    if bool(tokens) == every:
        raise GridError("no tokens are given", Exit.USAGE, "give their numbers, or --all")
    order: Json = {"all": True} if every else {"tokens": tokens}
    answer = daemon.client().post("/api/v1/tokens/revoke", order)
    messages = [f"token {token['id']} of {token['user']} is revoked" for token in answer["tokens"]]
    print_answer(answer, as_json, lambda _: "\n".join(map(printable, messages)))


token_group = Group(
    "Create, list and revoke tokens.", {"create": create_token, "list": list_tokens, "revoke": revoke_tokens}
)


PAGE = "dashboard.html"


def open_dashboard(
    open_it: Annotated[bool, Option("--open", help="open it in a browser of this machine")] = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Print an address that logs a browser in as you, once within a minute."""
    client = daemon.client()
    login_code = client.post("/api/v1/login-codes")
    address = f"{client.url}{login_code['path']}"
    if not open_it:
        print(printable(address))
        if sys.stdout.isatty():
            print("koala: open it in a browser within a minute, once", file=sys.stderr)
    elif not webbrowser.open(_write_redirect_page(address).as_uri()):
        raise GridError("no browser could be started", Exit.FAILED, "run it without --open, and open the address")


def _write_redirect_page(address: str) -> Path:
    """Write a private file that redirects a browser to an address. Raise ``GridError`` if this fails.

    Other accounts of the machine can read the arguments of a browser process, and would see a token in them.
    """
    folder = account_directory("browser")
    try:
        if folder is None:
            raise OSError("the account has no home")
        descriptor = open_own_folder(folder, make=True)
        try:
            text = (
                f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(address)}"><title>koala</title>\n'
            )
            os.close(write_private_file(PAGE, descriptor, text))
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise GridError(
            f"cannot create a file that only your account can read: {error}",
            Exit.FAILED,
            "run it without --open, and open the address",
        ) from error
    return folder / PAGE
