"""What happens to a job that is waited for: a line on standard error for each change out of the ordinary.

Of one that does not run yet it is told what it waits for, too, as soon as that has taken a moment.
"""

import json
import re
import threading
from collections.abc import Iterator

from koalapy.cli.terminal.progress import Progress
from koalapy.cli.terminal.screen import Block
from koalapy.cli.terminal.tables import seconds_since
from koalapy.client.answers import Job, TimelineEntry
from koalapy.client.client import FINAL, Client, events
from koalapy.client.errors import CliError, Exit, printable
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.model.wording import format_duration

RETRY_DELAY = 1.0
"""Seconds until a daemon that is away is asked again."""
RUNS = ("running", *FINAL)


class ProgressReporter:
    """A thread that reports what happens to a job while the block runs; whatever happens to it, the waiting goes on."""

    def __init__(self, client: Client, job: int, *, from_the_first: bool, in_place: bool = True) -> None:
        """``from_the_first``: report also what had happened before; ``in_place``: on a terminal also what it waits for
        at any moment, and how long already, in one line that is drawn again."""
        self._client, self._job, self._from_the_first = client.another(), job, from_the_first
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._over = threading.Event()
        self._timeouts = client.timeouts
        self._wait = WaitReporter(self._timeouts)
        self._line = Progress(self._wait.moment if in_place else lambda: "", plain=False, timeouts=self._timeouts)

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

    def _follow(self) -> None:
        seen = 0
        skip = not self._from_the_first
        while True:
            before = seen
            try:
                for entries, job in changes(self._client.events(self._job, seen)):
                    messages = [] if skip else list(lines(entries, job))
                    for line in messages:
                        _report(line)
                    self._wait.update(job, is_reported=bool(messages))
                    seen, skip = max([seen, *(number for number, _ in entries)]), False
            except CliError as error:
                if error.code is not Exit.UNREACHABLE or self._over.wait(RETRY_DELAY):
                    return
                continue
            except (ValueError, KeyError):
                return
            if seen == before:  # nothing more is to come
                return


class WaitReporter:
    """Says what a job waits for after a moment, and from then on what has become of that."""

    def __init__(self, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS) -> None:
        self._lock = threading.Lock()
        self._is_silent = True
        self._job: Job | None = None
        self._reported = ""
        self._after = threading.Timer(timeouts.wait_report_delay_s, self._end_silence)
        self._after.daemon = True
        self._after.start()  # last: it may call back at once

    def update(self, job: Job, *, is_reported: bool) -> None:
        """The job has changed; ``is_reported``: the user knows already why."""
        with self._lock:
            self._job = job
            if is_reported:
                self._reported = situation(job)
            elif not self._is_silent:
                self._report_wait()

    def close(self) -> None:
        self._after.cancel()

    def moment(self) -> str:
        """What it waits for now, and how long already; nothing of one that runs."""
        with self._lock:
            job = self._job
            if job is None or self._is_silent or job["state"] in RUNS:
                return ""
            waits = format_duration(seconds_since(job["submitted_at"], None))
            return f"job {job['id']} is {job['state']}, {waits}" + (f": {job['reason']}" if job["reason"] else "")

    def _end_silence(self) -> None:
        with self._lock:
            self._is_silent = False
            if self._job is not None:
                self._report_wait()

    def _report_wait(self) -> None:
        assert self._job is not None
        runs = self._job["state"] in RUNS
        if situation(self._job) == self._reported or (runs and not self._reported) or self._job["state"] in FINAL:
            return
        self._reported = situation(self._job)
        reason = "" if runs else self._job["reason"]
        _report(f"job {self._job['id']} is {self._job['state']}" + (f": {reason}" if reason else ""))


def situation(job: Job) -> str:
    """Where a job stands, without the numbers, which may change with every moment."""
    return re.sub(r"\d+", "0", f"{job['state']}: {'' if job['state'] in RUNS else job['reason']}")


def _report(line: str) -> None:
    Block.report(f"koala: {printable(line)}")


def lines(entries: list[tuple[int, TimelineEntry]], job: Job) -> Iterator[str]:
    """What is worth a line of the entries of a timeline after which a job is as it is."""
    for _, entry in entries:
        reason = entry["reason"]
        if entry["event"] == "requeued":
            yield f"job {job['id']} queues again: {reason}"
        elif entry["event"] in ("unknown", "held", "released") or reason.endswith(" is back"):
            yield f"job {job['id']} is {entry['state']}" + (f": {reason}" if reason not in ("", entry["event"]) else "")


def changes(pieces: Iterator[bytes]) -> Iterator[tuple[list[tuple[int, TimelineEntry]], Job]]:
    """A stream of events, change by change: the new entries of the timeline with their numbers, and the job then."""
    entries: list[tuple[int, TimelineEntry]] = []
    for fields in events(pieces):
        if fields.get("event") == "timeline":
            entries.append((int(fields["id"]), json.loads(fields["data"])))
        elif fields.get("event") == "job":
            yield entries, json.loads(fields["data"])
            entries = []
