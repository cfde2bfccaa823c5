"""``koala clusters``, ``top``, ``metrics`` and ``alerts``: the clusters, their use and current problems."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Annotated, NamedTuple

from koalapy.cli.terminal import tables
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, ReasonPrompt, Watch, print_answer, refuse_together
from koalapy.cli.terminal.screen import waiting_for, watch_page
from koalapy.cli.terminal.tables import format_moment
from koalapy.client.client import Client, JobListing, in_path, nodes_of
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.submission import with_time_zone
from koalapy.client.tables import Columns, seconds_since
from koalapy.model.alert import AlertKind
from koalapy.model.wording import format_duration, format_nodes

MAX_TOP_ALERTS = 3
MAX_JOBS_SHOWN = 20
"""Maximum number of printed jobs in each table of a drain's preview."""
Name = Annotated[str, Argument(help="the cluster", completes="clusters")]


def list_clusters(watch: Watch = False, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show the clusters and their nodes."""
    client = daemon.client()
    if watch:
        refuse_together(watch=True, json=as_json)
        watch_page(client, _request_clusters, tables.clusters_table)
    print_answer(client.get("/api/v1/clusters"), as_json, lambda answer: tables.clusters_table(answer["clusters"]))


def _request_clusters(client: Client) -> list[Json]:
    """Return the clusters without the times of their last reports, so that new times are not shown as a change."""
    return [{**cluster, "last_heard": None} for cluster in client.clusters()]


class GridState(NamedTuple):
    """What ``koala top`` shows."""

    alerts: list[Json]
    clusters: list[Json]
    listing: JobListing


def show_top(
    everyone: Annotated[bool, Option("--all", help="show jobs of all users")] = False,
    limit: Annotated[int, Option(help="maximum number of jobs", min=1, max=2000)] = 200,
    daemon: Daemon = DAEMON,
) -> None:
    """Show alerts, clusters and queue until Ctrl-C, live on the whole terminal."""

    def request_state(client: Client) -> GridState:
        jobs = client.unfinished_jobs(limit, mine=None if everyone else True)
        return GridState(client.alerts(), _request_clusters(client), jobs)

    with suppress(KeyboardInterrupt):
        watch_page(daemon.client(), request_state, format_top)


def format_top(state: GridState) -> str:
    """Return the most urgent alerts, the clusters, and the jobs with the number of those that wait."""
    alerts = [f"{a['severity'].upper()} {a['target']}: {a['summary']}. {a['remedy']}" for a in state.alerts]
    parts = [*map(printable, alerts[:MAX_TOP_ALERTS])]
    if len(alerts) > MAX_TOP_ALERTS:
        parts.append(f"and {len(alerts) - MAX_TOP_ALERTS} more: koala alerts")
    jobs, has_more = state.listing.jobs, state.listing.has_more
    waiting = [job for job in jobs if job["state"] in ("queued", "held")]
    nodes = format_nodes(sum(nodes_of(job["request"]) for job in waiting if job["state"] == "queued"))
    counts = "; more jobs wait, --limit shows them" if has_more else f", {len(waiting)} wait for {nodes}"
    parts += [tables.clusters_table(state.clusters), "", f"Jobs: {len(jobs)}{counts}"]
    return "\n".join([*parts, tables.queue_table(jobs)])


def show_cluster(name: Name, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show a cluster with its node classes and its uplink."""
    print_answer(daemon.client().cluster(name), as_json, tables.cluster_page)


States = Annotated[
    list[str] | None, Option("--state", help="only nodes in this state, e.g. down, idle, local or running; repeatable")
]


def list_nodes(name: Name, state: States = None, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """List the nodes of a cluster one by one, with their jobs.

    Operators see all nodes. Other users see those of jobs; the nodes of other users' jobs have no names.
    """
    print_answer(daemon.client().nodes(name, state or ()), as_json, _format_nodes)


NODES: Columns = {
    "NODE": itemgetter("name"),
    "STATE": itemgetter("state"),
    "JOB": lambda node: node["job"] or "-",
    "USER": lambda node: node["owner"] or "-",
    "CLASS": lambda node: node["node_class"] or "-",
    "REASON": itemgetter("reason"),
}


def _format_nodes(answer: Json) -> str:
    parts = [tables.format_columns(NODES, answer["nodes"]) if answer["nodes"] else "no nodes"]
    if answer["problem"]:
        age = f"; the list is of {format_moment(answer['known_at'])}" if answer["known_at"] else ""
        parts.append(printable(f"Note: {answer['problem']}{age}."))
    return "\n\n".join(parts)


def clear_errors(name: Name, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Clear the errors of an unusable cluster and use it again."""
    print_answer(daemon.client().act_on_cluster(name, "clear"), as_json, _format_state)


def _format_state(cluster: Json) -> str:
    return f"cluster {cluster['name']} is {cluster['state']}"


def drain_cluster(
    name: Name,
    reason: Annotated[str, Option("--reason", help="reason, required and visible to all users")] = "",
    requeue: Annotated[
        bool, Option("--requeue", help="stop its jobs after their warning; they return to their queues")
    ] = False,
    begin: Annotated[
        str, Option("--from", help="begin, now by default: 08:00, tomorrow, 2026-12-01T08:00, now+1h")
    ] = "",
    end: Annotated[str, Option("--until", help="end; by default it lasts until koala clusters resume")] = "",
    dry_run: Annotated[
        bool, Option("--dry-run", help="only predict, by simulation, which jobs it would delay")
    ] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Drain a cluster: running jobs continue, nothing more is placed. A second order replaces the first.

    Before a planned begin (--from), jobs are placed there only if their walltime ends in time. On a terminal it asks
    for the reason if none is given.
    """
    times = Json({key: with_time_zone(text) for key, text in (("begin", begin), ("end", end)) if text})
    path = f"/api/v1/clusters/{in_path(name)}/drain"
    if dry_run:
        if not as_json:
            facts = daemon.client().get(path, simulate="false", **times)
            print(_format_facts(facts, requeue=requeue, is_planned=bool(begin)), flush=True)
        with waiting_for("simulates"):
            preview = daemon.client().get(path, patient=True, **times)
        print_answer(preview, as_json, partial(_format_delays, is_planned=bool(begin)))
        return
    order = Json({"requeue": True} if requeue else {}) | times
    cluster = ReasonPrompt(daemon.client(), reason).post(path, order)
    print_answer(cluster, as_json, _format_planned if begin and cluster["planned_drains"] else _format_drained)


def _format_drained(cluster: Json) -> str:
    ends_at = cluster["drained"]["ends_at"] if cluster["drained"] else None
    until = f" until {format_moment(ends_at)} UTC" if ends_at else ""
    remaining = f"; jobs still have {format_nodes(cluster['used'])} there" if cluster["used"] else ""
    return f"cluster {cluster['name']} is drained{until}{remaining}"


def _format_planned(cluster: Json) -> str:
    drains = [
        f"from {format_moment(drain['begins_at'])}"
        + (f" to {format_moment(drain['ends_at'])}" if drain["ends_at"] else "")
        for drain in cluster["planned_drains"]
    ]
    return f"cluster {cluster['name']} will be drained {', '.join(drains)} UTC"


def _format_facts(preview: Json, *, requeue: bool, is_planned: bool) -> str:
    """Format what a drain affects without a simulation: jobs that run there, and jobs that name the cluster."""
    name, running, bound = preview["cluster"], preview["running"], preview["bound"]
    effect = "would stop and queue again" if requeue else "would continue there"
    until_then = " that may run until then" if is_planned else ""
    parts = [f"Nothing was changed. {_count_jobs(len(running))} on {name}{until_then} {effect}."]
    if running:
        ends = ["no limit" if job["ends_within"] is None else format_duration(job["ends_within"]) for job in running]
        rows = [[job["job"], job["owner"], job["nodes"], end] for job, end in zip(running, ends, strict=True)]
        parts.append(_format_jobs(("JOB", "USER", "NODES", "ENDS WITHIN"), rows))
    if bound:
        until = f"{format_moment(preview['ends_at'])} UTC" if preview["ends_at"] else f"{name} is resumed"
        parts.append(f"{_count_jobs(len(bound))} in the queue would wait until {until}: the job names {name}.")
        parts.append(_format_places(bound))
    if requeue and running:
        parts.append("The simulation does not include the second start of stopped jobs.")
    return "\n\n".join([*parts, ""])


def _format_delays(preview: Json, *, is_planned: bool) -> str:
    """Return the jobs that would run there at a planned begin, and those that would start later in a simulation."""
    from koalapy.cli.jobs.explain import format_interval

    delayed, span = preview["delayed"], f"{preview['horizon'] / 3600:.0f} hours"
    counted = f"{_count_jobs(len(delayed))} of the {preview['waiting']} that wait would start later"
    parts = [f"{counted}, as simulated for the next {span}."]
    if is_planned and (running := preview["running"]):
        parts = [f"{_count_jobs(len(running))} would run there at the begin, in most simulations."]
        parts.append(_format_places(running))
        parts.append(f"{counted}, as simulated for the next {span}.")
    rows = []
    for job in delayed:
        changed = format_interval(job["changed"]) if job["changed"] else f"not within {span}"
        rows.append([job["job"], job["owner"], format_interval(job["starts"]), changed])
    if rows:
        parts.append(_format_jobs(("JOB", "USER", "STARTS IN", "AFTER THE DRAIN"), rows))
    parts += [f"Note: {preview['note']}."] if preview["note"] else []
    return "\n\n".join(parts)


def _format_places(jobs: Sequence[Json]) -> str:
    """Return a table of jobs with nodes on a cluster."""
    return _format_jobs(("JOB", "USER", "NODES"), [[job["job"], job["owner"], job["nodes"]] for job in jobs])


def _format_jobs(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of the first jobs, with the number of further ones."""
    table = tables.format_table(head, rows[:MAX_JOBS_SHOWN])
    remaining = len(rows) - MAX_JOBS_SHOWN
    return f"{table}\nand {remaining} more; --json prints all" if remaining > 0 else table


def _count_jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def resume_cluster(
    name: Name,
    planned: Annotated[bool, Option("--planned", help="withdraw its planned drains instead")] = False,
    begin: Annotated[str, Option("--from", help="withdraw only the planned drain that begins then")] = "",
    ordered: Annotated[str, Option("--ordered", help="of several that begin then, the one ordered at this time")] = "",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Resume a drained cluster, or withdraw planned drains."""
    times = Json({key: with_time_zone(text) for key, text in (("begin", begin), ("ordered", ordered)) if text})
    order = Json({"planned": True} if planned else {}) | times
    print_answer(daemon.client().act_on_cluster(name, "resume", order or None), as_json, _format_state)


def declare_lost(
    name: Name,
    reason: Annotated[str, Option("--reason", help="reason, visible to all users", may_be_empty=True)] = "",
    yes: Annotated[bool, Option("--yes", help="do not ask for confirmation")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Declare that no job runs on an unreachable cluster any more, so that its jobs are retried."""
    if not yes:
        _confirm_lost(name)
    cluster = daemon.client().act_on_cluster(name, "lost", {"reason": reason})
    print_answer(cluster, as_json, lambda cluster: f"cluster {cluster['name']} is lost: its jobs are tried again")


def _confirm_lost(name: str) -> None:
    """Ask the operator to type the cluster's name. Raise ``GridError`` for another answer."""
    print(
        f"Every job that runs on {name} will be started again elsewhere, at once. A program that still runs there then "
        f"runs twice.\nGo on only if nothing runs there: its nodes are off, or its resource manager has ended all jobs "
        f"named koala-*.",
        file=sys.stderr,
    )
    if not sys.stdin.isatty():
        raise GridError(
            f"declaring cluster {name} lost needs a confirmation, and there is no terminal to ask on",
            Exit.USAGE,
            f"add --yes if nothing runs on {name} any more",
        )
    print(f"Type {name} to confirm: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() != name:
        raise GridError(f"cluster {name} was not declared lost", Exit.USAGE, f"type its name, {name}, to confirm")


clusters_group = Group(
    "List clusters, or act on one.\n\nUSED are nodes of this scheduler's jobs, BACKGROUND those that the clusters' own "
    "users have, past the scheduler.",
    {
        "clear": clear_errors,
        "drain": drain_cluster,
        "lost": declare_lost,
        "nodes": list_nodes,
        "resume": resume_cluster,
        "show": show_cluster,
    },
    default=list_clusters,
)


Channel = Annotated[str, Argument(help="mail or webhook")]


def send_test(channel: Channel, as_json: AsJson = False, daemon: Daemon = DAEMON) -> int:
    """Send a test notification to the configured recipients of alerts, and print the answer of each.

    A channel is tested at most once in 30 seconds.
    """
    answer = daemon.client().post("/api/v1/alerts/test", {"channel": channel}, patient=True)
    rows = [[r["channel"], r["to"], "yes" if r["delivered"] else "no", r["answer"]] for r in answer["results"]]
    print_answer(answer, as_json, lambda _: tables.format_table(("CHANNEL", "TO", "DELIVERED", "ANSWER"), rows))
    return Exit.OK if all(result["delivered"] for result in answer["results"]) else Exit.FAILED


def list_alerts(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """List current alerts with cause and remedy, most urgent first."""
    print_answer(daemon.client().get("/api/v1/alerts"), as_json, _format_alerts)


def _format_alerts(answer: Json) -> str:
    nothing = "nothing is wrong" if answer["looked_at"] else "the daemon has just begun, and has not looked yet"
    return "\n\n".join(_format_alert(alert) for alert in answer["alerts"]) or nothing


def _format_alert(alert: Json) -> str:
    so_long = format_duration(seconds_since(alert["since"], None))
    fields = {name: printable(str(value)) for name, value in alert.items()}
    head = f"{fields['severity'].upper()}  {fields['target']}  {fields['kind']}, for {so_long}"
    text = f"{head}\n  {fields['summary']}\n  cause:  {fields['cause']}\n  remedy: {fields['remedy']}"
    if (mark := alert["mark"]) is None:
        return text
    state = "acknowledged" if mark["action"] == "acknowledge" else "silenced"
    comment = f": {mark['reason']}" if mark["reason"] else ""
    return text + "\n  " + printable(f"{state} by {mark['by']} until {format_moment(mark['until'])}{comment}")


Kind = Annotated[AlertKind, Argument(help="the kind of the alerts, such as agent-away")]
Targets = Annotated[list[str] | None, Argument(help="their targets, such as 'cluster north'; default: all of the kind")]
Duration = Annotated[str, Option("-d", "--duration", help="how long, e.g. 2h or 1-00:00:00")]
Comment = Annotated[str, Option("-c", "--comment", help="a note for other operators", may_be_empty=True)]


def acknowledge_alerts(
    kind: Kind,
    targets: Targets = None,
    duration: Duration = "4h",
    comment: Comment = "",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Acknowledge alerts: they stay listed with your name until they end."""
    _mark_alerts(daemon, "mark", kind, targets, as_json, action="acknowledge", duration=duration, reason=comment)


def silence_alerts(
    kind: Kind,
    targets: Targets = None,
    duration: Duration = "4h",
    comment: Comment = "",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Silence alerts: the dashboard folds them away and no notifications are sent, also when they begin again."""
    _mark_alerts(daemon, "mark", kind, targets, as_json, action="silence", duration=duration, reason=comment)


def expire_marks(kind: Kind, targets: Targets = None, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """End the acknowledgement or silence of alerts."""
    _mark_alerts(daemon, "unmark", kind, targets, as_json)


def _mark_alerts(
    daemon: Daemon, path: str, kind: AlertKind, targets: list[str] | None, as_json: bool, **fields: str
) -> None:
    body = {"kind": str(kind), "targets": targets or [], **fields}
    print_answer(daemon.client().post(f"/api/v1/alerts/{path}", body), as_json, _format_alerts)


alerts_group = Group(
    "List current alerts, mark them, or test how operators are notified of them.\n\nOperators see all alerts, other "
    "users those of clusters and of their own jobs.",
    {"ack": acknowledge_alerts, "expire": expire_marks, "silence": silence_alerts, "test": send_test},
    default=list_alerts,
)
