"""A run: jobs, local users and faults for some minutes, then the end of all jobs, and the check."""

import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from koalapy.audit.readers import GridFiles, read_grid
from tests.chaos import leftovers
from tests.chaos.checker import check
from tests.chaos.clients import ClusterPoller, LocalUsers, Submitters, read_reports
from tests.chaos.evidence import ClusterReport, Evidence, ReportedJob, Submission, Violation
from tests.chaos.faults import plan_faults
from tests.chaos.grid import RULES, ChaosGrid, Client
from tests.chaos.injector import DaemonKeeper, Injector, Waker
from tests.chaos.marks import MarkReader
from tests.chaos.workload import plan_jobs, plan_local_users
from tests.store.postgresql import Server

ATTACK_SHARE = 0.75
"""Share of the run in which jobs are submitted and faults injected; the jobs must end in the remaining time."""
MAX_DELAY_S = 20.0
"""Seconds by which jobs and faults may be late on a busy machine."""
MIN_COMPLETION_S = 60.0
"""Least seconds for jobs to end after the last fault, even in a short run, since a process may still be suspended."""
REPORT_TIMEOUT_S = 60.0
"""Seconds in which the daemon must report all jobs."""
MAX_UNFINISHED_JOBS = 60
IDLE_TIMEOUT_S = 20.0
"""Seconds until every node is idle and every spool empty, once all jobs have ended."""
PROCESS_END_TIMEOUT_S = 45.0
"""Seconds until every process has ended after the daemon; resource managers linger for less."""
MAX_LISTED_TRACEBACKS = 5


@dataclass(frozen=True)
class RunOptions:
    seed: int
    jobs: int
    faults: int
    minutes: float
    postgresql: bool = False


@dataclass
class Outcome:
    """The counts and violations of a run."""

    orders: RunOptions
    seconds: float = 0.0
    states: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    attempts: int = 0
    ranks: int = 0
    local_users: int = 0
    looks: int = 0
    starts: int = 0
    violations: list[Violation] = field(default_factory=list)


def run(orders: RunOptions, folder: Path, database: Server | None = None) -> Outcome:
    """Execute a run in an empty folder, with a running PostgreSQL as ``database`` or with SQLite."""
    return Run(orders, folder, database).execute()


class Run:
    def __init__(self, orders: RunOptions, folder: Path, database: Server | None) -> None:
        self._orders, self._database = orders, database
        (folder / "locks").mkdir()
        self._url = database.new_database() if database is not None else f"sqlite:///{folder}/data/koala.db"
        settings = {"database": self._url} if database is not None else {}
        self._grid = ChaosGrid(folder, **settings)
        self._troubles: list[str] = []
        self._outcome = Outcome(orders)
        self._attack_seconds = 60 * orders.minutes * ATTACK_SHARE
        self._began = time.monotonic()

    def execute(self) -> Outcome:
        deadline = self._began + max(60 * self._orders.minutes, self._attack_seconds + MAX_DELAY_S + MIN_COMPLETION_S)
        with self._daemon():
            submissions, all_looks = self._attack(deadline)
            client = self._grid.client()
            self._wait_for_jobs(client, deadline)
            final_reports = wait_until_idle(self._grid, client)
            jobs = read_jobs(client, time.monotonic() + REPORT_TIMEOUT_S, self._troubles)
            client.close()
        remains = stop_daemon(self._grid, self._url, self._troubles)
        marks = list(MarkReader(self._grid.folder).new())
        facts = list(read_grid(GridFiles(self._grid.directory, self._url)))
        evidence = Evidence(submissions, jobs, marks, all_looks, final_reports, remains, self._troubles, facts)
        return self._summarize(evidence)

    @contextmanager
    def _daemon(self) -> Iterator[None]:
        """Keep the daemon running while the block runs."""
        self._grid.begin()
        self._keeper = DaemonKeeper(self._grid, self._troubles)
        self._keeper.start()
        try:
            yield
        finally:
            self._keeper.close()

    def _attack(self, until: float) -> tuple[list[Submission], list[ClusterReport]]:
        """Submit jobs, run local users and inject faults in parallel."""
        orders = self._orders
        seconds = self._attack_seconds
        planned = plan_jobs(orders.seed, orders.jobs)
        # Submit faster than the time requires, since faults delay submitters.
        submitters = Submitters(
            self._grid,
            planned,
            pace=0.7 * seconds / orders.jobs,
            max_unfinished=MAX_UNFINISHED_JOBS,
            stop_at=self._began + seconds + MAX_DELAY_S,
            deadline=until,
        )
        users = LocalUsers(self._grid, plan_local_users(orders.seed, orders.jobs // 20, 0.9 * seconds), until)
        looker, waker = ClusterPoller(self._grid), Waker()
        for part in (submitters, users, looker, waker):
            part.start()
        injector = Injector(self._grid, self._keeper, waker, self._database)
        faults = plan_faults(orders.seed, orders.faults, seconds, database=self._database is not None)
        try:
            injector.run(faults, self._began + seconds + MAX_DELAY_S)
        finally:
            waker.close()
            submissions = submitters.finish()
            self._outcome.local_users = users.finish(10.0)
            looker.close()
        self._troubles += submitters.troubles
        self._outcome.faults = injector.done
        self._outcome.looks = len(looker.looks)
        return submissions, looker.looks

    def _wait_for_jobs(self, client: Client, until: float) -> None:
        while time.monotonic() < until:
            if not client.get("/api/v1/jobs", until, active=True, limit=1)["jobs"]:
                return
            time.sleep(0.2)

    def _summarize(self, evidence: Evidence) -> Outcome:
        outcome = self._outcome
        outcome.seconds = time.monotonic() - self._began
        outcome.states.update(job.state for job in evidence.jobs)
        outcome.restarts = sum(job.restarts for job in evidence.jobs)
        outcome.attempts = sum(job.generation for job in evidence.jobs)
        outcome.ranks = sum(mark.event == "begin" for mark in evidence.marks)
        outcome.starts = self._grid.starts
        outcome.violations = check(evidence)
        return outcome


def wait_until_idle(grid: ChaosGrid, client: Client) -> list[ClusterReport]:
    """Wait until all clusters are idle and spools empty, or for the timeout, and return the reports."""
    end = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        reports = read_reports(client.get("/api/v1/clusters", end + IDLE_TIMEOUT_S)["clusters"])
        idle = all((look.idle, look.state) == (look.total, "usable") for look in reports)
        if (idle and not leftovers.list_spools(grid.directory)) or time.monotonic() > end:
            return reports
        time.sleep(0.2)


def read_jobs(client: Client, until: float, troubles: list[str], arrays: Sequence[int] = ()) -> list[ReportedJob]:
    """Return all jobs, and the tasks of arrays, with their attempts, output and results."""
    jobs: list[dict[str, Any]] = []
    cursor: dict[str, int] = {}
    try:
        while page := client.get("/api/v1/jobs", until, limit=500, **cursor)["jobs"]:
            jobs += page
            cursor = {"before": page[-1]["id"]}
        for array in arrays:
            jobs += client.get("/api/v1/jobs", until, limit=500, array=array)["jobs"]
        return [_read_job(client, client.get(f"/api/v1/jobs/{job['id']}", until), until) for job in jobs]
    except TimeoutError as error:
        troubles.append(f"the daemon does not tell of its jobs: {error}")
        return []


def _read_job(client: Client, job: dict[str, Any], until: float) -> ReportedJob:
    path = f"/api/v1/jobs/{job['id']}"
    attempts = client.get(f"{path}/attempts", until)["attempts"]
    sizes: dict[int, Counter[str]] = {}
    for attempt in attempts:
        sizes[attempt["generation"]] = Counter()
        for component in attempt["components"]:
            if not component["superseded"]:
                sizes[attempt["generation"]][component["cluster"]] += component["size"]
    components = [component["index"] for component in attempts[-1]["components"]] if attempts else []
    output = {c: client.request("GET", f"{path}/logs", until, params={"component": c}).content for c in components}
    joined_output = client.request("GET", f"{path}/logs", until).content
    results = {}
    if job["collect"] and job["state"] == "succeeded":
        answer = client.request("GET", f"{path}/results", until)
        results = _read_archive(answer.content) if answer.status_code == 200 else {"?": answer.content}
    missing = {
        entry["cluster"]
        for entry in job["timeline"]
        if (entry["event"], entry["generation"]) == ("output-missing", job["generation"])
    }
    limit = job["max_restarts"] if job["max_restarts"] is not None else int(RULES["max_restarts"])
    index = f"[{job['array_index']}]" if job.get("array_index") else ""
    return ReportedJob(
        job["id"],
        job["name"] + index,
        job["state"],
        job["reason"],
        job["exit_code"],
        job["generation"],
        job["restarts"],
        limit,
        sizes,
        output,
        joined_output,
        results,
        frozenset(missing),
    )


def stop_daemon(grid: ChaosGrid, database: str, troubles: list[str]) -> list[str]:
    """Stop the daemon, and return the remains of the grid."""
    directory = grid.directory
    try:
        if (code := grid.stop_daemon()) != 0:
            troubles.append(f"the daemon ended with {code} when it was asked to end")
    except Exception as error:  # noqa: BLE001 - after any error the remains are checked
        troubles.append(f"the daemon did not end when it was asked to: {error!r}")
        grid.kill_daemon()
    remains = leftovers.wait_for_none(lambda: leftovers.list_processes(directory), PROCESS_END_TIMEOUT_S)
    remains += leftovers.list_spools(directory) + leftovers.list_temporary_files(grid.folder / "tmp")
    remains += leftovers.list_rows(database)
    troubles += _list_tracebacks(grid.log)
    return remains


def _read_archive(archive: bytes) -> dict[str, bytes]:
    """Return the files of an archive of results, without the components' folders."""
    files = {}
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                files[member.name.partition("/")[2]] = file.read()
    return files


def _list_tracebacks(log: Path) -> list[str]:
    """Return the unexpected errors that the daemon and its agents logged, with counts."""
    counts: Counter[str] = Counter()
    lines = log.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            following = (text for text in lines[number + 1 :] if text[:1].strip())
            last = next((text for text in following if not text.startswith(("timestamp=", "Traceback"))), "")
            counts[last[:200]] += 1
    return [f"{count} tracebacks in the log: {error}" for error, count in counts.most_common(MAX_LISTED_TRACEBACKS)]
