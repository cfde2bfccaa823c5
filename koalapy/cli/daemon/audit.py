"""``koala audit-log``: changes and rejected requests, with their users and addresses."""

import json
import sys
from typing import Annotated

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, Daemon
from koalapy.client.answers import Json
from koalapy.client.client import MAX_PAGE_SIZE, Client
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.times import PAST_TIME_EXAMPLES

POLL_INTERVAL = 2.0
"""Seconds between two requests for new entries."""


def audit_log(
    since: Annotated[str, Option(help=f"entries since then: {PAST_TIME_EXAMPLES}")] = "1d",
    until: Annotated[str, Option(help="entries before then")] = "now",
    user: Annotated[str | None, Option(help="only this user", completes="users")] = None,
    action: Annotated[str | None, Option(help="only this operation, e.g. submit_job")] = None,
    follow: Annotated[bool, Option("--follow", help="follow new entries")] = False,
    json_lines: Annotated[bool, Option("--json-lines", help="print one JSON object in each line")] = False,
    verify: Annotated[bool, Option("--verify", help="verify the hashes of all entries")] = False,
    known_head: Annotated[
        str | None, Option("--known-head", help="with --verify: an earlier last entry, ID:HASH, that must still exist")
    ] = None,
    daemon: Daemon = DAEMON,
) -> int:
    """List changes and rejected requests with their callers, oldest first; for administrators."""
    if verify:
        return _verify_log(daemon.client(), known_head)
    if known_head is not None:
        raise CliError("--known-head needs --verify", Exit.USAGE, "add --verify")
    if follow and until != "now":
        raise CliError("--follow and --until cannot be given together", Exit.USAGE, "choose one of them")
    client, last_id = daemon.client(), 0
    query: Json = {
        "since": since,
        "until": "" if until == "now" else until,
        "user": user,
        "action": action,
        "limit": MAX_PAGE_SIZE,
    }
    while True:
        page = client.get("/api/v1/audit", after=last_id, **query)
        for entry in page["entries"]:
            print(json.dumps(entry) if json_lines else _format_entry(entry))
        if not (page["entries"] or last_id or follow or json_lines):
            filters = (f" of {user}" if user else "") + (f" with the action {action}" if action else "")
            before = "" if until == "now" else f" and before {until}"
            print(printable(f"koala: there are no entries{filters} since {since}{before}"), file=sys.stderr)
        last_id = page["next"]
        if len(page["entries"]) < MAX_PAGE_SIZE:
            if not follow:
                return Exit.OK
            query.pop("since", None)  # later requests select by entry number, independently of the clocks
            sys.stdout.flush()
            client.timeouts.sleep(POLL_INTERVAL)


def _verify_log(client: Client, known_head: str | None) -> int:
    """Verify the whole audit log. If an entry of an earlier check is given, first verify the entries after it."""
    starts = [*([_parse_known_head(known_head)] if known_head is not None else []), {}]
    for start in starts:
        checked, query = 0, start
        while True:
            check = client.get("/api/v1/audit/verify", **query)
            checked += check["checked"]
            if check["problem"]:
                print(f"koala: the audit log was altered: {printable(check['problem'])}", file=sys.stderr)
                return Exit.FAILED
            last = check["last"]
            if check["is_complete"]:
                break
            query = {"after": last["id"], "after_hash": last["hash"]}
    head_text = f"; the last is {last['id']}:{last['hash']}" if last["id"] else ""
    print(f"{checked} {'entry is as it was' if checked == 1 else 'entries are as they were'} written{head_text}")
    return Exit.OK


def _parse_known_head(known_head: str) -> Json:
    number, separator, hashed = known_head.partition(":")
    if not (separator and number.isascii() and number.isdigit() and int(number)):
        hint = "give ID:HASH from an earlier --verify or from the daemon's log (audit-head)"
        raise CliError(f"--known-head is {known_head!r}, which is not ID:HASH", Exit.USAGE, hint)
    return {"after": int(number), "after_hash": hashed}


def _format_entry(entry: Json) -> str:
    identity = f"{entry['actor']} ({entry['role']}, {entry['how']})" if entry["actor"] else "unknown"
    parts = [entry["at"], identity, f"from {entry['address']}", entry["action"], entry["target"], entry["outcome"]]
    details = [entry["detail"]] if entry["detail"] else []
    times = [f"({entry['times']} times)"] if entry["times"] > 1 else []
    return "  ".join(printable(part) for part in [*parts, *details, *times] if part)
