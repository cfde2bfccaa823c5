"""``koala limits``: what a user may have, and has."""

from typing import Annotated

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer
from koalapy.cli.terminal.tables import table
from koalapy.client.client import Json
from koalapy.client.errors import printable
from koalapy.model.quantities import bytes_text


def limits(
    user: Annotated[
        str | None, Option(help="whose; default: your own; of others for operators", completes="users")
    ] = None,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """What you may have at most, and how much of it you have."""
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
        return bytes_text(int(value)) if limit["name"].endswith("_bytes") else f"{value:g}"

    of = f"group {scope['name']}" if scope["kind"] == "group" else scope["name"]
    return [of, limit["name"], text(limit["used"]), text(limit["limit"])]
