"""``koala alerts``: what is wrong now, and what helps."""

from typing import Any

from koalapy.cli.client import Client
from koalapy.cli.errors import printable
from koalapy.cli.options import DEFAULT_URL, AsJson, Token, Url, show_json

Json = dict[str, Any]


def alerts(as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """What is wrong now, why, and what helps; the most urgent first.

    Operators are told all, others what concerns the clusters and their own jobs.
    """
    answer = Client(url, token).get("/api/v1/alerts")
    if as_json:
        show_json(answer)
        return
    print("\n\n".join(_text(alert) for alert in answer["alerts"]) or "nothing is wrong")


def _text(alert: Json) -> str:
    from koalapy.cli.tables import duration, seconds_since

    for_ = duration(seconds_since(alert["since"], None))
    lines = [
        f"{alert['severity'].upper()}  {alert['target']}  {alert['kind']}, for {for_}",
        f"  {alert['summary']}",
        f"  cause:  {alert['cause']}",
        f"  remedy: {alert['remedy']}",
    ]
    return "\n".join(printable(line) for line in lines if line.strip() not in ("cause:", "remedy:"))
