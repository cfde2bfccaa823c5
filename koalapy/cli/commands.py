"""The commands that look at one job, or act on some."""

import sys
from typing import Annotated, Any

from koalapy.cli.client import FINAL, Client, refused
from koalapy.cli.errors import CliError, Exit, printable, refuse_together
from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import DEFAULT_URL, AsJson, Job, Jobs, Token, Url, Why, show_json
from koalapy.model.job import Priority

QueuedJobs = Annotated[list[int], Argument(help="ids of jobs", completes="queued jobs")]
PATIENCE = 3.0
"""Seconds that a job's page waits to be told when it will start."""
HeldJobs = Annotated[list[int], Argument(help="ids of jobs", completes="held jobs")]


def show(
    job: Job,
    attempts: Annotated[int, Option(help="how many attempts to chart, the last ones", min=1, max=10**6)] = 5,
    follow: Annotated[bool, Option("-f", "--follow", help="first show how its files come")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Everything about one job: where it is, and what happened to it.

    A claim asks a cluster for the nodes of a component. At the barrier, components that have theirs wait for the
    others, and for files. The start delay is how much later than first estimated the job was to start.
    """
    from koalapy.cli.files import transfers
    from koalapy.cli.terminal import tables

    refuse_together(json=as_json, follow=follow)
    client = Client(url, token)
    if follow:
        transfers.follow(client, job)
    found = client.get(f"/api/v1/jobs/{job}")
    if as_json:
        show_json(found)
    else:
        # With one more, for the chart begins where that ended.
        under_way = transfers.lines(found, unicode=tables.is_unicode())
        print(tables.job_page(found, client.attempts(job, attempts + 1), attempts, under_way))
        if found["state"] == "queued" and (expected := _expected(client, job)):
            print(f"\n{printable(expected)}")


def _expected(client: Client, job: int) -> str:
    """When it will start, if that can be told soon."""
    from koalapy.cli.jobs.what_if import span

    try:
        told = client.get(f"/api/v1/jobs/{job}/forecast", wait=PATIENCE)["expected"]
    except CliError:
        return ""  # what was asked for has been told
    if told is None or told["starts"] is None:
        return ""
    return f"expected to start in {span(told['starts'])}, by {told['basis']}"


def cancel(
    jobs: Jobs,
    reason: Why = "",
    warn: Annotated[bool, Option("--warn", help="with the signal and grace that they asked for")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> int:
    """End jobs; a running one gives all its nodes back."""
    worst = Exit.OK
    for one in Client(url, token).act("cancel", jobs, reason=reason, **({"warn": True} if warn else {})):
        if problem := one["problem"]:
            worst = max(worst, _told(problem))
        else:
            print(f"job {one['job']} {'cancelled' if one['state'] in FINAL else 'is being cancelled'}")
    return worst


def _told(problem: dict[str, Any]) -> Exit:
    error = refused(problem)
    print(f"koala: {error}", file=sys.stderr)
    return error.code


def hold(jobs: QueuedJobs, reason: Why = "", url: Url = DEFAULT_URL, token: Token = None) -> int:
    """Keep queued jobs from being placed."""
    return _act("hold", jobs, {"reason": reason}, Client(url, token))


def release(jobs: HeldJobs, url: Url = DEFAULT_URL, token: Token = None) -> int:
    """Let held jobs be placed again."""
    return _act("release", jobs, None, Client(url, token))


def priority(
    priority: Annotated[Priority, Argument(help="what they are to have")],
    jobs: QueuedJobs,
    reason: Why = "",
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> int:
    """Give jobs that wait another priority; each keeps its place by when it came."""
    worst = Exit.OK
    for one in Client(url, token).act("priority", jobs, priority=priority, reason=reason):
        if problem := one["problem"]:
            worst = max(worst, _told(problem))
        else:
            print(f"job {one['job']} {one['state']}, {one['priority']} priority")
    return worst


def _act(action: str, jobs: list[int], body: dict[str, Any] | None, client: Client) -> Exit:
    """Act on each job, and go on after errors; the worst of them is the exit code."""
    worst = Exit.OK
    for job in jobs:
        try:
            now = client.post(f"/api/v1/jobs/{job}/{action}", body)
        except CliError as error:
            print(f"koala: {error}", file=sys.stderr)
            worst = max(worst, error.code)
            if error.code is Exit.UNREACHABLE:
                break
        else:
            print(f"job {job} {now['state']}")
    return worst
