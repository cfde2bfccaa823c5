"""``koala submit``."""

import itertools
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from koalapy.cli.jobs import submission
from koalapy.cli.jobs.submission import JOB_OPTIONS, Export, RequestOptions, exported_variables, read_options
from koalapy.cli.terminal.arguments import BEFORE_DASHES, Argument, Option, Options, refuse_words_before_dashes
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Timeout, refuse_together, show_json
from koalapy.client.client import Client, nodes_of
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.submission import build_body
from koalapy.model.wording import format_nodes

if TYPE_CHECKING:
    from koalapy.cli.jobs.translation import LoadedScript


def submit_job(
    request: submission.RequestOptions,
    job: Annotated[Json, Options(JOB_OPTIONS)],
    command: Annotated[
        list[str] | None,
        Argument(help="a script and its arguments; or, after --, a command for each rank", takes_rest=True),
    ] = None,
    file: Annotated[
        Path | None, Option("-f", "--file", help="job file in YAML or JSON, - for standard input; options override it")
    ] = None,
    export: Export = None,
    translate: Annotated[
        bool, Option("--translate", help="translate #SBATCH, #$, #PBS and #BSUB lines of the script")
    ] = False,
    ranks_on: Annotated[
        str,
        Option(
            envvar="KOALA_RANKS_ON",
            help="with --translate: 'one-node' or 'each-node' for ranks without a number of nodes",
        ),
    ] = "",
    idempotency_key: Annotated[str | None, Option(help="submissions with the same key create one job")] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="do not submit; show the placement, or why the job would wait")
    ] = False,
    wait: Annotated[
        bool, Option("--wait", help="print the output, wait for the end, and exit with the job's code")
    ] = False,
    timeout: Timeout = None,
    quiet: Annotated[bool, Option("-q", "--quiet", help="print the id only")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int | None:
    """Submit a job: koala submit job.sh, or koala submit --flexible 6 -- python -m koalapy.apps.poisson"""
    refuse_together(json=as_json, quiet=quiet)
    if timeout is not None and not wait:
        raise GridError("--timeout needs --wait", Exit.USAGE, "add --wait, or drop --timeout")
    if dry_run:
        refuse_together(dry_run=True, wait=wait, quiet=quiet, idempotency_key=idempotency_key is not None)
    if idempotency_key is not None:
        idempotency_key = submission.checked_key(idempotency_key)
    script, lines = _find_script(command, file, request, job, ranks_on, translate=translate), submission.NO_LINES
    if script is not None:
        request, job, lines = script.apply_options(request, job)
        export = script.options.export if export is None else export
        command = [script.name, *(command or [])[1:]]
    options = {"request": submission.request_of(request), "command": command, **read_options(job)}
    environment = exported_variables(export) | (options.pop("environment") or {})
    if script is not None:
        environment = script.variables(options) | environment
    stage = options.pop("bundle") or []
    deadline = None if timeout is None else time.monotonic() + timeout
    documents = submission.read_job_file(file) if file else [{}]
    bodies = [build_body(fields, options | {"stage": stage}, environment) for fields in documents]
    file_folder = None if stage else file
    if file and len(bodies) > 1:
        paths_of_jobs = [submission.paths_to_stage(body, file_folder, stage) for body in bodies]
        if dry_run:
            hint = "give a file with one job"
            raise GridError(f"--dry-run shows one job, and {file} has {len(bodies)}", Exit.USAGE, hint)
        client = daemon.client()
        with _named_key(client, idempotency_key) as key:
            jobs = _submit_batch(client, bodies, options, paths_of_jobs, key, submission.name_of(file))
        return _follow_batch(client, jobs, wait=wait, deadline=deadline, quiet=quiet, as_json=as_json)
    body = bodies[0]
    options["bundle"] = paths = submission.paths_to_stage(body, file_folder, stage)
    if script is not None:
        body["script"] = script.text
    client = daemon.client()
    if dry_run:
        from koalapy.cli.jobs import explain
        from koalapy.client.archive import pack_archive

        # Pack the files to detect unreadable ones.
        with pack_archive(paths) if paths else nullcontext():
            explain.dry_run(client, body, options, lines, as_json=as_json)
        return None
    with _named_key(client, idempotency_key) as key:
        submitted = submit_with_files(client, body, options, paths, key, lines)
    if quiet:
        print(submitted["id"], flush=True)
    elif not as_json:
        _announce_job(submitted, wait)
    if wait:
        from koalapy.cli.jobs.waiting import end_with

        shows_output = not quiet and submitted["tasks"] is None  # each task of an array has an output
        return end_with(client, submitted, deadline, as_json=as_json, show_output=shows_output)
    if as_json:
        show_json(client.job(submitted["id"]))
    return None


def _find_script(
    command: list[str] | None, file: Path | None, request: RequestOptions, job: Json, ranks_on: str, *, translate: bool
) -> "LoadedScript | None":
    """Return the script that a command line names; None for a command, which follows ``--`` or names no file."""
    context = click.get_current_context()
    script = command[0] if command else ""
    if context.meta.get(BEFORE_DASHES) == [] or not (os.path.exists(script) or "/" in script or "." in script):
        if translate:
            raise GridError("--translate needs a script", Exit.USAGE, "name one: koala submit --translate job.sh")
        refuse_words_before_dashes()
        return None
    if file is not None:
        hint = "write its options as #KOALA lines of the script"
        raise GridError(f"the script {script} and --file cannot be given together", Exit.USAGE, hint)
    from koalapy.cli.jobs.translation import load_script

    names = {name for parameter in context.command.params for name in parameter.opts if name.startswith("-")}
    _note_late_options(command or [], names)
    return load_script(script, names, request, job, translate=translate, ranks_on=ranks_on)


def _note_late_options(command: list[str], names: set[str]) -> None:
    """Print a note about arguments of a script that are long options of ``koala submit``."""
    before_dashes = itertools.takewhile(lambda argument: argument != "--", command[1:])
    used_options = dict.fromkeys(argument.partition("=")[0] for argument in before_dashes if argument.startswith("--"))
    if late := [name for name in used_options if name in names]:
        are = "is its argument" if len(late) == 1 else "are its arguments"
        print(
            f"koala: {', '.join(late)} after the script {are}; write koala's options before the script",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def _named_key(client: Client, given: str | None) -> Iterator[str]:
    """Provide the key of a submission, and name it where the daemon may have stored the job without an answer."""
    key = os.urandom(16).hex() if given is None else given
    repeat = f"repeat it with --idempotency-key {shlex.quote(key)}: it becomes one job"
    try:
        yield key
    except KeyboardInterrupt:
        if not client.has_connected:
            raise
        raise GridError("the job may have been submitted", Exit.INTERRUPTED, repeat) from None
    except GridError as error:
        if error.may_recover and client.has_connected:
            error.hint = repeat
        raise


def submit_with_files(
    client: Client,
    body: Json,
    options: Json,
    paths: list[str],
    key: str,
    lines: submission.ScriptLines = submission.NO_LINES,
) -> Json:
    """Upload the files, then submit the job."""
    if paths:
        body["bundle"] = stage_files(client, paths)
    try:
        return client.submit(body, key)
    except GridError as error:
        raise submission.in_terms_of_options(error, body, options, lines) from error


def stage_files(client: Client, paths: Sequence[str]) -> str:
    """Upload files and folders unless the daemon stores them already; return the id of their archive."""
    from koalapy.cli.terminal.screen import CountingReader, Progress, Transfer, waiting_for
    from koalapy.client.archive import pack_archive

    with ExitStack() as stack:
        with waiting_for("packs the files of --stage"):
            archive = stack.enter_context(pack_archive(paths))
        if not client.has_bundle(archive.id):
            sent = Transfer("sends the files of --stage", archive.size)
            with Progress(lambda: str(sent)):
                client.upload_archive(CountingReader(archive.file, sent), archive.size)
    return archive.id


def _submit_batch(
    client: Client, bodies: list[Json], options: Json, paths_of_jobs: list[list[str]], key: str, file: str
) -> list[int]:
    """Upload the files of all jobs, then submit the jobs together, and return their ids."""
    archives: dict[tuple[str, ...], str] = {}
    for body, paths in zip(bodies, paths_of_jobs, strict=True):
        if paths:
            if tuple(paths) not in archives:
                archives[tuple(paths)] = stage_files(client, paths)
            body["bundle"] = archives[tuple(paths)]
    try:
        return client.submit_batch(bodies, key)
    except GridError as error:
        raise submission.in_terms_of_documents(error, bodies, options, file) from error


def _follow_batch(
    client: Client, jobs: list[int], *, wait: bool, deadline: float | None, quiet: bool, as_json: bool
) -> int | None:
    """Print the ids of submitted jobs; with ``wait``, wait for their ends and return the exit code."""
    if quiet:
        print("\n".join(map(str, jobs)), flush=True)
    elif not as_json:
        text = f"Submitted {len(jobs)} jobs: {jobs[0]} to {jobs[-1]}"
        print(text, file=sys.stderr if wait else sys.stdout, flush=True)
    if wait:
        from koalapy.cli.jobs.waiting import wait_for_ends

        return wait_for_ends(client, jobs, deadline, as_json=as_json)
    if as_json:
        show_json({"jobs": jobs})
    return None


def _announce_job(job: Json, wait: bool) -> None:
    """Print the id and kind of the submitted job. On a terminal, also print how to follow it."""
    request = job["request"]
    kind = f"{request['type']}, {format_nodes(nodes_of(request))}, {job['priority']} priority"
    tasks = job["tasks"]
    if tasks is not None:
        kind = f"{tasks['size']} tasks, each {kind}"
    # With --wait, standard output is for the program's output only.
    print(printable(f"Submitted job {job['id']}: {kind}"), file=sys.stderr if wait else sys.stdout, flush=True)
    if not wait and sys.stdout.isatty():
        if tasks is None:
            print(f"Follow it: koala show {job['id']} · koala logs -f {job['id']}")
        else:
            print(f"Follow it: koala show {job['id']} · koala queue --tasks {job['id']}")
