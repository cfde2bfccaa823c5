"""Commands that wait for jobs or print their output, and the progress that they report.

An unusual change of a job is a line on standard error. For a job that does not run yet, the cause of its wait is
printed after a short delay, and file transfers are shown as bars.
"""

import json
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from operator import itemgetter
from typing import Annotated, NamedTuple

from koalapy.cli.jobs.jobs import (
    MAX_SHOWN_IDS,
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
from koalapy.cli.terminal.screen import Block, Progress
from koalapy.cli.terminal.streams import ProgramOutput
from koalapy.cli.terminal.text import align_left, cell_len
from koalapy.client.client import FINAL, MAX_PAGE_SIZE, Absence, Client, name_of, read_events
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.tables import seconds_since
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts, TimeIsUp, time_limit
from koalapy.model.array import MAX_ARRAY_SIZE
from koalapy.model.wording import format_bytes, format_duration
from koalapy.runner.output_streams import LineLabels, StreamSplitter

EVENTS_RETRY_DELAY_S = 1.0
"""Seconds until the next request to an unreachable daemon."""
RUNS = ("running", *FINAL)
MAX_SHOWN_REASONS = 5
"""Reasons for which tasks failed that are printed at the end of an array."""


class ProgressReporter:
    """A thread that reports changes of a job while the block runs. Its errors do not end the wait."""

    def __init__(self, client: Client, job: int, *, from_the_first: bool, in_place: bool = True) -> None:
        """``from_the_first``: also report earlier changes; ``in_place``: on a terminal, also show the cause and the
        duration of the wait in one line that is redrawn."""
        self._client, self._job, self._from_the_first = client.clone_for_thread(), job, from_the_first
        self._thread = threading.Thread(target=self._follow_job, daemon=True)
        self._over = threading.Event()
        self._timeouts = client.timeouts
        self._wait = WaitReporter(self._timeouts)
        self._line = Progress(
            self._wait.describe_wait if in_place else lambda: "", plain=False, timeouts=self._timeouts
        )

    def __enter__(self) -> "ProgressReporter":
        self._thread.start()
        self._line.__enter__()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._over.set()
        self._wait.close()
        self._line.__exit__()
        if error is None:
            self._thread.join(self._timeouts.last_report_s)

    def _follow_job(self) -> None:
        """Report changes of the job until it has ended. Reconnect if the daemon becomes unreachable or ends."""
        last_entry, has_ended = 0, False
        skip = not self._from_the_first
        while True:
            try:
                for entries, job in read_changes(self._client.stream_events(self._job, last_entry)):
                    messages = [] if skip else list(progress_lines(entries, job))
                    for line in messages:
                        _report_line(line)
                    self._wait.update(job, is_reported=bool(messages))
                    last_entry, skip = max([last_entry, *(number for number, _ in entries)]), False
                    has_ended = job["state"] in FINAL
            except GridError as error:
                if error.code is not Exit.UNREACHABLE:
                    return
            except (ValueError, KeyError):
                return
            if has_ended or self._over.wait(EVENTS_RETRY_DELAY_S):
                return


class WaitReporter:
    """A reporter that prints the cause of a job's wait after a short delay, and later each change of it."""

    def __init__(self, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS) -> None:
        self._lock = threading.Lock()
        self._is_silent = True
        self._job: Json | None = None
        self._reported = ""
        self._timer = threading.Timer(timeouts.wait_report_delay_s, self._end_silence)
        self._timer.daemon = True
        self._timer.start()  # start it last: it may call back immediately

    def update(self, job: Json, *, is_reported: bool) -> None:
        """Store the changed or next job and report its wait. ``is_reported``: the reason was printed already."""
        with self._lock:
            if self._job is not None and self._job["id"] != job["id"]:
                self._reported = ""
            self._job = job
            if is_reported:
                self._reported = describe_state(job)
            elif not self._is_silent:
                self._report_wait()

    def close(self) -> None:
        self._timer.cancel()

    def describe_wait(self) -> str:
        """Return the state of a waiting job, the duration of its wait and the cause; empty for a running job."""
        with self._lock:
            job = self._job
            if job is None or self._is_silent or job["state"] in RUNS:
                return ""
            waits = format_duration(seconds_since(job["submitted_at"], None))
            return f"job {job['id']} is {job['state']}, {waits}" + (f": {job['reason']}" if job["reason"] else "")

    def _end_silence(self) -> None:
        """End the initial delay, and print what the job waits for. Called by the timer."""
        with self._lock:
            self._is_silent = False
            if self._job is not None:
                self._report_wait()

    def _report_wait(self) -> None:
        """Print the state of the job and the cause of its wait, unless they were printed before."""
        assert self._job is not None
        runs = self._job["state"] in RUNS
        if describe_state(self._job) == self._reported or (runs and not self._reported) or self._job["state"] in FINAL:
            return
        self._reported = describe_state(self._job)
        reason = "" if runs else self._job["reason"]
        _report_line(f"job {self._job['id']} is {self._job['state']}" + (f": {reason}" if reason else ""))


def describe_state(job: Json) -> str:
    """Return state and reason of a job without numbers, since these change too often for a comparison."""
    return re.sub(r"\d+", "0", f"{job['state']}: {'' if job['state'] in RUNS else job['reason']}")


def _report_line(line: str) -> None:
    Block.report(f"koala: {printable(line)}")


def progress_lines(entries: list[tuple[int, Json]], job: Json) -> Iterator[str]:
    """Yield a line of text for each timeline entry that a waiting user should see. ``job``: the job afterwards."""
    for _, entry in entries:
        reason = entry["reason"]
        if entry["event"] == "requeued":
            yield f"job {job['id']} queues again: {reason}"
        elif entry["event"] in ("unknown", "held", "released") or reason.endswith(" is back"):
            yield f"job {job['id']} is {entry['state']}" + (f": {reason}" if reason not in ("", entry["event"]) else "")


def read_changes(pieces: Iterator[bytes]) -> Iterator[tuple[list[tuple[int, Json]], Json]]:
    """Yield each change in a stream of events: the numbered new timeline entries, and the job after them."""
    entries: list[tuple[int, Json]] = []
    for fields in read_events(pieces):
        if fields.get("event") == "timeline":
            entries.append((int(fields["id"]), json.loads(fields["data"])))
        elif fields.get("event") == "job":
            yield entries, json.loads(fields["data"])
            entries = []


BAR_COLUMNS = 20
"""Width of a progress bar in characters."""
POLL_INTERVAL = 0.5
"""Seconds between two requests for a job during its transfers."""
UNDER_WAY = ("queued", "held", "placed", "claiming", "unknown")
"""States of a job in which files may still be transferred."""


def has_transfers(job: Json) -> bool:
    """Return whether files may be transferred to a component of the job."""
    has_inputs = any(component.get("inputs") for component in job["request"].get("components", ()))
    return bool(has_inputs or job["inputs"] or job["result_inputs"] or job["bundle"])


def transfer_lines(job: Json, *, unicode: bool) -> list[str]:
    """Return a line for each component with current or completed transfers."""
    staged = [
        (printable(f"{i} {c['cluster']}"), c)
        for i, c in enumerate(job["components"])
        if c["staging_since"] and (c["stage_size"] or c["staged_at"] is None)
    ]
    width = max((cell_len(label) for label, _ in staged), default=0)
    return [f"{align_left(label, width)}  {printable(_progress_text(job, c, unicode))}" for label, c in staged]


def _progress_text(job: Json, component: Json, unicode: bool) -> str:
    """Return the progress of a component's transfers with a bar, or their duration if they are complete.

    For example ``120 of 200 MB from north, 45 MB/s``.
    """
    size, staged = component["stage_size"], component["staged"]
    remote_sources = sorted({source for source in component["sources"] if source != component["cluster"]})
    origin = f" from {', '.join(remote_sources)}" if remote_sources else ""
    since = component["staging_since"] or ""
    if component["staged_at"]:
        took = seconds_since(since, component["staged_at"])
        return f"{format_bytes(size)}{origin} in {took:.3g} s{_format_speed(size, took)}"
    if not size:
        return f"waits for its files{origin}"
    now = job["ended_at"] or datetime.now(UTC).isoformat()
    passed = seconds_since(since, now)
    full = int(min(1.0, staged / size) * BAR_COLUMNS)
    bar = ("█" if unicode else "#") * full + ("░" if unicode else ".") * (BAR_COLUMNS - full)
    return f"[{bar}] {_format_share(staged, size)}{origin}{_format_speed(staged, passed)}"


def _format_share(staged: int, size: int) -> str:
    """Return two sizes as text: ``120 of 200 MB``, or each with its unit if the units differ."""
    (staged_number, staged_unit), (total_number, total_unit) = (
        format_bytes(staged).split(" "),
        format_bytes(size).split(" "),
    )
    return (
        f"{staged_number} of {total_number} {total_unit}"
        if staged_unit == total_unit
        else f"{staged_number} {staged_unit} of {total_number} {total_unit}"
    )


def _format_speed(size: int, seconds: float) -> str:
    return f", {format_bytes(size / seconds)}/s" if size and seconds >= 0.05 else ""


def follow_transfers(client: Client, job: int, deadline: float | None = None) -> None:
    """Show the progress of a job's transfers on standard error, until they are complete or the job has ended.

    Raise ``TimeIsUp`` at ``deadline`` (monotonic seconds).
    """
    with Block(leaves_lines=True) as block:
        while True:
            answer = client.job(job)
            is_waiting = answer["state"] in ("queued", "held")
            if not is_waiting:
                block.draw(transfer_lines(answer, unicode=False))
            elif sys.stderr.isatty():
                block.draw([printable(f"{answer['state']}: {answer['reason']}")])
            is_staging = any(
                component["staging_since"] and not component["staged_at"] for component in answer["components"]
            )
            if answer["state"] not in UNDER_WAY or not has_transfers(answer) or not (is_waiting or is_staging):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeIsUp
            client.timeouts.sleep(POLL_INTERVAL)


def end_with(client: Client, submitted: Json, deadline: float | None, *, as_json: bool, show_output: bool) -> int:
    """Wait until a job has ended, show its progress, and return the exit code for the command."""
    job = submitted["id"]
    try:
        # Show the transfers first, if there are any.
        shows_transfers = show_output and not as_json and has_transfers(submitted)
        with ProgressReporter(client, job, from_the_first=True, in_place=not shows_transfers):
            if shows_transfers and sys.stderr.isatty():
                try:
                    follow_transfers(client, job, deadline)
                except TimeIsUp:
                    pass
                except GridError as error:  # the wait for an unreachable daemon follows below
                    if not error.may_recover:
                        raise
            code: int = Exit.OK
            if show_output and not as_json:
                with suppress(TimeIsUp), time_limit(deadline):
                    code = _print_output(client, job, LogSelection(stream="marked"))
            ended = client.wait_for_end(job, deadline)
    except KeyboardInterrupt:
        raise _goes_on([job]) from None
    if as_json:
        show_json(ended)
    elif ended["state"] != "succeeded":
        message = f"job {job} {ended['state']}: {ended['reason']}"
        print(f"koala: {printable(message)}", file=sys.stderr)
        if ended["tasks"] is not None:
            _report_failed_tasks(client, job)
    return _code_of(ended) or code


def _print_output(
    client: Client,
    job: int,
    selection: "LogSelection",
    *,
    follow: bool = True,
    raw: bool = False,
    label: int | None = None,
) -> int:
    """Print the output of a job; return the exit code, which is not 0 if a part of the output is missing.

    A marked error stream goes to standard error. ``label``: number before each line; None: no label.
    """
    splitter, labels, has_all = StreamSplitter(), LineLabels(), True
    writers = {is_error: ProgramOutput(raw=raw, is_error=is_error) for is_error in (False, True)}
    for piece, is_complete in client.follow_output(job, follow=follow, **selection._asdict()):
        has_all = is_complete
        for is_error, text in splitter.split(piece) if selection.stream == "marked" else [(False, piece)]:
            writers[is_error].write_piece(labels.add(label, text, is_error=is_error) if label is not None else text)
    for is_error, text in labels.take_unfinished():
        writers[is_error].write_piece(text)
    for writer in writers.values():
        writer.finish()
    if has_all:
        return Exit.OK
    print(f"koala: a part of the output of job {job} is missing", file=sys.stderr, flush=True)
    return Exit.FAILED


def _print_tasks(client: Client, array: int, selection: "LogSelection", *, follow: bool, raw: bool) -> int:
    """Print the output of an array's started tasks one after the other, each line with the index of its task.

    With ``follow``, go on until the array has ended. Return the exit code.
    """
    absence, last, code = Absence(client), 0, int(Exit.OK)
    while True:
        tasks = list[Json]()
        try:
            is_over = not follow or client.job(array)["state"] in FINAL
            has_new_tasks = any(task["id"] > last for task in client.list_jobs(1, array=array).jobs)
            if has_new_tasks:
                tasks = client.list_jobs(MAX_ARRAY_SIZE, array=array).jobs
            absence.end()
        except GridError as error:
            absence.tolerate(error)
            is_over = False
        for task in sorted((task for task in tasks if task["id"] > last), key=itemgetter("id")):
            index, last = task["array_index"], task["id"]
            code = _print_output(client, last, selection, follow=follow, raw=raw, label=index) or code
        if is_over:
            return code
        if not tasks:
            client.timeouts.sleep(POLL_INTERVAL)


def _report_failed_tasks(client: Client, array: int) -> None:
    """Print why tasks of an array failed: each reason once, with the first tasks of that reason."""
    tasks_of = defaultdict[str, list[str]](list)
    for task in reversed(client.list_jobs(MAX_PAGE_SIZE, array=array, state=["failed"]).jobs):
        tasks_of[task["reason"]].append(name_of(task))
    for reason, names in list(tasks_of.items())[:MAX_SHOWN_REASONS]:
        suffix = f" and {len(names) - MAX_SHOWN_IDS} more" if len(names) > MAX_SHOWN_IDS else ""
        line = f"{', '.join(names[:MAX_SHOWN_IDS])}{suffix}: {reason}"
        print(f"koala: {printable(line)}", file=sys.stderr)


def _goes_on(jobs: list[int]) -> GridError:
    ids = " ".join(str(job) for job in jobs)
    message = f"job {ids} goes on" if len(jobs) == 1 else f"jobs {ids} go on"
    return GridError(message, Exit.INTERRUPTED, f"cancel with: koala cancel {ids}")


def _code_of(job: Json) -> int:
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
) -> int:
    """Print the output of a job, or of the started tasks of an array with the index of the task before each line.

    The exit code is 1 if a part of the output is missing.
    """
    refuse_together(output=output, error=error)
    selection = LogSelection(component, "output" if output else "error" if error else None, tail)
    client = daemon.client()
    number = find_job(client, job)
    try:
        with ProgressReporter(client, number, from_the_first=False) if follow else nullcontext():
            try:
                return _print_output(client, number, selection, follow=follow, raw=raw)
            except GridError as error:
                if error.status != HTTPStatus.CONFLICT:
                    raise
            return _print_tasks(client, number, selection, follow=follow, raw=raw)
    except KeyboardInterrupt:
        if not follow:
            raise
        raise _goes_on([number]) from None


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
    ended_jobs = list[Json]()
    try:
        for job in jobs:
            with ProgressReporter(client, job, from_the_first=False):
                ended_jobs.append(client.wait_for_end(job, deadline))
    except KeyboardInterrupt:
        raise _goes_on(jobs[len(ended_jobs) :]) from None
    if as_json:
        show_json(ended_jobs if len(ended_jobs) > 1 else ended_jobs[0])
    else:
        for ended in ended_jobs:
            reason = f": {ended['reason']}" if ended["reason"] else ""
            print(printable(f"job {name_of(ended)} {ended['state']}{reason}"))
    return next((code for ended in ended_jobs if (code := _code_of(ended))), 0)
