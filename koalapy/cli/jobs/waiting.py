"""Commands that wait for jobs or print their output."""

import sys
import time
from contextlib import suppress
from typing import Annotated, NamedTuple

from koalapy.cli.files import transfers
from koalapy.cli.jobs.job_progress import ProgressReporter
from koalapy.cli.jobs.selection import (
    NO_SELECTION,
    LastJob,
    Selection,
    find_job,
    find_last_job,
    print_dry_run,
    report_selection,
    select_jobs,
)
from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Jobs, Timeout, refuse_together, show_json
from koalapy.cli.terminal.streams import ProgramOutput
from koalapy.client.answers import Job as JobAnswer
from koalapy.client.client import FINAL, Absence, Client, name_of
from koalapy.client.errors import CliError, Exit, printable
from koalapy.client.timeouts import TimeIsUp, time_limit
from koalapy.runner.output_streams import StreamSplitter

RETRY_DELAY = 0.5
"""Seconds until the next request for a job's output to an unreachable daemon."""


def end_with(client: Client, submitted: JobAnswer, deadline: float | None, *, as_json: bool, show_output: bool) -> int:
    """Wait until a job has ended, show its progress, and return the exit code for the command."""
    job = submitted["id"]
    try:
        # Show the transfers first, if there are any.
        shows_transfers = show_output and not as_json and transfers.has_transfers(submitted)
        with ProgressReporter(client, job, from_the_first=True, in_place=not shows_transfers):
            if shows_transfers and sys.stderr.isatty():
                with suppress(TimeIsUp):  # the wait for an unreachable daemon follows below
                    _follow_transfers(client, job, deadline)
            is_complete = not show_output or as_json or _print_output(client, job, deadline)
            ended = client.wait_for_end(job, deadline)
    except KeyboardInterrupt:
        raise _goes_on([job]) from None
    if not is_complete:
        print(
            f"koala: the daemon was unreachable for a while; koala logs {job} shows all of the output", file=sys.stderr
        )
    if as_json:
        show_json(ended)
    elif ended["state"] != "succeeded":
        message = f"job {job} {ended['state']}: {ended['reason']}"
        print(f"koala: {printable(message)}", file=sys.stderr)
    return _code_of(ended)


def _follow_transfers(client: Client, job: int, deadline: float | None) -> None:
    """Show the transfers of a job until they are complete; stop silently if the daemon becomes unreachable."""
    try:
        transfers.follow_transfers(client, job, deadline)
    except CliError as error:
        if not error.may_recover:
            raise


def _print_output(client: Client, job: int, deadline: float | None) -> bool:
    """Print the output of a job until its end or ``deadline``; return whether the output was complete."""
    try:
        with time_limit(deadline):
            _print_streams(client, job)
        return bool(client.job(job)["state"] in FINAL)
    except TimeIsUp:
        return True
    except CliError as error:
        if not error.may_recover:
            raise
        return False


def _goes_on(jobs: list[int]) -> CliError:
    ids = " ".join(str(job) for job in jobs)
    message = f"job {ids} goes on" if len(jobs) == 1 else f"jobs {ids} go on"
    return CliError(message, Exit.INTERRUPTED, f"cancel with: koala cancel {ids}")


def _code_of(job: JobAnswer) -> int:
    if job["state"] == "succeeded":
        return Exit.OK
    return int(job["exit_code"]) if job["exit_code"] else Exit.FAILED


class LogSelection(NamedTuple):
    """The part of a job's output to print."""

    component: int | None = None
    stream: str | None = None
    tail: int | None = None
    """Number of last lines of each component to begin with."""


def show_logs(
    job: LastJob = None,
    follow: Annotated[bool, Option("-f", "--follow", help="follow the output until the job ends")] = False,
    component: Annotated[int | None, Option(help="only this component")] = None,
    output: Annotated[bool, Option("--output", help="only the output, without the error stream")] = False,
    error: Annotated[bool, Option("--error", help="only the error stream, if it is kept apart")] = False,
    tail: Annotated[int | None, Option(help="only so many last lines of each component", min=0, max=10**9)] = None,
    raw: Annotated[bool, Option("--raw", help="keep control codes, such as colours, on a terminal")] = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Print the output of a job."""
    refuse_together(output=output, error=error)
    selection = LogSelection(component, "output" if output else "error" if error else None, tail)
    client = daemon.client()
    number = find_job(client, job)
    try:
        if follow:
            with ProgressReporter(client, number, from_the_first=False):
                _follow_logs(client, number, selection, raw)
        else:
            _print_logs(client, number, False, selection, raw)
    except KeyboardInterrupt:
        raise _goes_on([number]) from None


def _follow_logs(client: Client, job: int, selection: LogSelection, raw: bool) -> None:
    """Print the output until the job has ended. Wait for an unreachable daemon, and report if output was missed."""
    absence, output = Absence(client), ProgramOutput(raw=raw)
    while True:
        has_output = False
        try:
            for piece in client.stream_logs(job, True, *selection):
                has_output = True
                output.write_piece(piece)
            output.finish()
            return
        except CliError as error:
            absence.tolerate(error)
            if has_output:
                break  # a new stream would repeat the output from its beginning
        client.timeouts.sleep(RETRY_DELAY)
    client.wait_for_end(job, None)
    print(f"koala: the daemon was unreachable for a while; koala logs {job} shows all of the output", file=sys.stderr)


def _print_logs(client: Client, job: int, follow: bool, selection: LogSelection, raw: bool = False) -> None:
    output = ProgramOutput(raw=raw)
    for piece in client.stream_logs(job, follow, *selection):
        output.write_piece(piece)
    output.finish()


def _print_streams(client: Client, job: int) -> None:
    """Print the output of a job until its end, and its error stream to standard error if that is kept apart."""
    splitter = StreamSplitter()
    writers = {is_error: ProgramOutput(is_error=is_error) for is_error in (False, True)}
    for piece in client.stream_logs(job, True, None, "marked"):
        for is_error, text in splitter.split(piece):
            writers[is_error].write_piece(text)
    for writer in writers.values():
        writer.finish()


def wait_for_jobs(
    jobs: Jobs = None,
    selection: Selection = NO_SELECTION,
    timeout: Timeout = None,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Wait until jobs have ended; exit with the code of the first job that did not succeed.

    Without a job or a selection it waits for the job you submitted last.
    """
    client, deadline = daemon.client(), None if timeout is None else time.monotonic() + timeout
    if jobs or selection.filters:
        numbers = [number for job in jobs or () for number in job.find_numbers(client)]
        chosen = select_jobs(client, "wait", numbers, selection)
    else:
        chosen = [find_last_job(client)]
    if selection.dry_run:
        print_dry_run("wait", chosen, as_json=as_json)
        return Exit.OK
    report_selection(selection, chosen)
    return wait_for_ends(client, chosen, deadline, as_json=as_json)


def wait_for_ends(client: Client, jobs: list[int], deadline: float | None, *, as_json: bool) -> int:
    """Wait until jobs have ended, print how, and return the exit code of the first that did not succeed."""
    try:
        ended_jobs = []
        for job in jobs:
            with ProgressReporter(client, job, from_the_first=False):
                ended_jobs.append(client.wait_for_end(job, deadline))
    except KeyboardInterrupt:
        raise _goes_on(jobs) from None
    if as_json:
        show_json(ended_jobs if len(ended_jobs) > 1 else ended_jobs[0])
    else:
        for ended in ended_jobs:
            reason = f": {ended['reason']}" if ended["reason"] else ""
            print(printable(f"job {name_of(ended)} {ended['state']}{reason}"))
    return next((code for ended in ended_jobs if (code := _code_of(ended))), 0)
