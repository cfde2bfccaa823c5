"""``koala show``, ``cancel``, ``hold``, ``release`` and ``priority``: show a job, or change jobs."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Annotated

from koalapy.cli.jobs.selection import (
    NO_SELECTION,
    LastJob,
    Selection,
    confirm_cancel,
    describe_jobs,
    find_job,
    find_last_job,
    print_dry_run,
    report_selection,
    select_jobs,
)
from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.job_reference import JobReference
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Jobs, Why, refuse_together, show_json
from koalapy.client.answers import Json
from koalapy.client.client import FINAL, Client, problem_to_error
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.job_spec import Priority

QueuedJobs = Annotated[list[JobReference] | None, Argument(help="ids of jobs", completes="queued jobs")]
HeldJobs = Annotated[list[JobReference] | None, Argument(help="ids of jobs", completes="held jobs")]
FORECAST_TIMEOUT_S = 3.0


def show_job(
    job: LastJob = None,
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
    number = find_job(client, job)
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
    jobs: Jobs = None,
    selection: Selection = NO_SELECTION,
    reason: Why = "",
    warn: Annotated[
        bool, Option("--warn", help="send the warning signal and wait for the grace of --signal first")
    ] = False,
    yes: Annotated[bool, Option("-y", "--yes", help="do not ask before selected jobs are cancelled")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Cancel jobs, or tasks of arrays: koala cancel 7 9[3-9], or koala cancel --mine --state queued

    On a terminal it asks before it cancels selected jobs, or the one you submitted last if none is given.
    """
    client, orders = daemon.client(), Json({"reason": reason} | ({"warn": True} if warn else {}))
    asks = not jobs and not selection.last and not selection.dry_run and not yes and sys.stdin.isatty()
    if asks and not selection.filters:
        last = client.job(find_last_job(client))
        chosen = [last["id"]]
        confirm_cancel(f"job {last['id']}{f' ({name})' if (name := last['name']) else ''}, {last['state']}")
    else:
        chosen = select_jobs(client, "cancel", [job.job for job in jobs or ()], selection)
        if asks:
            confirm_cancel(describe_jobs(chosen))
    parts = [job for job in jobs or () if job.tasks is not None]
    if jobs:
        chosen = [job.job for job in jobs if job.tasks is None]
    if selection.dry_run:
        print_dry_run("cancel", [*chosen, *map(str, parts)], as_json=as_json)
        return Exit.OK
    report_selection(selection, chosen)
    results = client.act_on_jobs("cancel", chosen, **orders)
    return _print_results(chain(results, _cancel_tasks(client, parts, orders)), as_json, _cancel_text)


def _cancel_tasks(client: Client, parts: Iterable[JobReference], orders: Json) -> Iterator[Json]:
    """Cancel tasks of arrays, and yield the result for each array."""
    for part in parts:
        result = {"job": part.job, "tasks": str(part.tasks), "state": None, "problem": None}
        try:
            answer = client.post(f"/api/v1/jobs/{part.job}/cancel", {**orders, "tasks": str(part.tasks)})
        except CliError as error:
            if not error.status:
                raise
            problem = {"status": error.status, "code": error.problem, "detail": error.message, "hint": error.hint}
            yield result | {"problem": problem}
        else:
            yield result | {"state": answer["state"]}


def _whole_jobs(action: str, jobs: list[JobReference] | None, words: str = "") -> list[int]:
    """Return the numbers of jobs. Raise ``CliError`` for tasks. ``words``: the command's words before the job."""
    for job in jobs or ():
        if job.tasks is not None:
            hint = f"koala {words or action} {job.job}"
            raise CliError(f"{job} is a part of an array, and {action} acts on whole arrays", Exit.USAGE, hint)
    return [job.job for job in jobs or ()]


def hold_jobs(
    jobs: QueuedJobs = None,
    selection: Selection = NO_SELECTION,
    reason: Why = "",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Hold queued jobs: they are not placed until they are released."""
    client = daemon.client()
    chosen = select_jobs(client, "hold", _whole_jobs("hold", jobs), selection)
    return _act(client, "hold", chosen, {"reason": reason}, selection, as_json, lambda result: str(result["state"]))


def release_jobs(
    jobs: HeldJobs = None, selection: Selection = NO_SELECTION, as_json: AsJson = False, daemon: Daemon = DAEMON
) -> int:
    """Release held jobs."""
    client = daemon.client()
    chosen = select_jobs(client, "release", _whole_jobs("release", jobs), selection)
    return _act(client, "release", chosen, {}, selection, as_json, lambda result: str(result["state"]))


def change_priority(
    priority: Annotated[Priority, Argument(help="the new priority")],
    jobs: QueuedJobs = None,
    selection: Selection = NO_SELECTION,
    reason: Why = "",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Change the priority of waiting jobs; their order by submission time stays."""
    client, orders = daemon.client(), {"priority": priority, "reason": reason}
    chosen = select_jobs(client, "priority", _whole_jobs("priority", jobs, f"priority {priority}"), selection)
    return _act(client, "priority", chosen, orders, selection, as_json, _priority_text)


def _cancel_text(result: Json) -> str:
    return "cancelled" if result["state"] in FINAL and "tasks" not in result else "is being cancelled"


def _priority_text(result: Json) -> str:
    return f"{result['state']}, {result['priority']} priority"


def _act(
    client: Client,
    action: str,
    jobs: list[int],
    orders: Mapping[str, str | bool],
    selection: Selection,
    as_json: bool,
    change: Callable[[Json], str],
) -> int:
    """Apply an action to jobs and print the result for each job; return the worst exit code."""
    if selection.dry_run:
        print_dry_run(action, jobs, as_json=as_json)
        return Exit.OK
    report_selection(selection, jobs)
    return _print_results(client.act_on_jobs(action, jobs, **orders), as_json, change)


def _print_results(results: Iterable[Json], as_json: bool, change: Callable[[Json], str]) -> int:
    """Print the result for each job; return the worst exit code."""
    if as_json:
        listed = list(results)
        show_json({"jobs": listed})
        return max((problem_to_error(r["problem"]).code for r in listed if r["problem"]), default=Exit.OK)
    worst = Exit.OK
    for result in results:
        if result["problem"]:
            error = problem_to_error(result["problem"])
            print(f"koala: {error}", file=sys.stderr)
            worst = max(worst, error.code)
        else:
            tasks = f"[{result['tasks']}]" if "tasks" in result else ""
            print(f"job {result['job']}{tasks} {change(result)}")
    return worst
