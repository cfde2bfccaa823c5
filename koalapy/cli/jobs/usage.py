"""``koala usage``: past use of clusters, wait times and outcomes of jobs, by days or weeks."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer, refuse_together
from koalapy.cli.terminal.streams import ProgramOutput
from koalapy.cli.terminal.tables import format_table
from koalapy.client.answers import Json
from koalapy.model.history import Kind, Step
from koalapy.model.wording import format_duration, format_share

MAX_DAYS = 36_500
HEADER = ("DAYS", "NAME", "JOBS", "FAILED", "SUCCESS", "CO-ALLOC", "USED", "QUEUED", "IN 10 MIN", "RUN", "SLOWDOWN")


def show_usage(
    by: Annotated[Kind, Option(help="group by")] = Kind.GRID,
    step: Annotated[Step, Option(help="period of a row")] = Step.DAY,
    days: Annotated[int, Option(help="number of days until today, in UTC", min=1)] = 30,
    name: Annotated[str | None, Option(help="only this cluster, user, policy, priority or home site")] = None,
    as_csv: Annotated[bool, Option("--csv", help="print CSV")] = False,
    as_swf: Annotated[bool, Option("--swf", help="print the jobs as a trace in the Standard Workload Format")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show past use of clusters, wait times and outcomes by days or weeks.

    USED: share of all node time. QUEUED, RUN and SLOWDOWN: means over jobs whose program ended by itself. IN 10 MIN:
    share of these jobs that were placed within ten minutes.
    """
    refuse_together(csv=as_csv, swf=as_swf, json=as_json)
    client = daemon.client()
    first = datetime.now(UTC).date() - timedelta(days=min(days, MAX_DAYS) - 1)
    query: Json = {"by": by.value, "step": step.value, "first": first.isoformat()} | ({"name": name} if name else {})
    if as_csv or as_swf:
        ProgramOutput().write_all(client.stream_text("/api/v1/usage", query | {"format": "csv" if as_csv else "swf"}))
        return
    print_answer(client.get("/api/v1/usage", **query), as_json, _format_usage)


def _format_usage(answer: Json) -> str:
    rows = format_table(HEADER, [_usage_row(line) for line in answer["lines"]])
    retention = "for good" if answer["jobs_keep"] is None else f"for {format_duration(answer['jobs_keep'])}"
    return (
        f"{rows}\n\nKnown since {answer['since'] or 'today'}. Days are kept for good, jobs {retention} after their end."
    )


def _usage_row(line: Json) -> list[object]:
    """Return the table cells of a period: its days, job counts, percentages and mean times."""
    days = line["start"] if line["start"] == line["end"] else f"{line['start']} to {line['end']}"
    success, coallocated, used, soon = (
        format_share(line[name]) for name in ("success", "coallocated", "utilisation", "within_10m")
    )
    queued, ran = format_duration(line["queue_time"]), format_duration(line["run_time"])
    slowdown = "-" if line["slowdown"] is None else f"{line['slowdown']:.2f}"
    counts = [days, line["name"] or "-", line["jobs"], line["failed"]]
    return [*counts, success, coallocated, used, queued, soon, ran, slowdown]
