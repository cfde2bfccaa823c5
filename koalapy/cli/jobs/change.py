"""``koala change``."""

from functools import partial
from typing import Annotated

from koalapy.cli.jobs.explain import format_explanation
from koalapy.cli.jobs.jobs import find_job
from koalapy.cli.jobs.submission import JOB_OPTIONS, RequestOptions, change_of, in_terms_of_options, read_options
from koalapy.cli.terminal.arguments import Argument, Option, Options
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, OwnersWhy, ReasonPrompt, print_answer
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.job_reference import JobReference
from koalapy.model.job_spec import CHANGEABLE_FIELDS

CHANGE_OPTIONS = {name: option for name, option in JOB_OPTIONS.items() if name in CHANGEABLE_FIELDS}


def change_job(
    request: RequestOptions,
    changes: Annotated[Json, Options(CHANGE_OPTIONS)],
    job: Annotated[JobReference | None, Argument(help="the job's id", completes="queued jobs")] = None,
    last: Annotated[bool, Option("--last", help="the job you submitted last")] = False,
    reset: Annotated[
        list[str] | None, Option(help="option to set back to its default, e.g. max-components; repeatable")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="do not change it; show the placement, or why the job would wait")
    ] = False,
    reason: OwnersWhy = "",
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Change a waiting job in its place: koala change 7 --flexible 3

    Options that are not given stay as they are. The job keeps its number, its submission time and the jobs that wait
    for it, and is tried at once. Of an array, the tasks that were not started change.
    """
    if (job is None) is not last:
        raise GridError("give either the id of the job to change or --last", Exit.USAGE)
    options = read_options(changes)
    change = change_of(request, options, reset or [])
    client = daemon.client()
    number = find_job(client, job)
    try:
        if dry_run:
            explanation = client.post(f"/api/v1/jobs/{number}/explain", {**change, "reason": reason})
            print_answer(explanation, as_json, lambda answer: format_explanation({**answer, "job": None}))
            return
        answer = ReasonPrompt(client, reason).send(partial(client.change_job, number), change)
    except GridError as error:
        raise in_terms_of_options(error, {"request": {"type": ""}, **change}, {**options, **change}) from error
    is_waiting = answer["state"] == "queued" and answer["reason"]
    outcome = f", and waits: {answer['reason']}" if is_waiting else f": {answer['state']}"
    print_answer(answer, as_json, lambda job: printable(f"job {job['id']} changed{outcome}"))
