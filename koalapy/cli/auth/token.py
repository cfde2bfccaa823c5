"""``koala token``: create, list and revoke tokens."""

import sys
from typing import Annotated

from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, refuse_together, show_json
from koalapy.cli.terminal.tables import format_moment, format_table
from koalapy.client.answers import Json
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.identity import Role


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
    header = ["ID", "USER", "ROLE", "BY", "CREATED", "EXPIRES", "LAST USE", *(["REVOKED"] if every else []), "NOTE"]
    print(format_table(header, [_token_row(token, every=every) for token in answer["tokens"]]))
    if not answer["tokens"]:
        print(printable(f"koala: there are no tokens{f' of {user}' if user else ''}"), file=sys.stderr)


def _token_row(token: Json, *, every: bool) -> list[object]:
    """Return the table cells of a token. ``every``: include the time of its revocation."""
    times = ["created_at", "expires_at", "last_used_at", *(["revoked_at"] if every else [])]
    moments = [format_moment(token[name]) for name in times]
    return [
        token["id"],
        token["user"],
        token["role"],
        token["created_by"],
        *moments,
        token["note"] or token["how"] or "-",
    ]


def revoke_tokens(
    tokens: Annotated[list[int] | None, Argument(help="numbers of tokens", completes="tokens")] = None,
    every: Annotated[bool, Option("--all", help="all tokens, for administrators")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Revoke tokens at once, with all tokens created from them and their open connections."""
    if bool(tokens) == every:
        raise CliError("no tokens are given", Exit.USAGE, "give their numbers, or --all")
    order: Json = {"all": True} if every else {"tokens": tokens}
    answer = daemon.client().post("/api/v1/tokens/revoke", order)
    if as_json:
        show_json(answer)
        return
    for token in answer["tokens"]:
        print(printable(f"token {token['id']} of {token['user']} is revoked"))


token_group = Group(
    "Create, list and revoke tokens.", {"create": create_token, "list": list_tokens, "revoke": revoke_tokens}
)
