"""``koala alerts``: what is wrong now, and what helps."""

from typing import Any

from koalapy.cli.client import Client
from koalapy.cli.errors import printable
from koalapy.cli.terminal.options import DEFAULT_URL, AsJson, Token, Url, show_json
from koalapy.model.wording import duration

Json = dict[str, Any]


def alerts(as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """What is wrong now, why, and what helps; the most urgent first.

    Operators are told all, others what concerns the clusters and their own jobs.
    """
    answer = Client(url, token).get("/api/v1/alerts")
    if as_json:
        show_json(answer)
        return
    nothing = "nothing is wrong" if answer["looked_at"] else "the daemon has just begun, and has not looked yet"
    print("\n\n".join(_text(alert) for alert in answer["alerts"]) or nothing)


def _text(alert: Json) -> str:
    from koalapy.cli.terminal.tables import seconds_since

    so_long = duration(seconds_since(alert["since"], None))
    told = {name: printable(alert[name]) for name in ("severity", "target", "kind", "summary", "cause", "remedy")}
    head = f"{told['severity'].upper()}  {told['target']}  {told['kind']}, for {so_long}"
    return f"{head}\n  {told['summary']}\n  cause:  {told['cause']}\n  remedy: {told['remedy']}"
