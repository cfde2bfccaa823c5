"""``koala history``: what has become of jobs, by days or weeks."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DEFAULT_URL, AsJson, Token, Url, show_json
from koalapy.cli.terminal.streams import ProgramOutput
from koalapy.cli.terminal.tables import table
from koalapy.model.history import Kind, Step
from koalapy.model.wording import duration

Json = dict[str, Any]
MAX_DAYS = 36_500
HEADER = ("DAYS", "NAME", "JOBS", "FAILED", "SUCCESS", "CO-ALLOC", "USED", "QUEUED", "IN 10 MIN", "RUN", "SLOWDOWN")


def history(
    by: Annotated[Kind, Option(help="of all together, or of each")] = Kind.GRID,
    step: Annotated[Step, Option(help="what a line stands for")] = Step.DAY,
    days: Annotated[int, Option(help="so many until today, in UTC")] = 30,
    name: Annotated[str | None, Option(help="only this cluster, user, policy, priority or site")] = None,
    as_csv: Annotated[bool, Option("--csv", help="all figures, with commas between")] = False,
    as_swf: Annotated[bool, Option("--swf", help="the jobs themselves, as a trace in SWF")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """How clusters were used, how long jobs waited, and what became of them, in days or weeks of the past.

    USED is the share of all nodes' time; QUEUED, RUN and SLOWDOWN are means over the jobs that ran to an end of
    their own, IN 10 MIN is the share of these that were placed so soon. Days are kept for good.
    """
    if as_csv + as_swf + as_json > 1:
        raise CliError("only one of --csv, --swf and --json can be had", Exit.USAGE)
    if days < 1:
        raise CliError("--days is less than 1", Exit.USAGE)
    client = Client(url, token)
    first = datetime.now(UTC).date() - timedelta(days=min(days, MAX_DAYS) - 1)
    query: Json = {"by": by.value, "step": step.value, "first": first.isoformat()} | ({"name": name} if name else {})
    if as_csv or as_swf:
        _write(client.text("/api/v1/history", query | {"format": "csv" if as_csv else "swf"}))
        return
    found = client.get("/api/v1/history", **query)
    if as_json:
        show_json(found)
        return
    print(table(HEADER, [_row(line) for line in found["lines"]]))
    kept = "for good" if found["jobs_keep"] is None else f"for {duration(found['jobs_keep'])}"
    print(f"\nKnown since {found['since'] or 'today'}. Days are kept for good, jobs {kept} after their end.")


def _write(pieces: Iterator[bytes]) -> None:
    output = ProgramOutput()
    for piece in pieces:
        output.write(piece)
    output.end()


def _row(line: Json) -> list[object]:
    days = line["start"] if line["start"] == line["end"] else f"{line['start']} to {line['end']}"
    return [
        days,
        line["name"] or "-",
        line["jobs"],
        line["failed"],
        _share(line["success"]),
        _share(line["coallocated"]),
        _share(line["utilisation"]),
        duration(line["queue_time"]),
        _share(line["within_10m"]),
        duration(line["run_time"]),
        "-" if line["slowdown"] is None else f"{line['slowdown']:.2f}",
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
