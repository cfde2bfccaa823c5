"""``koala submit``."""

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from koalapy.cli import submission
from koalapy.cli.arguments import Argument, Option
from koalapy.cli.client import Client
from koalapy.cli.errors import CliError
from koalapy.cli.options import DEFAULT_URL, AsJson, Timeout, Token, Url, show_json
from koalapy.model.wording import nodes

Json = dict[str, Any]


class PriorityOption(StrEnum):
    HIGH = "high"
    LOW = "low"


class LauncherOption(StrEnum):
    OPENMPI = "openmpi"
    PROCESSES = "processes"


class ClaimingOption(StrEnum):
    ATOMIC = "atomic"
    INCREMENTAL = "incremental"


@dataclass(frozen=True)
class JobOptions:
    """What a job is to be, beside its command."""

    flexible: Annotated[int | None, Option(help="nodes in all; the scheduler splits them")] = None
    nonfixed: Annotated[str | None, Option(help="sizes of components, as 2,4")] = None
    fixed: Annotated[str | None, Option(help="clusters and sizes, as north:2,south:4")] = None
    min_component: Annotated[int | None, Option(help="flexible: smallest component")] = None
    max_components: Annotated[int | None, Option(help="flexible: most components")] = None
    split: Annotated[list[str] | None, Option(help="flexible: a way to split, best first")] = None
    policy: Annotated[str | None, Option(help="placement policy")] = None
    policy_option: Annotated[list[str] | None, Option(help="NAME=VALUE for the policy")] = None
    coallocation: Annotated[str | None, Option(help="never, allowed, or the most clusters to combine")] = None
    speed_ratio_min: Annotated[float | None, Option(help="slowest to fastest of combined clusters")] = None
    claiming: Annotated[ClaimingOption | None, Option(help="default: as the daemon is configured")] = None
    claim_threshold: Annotated[float | None, Option(help="fraction that a claim must be able to start")] = None
    priority: Annotated[PriorityOption | None, Option(help="default: low")] = None
    ppn: Annotated[int | None, Option(help="MPI processes on each node")] = None
    name: Annotated[str | None, Option(help="a name for people")] = None
    env: Annotated[list[str] | None, Option(help="NAME=VALUE, or NAME for its value here")] = None
    launcher: Annotated[LauncherOption | None, Option(help="default: openmpi")] = None
    walltime: Annotated[str | None, Option(help="seconds, 90m, 1:30:00")] = None
    output: Annotated[str | None, Option(help="file for the output, on the execution site")] = None
    chdir: Annotated[str | None, Option(help="where to run; default: here")] = None
    max_restarts: Annotated[int | None, Option(help="tries after failures of the infrastructure")] = None
    max_placement_tries: Annotated[int | None, Option(help="give up after so many tries to place it")] = None
    max_claiming_tries: Annotated[int | None, Option(help="give up after so many claiming tries")] = None
    retry_on_exit: Annotated[list[int] | None, Option(help="exit code after which to try again")] = None
    input_: Annotated[list[str] | None, Option("--input", help="NAME[:partitioned][:as=FILE]")] = None
    stage: Annotated[list[str] | None, Option(help="a file or folder to be sent along")] = None
    collect: Annotated[list[str] | None, Option(help="files to bring back, as 'out/*.csv'")] = None
    application: Annotated[str | None, Option(help="what the program is known as; default: its name")] = None
    communication: Annotated[float | None, Option(help="its share of communication, 0 to 1")] = None

    def body(self) -> Json:
        """By the API's names; None, or nothing, where nothing was said."""
        plain = {FIELDS.get(f.name, f.name): getattr(self, f.name) for f in fields(self) if f.name not in READ}
        request = submission.request_of(
            self.flexible, self.nonfixed, self.fixed, self.min_component, self.max_components, self.split or []
        )
        return {
            **plain,
            "request": request,
            "policy_options": submission.policy_options_of(self.policy_option or []),
            "coallocation": submission.coallocation_of(self.coallocation),
            "inputs": submission.inputs_of(self.input_ or []),
        }


FIELDS = {"ppn": "processes_per_node", "chdir": "workdir"}
"""Of options whose field has another name."""
READ = {
    "flexible",
    "nonfixed",
    "fixed",
    "min_component",
    "max_components",
    "split",
    "policy_option",
    "coallocation",
    "env",
    "input_",
}
"""Options whose text is read first."""


def submit(
    job: JobOptions,
    command: Annotated[list[str] | None, Argument(help="the program and its arguments, after --", rest=True)] = None,
    file: Annotated[
        Path | None, Option("-f", "--file", help="a job in YAML, - for standard input; options override it")
    ] = None,
    idempotency_key: Annotated[str | None, Option(help="the same key never makes a second job")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="show where it would go now; submit nothing")] = False,
    wait: Annotated[bool, Option("--wait", help="until it is over; exit with the job's code")] = False,
    timeout: Timeout = None,
    quiet: Annotated[bool, Option("-q", "--quiet", help="print the bare id")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> int | None:
    """Submit a job: koala submit --flexible 6 -- python -m koalapy.apps.poisson"""
    options = {**job.body(), "command": command}
    body = submission.body_of(file, options, submission.environment_of(job.env or []))
    options["bundle"] = paths = submission.paths_to_stage(body, None if job.stage else file, job.stage or [])
    deadline = None if timeout is None else time.monotonic() + timeout
    client = Client(url, token)
    if dry_run:
        _dry_run(
            client, body, options, paths, as_json=as_json, wait=wait, quiet=quiet, idempotency_key=bool(idempotency_key)
        )
        return None
    submitted = _hand_in(client, body, options, paths, idempotency_key)
    if quiet and not as_json:
        print(submitted["id"], flush=True)
    elif not as_json:
        _announce(submitted, wait)
    if wait:
        from koalapy.cli.waiting import end_with

        return end_with(client, submitted, deadline, as_json=as_json, show_output=not quiet)
    if as_json:
        show_json(client.get(f"/api/v1/jobs/{submitted['id']}"))
    return None


def _dry_run(client: Client, body: Json, options: Json, paths: list[str], *, as_json: bool, **others: bool) -> None:
    """Show what would become of it; with its files, as far as they can be read."""
    from koalapy.cli import explain, staging

    explain.refuse_with_dry_run(**others)
    with staging.packed(paths) if paths else nullcontext():
        explain.dry_run(client, body, options, as_json=as_json)


def _hand_in(client: Client, body: Json, options: Json, paths: list[str], key: str | None) -> Json:
    """The job, once the daemon has it, and its files before it."""
    if paths:
        from koalapy.cli import staging

        body["bundle"] = staging.stage(client, paths)
    try:
        return client.submit(body, key or os.urandom(16).hex())
    except CliError as error:
        raise submission.in_terms_of_options(error, body, options) from error


def _announce(job: Json, wait: bool) -> None:
    request = job["request"]
    kind = f"{request['type']}, {nodes(submission.nodes_of(request))}, {job['priority']} priority"
    # The program's output goes to standard output alone when it is waited for.
    print(f"Submitted job {job['id']}: {kind}", file=sys.stderr if wait else sys.stdout, flush=True)
    if not wait and sys.stdout.isatty():
        print(f"Follow it: koala show {job['id']} · koala logs -f {job['id']}")
