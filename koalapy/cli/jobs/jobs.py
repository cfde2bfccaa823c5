"""``koala show``, ``cancel``, ``hold``, ``release`` and ``priority``: show a job, or change jobs."""

import sys
from collections.abc import Callable, Iterable
from typing import Annotated

from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Job, Jobs, Why, refuse_together, show_json
from koalapy.client.answers import Json
from koalapy.client.client import FINAL, Client, problem_to_error
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.job import Priority

QueuedJobs = Annotated[list[int], Argument(help="ids of jobs", completes="queued jobs")]
FORECAST_TIMEOUT_S = 3.0
HeldJobs = Annotated[list[int], Argument(help="ids of jobs", completes="held jobs")]


def show_job(
    job: Job,
    attempts: Annotated[int, Option(help="number of last attempts in the chart", min=1, max=10**6)] = 5,
    follow: Annotated[bool, Option("-f", "--follow", help="first show the progress of file transfers")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show a job with its components, attempts and timeline.

    A claim requests the nodes of a component from its cluster. At the barrier, components wait for the others and for
    files. The start delay is the difference between the last and the first estimate of the start.
    """
    from koalapy.cli.files import transfers
    from koalapy.cli.terminal import tables

    refuse_together(json=as_json, follow=follow)
    client = daemon.client()
    number = job.find_number(client)
    if follow:
        transfers.follow_transfers(client, number)
    answer = client.job(number)
    if as_json:
        show_json(answer)
    else:
        # Request one more attempt, since the chart begins at its end.
        under_way = transfers.transfer_lines(answer, unicode=tables.is_unicode())
        print(tables.job_page(answer, client.attempts(number, attempts + 1), attempts, under_way))
        if answer["state"] == "queued" and (expected := _expected_start(client, number)):
            print(f"\n{printable(expected)}")


def _expected_start(client: Client, job: int) -> str:
    """Return the expected start of a job as text; empty if the daemon does not respond soon."""
    from koalapy.cli.jobs.explain import format_interval

    try:
        forecast = client.get(f"/api/v1/jobs/{job}/forecast", wait=FORECAST_TIMEOUT_S)["expected"]
    except CliError:
        return ""  # the page of the job has been printed
    if forecast is None or forecast["starts"] is None:
        return ""
    return f"expected to start in {format_interval(forecast['starts'])}, by {forecast['basis']}"


def cancel_jobs(
    jobs: Jobs,
    reason: Why = "",
    warn: Annotated[
        bool, Option("--warn", help="send the warning signal and wait for the grace of --signal first")
    ] = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Cancel jobs, or tasks of arrays: koala cancel 7[3-9]"""
    orders: dict[str, str | bool] = {"reason": reason} | ({"warn": True} if warn else {})
    client = daemon.client()
    results = client.act_on_jobs("cancel", [job.job for job in jobs if job.tasks is None], **orders)
    worst = _print_results(results, lambda result: "cancelled" if result["state"] in FINAL else "is being cancelled")
    for job in jobs:
        if job.tasks is None:
            continue
        try:
            client.post(f"/api/v1/jobs/{job.job}/cancel", {**orders, "tasks": str(job.tasks)})
        except CliError as error:
            if not error.status:
                raise
            print(f"koala: {error}", file=sys.stderr)
            worst = max(worst, error.code)
        else:
            print(f"job {job} is being cancelled")
    return worst


def hold_jobs(jobs: QueuedJobs, reason: Why = "", daemon: Daemon = DAEMON) -> int:
    """Hold queued jobs: they are not placed until they are released."""
    return _print_results(daemon.client().act_on_jobs("hold", jobs, reason=reason), lambda result: str(result["state"]))


def release_jobs(jobs: HeldJobs, daemon: Daemon = DAEMON) -> int:
    """Release held jobs."""
    return _print_results(daemon.client().act_on_jobs("release", jobs), lambda result: str(result["state"]))


def change_priority(
    priority: Annotated[Priority, Argument(help="the new priority")],
    jobs: QueuedJobs,
    reason: Why = "",
    daemon: Daemon = DAEMON,
) -> int:
    """Change the priority of waiting jobs; their order by submission time stays."""
    results = daemon.client().act_on_jobs("priority", jobs, priority=priority, reason=reason)
    return _print_results(results, lambda result: f"{result['state']}, {result['priority']} priority")


def _print_results(results: Iterable[Json], change: Callable[[Json], str]) -> int:
    """Print the result for each job; return the worst exit code."""
    worst = Exit.OK
    for result in results:
        if result["problem"]:
            error = problem_to_error(result["problem"])
            print(f"koala: {error}", file=sys.stderr)
            worst = max(worst, error.code)
        else:
            print(f"job {result['job']} {change(result)}")
    return worst
