"""Past jobs: ``koala history`` with their times and use of resources, and ``koala usage``, sums by days or weeks."""

import csv
import io
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from operator import itemgetter
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer, refuse_together, show_json
from koalapy.cli.terminal.streams import ProgramOutput
from koalapy.cli.terminal.tables import format_columns, format_listed_count, format_moment
from koalapy.client.client import MAX_PAGE_SIZE, Client
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.tables import Columns
from koalapy.model.array import format_task
from koalapy.model.history import HistorySort, Kind, Step
from koalapy.model.job_state import FINAL_STATES, JobState
from koalapy.model.times import PAST_TIME_EXAMPLES
from koalapy.model.wording import escape_formula, format_bytes, format_duration, format_share

CSV_COLUMNS = (
    *(
        "id",
        "array_job",
        "array_index",
        "name",
        "owner",
        "application",
        "priority",
        "state",
        "exit_code",
        "restarts",
        "clusters",
        "nodes",
    ),
    *("submitted_at", "started_at", "ended_at", "wait_time", "run_time", "node_seconds", "measured_nodes"),
    *("cpu_time", "cpu_available", "efficiency", "peak_memory", "memory", "reason"),
)


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    CSV = "csv"
    JSON = "json"


def show_history(
    since: Annotated[str, Option(help=f"jobs that ended since then: {PAST_TIME_EXAMPLES}")] = "7d",
    until: Annotated[str, Option(help="jobs that ended before then")] = "now",
    everyone: Annotated[bool, Option("--all", help="jobs of all users, for operators")] = False,
    user: Annotated[str | None, Option(help="jobs of this user; default: you", completes="users")] = None,
    state: Annotated[list[JobState] | None, Option(help="succeeded, failed or cancelled; repeatable")] = None,
    cluster: Annotated[str | None, Option(help="jobs that ran on this cluster", completes="clusters")] = None,
    name: Annotated[str | None, Option(help="jobs with this name, in which * stands for any text")] = None,
    sort: Annotated[HistorySort, Option(help="order")] = HistorySort.ENDED,
    limit: Annotated[int, Option(help="maximum number of jobs", min=1, max=10**6)] = 100,
    only_sums: Annotated[bool, Option("--sum", help="print only the sums over all these jobs")] = False,
    form: Annotated[Format, Option("--format", help="output format")] = Format.TABLE,
    as_json: Annotated[bool, Option("--json", help="the same as --format json")] = False,
    daemon: Daemon = DAEMON,
) -> None:
    """List ended jobs, by default yours of the last 7 days, the last end first.

    NODE-H: node-hours of all attempts. CPU: used share of the processor time of the job's nodes while its program ran.
    MEMORY: largest memory of the program on one node. A dash means unknown; ? means that only some nodes reported it.
    """
    if everyone and user:
        raise GridError("--all and --user cannot be given together", Exit.USAGE, "drop one")
    for job_state in state or ():
        if job_state not in FINAL_STATES:
            hint = f"koala queue --state {job_state} lists these"
            raise GridError(f"--state is {job_state}, and the history has only jobs that ended", Exit.USAGE, hint)
    client = daemon.client()
    mine = True if not user and not everyone else None
    query: Json = {"since": since, "until": until, "mine": mine, "owner": user, "name": name, "cluster": cluster}
    query |= {"state": state, "sort": sort}
    form = Format.JSON if as_json else form
    # A table needs the number of jobs; --sum and other orders need all of them.
    jobs, sums, is_whole = _read_history(client, query, 1 if only_sums else limit, sort, whole_sums=only_sums)
    if not jobs and cluster:
        client.cluster(cluster)  # raises an error if there is none
    if only_sums:
        _print_sums(sums, form)
    elif form is Format.JSON:
        show_json({"jobs": jobs, "sums": sums | {"is_whole": is_whole}})
    elif form is Format.CSV:
        cells = ((job[column] for column in CSV_COLUMNS) for job in jobs)
        # A text that spreadsheets would run as a formula is quoted.
        rows = [[escape_formula(" ".join(c) if isinstance(c, list) else c) for c in row] for row in cells]
        _print_csv(rows, CSV_COLUMNS)
    else:
        wide = form is Format.WIDE
        columns = {name: cell for name, cell in JOBS.items() if wide or name not in ("SUBMITTED", "STARTED")}
        print(format_columns(columns, jobs, fold=not wide))
    if form is not Format.CSV and form is not Format.JSON and not only_sums:
        if not jobs:
            period = f"since {since}" + (f" until {until}" if until != "now" else "")
            print(printable(f"koala: no such job ended {period}"), file=sys.stderr)
        else:
            print(f"\n{format_listed_count(len(jobs), sums['jobs'], is_whole=is_whole)}: {_describe_sums(sums)}")


def _read_history(
    client: Client, query: Json, limit: int, sort: HistorySort, *, whole_sums: bool
) -> tuple[list[Json], Json, bool]:
    """Return the first jobs in an order, the sums, and whether these are over all matching jobs.

    Other orders than by the end need all matching jobs, which are read in parts.
    """
    jobs: list[Json] = []
    by_end = sort is HistorySort.ENDED
    page = client.get("/api/v1/history", **query, limit=min(limit, MAX_PAGE_SIZE), sums=True)
    sums, sums_next = page["sums"], page["sums_next"]
    jobs, following = page["jobs"], page["next"]
    # The next pages have the times of the first one, so that no job is listed twice.
    while following is not None and (len(jobs) < limit or not by_end):
        page_limit = min(limit - len(jobs), MAX_PAGE_SIZE) if by_end else min(limit, MAX_PAGE_SIZE)
        page = client.get("/api/v1/history", **_query_of(following, limit=page_limit, sums=None if by_end else True))
        jobs, following = jobs + page["jobs"], page["next"]
        if not by_end:
            sums, sums_next = _add_sums(sums, page["sums"]), page["sums_next"]
            jobs = sorted(jobs, key=_sort_key(sort))[:limit]
    while whole_sums and sums_next is not None:
        page = client.get("/api/v1/history", **_query_of(sums_next, limit=1, sums=True))
        sums, sums_next = _add_sums(sums, page["sums"]), page["sums_next"]
    return jobs, sums, sums_next is None


def _query_of(path: str, **changes: Any) -> Json:
    return parse_qs(urlsplit(path).query) | changes


def _add_sums(first: Json, second: Json) -> Json:
    """Return the sums over both parts. ``peak_memory`` is the larger one."""
    added = {name: first[name] + second[name] for name in first if name != "peak_memory"}
    peaks = [part["peak_memory"] for part in (first, second) if part["peak_memory"] is not None]
    return {**added, "peak_memory": max(peaks, default=None)}


def _sort_key(sort: HistorySort) -> Callable[[Json], tuple[bool, float, int]]:
    """Return the key by which jobs of several pages are sorted, unknown values last, as the daemon does."""
    field, sign = {
        HistorySort.WAIT: ("wait_time", -1),
        HistorySort.RUN: ("run_time", -1),
        HistorySort.NODES: ("nodes", -1),
        HistorySort.NODE_HOURS: ("node_seconds", -1),
        HistorySort.CPU: ("cpu_time", -1),
        HistorySort.EFFICIENCY: ("efficiency", 1),
        HistorySort.MEMORY: ("peak_memory", -1),
    }[sort]
    return lambda job: (job[field] is None, sign * (job[field] or 0.0), -job["id"])


def _partly(job: Json) -> str:
    """Return a mark if only some nodes of a job have reported their use."""
    return "?" if 0 < job["measured_nodes"] < job["nodes"] else ""


JOBS: Columns = {
    "ID": lambda job: job["id"] if job["array_job"] is None else format_task(job["array_job"], job["array_index"]),
    "NAME": lambda job: job["name"] or "-",
    "USER": itemgetter("owner"),
    "STATE": itemgetter("state"),
    "NODES": lambda job: job["nodes"] or "-",
    "CLUSTERS": lambda job: ",".join(job["clusters"]) or "-",
    "SUBMITTED": lambda job: format_moment(job["submitted_at"]),
    "STARTED": lambda job: format_moment(job["started_at"]),
    "ENDED": lambda job: format_moment(job["ended_at"]),
    "WAIT": lambda job: format_duration(job["wait_time"]),
    "RUN": lambda job: format_duration(job["run_time"]),
    "NODE-H": lambda job: f"{job['node_seconds'] / 3600:.2f}",
    "CPU": lambda job: format_share(job["efficiency"]) + _partly(job),
    "MEMORY": lambda job: ("-" if job["peak_memory"] is None else format_bytes(job["peak_memory"])) + _partly(job),
    "REASON": lambda job: "-" if job["state"] == JobState.SUCCEEDED else job["reason"] or "-",
}


def _describe_sums(sums: Json) -> str:
    """Return one line on the sums."""
    states = ", ".join(f"{sums[state]:,} {state}" for state in ("succeeded", "failed", "cancelled") if sums[state])
    facts = [states, f"{sums['node_seconds'] / 3600:,.2f} node-hours"]
    if sums["started"]:
        facts.append(f"mean wait {format_duration(sums['wait_time'] / sums['started'])}")
        facts.append(f"mean run {format_duration(sums['run_time'] / sums['started'])}")
    if sums["cpu_available"]:
        unknown = f" ({sums['unmeasured']:,} jobs are not fully known)" if sums["unmeasured"] else ""
        facts.append(f"CPU {format_share(sums['cpu_time'] / sums['cpu_available'])}{unknown}")
    return "; ".join(facts)


def _print_sums(sums: Json, form: Format) -> None:
    """Print the sums in a format; as a table, one fact in each line."""
    if form is Format.JSON:
        show_json({"sums": sums})
        return
    if form is Format.CSV:
        _print_csv([list(sums.values())], list(sums))
        return
    started = sums["started"]
    share = sums["cpu_time"] / sums["cpu_available"] if sums["cpu_available"] else None
    facts = {
        "jobs": f"{sums['jobs']:,}",
        **{state: f"{sums[state]:,}" for state in ("succeeded", "failed", "cancelled")},
        "node-hours": f"{sums['node_seconds'] / 3600:,.2f}",
        "mean wait": format_duration(sums["wait_time"] / started if started else None),
        "mean run": format_duration(sums["run_time"] / started if started else None),
        "CPU-hours": f"{sums['cpu_time'] / 3600:,.2f} of {sums['cpu_available'] / 3600:,.2f}, {format_share(share)}",
        "largest memory": "-" if sums["peak_memory"] is None else f"{format_bytes(sums['peak_memory'])} on one node",
        "not fully known": f"{sums['unmeasured']:,} jobs ran on nodes that did not report processor time and memory",
    }
    print("\n".join(f"{name:>15}  {value}" for name, value in facts.items()))


def _print_csv(rows: list[list[object]], header: Any) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    sys.stdout.write(text.getvalue())


MAX_DAYS = 36_500
PERIODS: Columns = {
    "DAYS": lambda line: line["start"] if line["start"] == line["end"] else f"{line['start']} to {line['end']}",
    "NAME": lambda line: line["name"] or "-",
    "JOBS": itemgetter("jobs"),
    "FAILED": itemgetter("failed"),
    "SUCCESS": lambda line: format_share(line["success"]),
    "CO-ALLOC": lambda line: format_share(line["coallocated"]),
    "USED": lambda line: format_share(line["utilisation"]),
    "QUEUED": lambda line: format_duration(line["queue_time"]),
    "IN 10 MIN": lambda line: format_share(line["within_10m"]),
    "RUN": lambda line: format_duration(line["run_time"]),
    "SLOWDOWN": lambda line: "-" if line["slowdown"] is None else f"{line['slowdown']:.2f}",
}


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
    rows = format_columns(PERIODS, answer["lines"])
    retention = "for good" if answer["jobs_keep"] is None else f"for {format_duration(answer['jobs_keep'])}"
    return (
        f"{rows}\n\nKnown since {answer['since'] or 'today'}. Days are kept for good, jobs {retention} after their end."
    )
