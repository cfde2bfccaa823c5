"""The commands for the grid: its clusters, what an operator does with them, and how well they are used."""

from typing import Annotated

import typer

from koalapy.cli import tables
from koalapy.cli.client import Client
from koalapy.cli.options import DEFAULT_URL, AsJson, Token, Url, show_json
from koalapy.cli.submission import current_user
from koalapy.model.wording import nodes

Name = Annotated[str, typer.Argument(help="the cluster")]
InnerUrl = Annotated[str | None, typer.Option("--url", help="where the daemon is")]
InnerToken = Annotated[str | None, typer.Option("--token", help="what to show it", show_default=False)]

clusters_app = typer.Typer(help="Show clusters, or act on one.", invoke_without_command=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    app.add_typer(clusters_app, name="clusters")
    app.command()(metrics)


@clusters_app.callback()
def clusters(context: typer.Context, as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Show the clusters and their nodes."""
    context.obj = (url, token)
    if context.invoked_subcommand is not None:
        return
    answer = Client(url, token).get("/api/v1/clusters")
    if as_json:
        show_json(answer)
    else:
        print(tables.clusters(answer["clusters"]))


def _client(context: typer.Context, url: str | None, token: str | None) -> Client:
    outer_url, outer_token = context.obj
    return Client(url or outer_url, token or outer_token)


@clusters_app.command()
def clear(context: typer.Context, name: Name, url: InnerUrl = None, token: InnerToken = None) -> None:
    """Use a cluster again that was given up after errors."""
    cluster = _client(context, url, token).act_on_cluster(name, "clear")
    print(f"cluster {name} is {cluster['state']}")


@clusters_app.command()
def drain(
    context: typer.Context,
    name: Name,
    reason: Annotated[str, typer.Option("--reason", help="why; shown to everybody")] = "",
    url: InnerUrl = None,
    token: InnerToken = None,
) -> None:
    """Place nothing more on a cluster; running jobs go on. Again: with the new reason."""
    order = {"reason": reason, "by": current_user()}
    cluster = _client(context, url, token).act_on_cluster(name, "drain", order)
    left = f"; jobs still have {nodes(cluster['used'])} there" if cluster["used"] else ""
    print(f"cluster {name} is drained{left}")


@clusters_app.command()
def resume(context: typer.Context, name: Name, url: InnerUrl = None, token: InnerToken = None) -> None:
    """Use a drained cluster again."""
    cluster = _client(context, url, token).act_on_cluster(name, "resume")
    print(f"cluster {name} is {cluster['state']}")


def metrics(
    since: Annotated[float, typer.Option(help="over how many seconds until now")] = 3600.0,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """How well the clusters are used, and how long jobs wait."""
    answer = Client(url, token).get("/api/v1/metrics", since=since)
    if as_json:
        show_json(answer)
    else:
        print(tables.metrics(answer))
