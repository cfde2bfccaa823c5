"""``koala queue``."""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from operator import itemgetter
from typing import Annotated, NoReturn

from koalapy.cli.jobs.jobs import describe_jobs, find_jobs
from koalapy.cli.terminal import tables
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Jobs, Watch, refuse_together, show_json
from koalapy.client.client import Client, JobListing
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.job_reference import JobReference
from koalapy.client.tables import format_tasks
from koalapy.model.job_state import JobSort, JobState
from koalapy.model.times import PAST_TIME_EXAMPLES

MAX_IDS = 500
"""Jobs that one request lists by their ids."""


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    NDJSON = "ndjson"


def list_jobs(
    jobs: Jobs = None,
    everyone: Annotated[bool, Option("--all", help="jobs of all users")] = False,
    user: Annotated[
        str | None, Option("-u", "--user", help="jobs of this user; default: you", completes="users")
    ] = None,
    state: Annotated[list[JobState] | None, Option(help="jobs in this state, including ended ones")] = None,
    name: Annotated[str | None, Option(help="jobs with this name")] = None,
    cluster: Annotated[str | None, Option(help="jobs with a component on this cluster", completes="clusters")] = None,
    home_site: Annotated[str | None, Option(help="jobs with this home site", completes="clusters")] = None,
    tasks: Annotated[int | None, Option(help="started tasks of this array, ended ones with --state", min=1)] = None,
    since: Annotated[str, Option(help=f"jobs submitted since then: {PAST_TIME_EXAMPLES}")] = "",
    until: Annotated[str, Option(help="jobs submitted before then")] = "",
    sort: Annotated[JobSort | None, Option(help="order; default: queue, and newest for ended jobs")] = None,
    limit: Annotated[int, Option(help="maximum number of jobs", min=1)] = 100,
    quiet: Annotated[bool, Option("-q", "--quiet", help="print ids only")] = False,
    form: Annotated[Format, Option("-o", "--output", help="output format")] = Format.TABLE,
    watch: Watch = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """List jobs; by default your unfinished ones.

    Running jobs come first, then jobs that are about to run, then waiting jobs by their positions in the queue. With a
    --state of ended jobs the newest come first. An array is one line with the numbers of its tasks.

    States: queued jobs wait for a placement, placed jobs have clusters, claiming jobs request nodes, starting jobs have
    all nodes, and unknown jobs have an unreachable cluster.
    """
    refuse_together(all=everyone, user=bool(user))
    is_json = as_json or form is Format.JSON
    refuse_together(json=is_json, quiet=quiet, output=form in (Format.WIDE, Format.NDJSON))
    choices = (everyone, user, state, name, cluster, home_site, tasks, since, until, sort)
    if jobs and any(choice not in (None, False, "") for choice in choices):
        message = "ids of jobs and options that select or sort jobs cannot be given together"
        raise GridError(message, Exit.USAGE, "drop one")
    mine = True if not user and not everyone else None
    query = {"mine": mine, "owner": user, "name": name, "cluster": cluster, "home_site": home_site, "array": tasks}
    query |= {"since": since, "until": until}
    order = sort or (JobSort.NEWEST if any(job_state.is_final for job_state in state or ()) else JobSort.QUEUE)
    client = daemon.client()

    def request_jobs(client: Client) -> JobListing:
        """Request the jobs that the options select. Raise ``GridError`` if none is found and the cluster is unknown."""
        if jobs:
            return _request_by_id(client, jobs)
        listing = client.list_jobs(limit, state=state, active=not state, sort=order, count=True, **query)
        for cluster_name in (cluster, home_site):
            if not listing.jobs and cluster_name:
                client.cluster(cluster_name)  # raises an error if there is none
        return listing

    holder = "you have" if mine else f"{user} has" if user else "there are"
    nothing = f"{holder} no {' or '.join(state or ('unfinished',))} jobs"
    nothing += f" named {name}" if name else ""
    nothing += f" in array {tasks}" if tasks else ""
    nothing += f" whose home site is {home_site}" if home_site else ""
    nothing += f" with a component on {cluster}" if cluster else ""
    nothing = printable(nothing)
    if watch:
        _watch_jobs(client, request_jobs, form, nothing, json=is_json, quiet=quiet)
    listing = request_jobs(client)
    if is_json:
        show_json({"jobs": listing.jobs})
    elif form is Format.NDJSON:
        for job in listing.jobs:
            print(json.dumps(job))
    elif quiet:
        for job in listing.jobs:
            print(job["id"])
    else:
        print(tables.queue_table(listing.jobs, wide=form is Format.WIDE))
        if not listing.jobs:
            print(f"koala: {_describe_no_tasks(client, tasks, state) if tasks else nothing}", file=sys.stderr)
    if listing.has_more:
        print(f"koala: {_describe_cut(listing)}", file=sys.stderr)


def _request_by_id(client: Client, jobs: list[JobReference]) -> JobListing:
    """Return jobs and started tasks, newest first. Raise ``GridError`` if one is missing."""
    numbers, rows = list(dict.fromkeys(find_jobs(client, jobs))), list[Json]()
    for start in range(0, len(numbers), MAX_IDS):
        ids = numbers[start : start + MAX_IDS]
        rows += client.list_jobs(len(ids), ids=ids).jobs
    if missing := sorted(set(numbers) - {job["id"] for job in rows}):
        raise GridError(f"there is no started {describe_jobs(missing)}", Exit.NOT_FOUND, "see koala show")
    return JobListing(sorted(rows, key=itemgetter("id"), reverse=True), has_more=False)


def _describe_no_tasks(client: Client, array: int, states: list[JobState] | None) -> str:
    """Return how many tasks an array has by state, since none is listed. Raise ``GridError`` if it is no array."""
    tasks = client.job(array)["tasks"]
    if tasks is None:
        raise GridError(f"job {array} is not an array", Exit.USAGE, f"see koala show {array}")
    if tasks["waiting"] == tasks["size"]:
        return f"no task of array {array} has started; {tasks['waiting']} wait"
    counts = format_tasks(tasks)
    if states:
        return f"no started task of array {array} is {' or '.join(states)}; it has {counts}"
    return f"no task of array {array} runs; it has {counts}; --state lists ended tasks, as in --state succeeded"


def _describe_cut(listing: JobListing) -> str:
    count = listing.count or len(listing.jobs)
    return tables.format_listed_count(len(listing.jobs), count, is_whole=listing.is_whole)


def _watch_jobs(
    client: Client, look: Callable[[Client], JobListing], form: Format, nothing: str, **options: bool
) -> NoReturn:
    """Show the jobs after every change. As NDJSON, print each changed job, even if it is no longer listed."""
    from koalapy.cli.terminal import screen

    refuse_together(watch=True, **options)
    if form is Format.NDJSON:
        screen.show_changes(client, look, lambda previous, now: _print_changed(client, previous, now))

    def format_page(listing: JobListing) -> str:
        text = tables.queue_table(listing.jobs, wide=form is Format.WIDE)
        text += f"\n{nothing}" if not listing.jobs else ""
        return text + (f"\n{_describe_cut(listing)}" if listing.has_more else "")

    screen.watch_page(client, look, format_page)


def _print_changed(client: Client, previous: JobListing | None, now: JobListing) -> None:
    """Print each new, changed or no longer listed job as one line of JSON. ``previous``: None the first time."""
    old_jobs = {job["id"]: dict(job) for job in previous.jobs} if previous else {}
    new_jobs = {job["id"]: dict(job) for job in now.jobs}
    for number in old_jobs.keys() - new_jobs.keys():
        new_jobs[number] = old_jobs[number] | {k: v for k, v in client.job(number).items() if k in old_jobs[number]}
    for number in sorted(new_jobs):
        if new_jobs[number] != old_jobs.get(number):
            print(json.dumps(new_jobs[number]), flush=True)
