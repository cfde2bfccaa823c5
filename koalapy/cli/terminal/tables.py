"""Tables and pages as plain text that fits a terminal."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from koalapy.cli.terminal.text import align_left, cell_len, fold_text, terminal_size
from koalapy.client.client import name_of, nodes_of
from koalapy.client.errors import printable
from koalapy.client.http import Json
from koalapy.client.tables import CLUSTERS, QUEUE, WIDE_QUEUE, Columns, format_tasks, seconds_since
from koalapy.model.wording import format_bytes, format_cpu_use, format_memory_use, format_nodes

if TYPE_CHECKING:
    from koalapy.model.node_requirement import NodeRequirement

MIN_FOLDED_COLUMNS = 20
"""Minimum width in columns of folded text."""
INDENT = 4
"""Indentation in columns of continuation lines."""


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, fold: bool = True) -> str:
    """Format a table. On a terminal, fold the last column within its width or below the others."""
    text = [list(header), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(cell_len(row[column]) for row in text) for column in range(len(header))]
    terminal = terminal_size(sys.stdout) if fold else None
    start = sum(widths[:-1]) + 2 * len(widths[:-1])
    lines = []
    for row in text:
        prefix = "  ".join([*(align_left(cell, width) for cell, width in zip(row[:-1], widths, strict=False)), ""])
        if terminal is None or start + cell_len(row[-1]) <= terminal[0]:
            lines.append(f"{prefix}{row[-1]}".rstrip())
            continue
        fits_beside = terminal[0] - start >= MIN_FOLDED_COLUMNS
        margin = " " * (start if fits_beside else INDENT)
        parts = fold_text(row[-1], max(MIN_FOLDED_COLUMNS, terminal[0] - len(margin)))
        lines += [prefix + parts.pop(0)] if fits_beside else [prefix.rstrip()]
        lines += [margin + part for part in parts]
    return "\n".join(lines)


def format_columns(columns: Columns, items: Iterable[Json], *, fold: bool = True) -> str:
    """Format a table with a row for each item."""
    return format_table(list(columns), [[cell(item) for cell in columns.values()] for item in items], fold=fold)


def format_moment(moment: str | None) -> str:
    """Return a time of the API to the second, or a dash for None."""
    return moment.partition(".")[0].replace("T", " ") if moment else "-"


def format_listed_count(listed: int, count: int, *, is_whole: bool = True) -> str:
    """Return how many jobs of how many are listed: ``20 of 1,312 jobs; --limit 100 for more``.

    ``is_whole``: the count includes all; else there are more.
    """
    total = f"{count:,}" if is_whole else f"more than {count:,}"
    if listed >= count and is_whole:
        return f"{total} {'job' if count == 1 else 'jobs'}"
    larger = next(limit for limit in (10**power for power in range(2, 20)) if limit > listed)
    return f"{listed:,} of {total} jobs; --limit {larger} for more"


def queue_table(jobs: Sequence[Json], *, wide: bool = False) -> str:
    """Return a table of jobs, in the style of squeue."""
    return format_columns(WIDE_QUEUE if wide else QUEUE, jobs, fold=not wide)


def cluster_page(cluster: Json) -> str:
    """Return the page of a cluster: its row, its node classes and its uplink."""
    parts, details = [clusters_table([cluster])], cluster["details"]
    if classes := details.get("node_classes"):
        properties = {name: cell for name, cell in PROPERTIES.items() if any(cell(c) != "-" for c in classes)}
        parts.append(format_columns({**CLASSES, **properties}, classes))
    if (uplink := details.get("uplink")) is not None:
        capacity = uplink["capacity"]
        capacity_text = "; what it carries is not known" if capacity is None else f" of {format_bytes(capacity)}/s"
        parts.append(f"uplink: {format_bytes(uplink['consumed'])}/s used{capacity_text}")
    return "\n\n".join(parts)


CLASSES: Columns = {
    # Partly used nodes of a class have a separate row.
    "CLASS": lambda c: f"{c['name'] or 'all'}{', partly used' if c.get('is_part') else ''}",
    "TOTAL": lambda c: c["total"] or "-",
    "IDLE": itemgetter("idle"),
    "POWER": lambda c: f"{c['power']:g}",
    "MEMORY": lambda c: "-" if c["memory"] is None else format_bytes(c["memory"]),
}
PROPERTIES: Columns = {
    "CORES": lambda c: c.get("cores") or "-",
    "GPUS": lambda c: ",".join(f"{g['type'] or ''}:{g['count']}".lstrip(":") for g in c.get("gpus", ())) or "-",
    "FEATURES": lambda c: ",".join(c.get("features", ())) or "-",
    "PARTITIONS": lambda c: ",".join(c.get("partitions", ())) or "-",
}
"""Columns that are shown only if a node class has the property."""


def _requirement_text(job: Mapping[str, Any]) -> str:
    """Return what a job and its components require of their nodes; empty without any requirement."""
    from koalapy.model.node_requirement import describe_requirements

    return describe_requirements(_requirement_of(job), map(_requirement_of, job["request"].get("components", ())))


def _requirement_of(source: Mapping[str, Any]) -> "NodeRequirement":
    """Return the requirement of a job or a component of the API."""
    from koalapy.model.node_requirement import NodeRequirement, parse_gpus

    gpus = source.get("gpus")
    return NodeRequirement(
        source.get("cores"),
        source.get("memory"),
        parse_gpus(gpus) if gpus else None,
        tuple(source.get("features") or ()),
        source.get("partition") or "",
        tuple(source.get("exclude") or ()),
        source.get("account") or "",
        source.get("qos") or "",
    )


def clusters_table(clusters: Sequence[Json]) -> str:
    return format_columns(CLUSTERS, clusters)


def timeline_table(job: Json) -> str:
    """Return a table of the job's timeline, with times in seconds since the submission."""
    rows = []
    for entry in job["timeline"]:
        elapsed = seconds_since(job["submitted_at"], entry["at"])
        cluster = "" if entry["cluster"] is None else f"{entry['cluster']}"
        rows.append([f"+{elapsed:.3f}s", entry["event"], cluster, entry["reason"]])
    return format_table(["TIME", "EVENT", "CLUSTER", "WHAT"], rows)


COMPONENTS: Columns = {
    "COMPONENT": itemgetter("index"),
    "CLUSTER": itemgetter("cluster"),
    "NODES": lambda c: f"{c['size']} {c.get('node_class') or ''}".rstrip(),
    "STATE": itemgetter("state"),
    "LRM JOB": lambda c: c["lrm_job"] or "-",
    "HOSTS": lambda c: ",".join(c["hosts"]),
    "ERROR": itemgetter("error"),
}


ATTEMPTS: Columns = {
    "ATTEMPT": itemgetter("generation"),
    "PLACED": lambda attempt: format_moment(attempt["placed_at"]),
    "ENDED": lambda attempt: format_moment(attempt["ended_at"]),
    "COMPONENTS": lambda attempt: ",".join(f"{c['cluster']}:{c['size']}" for c in attempt["components"]),
    "REASON": lambda attempt: attempt["end_reason"] or "-",
}


def job_page(job: Json, attempts: Sequence[Json], transfers: Sequence[str] = ()) -> str:
    """Return the page of a job with its last attempts. ``transfers``: lines on its transfers."""
    request = job["request"]
    times = [("begin", job.get("begin")), ("deadline", job.get("deadline"))]
    facts = [
        ("job", f"{job['id']}" + (f" ({job['name']})" if job["name"] else "")),
        *([("task", name_of(job))] if job["array_job"] is not None else []),
        *([("array", f"{job['array']}: {format_tasks(job['tasks'])}")] if job["tasks"] is not None else []),
        ("user", job["owner"]),
        ("state", job["state"] + (f": {job['reason']}" if job["reason"] else "")),
        ("request", f"{request['type']}, {format_nodes(nodes_of(request))}, {job['priority']} priority"),
        *([("home site", job["home_site"])] if job.get("home_site") else []),
        *([("each node", nodes)] if (nodes := _requirement_text(job)) else []),
        *([("shares nodes", "with other jobs, where the site allows it")] if job.get("share") else []),
        *([("cpus per rank", str(job["cpus_per_rank"]))] if job.get("cpus_per_rank") else []),
        *([("container", image)] if (image := job.get("container")) else []),
        ("policy", job["policy"]),
        *([("reservation", name)] if (name := job.get("reservation")) else []),
        ("command", " ".join(job["command"]) or "(one for each component)"),
        *([("script", f"{len(job['script'].splitlines())} lines, once on the first node")] if job["script"] else []),
        ("submitted", job["submitted_at"]),
        *((name, moment) for name, moment in times if moment),
        *(_run_facts(job) if job["tasks"] is None else [("in all", _format_seconds(job["response_time"]))]),
    ]
    width = max(len(name) for name, _ in facts)
    parts = ["\n".join(f"{name.rjust(width)}  {printable(value)}" for name, value in facts)]
    if job["components"]:
        parts.append(format_columns(COMPONENTS, job["components"]))
    if job.get("dependencies") or job.get("dependents"):
        parts.append(_dependency_graph(job))
    if transfers:
        parts.append("\n".join(["files", *(f"  {line}" for line in transfers)]))
    if attempts:
        parts.append(format_columns(ATTEMPTS, attempts))
    parts.append(timeline_table(job))
    return "\n\n".join(parts)


def _run_facts(job: Json) -> list[tuple[str, str]]:
    """Return the times, tries and use of a job as lines of its page. An array has none: each of its tasks has them."""
    return [
        ("queued", _format_seconds(job["queue_time"])),
        ("start-up", _format_seconds(job["startup_overhead"])),
        ("start delay", _format_seconds(job["start_delay"], " later than first estimated")),
        ("in all", _format_seconds(job["response_time"])),
        ("tries", f"{job['placement_tries']} placement, {job['claiming_tries']} claiming, {job['restarts']} restarts"),
        ("exit code", "-" if job["exit_code"] is None else str(job["exit_code"])),
        *list_use(job),
    ]


def list_use(job: Json) -> list[tuple[str, str]]:
    """Return the program's use of processors and memory as lines of the page, once a component's program has ended."""
    components = job["components"]
    nodes, measured = sum(c["size"] for c in components), sum(c["measured_nodes"] for c in components)
    if not job["started_at"] or not (measured or job["ended_at"]):
        return []
    with_times = [c for c in components if c["cpu_time"] is not None]
    used = sum(c["cpu_time"] or 0.0 for c in with_times) if with_times else None
    available = sum(c["cpu_available"] or 0.0 for c in with_times) if with_times else None
    peak = max((c["peak_memory"] for c in components if c["peak_memory"] is not None), default=None)
    return [
        ("CPU used", format_cpu_use(used, available, measured, nodes)),
        ("memory used", format_memory_use(peak, job["memory"], measured, nodes)),
    ]


MAX_EDGES = 20
"""Maximum number of lines of a graph in each direction."""


def _dependency_graph(job: Json) -> str:
    """Return the graph of the jobs around a job: one line for each job that it waits for, or that waits for it.

    Alternatives of one entry of ``after`` are marked by ``or``.
    """
    dependencies, dependents, label = job["dependencies"], job["dependents"], f"job {job['id']}"
    edges = []
    for index, related in enumerate(dependencies[:MAX_EDGES]):
        is_alternative = index > 0 and dependencies[index - 1]["clause"] == related["clause"]
        edges.append((f"{'or ' if is_alternative else ''}{_related_label(related)}", related["condition"], label))
    edges += [(label, related["condition"], _related_label(related)) for related in dependents[:MAX_EDGES]]
    line, arrow = ("──", "─▶") if is_unicode() else ("--", "->")
    start_width, condition_width = (max(len(edge[column]) for edge in edges) for column in (0, 1))
    lines = [
        f"  {start.ljust(start_width)} {line} {condition.ljust(condition_width)} {arrow} {end}"
        for start, condition, end in edges
    ]
    hidden = len(dependencies) + len(dependents) - len(edges)
    return "\n".join(["dependencies", *lines, *([f"  and {hidden} more; --json lists all"] if hidden else [])])


def _related_label(related: Json) -> str:
    return f"job {related['job']} ({related['state'] or 'removed'})"


def is_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "").startswith("utf")


def _format_seconds(seconds: float | None, suffix: str = "") -> str:
    return "-" if seconds is None else f"{seconds:.3f} s{suffix}"
