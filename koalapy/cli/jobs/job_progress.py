"""Progress of a job while a command waits for it: a line on standard error for each unusual change.

For a job that does not run yet, the cause of its wait is also printed after a short delay.
"""

import json
import re
import threading
from collections.abc import Iterator

from koalapy.cli.terminal.progress import Progress
from koalapy.cli.terminal.screen import Block
from koalapy.cli.terminal.tables import seconds_since
from koalapy.client.answers import Job, TimelineEntry
from koalapy.client.client import FINAL, Client, read_events
from koalapy.client.errors import CliError, Exit, printable
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.model.wording import format_duration

RETRY_DELAY = 1.0
"""Seconds until the next request to an unreachable daemon."""
RUNS = ("running", *FINAL)


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
        """Report changes of the job until the daemon ends the stream. Reconnect if the daemon becomes unreachable."""
        last_entry = 0
        skip = not self._from_the_first
        while True:
            previous_entry = last_entry
            try:
                for entries, job in read_changes(self._client.stream_events(self._job, last_entry)):
                    messages = [] if skip else list(progress_lines(entries, job))
                    for line in messages:
                        _report_line(line)
                    self._wait.update(job, is_reported=bool(messages))
                    last_entry, skip = max([last_entry, *(number for number, _ in entries)]), False
            except CliError as error:
                if error.code is not Exit.UNREACHABLE or self._over.wait(RETRY_DELAY):
                    return
                continue
            except (ValueError, KeyError):
                return
            if last_entry == previous_entry:  # the stream has ended without new entries
                return


class WaitReporter:
    """A reporter that prints the cause of a job's wait after a short delay, and later each change of it."""

    def __init__(self, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS) -> None:
        self._lock = threading.Lock()
        self._is_silent = True
        self._job: Job | None = None
        self._reported = ""
        self._timer = threading.Timer(timeouts.wait_report_delay_s, self._end_silence)
        self._timer.daemon = True
        self._timer.start()  # start it last: it may call back immediately

    def update(self, job: Job, *, is_reported: bool) -> None:
        """Store the changed job and report its wait. ``is_reported``: the reason was printed already."""
        with self._lock:
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


def describe_state(job: Job) -> str:
    """Return state and reason of a job without numbers, since these change too often for a comparison."""
    return re.sub(r"\d+", "0", f"{job['state']}: {'' if job['state'] in RUNS else job['reason']}")


def _report_line(line: str) -> None:
    Block.report(f"koala: {printable(line)}")


def progress_lines(entries: list[tuple[int, TimelineEntry]], job: Job) -> Iterator[str]:
    """Yield a line of text for each timeline entry that a waiting user should see. ``job``: the job afterwards."""
    for _, entry in entries:
        reason = entry["reason"]
        if entry["event"] == "requeued":
            yield f"job {job['id']} queues again: {reason}"
        elif entry["event"] in ("unknown", "held", "released") or reason.endswith(" is back"):
            yield f"job {job['id']} is {entry['state']}" + (f": {reason}" if reason not in ("", entry["event"]) else "")


def read_changes(pieces: Iterator[bytes]) -> Iterator[tuple[list[tuple[int, TimelineEntry]], Job]]:
    """Yield each change in a stream of events: the numbered new timeline entries, and the job after them."""
    entries: list[tuple[int, TimelineEntry]] = []
    for fields in read_events(pieces):
        if fields.get("event") == "timeline":
            entries.append((int(fields["id"]), json.loads(fields["data"])))
        elif fields.get("event") == "job":
            yield entries, json.loads(fields["data"])
            entries = []
