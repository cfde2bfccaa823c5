"""A grid with processes that preload the interposer, and the run of the workload on it."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from koalapy.audit.facts import Fact
from koalapy.audit.readers import GridFiles, read_grid
from tests.chaos.checker import check
from tests.chaos.clients import archive_input, build_command
from tests.chaos.evidence import FINAL_STATES, Cancellation, Evidence, ReportedJob, Submission, Violation
from tests.chaos.grid import ChaosGrid, Client, read_details
from tests.chaos.injector import DaemonKeeper
from tests.chaos.marks import MarkReader
from tests.chaos.run import read_jobs, stop_daemon, wait_until_idle
from tests.chaos.workload import PlannedJob
from tests.crash.interposer import Crash, Interposer, Point
from tests.crash.workload import ARRAY, FIRST, HIGH, LAST, LONG, LOW, SETTINGS, TASKS, plan_jobs

START_TRIES = 5
RUN_TIMEOUT_S = 240.0
"""Seconds until all jobs must have ended."""
STATE_TIMEOUT_S = 5.0
"""Seconds to wait until a job runs that another one is to preempt, or that is to be cancelled."""
POLL_INTERVAL_S = 0.05


class CrashGrid(ChaosGrid):
    """A grid of two clusters with preloaded processes."""

    def __init__(self, folder: Path, crash: Crash | None = None, *, record_writes: bool = False) -> None:
        super().__init__(folder, **SETTINGS)
        (folder / "locks").mkdir(exist_ok=True)
        self.interposer = Interposer(folder / "control", self.directory, crash, record_writes=record_writes)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | self.interposer.environment

    def begin(self) -> None:
        """Start the daemon, and again if it is killed before it serves."""
        for number in range(START_TRIES):
            try:
                super().begin()
            except RuntimeError:
                if number == START_TRIES - 1:
                    raise
            else:
                return


@dataclass
class Acknowledgement:
    """An answer to a client, and its time: a submission, a cancellation or a final state."""

    time_s: float
    kind: str
    number: int
    job: int
    state: str = ""


@dataclass
class Outcome:
    """The violations of a run, and the points that it reached."""

    violations: list[Violation] = field(default_factory=list)
    points: Counter[Point] = field(default_factory=Counter)
    has_crashed: bool = False
    restarts: int = 0
    states: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class CrashRun:
    """The workload on one grid: submit, cancel, wait for all ends, stop the grid, and check."""

    def __init__(self, grid: CrashGrid) -> None:
        self.grid = grid
        self.troubles: list[str] = []
        self.submissions: list[Submission] = []
        self.acknowledged: list[Acknowledgement] = []
        self.bundle = ""
        """The id of the uploaded input."""
        self._until = 0.0

    def execute(self) -> Outcome:
        """Run everything in an empty folder."""
        began = time.monotonic()
        with self.serving():
            client = self.grid.client()
            self.submit_all(client)
            self.wait_for_ends(client)
            final_reports = wait_until_idle(self.grid, client)
            jobs = read_jobs(client, time.monotonic() + RUN_TIMEOUT_S, self.troubles, self.array_ids())
            client.close()
        remains = self.stop_grid()
        marks = list(MarkReader(self.grid.folder).new())
        facts = self.read_facts()
        evidence = Evidence(self.submissions, jobs, marks, [], final_reports, remains, self.troubles, facts)
        return Outcome(
            check(split_arrays(evidence)),
            self.grid.interposer.count_points(),
            self.grid.interposer.has_crashed(),
            self.grid.starts - 1,
            Counter(job.state for job in jobs),
            time.monotonic() - began,
        )

    def read_facts(self) -> list[Fact]:
        """Return what all sides of the stopped grid wrote, for the auditor."""
        return list(read_grid(GridFiles(self.grid.directory, self._database)))

    @property
    def _database(self) -> str:
        return f"sqlite:///{self.grid.directory}/koala.db"

    def stop_grid(self) -> list[str]:
        """Stop the daemon, and return the remains. If it is killed first, start it and stop it once more."""
        had_crashed, troubles = self.grid.interposer.has_crashed(), list[str]()
        remains = stop_daemon(self.grid, self._database, troubles)
        if troubles and not had_crashed and self.grid.interposer.has_crashed():
            troubles.clear()
            self.grid.begin()
            client = self.grid.client()
            wait_until_idle(self.grid, client)
            client.close()
            remains = stop_daemon(self.grid, self._database, troubles)
        self.troubles += troubles
        return remains

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Keep the daemon running while the block runs. The time of the run begins when the daemon serves."""
        self.grid.begin()
        self._until = time.monotonic() + RUN_TIMEOUT_S
        keeper = DaemonKeeper(self.grid, self.troubles)
        keeper.start()
        try:
            yield
        finally:
            keeper.close()

    def has_job(self, client: Client, job: int) -> bool:
        """Return whether the daemon knows a job."""
        return client.request("GET", f"/api/v1/jobs/{job}", self._until).status_code == 200

    def submit_all(self, client: Client, *, cancel: bool = True) -> None:
        """Submit all jobs; ``cancel``: cancel one when it runs. Submit the preempting one when its victim runs."""
        ids: dict[int, int] = {}
        for planned in plan_jobs():
            if planned.number == HIGH:
                self._wait_for_state(client, ids.get(LOW), "running")
            after = {"after": [ids[FIRST]]} if planned.number == LAST and FIRST in ids else {}
            if (ident := self.submit(client, planned, **after)) is not None:
                ids[planned.number] = ident
        if cancel and LONG in ids:
            self._wait_for_state(client, ids[LONG], "running")
            self._cancel(client, LONG, ids[LONG])

    def submit(self, client: Client, planned: PlannedJob, **fields: Any) -> int | None:
        """Submit a job with its key until it is acknowledged; return its number."""
        body = {**planned.body, **fields, "command": build_command(self.grid.folder, planned.task)}
        if planned.input and not self.bundle:
            answer = client.request("POST", "/api/v1/bundles", self._until, content=archive_input(planned.input))
            self.bundle = read_details(answer).get("id", answer.text)
        if planned.input:
            body["bundle"] = self.bundle
        headers = {"Idempotency-Key": f"key-{planned.number}"}
        answer = client.request("POST", "/api/v1/jobs", self._until, json=body, headers=headers)
        ids: tuple[int, ...] = ()
        if answer.status_code in (200, 201):
            ids = (int(answer.json()["id"]),)
            self.acknowledged.append(Acknowledgement(time.monotonic(), "submitted", planned.number, ids[0]))
        else:
            self.troubles.append(f"{planned.name} was refused: {answer.status_code} {answer.text[:300]}")
        self.submissions.append(Submission(planned, ids))
        return ids[0] if ids else None

    def _wait_for_state(self, client: Client, job: int | None, state: str) -> None:
        end = time.monotonic() + STATE_TIMEOUT_S
        while job is not None and time.monotonic() < end:
            if client.get(f"/api/v1/jobs/{job}", self._until)["state"] in (state, *FINAL_STATES):
                return
            time.sleep(POLL_INTERVAL_S)

    def _cancel(self, client: Client, number: int, job: int) -> None:
        answer = client.request("POST", f"/api/v1/jobs/{job}/cancel", self._until, json={"reason": "test"})
        details, now = read_details(answer), time.monotonic()
        order = None
        if answer.status_code == 200:
            order = Cancellation(now, details["generation"], details["state"])
            self.acknowledged.append(Acknowledgement(now, "cancelled", number, job))
        elif answer.status_code != 409:
            self.troubles.append(f"cancelling job {job}: {answer.status_code} {answer.text[:300]}")
        self.submissions = [
            replace(submission, cancelled=order, cancel_tried=True)
            if submission.planned.number == number
            else submission
            for submission in self.submissions
        ]

    def wait_for_ends(self, client: Client) -> None:
        """Wait until no job is active, and note each end that the daemon reports."""
        reported: set[int] = set()
        while time.monotonic() < self._until:
            jobs = client.get("/api/v1/jobs", self._until, limit=100)["jobs"]
            for job in jobs:
                if job["state"] in FINAL_STATES and job["id"] not in reported:
                    reported.add(job["id"])
                    self.acknowledged.append(Acknowledgement(time.monotonic(), "ended", 0, job["id"], job["state"]))
            if len(reported) == len(jobs) >= len(self.submissions):
                return
            time.sleep(2 * POLL_INTERVAL_S)

    def array_ids(self) -> list[int]:
        return [ident for entry in self.submissions if entry.planned.number == ARRAY for ident in entry.ids]


def split_arrays(evidence: Evidence) -> Evidence:
    """Return the evidence with an array's tasks as separate jobs, in place of the array."""
    submissions: list[Submission] = []
    jobs: list[ReportedJob] = list(evidence.jobs)
    for submission in evidence.submissions:
        if submission.planned.number != ARRAY:
            submissions.append(submission)
            continue
        jobs = [job for job in jobs if job.id not in submission.ids]
        for index in range(1, TASKS + 1):
            name = f"{submission.planned.name}[{index}]"
            body = {**submission.planned.body, "name": name}
            ids = tuple(job.id for job in jobs if job.name == name)
            submissions.append(Submission(replace(submission.planned, body=body, kind="task", number=100 + index), ids))
            jobs = [replace(job, name=f"task-{100 + index}") if job.name == name else job for job in jobs]
    return replace(evidence, submissions=submissions, jobs=jobs)


def run_crash(folder: Path, crash: Crash | None = None) -> Outcome:
    """Run the workload in an empty folder, with one crash or none."""
    return CrashRun(CrashGrid(folder, crash)).execute()
