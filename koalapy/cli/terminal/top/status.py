"""The lines at the top: how new it all is, and what is wrong."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from koalapy.cli.errors import printable
from koalapy.cli.terminal.feed import Feed
from koalapy.model.wording import duration

Json = dict[str, Any]
MAX_ALERTS = 3
"""As many are shown; koala alerts shows all."""
STALE_AFTER = 20.0
"""Seconds without an answer after which it is said."""


def head(feed: Feed[Any], url: str, whoami: Json) -> tuple[str, bool]:
    """Who looks at what, and how old that is; whether it is older than it should be."""
    if feed.trouble is not None:
        return printable(f"AS IT WAS {duration(feed.age)} AGO: {feed.trouble.message}"), True
    if feed.age > STALE_AFTER:
        return f"AS IT WAS {duration(feed.age)} AGO: the daemon takes long to answer", True
    live = "live" if feed.is_live else "every 2 s"
    now = datetime.now(UTC).strftime("%H:%M:%S UTC")
    return printable(f"koala top  {url}  {whoami['user']}, {whoami['role']}  {now}  {live}"), False


def alert_lines(alerts: Sequence[Json]) -> list[str]:
    """The most urgent first, each with what helps."""
    lines = [
        printable(f"{alert['severity'].upper()} {alert['target']}: {alert['summary']}. {alert['remedy']}")
        for alert in alerts[:MAX_ALERTS]
    ]
    if len(alerts) > MAX_ALERTS:
        lines.append(f"and {len(alerts) - MAX_ALERTS} more: koala alerts")
    return lines
