"""``koala audit-log``: who did what, from where, and who was refused."""

import json
import sys
import time
from typing import Annotated, Any

from koalapy.cli.arguments import Option
from koalapy.cli.client import MAX_PAGE_SIZE, Client
from koalapy.cli.errors import printable
from koalapy.cli.options import DEFAULT_URL, Token, Url

Json = dict[str, Any]
POLL_INTERVAL = 2.0
"""Seconds between two questions for what is new."""


def audit_log(
    since: Annotated[float, Option(help="of so many seconds until now")] = 86400.0,
    user: Annotated[str | None, Option(help="only what this user did", completes="users")] = None,
    action: Annotated[str | None, Option(help="only this operation, as submit_job")] = None,
    follow: Annotated[bool, Option("--follow", help="and what comes, as it comes")] = False,
    json_lines: Annotated[bool, Option("--json-lines", help="one JSON object a line")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Tell administrators who changed what, from where, and who was refused, the oldest first."""
    client, after = Client(url, token), 0
    query: Json = {"since": since, "user": user, "action": action, "limit": MAX_PAGE_SIZE}
    while True:
        page = client.get("/api/v1/audit", after=after, **query)
        for entry in page["entries"]:
            print(json.dumps(entry) if json_lines else _line(entry))
        if not (page["entries"] or after or follow or json_lines):
            print(f"koala: {printable(_none(since, user, action))}", file=sys.stderr)
        after = page["next"]
        if len(page["entries"]) < MAX_PAGE_SIZE:
            if not follow:
                return
            query.pop("since", None)  # what is new is told by its number, whatever the clocks say
            sys.stdout.flush()
            time.sleep(POLL_INTERVAL)


def _none(since: float, user: str | None, action: str | None) -> str:
    """What was looked for in vain."""
    told = f"there are no entries of {user}" if user else "there are no entries"
    return told + (f" with the action {action}" if action else "") + f" in the last {since:g} s"


def _line(entry: Json) -> str:
    who = f"{entry['actor']} ({entry['role']}, {entry['how']})" if entry["actor"] else "somebody"
    parts = [entry["at"], who, f"from {entry['address']}", entry["action"], entry["target"], entry["outcome"]]
    more = [entry["detail"]] if entry["detail"] else []
    times = [f"({entry['times']} times)"] if entry["times"] > 1 else []
    return "  ".join(printable(part) for part in [*parts, *more, *times] if part)
