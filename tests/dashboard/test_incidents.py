"""Incidents: the first line that needs attention names the cause right, as soon as the checks have run."""

import re
import time
from asyncio import run_coroutine_threadsafe
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event as ThreadEvent
from types import SimpleNamespace
from typing import Any

import pytest

from koalapy.daemon.alerts.cluster_checks import check_clocks, check_versions
from koalapy.daemon.alerts.daemon_checks import check_certificate
from koalapy.daemon.engine.engine import WorkItem
from koalapy.model.disk import Disk
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
    scene: SceneMaker = field(default_factory=lambda: SceneMaker(CALM, time.time()))
    clocks: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    certificate: Any = field(default_factory=lambda: SimpleNamespace(path="/etc/koala/tls.pem", complaint=""))

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

    def recover(self) -> None:
        """End all incidents."""
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
    grid = Grid(None)  # type: ignore[arg-type]
    grid.certificate.expires_at = time.time() + 90 * DAY_S
    checks = (
        partial(check_clocks, lambda: grid.clocks, (), time.time),
        partial(check_versions, lambda: grid.versions, dict),
        partial(check_certificate, grid.certificate),
    )
    with serve_scene(CALM, tmp_path_factory.mktemp("scene"), alert_checks=checks) as grid.daemon:
        yield grid


def flood(grid: Grid) -> None:
    jobs = [{"request": {"type": "flexible", "total_size": 2000}, "command": ["true"], "owner": "mallory"}] * 500
    grid.daemon.http.post("/api/v1/jobs:batch", json={"jobs": jobs}).raise_for_status()


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
    "queue of one user": (flood, "500 of the .* queued jobs belong to mallory"),
}


@pytest.mark.processes
@pytest.mark.parametrize("incident", INCIDENTS)
def test_first_line_of_overview_names_cause(grid: Grid, incident: str) -> None:
    cause, line = INCIDENTS[incident]
    assert grid.first_line() == ""
    cause(grid)
    assert re.search(line, grid.first_line()), grid.first_line()
    grid.recover()
