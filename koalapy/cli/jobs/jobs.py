"""Select jobs by id, name, owner and state, and change them: ``koala cancel``, ``hold``, ``release``, ``priority``."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Annotated

from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import (
    DAEMON,
    AsJson,
    Daemon,
    Jobs,
    OwnersWhy,
    ReasonPrompt,
    Why,
    refuse_together,
    show_json,
)
from koalapy.client.client import FINAL, Client, problem_to_error
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.job_reference import JobReference
from koalapy.model.job_state import ACTIVE_STATES, WAITING_STATES, JobState, Priority

MAX_SELECTED = 1_000_000
"""Maximum number of jobs that one command selects."""
MAX_SHOWN_IDS = 10
LastJob = Annotated[
    JobReference | None,
    Argument(help="the job's id, or a task of an array: 7[3]; default: the job you submitted last", completes="jobs"),
]
STATES = {
    "cancel": ACTIVE_STATES | WAITING_STATES,
    "wait": ACTIVE_STATES | WAITING_STATES,
    "hold": frozenset({JobState.QUEUED}),
    "release": frozenset({JobState.HELD}),
    "priority": WAITING_STATES,
}
"""The states of the jobs that an action selects by default; it can select no others."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The options that select jobs in place of their ids."""

    name: Annotated[str | None, Option(help="jobs whose name matches a pattern, e.g. 'study-*'")] = None
    mine: Annotated[bool, Option("--mine", help="your jobs")] = False
    user: Annotated[str | None, Option("-u", "--user", help="jobs of this user", completes="users")] = None
    state: Annotated[str | None, Option(help="jobs in these states, e.g. queued,held")] = None
    last: Annotated[bool, Option("--last", help="the job you submitted last")] = False
    dry_run: Annotated[bool, Option("--dry-run", help="only print the selected jobs")] = False

    @property
    def filters(self) -> list[str]:
        """Return the given filters as options, for messages."""
        texts = {"--name": self.name, "--state": self.state, "--user": self.user}
        return [*(f"{option} {text}" for option, text in texts.items() if text), *(["--mine"] if self.mine else [])]


NO_SELECTION = Selection()
"""Default value of the parameter in signatures. The command line passes another object."""


def find_last_job(client: Client) -> int:
    """Return the newest job of the user. Raise ``GridError`` if there is none."""
    jobs = client.list_jobs(1, mine=True).jobs
    if not jobs:
        raise GridError("you have no jobs", Exit.NOT_FOUND, "submit one with koala submit, or give a job's id")
    return int(jobs[0]["id"])


def find_job(client: Client, job: JobReference | None) -> int:
    """Return the number of a job or task; without one, of the user's newest job."""
    return find_last_job(client) if job is None else job.find_number(client)


def find_jobs(client: Client, jobs: list[JobReference] | None) -> list[int]:
    """Return the numbers of jobs and tasks; without any, that of the user's newest job."""
    return [number for job in jobs for number in job.find_numbers(client)] if jobs else [find_last_job(client)]


def select_jobs(client: Client, action: str, ids: list[int] | None, selection: Selection) -> list[int]:
    """Return the ids of the jobs for an action, which the command line gives or selects.

    Raise ``GridError`` if none is selected.
    """
    filters = selection.filters
    given_options = [*(["JOB"] if ids else []), *(["--last"] if selection.last else []), *filters[:1]]
    if len(given_options) > 1:
        raise GridError(
            f"{given_options[1].split()[0]} and {given_options[0]} cannot be given together", Exit.USAGE, "drop one"
        )
    if ids:
        return ids
    if selection.last:
        return [find_last_job(client)]
    if not filters:
        hint = "give ids, --last, or a selection such as --mine, --name 'study-*' or --state queued"
        raise GridError(f"koala {action} is given no job", Exit.USAGE, hint)
    jobs = _list_matching(client, action, selection)
    if not jobs:
        kind = "unfinished job" if action == "wait" else f"job that koala {action} can change"
        raise GridError(f"no {kind} matches {' '.join(filters)}", Exit.NOT_FOUND)
    return [job["id"] for job in jobs]


def _list_matching(client: Client, action: str, selection: Selection) -> list[Json]:
    """Return the jobs that match the filters and that the caller may change, oldest first."""
    refuse_together(mine=selection.mine, user=selection.user is not None)
    query = {"state": sorted(_parse_states(action, selection.state)), "owner": selection.user}
    jobs = client.list_jobs(MAX_SELECTED, mine=True if selection.mine else None, **query).jobs
    return [
        job
        for job in reversed(jobs)
        if not job["redacted"] and (selection.name is None or fnmatchcase(job["name"], selection.name))
    ]


def _parse_states(action: str, text: str | None) -> Collection[str]:
    """Return the states of an option ``--state a,b``. Raise ``GridError`` for a state that the action cannot change."""
    possible = sorted(str(state) for state in STATES[action])
    if text is None:
        return possible
    states = [state.strip().lower() for state in text.split(",")]
    for state in states:
        if state not in possible:
            problem = f"--state is {text}, and koala {action} cannot change jobs in state {state!r}"
            raise GridError(problem, Exit.USAGE, f"use {', '.join(possible)}")
    return states


def report_selection(selection: Selection, ids: list[int]) -> None:
    """Print the number of jobs that filters have selected on standard error."""
    if selection.filters:
        print(f"koala: selected {describe_jobs(ids)}", file=sys.stderr)


def describe_jobs(ids: Sequence[int | str]) -> str:
    """Return the number of jobs and their first ids."""
    id_list = " ".join(map(str, ids[:MAX_SHOWN_IDS])) + (" …" if len(ids) > MAX_SHOWN_IDS else "")
    return f"job {id_list}" if len(ids) == 1 else f"{len(ids)} jobs: {id_list}"


def print_dry_run(action: str, ids: Sequence[int | str], *, as_json: bool) -> None:
    """Print the jobs that an action would have."""
    if as_json:
        show_json({"action": action, "jobs": ids})
    else:
        print(f"koala {action} would act on {describe_jobs(ids)}")


def confirm_cancel(description: str) -> None:
    """Ask on the terminal whether to cancel jobs. Raise ``GridError`` unless the answer is yes."""
    print(f"{printable(f'cancel {description}?')} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise GridError("nothing was cancelled", Exit.USAGE, "answer y, or give the ids of jobs")


QueuedJobs = Annotated[list[JobReference] | None, Argument(help="ids of jobs", completes="queued jobs")]
HeldJobs = Annotated[list[JobReference] | None, Argument(help="ids of jobs", completes="held jobs")]


def cancel_jobs(
    jobs: Jobs = None,
    selection: Selection = NO_SELECTION,
    reason: OwnersWhy = "",
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
    client, order = daemon.client(), Json({"warn": True} if warn else {})
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
    post = ReasonPrompt(client, reason).post
    results = client.act_on_jobs("cancel", chosen, order, post)

    def describe_result(result: Json) -> str:
        return "cancelled" if result["state"] in FINAL and "tasks" not in result else "is being cancelled"

    return _print_results(chain(results, _cancel_tasks(post, parts, order)), as_json, describe_result)


def _cancel_tasks(post: Callable[[str, Json], Json], parts: Iterable[JobReference], order: Json) -> Iterator[Json]:
    """Cancel tasks of arrays, and yield the result for each array."""
    for part in parts:
        result = {"job": part.job, "tasks": str(part.tasks), "state": None, "problem": None}
        try:
            answer = post(f"/api/v1/jobs/{part.job}/cancel", {**order, "tasks": str(part.tasks)})
        except GridError as error:
            if not error.status:
                raise
            problem = {"status": error.status, "code": error.problem, "detail": error.message, "hint": error.hint}
            yield result | {"problem": problem}
        else:
            yield result | {"state": answer["state"]}


def hold_jobs(
    jobs: QueuedJobs = None,
    selection: Selection = NO_SELECTION,
    reason: OwnersWhy = "",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Hold queued jobs: they are not placed until they are released."""
    return _act(daemon.client(), "hold", jobs, selection, {}, as_json, reason)


def release_jobs(
    jobs: HeldJobs = None, selection: Selection = NO_SELECTION, as_json: AsJson = False, daemon: Daemon = DAEMON
) -> int:
    """Release held jobs."""
    return _act(daemon.client(), "release", jobs, selection, {}, as_json)


def change_priority(
    priority: Annotated[Priority, Argument(help="the new priority")],
    jobs: QueuedJobs = None,
    selection: Selection = NO_SELECTION,
    reason: Why = "",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Change the priority of waiting jobs; their order by submission time stays."""
    return _act(daemon.client(), "priority", jobs, selection, {"priority": priority}, as_json, reason)


def _act(
    client: Client,
    action: str,
    jobs: list[JobReference] | None,
    selection: Selection,
    order: Json,
    as_json: bool,
    reason: str | None = None,
) -> int:
    """Apply an action to whole jobs and print the result for each job; return the worst exit code.

    ``order``: the fields of the action; ``reason``: None for an action without a reason.
    """
    for job in jobs or ():
        if job.tasks is not None:
            hint = " ".join(["koala", action, *map(str, order.values()), str(job.job)])
            raise GridError(f"{job} is a part of an array, and {action} acts on whole arrays", Exit.USAGE, hint)
    chosen = select_jobs(client, action, [job.job for job in jobs or ()], selection)
    if selection.dry_run:
        print_dry_run(action, chosen, as_json=as_json)
        return Exit.OK
    report_selection(selection, chosen)
    post = None if reason is None else ReasonPrompt(client, reason).post

    def describe_result(result: Json) -> str:
        return str(result["state"]) + (f", {result['priority']} priority" if "priority" in order else "")

    return _print_results(client.act_on_jobs(action, chosen, order, post), as_json, describe_result)


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
