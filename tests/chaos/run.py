"""One run: jobs, local users and faults for some minutes, then everything is let come to its end, and judged."""

import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.chaos import leftovers
from tests.chaos.checker import check
from tests.chaos.clients import LocalUsers, Looker, Submitters, looks
from tests.chaos.evidence import Evidence, Look, Submission, Told, Violation
from tests.chaos.faults import plan_faults
from tests.chaos.grid import RULES, Chaos, Client
from tests.chaos.injector import Injector, Keeper, Waker
from tests.chaos.marks import MarkReader
from tests.chaos.workload import plan_jobs, plan_local_users
from tests.store.postgresql import Server

FAULTS_SHARE = 0.75
"""Of a run's time, in which there are jobs and faults; in the rest the jobs must come to their ends."""
LATE = 20.0
"""Seconds by which the last of these may be late, on a machine that has much to do."""
AT_LEAST = 60.0
"""Seconds that jobs have to come to their ends after the last fault, however short the run: a process may have been
stopped just then."""
ASK_WITHIN = 60.0
"""Seconds in which the daemon must have told of all jobs."""
MOST_UNFINISHED = 60
AT_REST = 20.0
"""Seconds until every node is idle and every spool empty, once all jobs are over."""
GONE = 45.0
"""Seconds until every process is gone, once the daemon has ended: more than resource managers linger."""
TRACEBACKS_SHOWN = 5


@dataclass(frozen=True)
class Orders:
    seed: int
    jobs: int
    faults: int
    minutes: float
    postgresql: bool = False


@dataclass
class Outcome:
    """What came of a run."""

    orders: Orders
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


def run(orders: Orders, ground: Path, database: Server | None = None) -> Outcome:
    """Play it in an empty folder; ``database`` is a PostgreSQL that runs, or SQLite is used."""
    return Run(orders, ground, database).play()


class Run:
    def __init__(self, orders: Orders, ground: Path, database: Server | None) -> None:
        self._orders, self._database = orders, database
        (ground / "locks").mkdir()
        self._url = database.new_database() if database is not None else f"sqlite:///{ground}/data/koala.db"
        settings = {"database": self._url} if database is not None else {}
        self._grid = Chaos(ground, **settings)
        self._troubles: list[str] = []
        self._outcome = Outcome(orders)
        self._attack_seconds = 60 * orders.minutes * FAULTS_SHARE
        self._began = time.monotonic()

    def play(self) -> Outcome:
        over_at = self._began + max(60 * self._orders.minutes, self._attack_seconds + LATE + AT_LEAST)
        with self._daemon():
            submissions, all_looks = self._attack(over_at)
            client = self._grid.client()
            self._wait_for_jobs(client, over_at)
            last_looks = self._rest(client)
            jobs = self._ask(client, time.monotonic() + ASK_WITHIN)
            client.close()
        left = self._end()
        marks = list(MarkReader(self._grid.ground).new())
        evidence = Evidence(submissions, jobs, marks, all_looks, last_looks, left, self._troubles)
        return self._sum_up(evidence)

    @contextmanager
    def _daemon(self) -> Iterator[None]:
        """Kept running until it is asked to end."""
        self._grid.begin()
        self._keeper = Keeper(self._grid, self._troubles)
        self._keeper.start()
        try:
            yield
        finally:
            self._keeper.close()

    def _attack(self, until: float) -> tuple[list[Submission], list[Look]]:
        """Jobs, local users and faults, all at once."""
        orders = self._orders
        seconds = self._attack_seconds
        planned = plan_jobs(orders.seed, orders.jobs)
        # A bit faster than there is time for, as submitters are held up again and again.
        submitters = Submitters(
            self._grid,
            planned,
            pace=0.7 * seconds / orders.jobs,
            most=MOST_UNFINISHED,
            stop_at=self._began + seconds + LATE,
            until=until,
        )
        users = LocalUsers(self._grid, plan_local_users(orders.seed, orders.jobs // 20, 0.9 * seconds), until)
        looker, waker = Looker(self._grid), Waker()
        for one in (submitters, users, looker, waker):
            one.start()
        injector = Injector(self._grid, self._keeper, waker, self._database)
        faults = plan_faults(orders.seed, orders.faults, seconds, database=self._database is not None)
        try:
            injector.run(faults, self._began + seconds + LATE)
        finally:
            waker.close()
            done = submitters.finish()
            self._outcome.local_users = users.finish(10.0)
            looker.close()
        self._troubles += submitters.troubles
        self._outcome.faults = injector.done
        self._outcome.looks = len(looker.looks)
        return done, looker.looks

    def _wait_for_jobs(self, client: Client, until: float) -> None:
        while time.monotonic() < until:
            if not client.get("/api/v1/jobs", until, active=True, limit=1)["jobs"]:
                return
            time.sleep(0.2)

    def _rest(self, client: Client) -> list[Look]:
        """The clusters once they are idle and the spools empty, or what they are after waiting for that."""
        end = time.monotonic() + AT_REST
        while True:
            found = looks(client.get("/api/v1/clusters", end + AT_REST)["clusters"])
            idle = all((look.idle, look.state) == (look.total, "usable") for look in found)
            if (idle and not leftovers.spools(self._grid.directory)) or time.monotonic() > end:
                return found
            time.sleep(0.2)

    def _ask(self, client: Client, until: float) -> list[Told]:
        """Everything that the daemon knows of its jobs."""
        found: list[dict[str, Any]] = []
        before: dict[str, int] = {}
        try:
            while page := client.get("/api/v1/jobs", until, limit=500, **before)["jobs"]:
                found += page
                before = {"before": page[-1]["id"]}
            return [self._told(client, client.get(f"/api/v1/jobs/{job['id']}", until), until) for job in found]
        except TimeoutError as error:
            self._troubles.append(f"the daemon does not tell of its jobs: {error}")
            return []

    def _told(self, client: Client, job: dict[str, Any], until: float) -> Told:
        path = f"/api/v1/jobs/{job['id']}"
        attempts = client.get(f"{path}/attempts", until)["attempts"]
        sizes: dict[int, Counter[str]] = {}
        for attempt in attempts:
            sizes[attempt["generation"]] = Counter()
            for component in attempt["components"]:
                if not component["superseded"]:
                    sizes[attempt["generation"]][component["cluster"]] += component["size"]
        own = [component["index"] for component in attempts[-1]["components"]] if attempts else []
        output = {c: client.ask("GET", f"{path}/logs", until, params={"component": c}).content for c in own}
        whole = client.ask("GET", f"{path}/logs", until).content
        results = {}
        if job["collect"] and job["state"] == "succeeded":
            answer = client.ask("GET", f"{path}/results", until)
            results = _files(answer.content) if answer.status_code == 200 else {"?": answer.content}
        missing = {
            entry["cluster"]
            for entry in job["timeline"]
            if (entry["event"], entry["generation"]) == ("output-missing", job["generation"])
        }
        limit = job["max_restarts"] if job["max_restarts"] is not None else int(RULES["max_restarts"])
        return Told(
            job["id"],
            job["name"],
            job["state"],
            job["reason"],
            job["exit_code"],
            job["generation"],
            job["restarts"],
            limit,
            sizes,
            output,
            whole,
            results,
            frozenset(missing),
        )

    def _end(self) -> list[str]:
        """End the daemon; what is left then."""
        directory = self._grid.directory
        try:
            if (code := self._grid.stop_daemon()) != 0:
                self._troubles.append(f"the daemon ended with {code} when it was asked to end")
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest is to be looked at
            self._troubles.append(f"the daemon did not end when it was asked to: {error!r}")
            self._grid.kill_daemon()
        left = leftovers.gone(lambda: leftovers.processes(directory), GONE)
        left += leftovers.spools(directory) + leftovers.temporary(self._grid.ground / "tmp")
        left += leftovers.rows(self._url)
        self._troubles += _tracebacks(self._grid.log)
        return left

    def _sum_up(self, evidence: Evidence) -> Outcome:
        outcome = self._outcome
        outcome.seconds = time.monotonic() - self._began
        outcome.states.update(job.state for job in evidence.jobs)
        outcome.restarts = sum(job.restarts for job in evidence.jobs)
        outcome.attempts = sum(job.generation for job in evidence.jobs)
        outcome.ranks = sum(mark.what == "begin" for mark in evidence.marks)
        outcome.starts = self._grid.starts
        outcome.violations = check(evidence)
        return outcome


def _files(archive: bytes) -> dict[str, bytes]:
    """What components brought, without the names of the components' folders."""
    found = {}
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                found[member.name.partition("/")[2]] = file.read()
    return found


def _tracebacks(log: Path) -> list[str]:
    """Errors that nobody had thought of, as the daemon and its agents logged them: each of its kind once."""
    found: Counter[str] = Counter()
    lines = log.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            following = (text for text in lines[number + 1 :] if text[:1].strip())
            last = next((text for text in following if not text.startswith(("timestamp=", "Traceback"))), "")
            found[last[:200]] += 1
    return [f"{count} tracebacks in the log: {what}" for what, count in found.most_common(TRACEBACKS_SHOWN)]
