"""``koala queue``."""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, NoReturn

from koalapy.cli.terminal import tables
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Watch, refuse_together, show_json
from koalapy.client.answers import ListedJob
from koalapy.client.client import Client
from koalapy.client.errors import printable
from koalapy.model.job import JobState

Found = tuple[list[ListedJob], bool]
"""Listed jobs, and whether more exist."""


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    NDJSON = "ndjson"


def queue(
    everyone: Annotated[bool, Option("--all", help="jobs of all users")] = False,
    user: Annotated[str | None, Option(help="jobs of this user; default: you", completes="users")] = None,
    state: Annotated[list[JobState] | None, Option(help="jobs in this state, including ended ones")] = None,
    name: Annotated[str | None, Option(help="jobs with this name")] = None,
    cluster: Annotated[str | None, Option(help="jobs with a component on this cluster", completes="clusters")] = None,
    home_site: Annotated[str | None, Option(help="jobs with this home site", completes="clusters")] = None,
    limit: Annotated[int, Option(help="maximum number of waiting jobs; with --state, of jobs", min=1)] = 100,
    quiet: Annotated[bool, Option("-q", "--quiet", help="print ids only")] = False,
    form: Annotated[Format, Option("-o", "--output", help="output format")] = Format.TABLE,
    watch: Watch = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """List jobs; by default your unfinished ones.

    Jobs with nodes come first, then the newest waiting jobs. With --state the newest jobs in that state are listed.

    States: queued jobs wait for a placement, placed jobs have clusters, claiming jobs request nodes, starting jobs have
    all nodes, and unknown jobs have an unreachable cluster.
    """
    refuse_together(all=everyone, user=bool(user))
    is_json = as_json or form is Format.JSON
    refuse_together(json=is_json, quiet=quiet, output=form in (Format.WIDE, Format.NDJSON))
    mine = True if not user and not everyone else None
    query = {"mine": mine, "owner": user, "name": name, "cluster": cluster, "home_site": home_site}
    client = daemon.client()

    def look(client: Client) -> Found:
        jobs, more = client.jobs(limit, state=state, **query) if state else client.unfinished_jobs(limit, **query)
        for named in (cluster, home_site):
            if not jobs and named:
                client.cluster(named)  # raises an error if there is none
        return jobs, more

    owner = user or ("yours" if mine else "")
    nothing = f"there are no jobs of {owner}" if owner else "there are no jobs"
    nothing += f" named {name}" if name else ""
    nothing += f" whose home site is {home_site}" if home_site else ""
    nothing += f" with a component on {cluster}" if cluster else ""
    nothing = printable(nothing + (f" in the state {' or '.join(state)}" if state else " that are not over"))
    cut = f"only the newest {limit}{'' if state else ' that wait'} are shown; --limit shows more"
    if watch:
        _watch(client, look, form, nothing, cut, json=is_json, quiet=quiet)
    jobs, more = look(client)
    if is_json:
        show_json({"jobs": jobs})
    elif form is Format.NDJSON:
        for job in jobs:
            print(json.dumps(job))
    elif quiet:
        for job in jobs:
            print(job["id"])
    else:
        print(tables.queue(jobs, wide=form is Format.WIDE))
        if not jobs:
            print(f"koala: {nothing}", file=sys.stderr)
    if more:
        print(f"koala: {cut}", file=sys.stderr)


def _watch(
    client: Client, look: Callable[[Client], Found], form: Format, nothing: str, cut: str, **others: bool
) -> NoReturn:
    """Show the jobs after every change. As NDJSON, print each changed job, even if it is no longer listed."""
    from koalapy.cli.terminal import watching

    refuse_together(watch=True, **others)
    if form is Format.NDJSON:
        watching.each_change(client, look, lambda before, now: _print_changed(client, before, now))

    def page(found: Found) -> str:
        jobs, more = found
        told = tables.queue(jobs, wide=form is Format.WIDE)
        return told + (f"\n{nothing}" if not jobs else "") + (f"\n{cut}" if more else "")

    watching.watch(client, look, page)


def _print_changed(client: Client, before: Found | None, now: Found) -> None:
    known = {job["id"]: dict(job) for job in before[0]} if before else {}
    found = {job["id"]: dict(job) for job in now[0]}
    for number in known.keys() - found.keys():
        found[number] = known[number] | {k: v for k, v in client.job(number).items() if k in known[number]}
    for number in sorted(found):
        if found[number] != known.get(number):
            print(json.dumps(found[number]), flush=True)
