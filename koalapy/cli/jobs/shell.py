"""``koala run`` and ``koala shell``, jobs with a client that sends input, and ``koala mpirun`` inside of scripts."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from koalapy.cli.jobs import submission
from koalapy.cli.jobs.submission import JOB_OPTIONS, read_options
from koalapy.cli.jobs.submit import submit_with_files
from koalapy.cli.jobs.waiting import EVENTS_RETRY_DELAY_S, ProgressReporter, end_with, read_changes
from koalapy.cli.terminal.arguments import Argument, JobReferenceType, Option, Options, refuse_words_before_dashes
from koalapy.cli.terminal.options import DAEMON, Daemon
from koalapy.client.client import FINAL, Absence, Client
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.submission import build_body

INTERRUPT_INTERVAL_S = 5.0
"""Time after an interrupt in which a second one cancels the job."""
HOLD_COMMAND = ("sleep", "infinity")
"""The program that holds the nodes of a shell."""
File = Annotated[Path | None, Option("-f", "--file", help="job file in YAML or JSON; options override it")]


def run_job(
    request: submission.RequestOptions,
    job: Annotated[Json, Options(JOB_OPTIONS)],
    command: Annotated[
        list[str] | None, Argument(help="the program and its arguments, after --", takes_rest=True)
    ] = None,
    file: File = None,
    quiet: Annotated[bool, Option("-q", "--quiet", help="print the program's output only")] = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Run a program as if it were local: koala run --flexible 2 -- python solve.py < input

    Standard input goes to rank 0. Output is printed as it arrives, errors to standard error. The exit code is the
    program's. Ctrl-C twice cancels the job. If this command ends or its connection is lost for a minute, the job is
    cancelled.
    """
    refuse_words_before_dashes()
    client = daemon.client()
    submitted = _submit_interactive(client, request, job, command, file)
    ident = submitted["id"]
    if not quiet:
        print(printable(f"koala: submitted job {ident}"), file=sys.stderr, flush=True)
    from koalapy.client.program_input import ProgramInput

    problems: list[str] = []

    def fail(problem: str) -> None:
        problems.append(problem)
        _cancel(client.clone_for_thread(), ident, problem)

    sender = ProgramInput(client, ident, 0, fail)
    sender.start()
    try:
        with _interrupt_twice(ident):
            code = end_with(client, submitted, None, as_json=False, show_output=True)
    except GridError as error:
        if error.code is Exit.INTERRUPTED:
            _cancel(client, ident, "interrupted")
            raise GridError(f"job {ident} was cancelled", Exit.INTERRUPTED) from None
        raise
    finally:
        sender.close()
    if problems:
        raise GridError(f"job {ident} was cancelled: {problems[0]}", Exit.FAILED, "run it again")
    return code


def open_shell(
    request: submission.RequestOptions,
    options: Annotated[Json, Options(JOB_OPTIONS)],
    words: Annotated[
        list[str] | None,
        Argument(
            help="the job's id, unless options request nodes; after --, a command in place of a shell",
            completes="active jobs",
            metavar="[JOB] [COMMAND]",
        ),
    ] = None,
    cluster: Annotated[
        str | None, Option(help="cluster of the node; default: that of rank 0", completes="clusters")
    ] = None,
    node: Annotated[str | None, Option(help="name, address or index of the node; default: the first")] = None,
    file: File = None,
    daemon: Daemon = DAEMON,
) -> int:
    """Open a terminal on a node of a running job: koala shell 7

    With options that request nodes, a new job holds them: koala shell --flexible 2 --walltime 1h. The shell runs as the
    account of the job, and ends with it. ~. at the beginning of a line detaches, which ends the shell; ~~ is one tilde.
    """
    requests_nodes = submission.request_of(request) is not None or file is not None
    refuse_words_before_dashes(0 if requests_nodes else 1)
    command, client = words or [], daemon.client()
    if not requests_nodes:
        if not command:
            hint = "give the id of a running job, or request nodes: koala shell --flexible 1"
            raise GridError("no job is given", Exit.USAGE, hint)
        job = JobReferenceType().convert(command[0], None, None).find_number(client)
        return _serve_terminal(client, job, command[1:], cluster, node)
    submitted = _submit_interactive(client, request, options | {"launcher": "processes"}, list(HOLD_COMMAND), file)
    ident = submitted["id"]
    from koalapy.client.program_input import ProgramInput

    attendant = ProgramInput(client, ident, None, lambda problem: None)
    attendant.start()
    try:
        with ProgressReporter(client, ident, from_the_first=True):
            _wait_until_running(client, ident)
        return _serve_terminal(client, ident, command, cluster, node)
    finally:
        attendant.close()
        _cancel(client, ident, "its shell has ended")


def _submit_interactive(
    client: Client, request: submission.RequestOptions, job: Json, command: list[str] | None, file: Path | None
) -> Json:
    """Submit a job that is cancelled when its client is gone."""
    options = {"request": submission.request_of(request), "command": command, **read_options(job)}
    environment, stage = options.pop("environment") or {}, options.pop("bundle") or []
    documents = submission.read_job_file(file) if file else [{}]
    if len(documents) > 1:
        raise GridError(f"{file} has {len(documents)} jobs", Exit.USAGE, "give a file with one job")
    body = build_body(documents[0], options | {"stage": stage}, environment)
    # A program that is started again would miss the input that the first one has read.
    body = {"max_restarts": 0, **body, "interactive": True}
    options["bundle"] = paths = submission.paths_to_stage(body, None if stage else file, stage)
    return submit_with_files(client, body, options, paths, os.urandom(16).hex())


def _serve_terminal(client: Client, job: int, command: list[str], cluster: str | None, node: str | None) -> int:
    """Connect this terminal with one on a node of a running job; return the exit code of its shell."""
    from koalapy.cli.terminal.remote_terminal import RemoteTerminal, terminal_size

    rows, columns = terminal_size()
    place: dict[str, Any] = {"cluster": cluster, "node": node, "command": command}
    term = os.environ.get("TERM", "")
    stream = client.open_stream(job, "terminal", rows=rows, columns=columns, term=term, **place)
    if os.isatty(0):
        text = f"koala: terminal on {stream.opened['opened']} of {stream.opened['cluster']}, job {job}; ~. detaches"
        print(printable(text), file=sys.stderr, flush=True)
    result = RemoteTerminal(stream).run()
    if result.is_lost:
        raise GridError(f"the connection to the daemon was lost ({result.error})", Exit.UNREACHABLE)
    if result.error:
        raise GridError(f"the terminal was closed: {result.error}", Exit.FAILED)
    return result.code or 0


def _wait_until_running(client: Client, job: int) -> None:
    """Wait until a job runs, also while the daemon is away. Raise ``GridError`` if it ends before."""
    absence = Absence(client)
    while True:
        try:
            for _, present in read_changes(client.stream_events(job, 0)):
                absence.end()
                if present["state"] == "running":
                    return
                if present["state"] in FINAL:
                    raise GridError(f"job {job} {present['state']}: {present['reason']}", Exit.FAILED)
        except GridError as error:
            absence.tolerate(error)
        client.timeouts.sleep(EVENTS_RETRY_DELAY_S)


def _cancel(client: Client, job: int, reason: str) -> None:
    """Cancel a job, unless it has ended. Without a client it is cancelled later in any case."""
    with suppress(GridError):
        client.post(f"/api/v1/jobs/{job}/cancel", {"reason": reason})


@contextmanager
def _interrupt_twice(job: int) -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at the second interrupt within ``INTERRUPT_INTERVAL_S``; warn at the first."""
    last = float("-inf")

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last <= INTERRUPT_INTERVAL_S:
            raise KeyboardInterrupt
        last = now
        text = f"koala: job {job} goes on; interrupt again within {INTERRUPT_INTERVAL_S:g} s to cancel it\n"
        os.write(2, text.encode())  # a buffered stream may be in use by the interrupted code

    previous_handler = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


VARIABLE = "KOALA_MPIRUN"
"""Variable of scripts with the path of the runner's ``mpirun``."""


def start_program(
    arguments: Annotated[
        list[str] | None,
        Argument(help="options of mpirun, the program and its arguments", takes_rest=True, takes_options=True),
    ] = None,
) -> int | None:
    """Start a program on all nodes of a job, inside the job's script. koala mpirun --help there lists its options."""
    path = os.environ.get(VARIABLE)
    if not path:
        hint = "write it into a script, and submit that: koala submit job.sh"
        raise GridError("koala mpirun starts programs inside the script of a job only", Exit.NOT_ALLOWED, hint)
    try:
        os.execv(path, [path, *(arguments or [])])
    except OSError as error:
        hint = "its nodes are no longer available"
        raise GridError("the job of this script has ended", Exit.NOT_ALLOWED, hint) from error
