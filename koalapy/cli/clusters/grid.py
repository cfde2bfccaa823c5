"""The commands for the grid: its clusters, what an operator does with them, and how well they are used."""

import sys
from typing import Annotated, Any

from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit, refuse_together
from koalapy.cli.terminal import tables
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DEFAULT_URL, AsJson, Token, Url, Watch, show_json
from koalapy.model.wording import nodes

Name = Annotated[str, Argument(help="the cluster", completes="clusters")]


def clusters(watch: Watch = False, as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show the clusters and their nodes."""
    client = Client(url, token)
    if watch:
        from koalapy.cli.terminal.watching import watch as watch_clusters

        refuse_together(watch=True, json=as_json)
        watch_clusters(client, _look, tables.clusters)
    answer = client.get("/api/v1/clusters")
    if as_json:
        show_json(answer)
    else:
        print(tables.clusters(answer["clusters"]))


def _look(client: Client) -> list[dict[str, Any]]:
    """When they were heard of last is no change."""
    found = client.get("/api/v1/clusters")["clusters"]
    return [{**cluster, "last_heard": None} for cluster in found]


def show(name: Name, as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show one cluster: its nodes, by class where they differ, and its link to the others."""
    found = Client(url, token).cluster(name)
    if as_json:
        show_json(found)
    else:
        print(tables.cluster(found))


def clear(name: Name, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Use a cluster again that was given up after errors."""
    cluster = Client(url, token).act_on_cluster(name, "clear")
    print(f"cluster {name} is {cluster['state']}")


def drain(
    name: Name,
    reason: Annotated[str, Option("--reason", help="why; shown to everybody", may_be_empty=True)] = "",
    requeue: Annotated[
        bool, Option("--requeue", help="stop the jobs there, with their warning; they queue again")
    ] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Place nothing more on a cluster; running jobs go on. Again: with the new reason."""
    order = {"reason": reason} | ({"requeue": True} if requeue else {})
    cluster = Client(url, token).act_on_cluster(name, "drain", order)
    left = f"; jobs still have {nodes(cluster['used'])} there" if cluster["used"] else ""
    print(f"cluster {name} is drained{left}")


def resume(name: Name, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Use a drained cluster again."""
    cluster = Client(url, token).act_on_cluster(name, "resume")
    print(f"cluster {name} is {cluster['state']}")


def lost(
    name: Name,
    reason: Annotated[str, Option("--reason", help="why; shown to everybody", may_be_empty=True)] = "",
    yes: Annotated[bool, Option("--yes", help="do not ask whether it is certain")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Declare that nothing of koalapy's runs any more on a cluster that is out of reach; its jobs are tried again."""
    if not yes:
        _confirm_lost(name)
    Client(url, token).act_on_cluster(name, "lost", {"reason": reason})
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
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """How well the clusters are used, and how long jobs wait.

    USED are nodes of this scheduler's jobs, BACKGROUND those that the clusters' own users have, past the scheduler.
    """
    answer = Client(url, token).get("/api/v1/metrics", since=since)
    if as_json:
        show_json(answer)
    else:
        print(tables.metrics(answer))


clusters_group = Group(
    "Show clusters, or act on one.\n\nUSED are nodes of this scheduler's jobs, BACKGROUND those that the clusters' own "
    "users have, past the scheduler.",
    {"clear": clear, "drain": drain, "lost": lost, "resume": resume, "show": show},
    default=clusters,
)
