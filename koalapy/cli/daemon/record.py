"""``koala export`` and ``koala replay`` for the record of the scheduler; ``koala audit-log`` for the audit entries."""

import gzip
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, cast

from koalapy import __version__
from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import DAEMON, Daemon, show_json
from koalapy.cli.terminal.screen import Progress, Transfer, waiting_for
from koalapy.cli.terminal.streams import ProgramOutput
from koalapy.client.client import MAX_PAGE_SIZE, Client
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.model.times import PAST_TIME_EXAMPLES

if TYPE_CHECKING:
    from koalapy.simulation.record.replay import History

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
        raise GridError("--known-head needs --verify", Exit.USAGE, "add --verify")
    if follow and until != "now":
        raise GridError("--follow and --until cannot be given together", Exit.USAGE, "choose one of them")
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
            until_text = "" if until == "now" else f" and before {until}"
            print(printable(f"koala: there are no entries{filters} since {since}{until_text}"), file=sys.stderr)
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
        raise GridError(f"--known-head is {known_head!r}, which is not ID:HASH", Exit.USAGE, hint)
    return {"after": int(number), "after_hash": hashed}


def _format_entry(entry: Json) -> str:
    identity = f"{entry['actor']} ({entry['role']}, {entry['how']})" if entry["actor"] else "unknown"
    parts = [entry["at"], identity, f"from {entry['address']}", entry["action"], entry["target"], entry["outcome"]]
    details = [entry["detail"]] if entry["detail"] else []
    times = [f"({entry['times']} times)"] if entry["times"] > 1 else []
    return "  ".join(printable(part) for part in [*parts, *details, *times] if part)


def export_record(
    output: Annotated[
        Path | None, Option("-o", "--output", help="output file, compressed if its name ends in .gz")
    ] = None,
    since: Annotated[float, Option(help="daemon runs within so many seconds until now")] = 86400.0,
    until: Annotated[float, Option(help="until so many seconds before now")] = 0.0,
    daemon: Daemon = DAEMON,
) -> None:
    """Export the scheduler's input and decisions: koala export -o day.gz; then koala replay day.gz

    For operators. Each daemon run is exported from its beginning. The export contains commands of jobs, but no
    variables of programs.
    """
    pieces = daemon.client().stream_text("/api/v1/record", {"since": since, "until": until})
    if output is None:
        ProgramOutput().write_all(pieces)
        return
    if not output.name or output.is_dir():
        raise GridError(f"{output} is a folder", Exit.USAGE, "give a file: --output day.gz")
    # Write to a pipe, a terminal or the target of a link in place; replace only regular files.
    is_new = not output.is_symlink() and (output.is_file() or not output.exists())
    incoming = output.with_name(f".{output.name}.incoming") if is_new else output
    transfer = Transfer(f"writes {output}")
    try:
        with (
            Progress(lambda: str(transfer)),
            _open_output(incoming, is_new=is_new, packed=output.suffix == ".gz") as file,
        ):
            for piece in transfer.count_bytes(pieces):
                file.write(piece)
        if is_new:
            incoming.rename(output)
    except OSError as error:
        raise GridError(f"cannot write {output}: {error.strerror or error}", Exit.FAILED) from error
    finally:
        if is_new:
            incoming.unlink(missing_ok=True)


@contextmanager
def _open_output(path: Path, *, is_new: bool, packed: bool) -> Iterator[IO[bytes]]:
    """Open a file for writing. A new file is readable by this account only, since it contains the commands of jobs."""
    if is_new:
        path.unlink(missing_ok=True)
    how = os.O_WRONLY | (os.O_CREAT | os.O_EXCL if is_new else os.O_TRUNC)
    with os.fdopen(os.open(path, how, 0o600), "wb") as plain:
        if not packed:
            yield plain
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=plain) as file:
            yield cast(IO[bytes], file)


def replay_export(
    file: Annotated[Path, Argument(help="file written by koala export")],
    as_json: Annotated[bool, Option("--json", help="print JSON")] = False,
) -> int:
    """Replay an export and compare every decision: koala export -o day.gz; koala replay day.gz

    Needs no daemon and starts nothing.
    """
    from koalapy.policies.registry import load_policies
    from koalapy.simulation.record.replay import replay

    runs, lost = [], list[str]()
    with waiting_for(f"replays {file}"):
        runs += [_history_json(history) for history in replay(file, load_policies(), lost)]
    if as_json:
        show_json({"file": str(file), "lives": runs, "lost": lost})
    else:
        for run in runs:
            summary = f"{run['began']} to {run['ended']}: {run['jobs']} jobs, {run['placements']} placements"
            if (divergence := run["divergence"]) is None:
                print(f"{summary}, all as recorded ({run['steps']} steps)")
            else:
                location = f"at {divergence['at']}, in step {divergence['step']}"
                print(f"{summary}; {location}: {divergence['recorded']}; replayed: {divergence['replayed']}")
        if not runs:
            print("nothing was recorded then", file=sys.stderr)
    if any(run["divergence"] for run in runs):
        versions = sorted({run["version"] for run in runs} - {__version__})
        hint = f"it was written by version {', '.join(versions)}; this is {__version__}" if versions else ""
        raise GridError("the replay differs from the record", Exit.FAILED, hint)
    if lost:
        hint = "restore the missing files of the record from a backup, or remove the damaged ones"
        raise GridError(printable(f"the record is incomplete: {'; '.join(lost)}"), Exit.FAILED, hint)
    return Exit.OK


def _history_json(history: "History") -> Json:
    """Convert the replay of one daemon run to JSON. ``divergence`` is null if every decision was repeated."""
    divergence = history.divergence
    return {
        "began": _format_time(history.began),
        "ended": _format_time(history.ended),
        "version": history.version,
        "steps": history.steps,
        "jobs": len(history.jobs),
        "placements": history.placements,
        "divergence": divergence
        and {
            "step": divergence.step,
            "at": _format_time(divergence.at),
            "recorded": divergence.recorded,
            "replayed": divergence.replayed,
        },
    }


def _format_time(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")
