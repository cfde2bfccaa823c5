"""The command for limits: what one may have, and has."""

from typing import Annotated, Any

from koalapy.cli.client import Client
from koalapy.cli.errors import printable
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DEFAULT_URL, AsJson, Token, Url, show_json
from koalapy.model.quantities import bytes_text

Json = dict[str, Any]


def limits(
    user: Annotated[
        str | None, Option(help="whose; default: your own; of others for operators", completes="users")
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """What you may have at most, and how much of it you have."""
    answer = Client(url, token).get("/api/v1/limits", user=user)
    if as_json:
        show_json(answer)
        return
    from koalapy.cli.terminal.tables import table

    rows = [_row(scope, limit) for scope in answer["scopes"] for limit in scope["limits"]]
    if not rows:
        print(printable(f"nothing is limited of {answer['user']}"))
        return
    print(table(["OF", "LIMIT", "USED", "AT MOST"], rows))
    if answer["contact"]:
        print("\n" + printable(f"more: {answer['contact']}"))


def _row(scope: Json, limit: Json) -> list[object]:
    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return bytes_text(int(value)) if limit["name"].endswith("_bytes") else f"{value:g}"

    of = f"group {scope['name']}" if scope["kind"] == "group" else scope["name"]
    return [of, limit["name"], text(limit["used"]), text(limit["limit"])]
