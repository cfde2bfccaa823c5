"""``koala clusters``, ``metrics`` and ``alerts``: clusters, how well they are used, and what is wrong."""

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


def clusters(watch: Watch = False, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show the clusters and their nodes."""
    client = daemon.client()
    if watch:
        from koalapy.cli.terminal.watching import watch as watch_clusters

        refuse_together(watch=True, json=as_json)
        watch_clusters(client, _look, tables.clusters)
    print_answer(client.get("/api/v1/clusters"), as_json, lambda answer: tables.clusters(answer["clusters"]))


def _look(client: Client) -> list[Cluster]:
    """Return the clusters without the times of their last reports, whose change is not shown."""
    return [cast(Cluster, {**cluster, "last_heard": None}) for cluster in client.clusters()]


def show(name: Name, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show one cluster: its nodes, by class where they differ, and its link to the others."""
    print_answer(daemon.client().cluster(name), as_json, tables.cluster)


def clear(name: Name, daemon: Daemon = DAEMON) -> None:
    """Use a cluster again that was given up after errors."""
    cluster = daemon.client().act_on_cluster(name, "clear")
    print(f"cluster {name} is {cluster['state']}")


def drain(
    name: Name,
    reason: Annotated[str, Option("--reason", help="why; shown to everybody", may_be_empty=True)] = "",
    requeue: Annotated[
        bool, Option("--requeue", help="stop the jobs there, with their warning; they queue again")
    ] = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Place nothing more on a cluster; running jobs go on. Again: with the new reason."""
    order = {"reason": reason} | ({"requeue": True} if requeue else {})
    cluster = daemon.client().act_on_cluster(name, "drain", order)
    left = f"; jobs still have {format_nodes(cluster['used'])} there" if cluster["used"] else ""
    print(f"cluster {name} is drained{left}")


def resume(name: Name, daemon: Daemon = DAEMON) -> None:
    """Use a drained cluster again."""
    cluster = daemon.client().act_on_cluster(name, "resume")
    print(f"cluster {name} is {cluster['state']}")


def lost(
    name: Name,
    reason: Annotated[str, Option("--reason", help="why; shown to everybody", may_be_empty=True)] = "",
    yes: Annotated[bool, Option("--yes", help="do not ask whether it is certain")] = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Declare that nothing of koalapy's runs any more on a cluster that is out of reach; its jobs are tried again."""
    if not yes:
        _confirm_lost(name)
    daemon.client().act_on_cluster(name, "lost", {"reason": reason})
    print(f"cluster {name} is lost: its jobs are tried again")


def _confirm_lost(name: str) -> None:
    """Have the operator type the cluster's name; ``CliError`` otherwise."""
    print(
        f"Every job that runs on {name} will be started again elsewhere, at once. A program that still runs there then "
        f"runs twice.\nGo on only if nothing runs there: its nodes are off, or its resource manager has ended all jobs "
        f"named koala-*.",
        file=sys.stderr,
    )
    if not sys.stdin.isatty():
        raise CliError("it was not confirmed", Exit.USAGE, f"add --yes if nothing runs on {name} any more")
    print(f"Type {name} to go on: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() != name:
        raise CliError(f"cluster {name} was not declared lost", Exit.USAGE, f"type its name, {name}, to go on")


def metrics(
    since: Annotated[float, Option(help="over how many seconds until now")] = 3600.0,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """How well the clusters are used, and how long jobs wait.

    USED are nodes of this scheduler's jobs, BACKGROUND those that the clusters' own users have, past the scheduler.
    """
    print_answer(daemon.client().get("/api/v1/metrics", since=since), as_json, tables.metrics)


clusters_group = Group(
    "Show clusters, or act on one.\n\nUSED are nodes of this scheduler's jobs, BACKGROUND those that the clusters' own "
    "users have, past the scheduler.",
    {"clear": clear, "drain": drain, "lost": lost, "resume": resume, "show": show},
    default=clusters,
)


def alerts(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """What is wrong now, why, and what helps; the most urgent first.

    Operators are told all, others what concerns the clusters and their own jobs.
    """
    print_answer(daemon.client().get("/api/v1/alerts"), as_json, _page)


def _page(answer: Json) -> str:
    nothing = "nothing is wrong" if answer["looked_at"] else "the daemon has just begun, and has not looked yet"
    return "\n\n".join(_text(alert) for alert in answer["alerts"]) or nothing


def _text(alert: Alert) -> str:
    so_long = format_duration(seconds_since(alert["since"], None))
    told = {name: printable(str(value)) for name, value in alert.items()}
    head = f"{told['severity'].upper()}  {told['target']}  {told['kind']}, for {so_long}"
    return f"{head}\n  {told['summary']}\n  cause:  {told['cause']}\n  remedy: {told['remedy']}"
