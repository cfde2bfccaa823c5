"""The commands for jobs and clusters."""

import json
import sys
import time
import uuid
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from koalapy.cli import (
    advisor,
    explain,
    files,
    grid,
    network,
    processes,
    staging,
    submission,
    tables,
    transfers,
    workload,
)
from koalapy.cli.client import FINAL, Absence, Client, refused
from koalapy.cli.deadline import TimeIsUp, until
from koalapy.cli.errors import EPILOG, CliError, Exit, printable
from koalapy.cli.options import DEFAULT_URL, AsJson, Job, Jobs, Timeout, Token, Url, Why, show_json
from koalapy.cli.telling import Telling
from koalapy.model.wording import nodes

app = typer.Typer(
    name="koala",
    help="One parallel job over several clusters at the same moment.",
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


PAUSE = 0.5
"""Seconds until a daemon that is away is asked again for a job's output."""


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    NDJSON = "ndjson"


class PriorityOption(StrEnum):
    HIGH = "high"
    LOW = "low"


class LauncherOption(StrEnum):
    OPENMPI = "openmpi"
    PROCESSES = "processes"


class ClaimingOption(StrEnum):
    ATOMIC = "atomic"
    INCREMENTAL = "incremental"


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    command: Annotated[list[str] | None, typer.Argument(help="the program and its arguments, after --")] = None,
    flexible: Annotated[int | None, typer.Option(help="nodes in all; the scheduler splits them")] = None,
    nonfixed: Annotated[str | None, typer.Option(help="sizes of components, as 2,4")] = None,
    fixed: Annotated[str | None, typer.Option(help="clusters and sizes, as north:2,south:4")] = None,
    min_component: Annotated[int | None, typer.Option(help="flexible: smallest component")] = None,
    max_components: Annotated[int | None, typer.Option(help="flexible: most components")] = None,
    split: Annotated[list[str] | None, typer.Option(help="flexible: a way to split, best first")] = None,
    policy: Annotated[str | None, typer.Option(help="placement policy")] = None,
    policy_option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the policy")] = None,
    coallocation: Annotated[str | None, typer.Option(help="never, allowed, or the most clusters to combine")] = None,
    speed_ratio_min: Annotated[float | None, typer.Option(help="slowest to fastest of combined clusters")] = None,
    claiming: Annotated[ClaimingOption | None, typer.Option(help="default: as the daemon is configured")] = None,
    claim_threshold: Annotated[float | None, typer.Option(help="fraction that a claim must be able to start")] = None,
    priority: Annotated[PriorityOption | None, typer.Option(help="default: low")] = None,
    ppn: Annotated[int | None, typer.Option(help="MPI processes on each node")] = None,
    name: Annotated[str | None, typer.Option(help="a name for people")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, or NAME for its value here")] = None,
    launcher: Annotated[LauncherOption | None, typer.Option(help="default: openmpi")] = None,
    walltime: Annotated[str | None, typer.Option(help="seconds, 90m, 1:30:00")] = None,
    output: Annotated[str | None, typer.Option(help="file for the output, on the execution site")] = None,
    chdir: Annotated[str | None, typer.Option(help="where to run; default: here")] = None,
    max_restarts: Annotated[int | None, typer.Option(help="tries after failures of the infrastructure")] = None,
    max_placement_tries: Annotated[int | None, typer.Option(help="give up after so many tries to place it")] = None,
    max_claiming_tries: Annotated[int | None, typer.Option(help="give up after so many claiming tries")] = None,
    retry_on_exit: Annotated[list[int] | None, typer.Option(help="exit code after which to try again")] = None,
    input_: Annotated[list[str] | None, typer.Option("--input", help="NAME[:partitioned][:as=FILE]")] = None,
    stage: Annotated[list[str] | None, typer.Option(help="a file or folder to be sent along")] = None,
    collect: Annotated[list[str] | None, typer.Option(help="files to bring back, as 'out/*.csv'")] = None,
    application: Annotated[str | None, typer.Option(help="what the program is known as; default: its name")] = None,
    communication: Annotated[float | None, typer.Option(help="its share of communication, 0 to 1")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="a job in YAML; options override it")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="the same key never makes a second job")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show where it would go now; submit nothing")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="until it is over; exit with the job's code")] = False,
    timeout: Timeout = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print the bare id")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Submit a job: koala submit --flexible 6 -- python -m koalapy.apps.poisson"""
    options = {
        "request": submission.request_of(flexible, nonfixed, fixed, min_component, max_components, split or []),
        "command": command,
        "policy": policy,
        "policy_options": submission.policy_options_of(policy_option or []),
        "coallocation": submission.coallocation_of(coallocation),
        "speed_ratio_min": speed_ratio_min,
        "claiming": claiming,
        "claim_threshold": claim_threshold,
        "priority": priority,
        "processes_per_node": ppn,
        "name": name,
        "launcher": launcher,
        "walltime": walltime,
        "output": output,
        "workdir": chdir,
        "max_restarts": max_restarts,
        "max_placement_tries": max_placement_tries,
        "max_claiming_tries": max_claiming_tries,
        "retry_on_exit": retry_on_exit,
        "inputs": submission.inputs_of(input_ or []),
        "stage": stage,
        "collect": collect,
        "application": application,
        "communication": communication,
    }
    body = submission.body_of(file, options, submission.environment_of(env or []))
    options["bundle"] = paths = submission.paths_to_stage(body, None if stage else file, stage or [])
    deadline = None if timeout is None else time.monotonic() + timeout
    client = Client(url, token)
    if dry_run:
        explain.refuse_with_dry_run(wait=wait, quiet=quiet, idempotency_key=idempotency_key is not None)
        with staging.packed(paths) if paths else nullcontext():
            explain.dry_run(client, body, options, as_json=as_json)
        return
    if paths:
        body["bundle"] = staging.stage(client, paths)
    try:
        job = client.submit(body, idempotency_key or str(uuid.uuid4()))
    except CliError as error:
        raise submission.in_terms_of_options(error, body, options) from error
    if quiet and not as_json:
        print(job["id"], flush=True)
    elif not as_json:
        _announce(job, wait)
    if wait:
        _end_with(client, job, deadline, as_json=as_json, show_output=not quiet)
    if as_json:
        show_json(client.get(f"/api/v1/jobs/{job['id']}"))


def _announce(job: dict[str, Any], wait: bool) -> None:
    request = job["request"]
    kind = f"{request['type']}, {nodes(submission.nodes_of(request))}, {job['priority']} priority"
    # The program's output goes to standard output alone when it is waited for.
    print(f"Submitted job {job['id']}: {kind}", file=sys.stderr if wait else sys.stdout, flush=True)
    if not wait and sys.stdout.isatty():
        print(f"Follow it: koala show {job['id']} · koala logs -f {job['id']}")


def _end_with(
    client: Client, submitted: dict[str, Any], deadline: float | None, *, as_json: bool, show_output: bool
) -> None:  # fmt: skip
    """Wait for a job and exit with its code."""
    job = submitted["id"]
    try:
        with Telling(client, job, from_the_first=True):
            if show_output and not as_json:
                _show_transfers(client, submitted, deadline)
            whole = not show_output or as_json or _print_output(client, job, deadline)
            over = client.wait(job, deadline)
    except KeyboardInterrupt:
        raise _goes_on([job]) from None
    if not whole:
        print(f"koala: the daemon was away for a while; koala logs {job} has all the output", file=sys.stderr)
    if as_json:
        show_json(over)
    elif over["state"] != "succeeded":
        said = f"job {job} {over['state']}: {over['reason']}"
        print(f"koala: {printable(said)}", file=sys.stderr)
    raise typer.Exit(_code_of(over))


def _show_transfers(client: Client, job: dict[str, Any], deadline: float | None) -> None:
    """How far its files are, for who sits at a terminal; a daemon that is away meanwhile is nobody's loss."""
    try:
        transfers.follow_on_terminal(client, job, deadline)
    except TimeIsUp:
        return
    except CliError as error:
        if not error.is_passing:
            raise


def _print_output(client: Client, job: int, deadline: float | None) -> bool:
    """Print what a job prints as it comes, until it is over or ``deadline``; whether that was all of it."""
    try:
        with until(deadline):
            _print_logs(client, job, follow=True, component=None)
        return bool(client.get(f"/api/v1/jobs/{job}")["state"] in FINAL)
    except TimeIsUp:
        return True
    except CliError as error:
        if not error.is_passing:
            raise
        return False


def _goes_on(jobs: list[int]) -> CliError:
    """What an interrupted command says of the jobs it waited for."""
    named = " ".join(str(job) for job in jobs)
    said = f"job {named} goes on" if len(jobs) == 1 else f"jobs {named} go on"
    return CliError(said, Exit.INTERRUPTED, f"cancel with: koala cancel {named}")


def _code_of(job: dict[str, Any]) -> int:
    """The program's own code where there is one."""
    if job["state"] == "succeeded":
        return Exit.OK
    return int(job["exit_code"]) if job["exit_code"] else Exit.FAILED


@app.command()
def queue(
    everyone: Annotated[bool, typer.Option("--all", help="jobs of all users")] = False,
    user: Annotated[str | None, typer.Option(help="jobs of this user; default: you")] = None,
    state: Annotated[list[str] | None, typer.Option(help="jobs in this state, final ones too")] = None,
    name: Annotated[str | None, typer.Option(help="jobs of this name")] = None,
    cluster: Annotated[str | None, typer.Option(help="jobs with a component there")] = None,
    limit: Annotated[int, typer.Option(help="how many at most", min=1)] = 100,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print bare ids")] = False,
    form: Annotated[Format, typer.Option("-o", "--output", help="how to print")] = Format.TABLE,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """List jobs, newest first: yours that are not over, or what the options ask for."""
    owner = user or ("" if everyone else submission.current_user())
    query = {"owner": owner, "state": state, "name": name, "cluster": cluster}
    jobs, more = Client(url, token).jobs(limit, active=None if state else True, **query)
    if as_json or form is Format.JSON:
        show_json({"jobs": jobs})
    elif form is Format.NDJSON:
        for job in jobs:
            print(json.dumps(job))
    elif quiet:
        for job in jobs:
            print(job["id"])
    else:
        print(tables.queue(jobs, wide=form is Format.WIDE))
    if more:
        print(f"koala: only the newest {limit} are shown; --limit shows more", file=sys.stderr)


@app.command()
def show(
    job: Job,
    attempts: Annotated[int, typer.Option(help="how many attempts to chart, the last ones", min=1, max=10**6)] = 5,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="first show how its files come")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Everything about one job: where it is, and what happened to it."""
    client = Client(url, token)
    if follow and not as_json:
        transfers.follow(client, job, sys.stderr)
    found = client.get(f"/api/v1/jobs/{job}")
    if as_json:
        show_json(found)
    else:
        # With one more, for the chart begins where that ended.
        under_way = transfers.lines(found, unicode=tables.is_unicode())
        print(tables.job_page(found, client.attempts(job, attempts + 1), attempts, under_way))


@app.command()
def logs(
    job: Job,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="as it comes, until the job is over")] = False,
    component: Annotated[int | None, typer.Option(help="of this component only")] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Print the output of a job."""
    client = Client(url, token)
    try:
        _follow_logs(client, job, component) if follow else _print_logs(client, job, False, component)
    except KeyboardInterrupt:
        raise _goes_on([job]) from None


def _follow_logs(client: Client, job: int, component: int | None) -> None:
    """Until the job is over, also while its daemon is away; what it missed meanwhile is said."""
    absence = Absence()
    while True:
        shown = False
        try:
            for piece in client.logs(job, True, component):
                shown = True
                _show(piece)
            return
        except CliError as error:
            absence.bear(error, answered=client.has_answered)
            if shown:
                break  # what comes anew has begun from its beginning
        time.sleep(PAUSE)
    client.wait(job, None)
    print(f"koala: the daemon was away for a while; koala logs {job} has all the output", file=sys.stderr)


def _print_logs(client: Client, job: int, follow: bool, component: int | None) -> None:
    for piece in client.logs(job, follow, component):
        _show(piece)


def _show(piece: bytes) -> None:
    sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


@app.command()
def wait(
    jobs: Jobs, timeout: Timeout = None, as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = None
) -> None:
    """Wait until jobs are over; exit with the code of the first that did not succeed."""
    client = Client(url, token)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        over = [_wait_for(client, job, deadline) for job in jobs]
    except KeyboardInterrupt:
        raise _goes_on(jobs) from None
    if as_json:
        show_json(over if len(over) > 1 else over[0])
    else:
        for job in over:
            print(printable(f"job {job['id']} {job['state']}" + (f": {job['reason']}" if job["reason"] else "")))
    raise typer.Exit(next((code for job in over if (code := _code_of(job))), 0))


def _wait_for(client: Client, job: int, deadline: float | None) -> dict[str, Any]:
    with Telling(client, job, from_the_first=False):
        return client.wait(job, deadline)


@app.command()
def cancel(jobs: Jobs, reason: Why = "", url: Url = DEFAULT_URL, token: Token = None) -> None:
    """End jobs; a running one gives all its nodes back."""
    worst = Exit.OK
    for one in Client(url, token).cancel(jobs, reason):
        if problem := one["problem"]:
            error = refused(problem)
            print(f"koala: {error}", file=sys.stderr)
            worst = max(worst, error.code)
        else:
            print(f"job {one['job']} {'cancelled' if one['state'] in FINAL else 'is being cancelled'}")
    if worst is not Exit.OK:
        raise typer.Exit(worst)


@app.command()
def hold(jobs: Jobs, reason: Why = "", url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Keep queued jobs from being placed."""
    _act("hold", jobs, {"reason": reason}, Client(url, token))


@app.command()
def release(jobs: Jobs, url: Url = DEFAULT_URL, token: Token = None) -> None:
    """Let held jobs be placed again."""
    _act("release", jobs, None, Client(url, token))


def _act(action: str, jobs: list[int], body: dict[str, Any] | None, client: Client) -> None:
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
    if worst is not Exit.OK:
        raise typer.Exit(worst)


grid.register(app)
network.register(app)
advisor.register(app)
explain.register(app)
files.register(app)
processes.register(app)
workload.register(app)
