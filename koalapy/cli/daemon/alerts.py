"""``koala alerts``: what is wrong now, and what helps."""

from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer
from koalapy.cli.terminal.tables import seconds_since
from koalapy.client.client import Json
from koalapy.client.errors import printable
from koalapy.model.wording import duration


def alerts(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """What is wrong now, why, and what helps; the most urgent first.

    Operators are told all, others what concerns the clusters and their own jobs.
    """
    print_answer(daemon.client().get("/api/v1/alerts"), as_json, _page)


def _page(answer: Json) -> str:
    nothing = "nothing is wrong" if answer["looked_at"] else "the daemon has just begun, and has not looked yet"
    return "\n\n".join(_text(alert) for alert in answer["alerts"]) or nothing


def _text(alert: Json) -> str:
    so_long = duration(seconds_since(alert["since"], None))
    told = {name: printable(alert[name]) for name in ("severity", "target", "kind", "summary", "cause", "remedy")}
    head = f"{told['severity'].upper()}  {told['target']}  {told['kind']}, for {so_long}"
    return f"{head}\n  {told['summary']}\n  cause:  {told['cause']}\n  remedy: {told['remedy']}"
