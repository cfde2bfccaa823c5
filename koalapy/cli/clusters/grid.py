"""``koala clusters``, ``metrics`` and ``alerts``: the clusters, their use and current problems."""

import sys
from typing import Annotated, cast

from koalapy.cli.terminal import tables
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Watch, print_answer, refuse_together
from koalapy.cli.terminal.tables import seconds_since
from koalapy.client.answers import Alert, Cluster, Json
from koalapy.client.client import Client
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.wording import format_duration, format_nodes

Name = Annotated[str, Argument(help="the cluster", completes="clusters")]


def list_clusters(watch: Watch = False, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show the clusters and their nodes."""
    client = daemon.client()
    if watch:
        from koalapy.cli.terminal.screen import watch_page as watch_clusters

        refuse_together(watch=True, json=as_json)
        watch_clusters(client, _request_clusters, tables.clusters_table)
    print_answer(client.get("/api/v1/clusters"), as_json, lambda answer: tables.clusters_table(answer["clusters"]))


def _request_clusters(client: Client) -> list[Cluster]:
    """Return the clusters without the times of their last reports, so that new times are not shown as a change."""
    return [cast(Cluster, {**cluster, "last_heard": None}) for cluster in client.clusters()]


def show_cluster(name: Name, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show a cluster with its node classes and its uplink."""
    print_answer(daemon.client().cluster(name), as_json, tables.cluster_page)


def clear_errors(name: Name, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Clear the errors of an unusable cluster and use it again."""
    print_answer(daemon.client().act_on_cluster(name, "clear"), as_json, _format_state)


def _format_state(cluster: Cluster) -> str:
    return f"cluster {cluster['name']} is {cluster['state']}"


def drain_cluster(
    name: Name,
    reason: Annotated[str, Option("--reason", help="reason, visible to all users", may_be_empty=True)] = "",
    requeue: Annotated[
        bool, Option("--requeue", help="stop its jobs after their warning; they return to their queues")
    ] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Drain a cluster: running jobs continue, nothing more is placed. Repeat to change the reason."""
    order = {"reason": reason} | ({"requeue": True} if requeue else {})
    cluster = daemon.client().act_on_cluster(name, "drain", order)
    remaining = f"; jobs still have {format_nodes(cluster['used'])} there" if cluster["used"] else ""
    print_answer(cluster, as_json, lambda cluster: f"cluster {cluster['name']} is drained{remaining}")


def resume_cluster(name: Name, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Resume a drained cluster."""
    print_answer(daemon.client().act_on_cluster(name, "resume"), as_json, _format_state)


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
    """Ask the operator to type the cluster's name. Raise ``CliError`` for another answer."""
    print(
        f"Every job that runs on {name} will be started again elsewhere, at once. A program that still runs there then "
        f"runs twice.\nGo on only if nothing runs there: its nodes are off, or its resource manager has ended all jobs "
        f"named koala-*.",
        file=sys.stderr,
    )
    if not sys.stdin.isatty():
        raise CliError(
            f"declaring cluster {name} lost needs a confirmation, and there is no terminal to ask on",
            Exit.USAGE,
            f"add --yes if nothing runs on {name} any more",
        )
    print(f"Type {name} to confirm: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() != name:
        raise CliError(f"cluster {name} was not declared lost", Exit.USAGE, f"type its name, {name}, to confirm")


def show_metrics(
    since: Annotated[float, Option(help="period in seconds until now")] = 3600.0,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show the use of clusters and the wait times of jobs.

    USED: nodes of this scheduler's jobs. BACKGROUND: nodes of the clusters' local users.
    """
    print_answer(daemon.client().get("/api/v1/metrics", since=since), as_json, tables.metrics_page)


clusters_group = Group(
    "List clusters, or act on one.\n\nUSED are nodes of this scheduler's jobs, BACKGROUND those that the clusters' own "
    "users have, past the scheduler.",
    {
        "clear": clear_errors,
        "drain": drain_cluster,
        "lost": declare_lost,
        "resume": resume_cluster,
        "show": show_cluster,
    },
    default=list_clusters,
)


def list_alerts(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """List current alerts with cause and remedy, most urgent first.

    Operators see all alerts, other users those of clusters and of their own jobs.
    """
    print_answer(daemon.client().get("/api/v1/alerts"), as_json, _format_alerts)


def _format_alerts(answer: Json) -> str:
    nothing = "nothing is wrong" if answer["looked_at"] else "the daemon has just begun, and has not looked yet"
    return "\n\n".join(_format_alert(alert) for alert in answer["alerts"]) or nothing


def _format_alert(alert: Alert) -> str:
    so_long = format_duration(seconds_since(alert["since"], None))
    fields = {name: printable(str(value)) for name, value in alert.items()}
    head = f"{fields['severity'].upper()}  {fields['target']}  {fields['kind']}, for {so_long}"
    return f"{head}\n  {fields['summary']}\n  cause:  {fields['cause']}\n  remedy: {fields['remedy']}"
