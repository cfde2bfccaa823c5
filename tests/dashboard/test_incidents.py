"""Incidents: the first line that needs attention names the cause right, as soon as the checks have run."""

import re
import sqlite3
import time
from asyncio import run_coroutine_threadsafe
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event as ThreadEvent
from types import SimpleNamespace
from typing import Any

import pytest

from koalapy.daemon.agents.hub import Rejection
from koalapy.daemon.alerts.alerts import Check
from koalapy.daemon.alerts.cluster_checks import BlackHoleCheck, check_clocks, check_disks, check_versions
from koalapy.daemon.alerts.daemon_checks import check_certificate, check_database
from koalapy.daemon.engine.engine import WorkItem
from koalapy.model.alert import Alert, AlertRules
from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.job import JobState
from koalapy.model.reports import ClusterReport
from koalapy.scheduler.events import ClusterDisconnected, Event, Reported
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.scenes import SITES, Scene, SceneMaker, serve_scene

CALM = Scene(30, 60, troubles=False)
"""Three clusters at each of ten sites."""
NAMES = [f"{site}-{number}" for number in (1, 2, 3) for site in SITES]
DELFT = [name for name in NAMES if name.startswith("delft-")]
DAY_S = 86400.0


@dataclass
class Grid:
    """A grid in which nothing is wrong, and what its agents and the daemon's certificate say."""

    daemon: ServedDaemon
    folder: Path
    scene: SceneMaker = field(default_factory=lambda: SceneMaker(CALM, time.time()))
    clocks: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    certificate: Any = field(default_factory=lambda: SimpleNamespace(path="/etc/koala/tls.pem", complaint=""))
    disks: list[Disk] = field(default_factory=list)
    rejections: dict[str, Rejection] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    """Those of the daemon's own database and jobs."""
    lock: sqlite3.Connection | None = None
    """A connection that keeps the daemon from writing."""

    async def check_daemon(self, now: float) -> AsyncIterator[Alert]:
        """Run the checks that need a running daemon."""
        for check in self.checks:
            async for alert in check(now):
                yield alert

    def send(self, *events: Event) -> None:
        """Have the scheduler process events."""
        written = ThreadEvent()
        self.daemon.loop.call_soon_threadsafe(self.daemon.engine.post, WorkItem(events=events, after_write=written.set))
        assert written.wait(60)

    def lose(self, names: list[str], reason: str = "its agent has not answered for 6 s") -> None:
        """Lose the connections of agents within three seconds."""
        now = self.daemon.engine.clock()
        self.send(*(ClusterDisconnected(name, reason, now - 6 - number % 3) for number, name in enumerate(names)))

    def report(self, **changes: Any) -> None:
        """Have the agent of the first cluster report something else."""
        report = next(event.report for event in self.scene.events() if isinstance(event, Reported))
        assert isinstance(report, ClusterReport)
        self.send(Reported(NAMES[0], replace(report, **changes)))

    def fail_jobs(self) -> None:
        """Let jobs of two users fail on the first cluster as soon as they start."""
        now, job = self.daemon.engine.clock(), next(job for job in self.scene.jobs if job.state.is_final)
        assert job.attempt is not None
        component = replace(job.attempt.components[0], cluster=NAMES[0], exit_code=127)
        attempt, times = replace(job.attempt, components=(component,)), {"started_at": now - 1, "ended_at": now}
        failed = replace(job, state=JobState.FAILED, exit_code=127, attempt=attempt, **times)
        for owner in ("alice", "bruno") * 3:
            self.black_holes.record_exit(replace(failed, spec=replace(job.spec, owner=owner)), None)

    def lock_database(self) -> None:
        """Keep the daemon from writing, and have it try."""
        self.lock = sqlite3.connect(self.folder / "koala.db", isolation_level=None, check_same_thread=False)
        self.lock.execute("begin immediate")
        assert self.submit(1, "alice").status_code == 503

    def reject_agent(self) -> None:
        """Reject an agent that shows a wrong token, after it was lost."""
        rejection = Rejection("the token is wrong", "give it its token", self.daemon.engine.clock())
        self.rejections[NAMES[0]] = rejection
        self.lose(NAMES[:1], "its agent is not connected")

    def submit(self, count: int, owner: str) -> Any:
        """Submit jobs that wait for more nodes than are idle."""
        job = {"request": {"type": "flexible", "total_size": 2000}, "command": ["true"], "owner": owner}
        return self.daemon.http.post("/api/v1/jobs:batch", json={"jobs": [job] * count})

    def start_checks(self) -> None:
        """Begin to check the running daemon; forget failed jobs."""
        engine, rules = self.daemon.engine, AlertRules()
        self.black_holes = BlackHoleCheck(engine.queries.grid.clusters, rules, engine.clock)
        database = (engine.database, engine.instruments.writes, "see who locks it", "", rules)
        self.checks = [self.black_holes, partial(check_database, *database)]

    def recover(self) -> None:
        """End all incidents."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None
        self.start_checks()
        self.disks.clear()
        self.rejections.clear()
        self.clocks.clear()
        self.versions.clear()
        self.certificate.expires_at = time.time() + 90 * DAY_S
        self.send(*self.scene.events())

    def first_line(self) -> str:
        """Return the text of the first article on the overview after the checks; empty without one."""
        run_coroutine_threadsafe(self.daemon.alerts.run_checks(), self.daemon.loop).result(60)
        page = self.daemon.http.get("/", headers={"Accept": "text/html"}).text
        article = re.search(r"<article.*?</article>", page, re.DOTALL)
        text = re.sub(r"<[^>]+>", " ", article[0].partition('<div class="remedies"')[0]) if article else ""
        return re.sub(r"\s+", " ", text.replace("&#39;", "'").replace("&#34;", '"'))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    grid = Grid(None, tmp_path_factory.mktemp("scene"))  # type: ignore[arg-type]
    grid.certificate.expires_at = time.time() + 90 * DAY_S
    checks = (
        partial(check_clocks, lambda: grid.clocks, (), time.time),
        partial(check_versions, lambda: grid.versions, dict),
        partial(check_certificate, grid.certificate),
        partial(check_disks, lambda: grid.disks, tuple, DiskLimits()),
        grid.check_daemon,
    )
    options = {"alert_checks": checks, "rejections": grid.rejections, "busy_timeout_ms": 50}
    with serve_scene(CALM, grid.folder, **options) as grid.daemon:
        grid.start_checks()
        yield grid


INCIDENTS: dict[str, tuple[Callable[[Grid], Any], str]] = {
    "network of the daemon": (
        lambda grid: grid.lose(NAMES),
        "all agents were lost within 2 s: the daemon's network is the likely cause; .* jobs hold .* nodes there",
    ),
    "power of a site": (
        lambda grid: grid.lose(DELFT),
        "3 of 30 agents were lost within 2 s: a network or a power supply that they share is the likely cause",
    ),
    "agent of a cluster": (
        lambda grid: grid.lose(NAMES[:1], "its agent is not connected"),
        f"the agent of {NAMES[0]} is absent.*its agent is not connected",
    ),
    "resource manager hangs": (
        lambda grid: grid.report(problem="squeue: not answering since 12:00", silent_for=30.0),
        f"no jobs can start on {NAMES[0]}: its resource manager does not answer.*squeue: not answering",
    ),
    "resource manager rejects": (
        lambda grid: grid.report(problem="sbatch: error: account is over its limit"),
        f"no jobs can start on {NAMES[0]}: its resource manager accepts no jobs.*account is over its limit",
    ),
    "disk of an agent": (
        lambda grid: grid.report(disks=(Disk("spool", "/var/spool/koala", 2**20, 500 * 2**30),)),
        f"the disk of the spool on {NAMES[0]} is full",
    ),
    "clock of an agent": (
        lambda grid: grid.clocks.update({NAMES[0]: -7200.0}),
        f"the clock of the head node of {NAMES[0]} is 2:00:00 behind the daemon's",
    ),
    "version of an agent": (
        lambda grid: grid.versions.update({NAMES[0]: "0.0.9"}),
        f"the agent of {NAMES[0]} has version 0.0.9",
    ),
    "certificate of tomorrow": (
        lambda grid: setattr(grid.certificate, "expires_at", time.time() + DAY_S),
        "the daemon's certificate expires soon: agents and commands will refuse to connect",
    ),
    "hanging agent": (
        lambda grid: grid.lose(NAMES[:1]),
        f"the agent of {NAMES[0]} is absent.*its agent has not answered for 6 s",
    ),
    "token of an agent": (
        lambda grid: grid.reject_agent(),
        f"the agent of {NAMES[0]} is rejected.*a connection in its name was rejected: the token is wrong",
    ),
    "disk of the daemon": (
        lambda grid: grid.disks.append(Disk("data", "/var/lib/koala", 2**20, 500 * 2**30)),
        "the disk of the data is full: nothing more can be written",
    ),
    "database locked": (
        lambda grid: grid.lock_database(),
        "the database rejects writes: jobs and actions are rejected.*locked",
    ),
    "jobs fail at once": (
        lambda grid: grid.fail_jobs(),
        f"jobs fail on {NAMES[0]} as soon as they start.*6 of 6 jobs that ended there.*last exit code: 127",
    ),
    "queue of one user": (
        lambda grid: grid.submit(500, "mallory").raise_for_status(),
        "500 of the .* queued jobs belong to mallory",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("incident", INCIDENTS)
def test_first_line_of_overview_names_cause(grid: Grid, incident: str) -> None:
    cause, line = INCIDENTS[incident]
    assert grid.first_line() == ""
    cause(grid)
    assert re.search(line, grid.first_line()), grid.first_line()
    grid.recover()
