"""Select the jobs of a command: by id, by name, owner and state, or the last one that the user submitted."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.job_reference import JobReference
from koalapy.cli.terminal.options import show_json
from koalapy.client.answers import ListedJob
from koalapy.client.client import Client
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.job import ACTIVE_STATES, WAITING_STATES, JobState

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
    state: Annotated[str | None, Option(help="jobs in these states, e.g. queued,held")] = None
    last: Annotated[bool, Option("--last", help="the job you submitted last")] = False
    dry_run: Annotated[bool, Option("--dry-run", help="only print the selected jobs")] = False

    @property
    def filters(self) -> list[str]:
        """Return the given filters as options, for messages."""
        texts = {"--name": self.name, "--state": self.state}
        return [*(f"{option} {text}" for option, text in texts.items() if text), *(["--mine"] if self.mine else [])]


NO_SELECTION = Selection()
"""Default value of the parameter in signatures. The command line passes another object."""


def find_last_job(client: Client) -> int:
    """Return the newest job of the user. Raise ``CliError`` if there is none."""
    jobs = client.list_jobs(1, mine=True).jobs
    if not jobs:
        raise CliError("you have no jobs", Exit.NOT_FOUND, "submit one with koala submit, or give a job's id")
    return jobs[0]["id"]


def find_job(client: Client, job: JobReference | None) -> int:
    """Return the number of a job or task; without one, of the user's newest job."""
    return find_last_job(client) if job is None else job.find_number(client)


def select_jobs(client: Client, action: str, ids: list[int] | None, selection: Selection) -> list[int]:
    """Return the ids of the jobs for an action, which the command line gives or selects.

    Raise ``CliError`` if none is selected.
    """
    filters = selection.filters
    given_options = [*(["JOB"] if ids else []), *(["--last"] if selection.last else []), *filters[:1]]
    if len(given_options) > 1:
        raise CliError(
            f"{given_options[1].split()[0]} and {given_options[0]} cannot be given together", Exit.USAGE, "drop one"
        )
    if ids:
        return ids
    if selection.last:
        return [find_last_job(client)]
    if not filters:
        hint = "give ids, --last, or a selection such as --mine, --name 'study-*' or --state queued"
        raise CliError(f"koala {action} is given no job", Exit.USAGE, hint)
    jobs = _list_matching(client, action, selection)
    if not jobs:
        kind = "unfinished job" if action == "wait" else f"job that koala {action} can change"
        raise CliError(f"no {kind} matches {' '.join(filters)}", Exit.NOT_FOUND)
    return [job["id"] for job in jobs]


def _list_matching(client: Client, action: str, selection: Selection) -> list[ListedJob]:
    """Return the jobs that match the filters and that the caller may change, oldest first."""
    states = _parse_states(action, selection.state)
    jobs = client.list_jobs(MAX_SELECTED, state=sorted(states), mine=True if selection.mine else None).jobs
    return [
        job
        for job in reversed(jobs)
        if not job["redacted"] and (selection.name is None or fnmatchcase(job["name"], selection.name))
    ]


def _parse_states(action: str, text: str | None) -> Collection[str]:
    """Return the states of an option ``--state a,b``. Raise ``CliError`` for a state that the action cannot change."""
    possible = sorted(str(state) for state in STATES[action])
    if text is None:
        return possible
    states = [state.strip().lower() for state in text.split(",")]
    for state in states:
        if state not in possible:
            problem = f"--state is {text}, and koala {action} cannot change jobs in state {state!r}"
            raise CliError(problem, Exit.USAGE, f"use {', '.join(possible)}")
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
    """Ask on the terminal whether to cancel jobs. Raise ``CliError`` unless the answer is yes."""
    print(f"{printable(f'cancel {description}?')} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError("nothing was cancelled", Exit.USAGE, "answer y, or give the ids of jobs")
