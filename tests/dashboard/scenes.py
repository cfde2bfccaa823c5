"""Serve the dashboard of a grid without agents at one of several sizes, for pictures, tests and measurements.

``python -m tests.dashboard.scenes large`` serves one until it is interrupted, and prints its address and token.
"""

import gc
import sys
import time
from asyncio import run_coroutine_threadsafe
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from math import sin
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Event as ThreadEvent
from typing import Any

from koalapy.daemon.engine.engine import WorkItem
from koalapy.model.alert import AlertRules
from koalapy.model.cluster import Link
from koalapy.model.disk import Disk
from koalapy.model.history import USES, UseSum
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, TimelineEntry
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.node_requirement import Gpus
from koalapy.model.reports import (
    ClusterReport,
    ComponentStatus,
    Inventory,
    LrmCalls,
    LrmOperation,
    NodeClassReport,
    Versions,
)
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest
from koalapy.scheduler.events import (
    AgentConnected,
    ClusterDisconnected,
    ClusterDrained,
    Event,
    InventoryReceived,
    Reported,
)
from koalapy.scheduler.rules import Rules
from koalapy.store.database import Database
from koalapy.store.records import Batch
from koalapy.store.service_tables import SampleStore
from koalapy.store.sql import JobStore
from tests.daemon.sites import Sites
from tests.daemon_in_process import ServedDaemon, daemon_in_thread
from tests.databases import open_database

HISTORY_S = 6 * 3600.0
"""The time over which the jobs of a scene were submitted."""
SITES = ("delft", "leiden", "utrecht", "amsterdam", "eindhoven", "groningen", "twente", "nijmegen", "tilburg", "hague")
USERS = ("alice", "bruno", "chen", "dora", "emil", "farida", "goran", "hana", "ivan", "jelena")
PROGRAMS = ("poisson", "wave", "lammps", "namd", "gromacs", "openfoam", "wrf", "cp2k")
POLICIES = {NonFixedRequest: ("worst-fit", "close-to-files"), FlexibleRequest: ("cluster-minimization", "auto")}
MAX_RUNNING = 40
"""Maximum number of running jobs per connected cluster."""


@dataclass(frozen=True)
class Scene:
    """The size of a grid: ``away`` of its ``clusters`` have no agent. Without ``troubles`` nothing else is wrong."""

    clusters: int
    jobs: int
    away: int = 0
    troubles: bool = True


SCENES = {
    "empty": Scene(3, 0),
    "small": Scene(3, 50),
    "sixty": Scene(60, 200, away=48),
    "large": Scene(60, 20_000, away=48),
    "wide": Scene(500, 2_000, away=20),
}


class SceneMaker:
    """The clusters and jobs of a scene; the same seed makes the same scene, relative to ``now``."""

    def __init__(self, scene: Scene, now: float) -> None:
        self.scene, self.now, self._random = scene, now, Random(11)
        names = [f"{SITES[n % len(SITES)]}-{n // len(SITES) + 1}" for n in range(scene.clusters)]
        self.nodes = {name: self._random.choice((16, 24, 32, 64, 96, 128)) for name in names}
        self.away = names[scene.clusters - scene.away :]
        self.connected = names[: scene.clusters - scene.away]
        self._unused = dict(self.nodes)
        self._first_host: dict[str, int] = {}
        """Number of the first node of the next component, by cluster."""
        self._ids = count(1)
        self.jobs: list[Job] = []
        self.timeline: list[TimelineEntry] = []
        if scene.jobs:
            self._make_jobs()

    @property
    def links(self) -> dict[tuple[str, str], Link]:
        """Return measured links between the first twelve clusters."""
        draw, names = Random(5), list(self.nodes)[:12]
        return {
            (min(one, other), max(one, other)): Link(draw.uniform(2e-4, 1.2e-2), draw.choice((1.2e8, 5e8, 1.2e9)))
            for index, one in enumerate(names)
            for other in names[:index]
        }

    def _make_jobs(self) -> None:
        """Make the jobs in the order of their submission: most have ended, some run, the last ones wait."""
        total = self.scene.jobs
        running = min(total // 4, MAX_RUNNING * len(self.connected) // 2)
        waiting = min(total // 3, 3000)
        ended = total - running - waiting
        for index in range(ended):
            submitted = self.now - HISTORY_S * (1 - 0.95 * index / max(1, ended))
            self._add_ended(submitted)
        for index in range(running):
            self._add_running(self.now - 3600.0 * (1 - 0.9 * index / running))
        for index in range(waiting):
            self._add_waiting(self.now - 5400.0 * (1 - index / waiting), index)

    def _spec(self, size: int, parts: int = 1, priority: Priority = Priority.LOW) -> JobSpec:
        draw = self._random
        program = draw.choice(PROGRAMS)
        request: FlexibleRequest | NonFixedRequest = FlexibleRequest(size)
        if parts > 1:
            request = NonFixedRequest(tuple(ComponentRequest(size // parts) for _ in range(parts)))
        return JobSpec(
            request,
            (f"./{program}", f"--case={draw.randrange(900)}"),
            policy=draw.choice(POLICIES[type(request)]),
            name=f"{program}-{draw.randrange(40)}",
            owner=USERS[int(draw.random() ** 2 * len(USERS))],
            priority=priority,
            walltime=draw.choice((1800.0, 3600.0, 7200.0, 14400.0)),
            launcher=Launcher.PROCESSES,
        )

    def _components(self, state: ComponentState, sizes: list[tuple[str, int]], claimed: float) -> tuple[Component, ...]:
        return tuple(
            Component(
                index,
                cluster,
                size,
                state,
                index,
                tuple(f"{cluster}-n{self._first_host.get(cluster, 0) + node}" for node in range(size)),
                f"{self._random.randrange(10**6)}",
                submitted_at=claimed - 1.5,
                claimed_at=claimed - index * self._random.uniform(0.1, 3.0),
                lease=7200.0,
            )
            for index, (cluster, size) in enumerate(sizes)
        )

    def _add(self, job: Job, *events: tuple[float, str, JobState]) -> None:
        self.jobs.append(job)
        self.timeline.extend(
            TimelineEntry(job.id, at, event, state, generation=job.generation) for at, event, state in events
        )

    def _add_ended(self, submitted: float) -> None:
        draw = self._random
        size = draw.choice((1, 2, 4, 4, 8, 12))
        clusters = list(dict.fromkeys(draw.choices(list(self.nodes), self.nodes.values(), k=2 if size > 4 else 1)))
        placed = submitted + draw.expovariate(1 / 240)
        started = placed + draw.uniform(1.0, 9.0)
        ended = min(self.now - 1, started + draw.expovariate(1 / 900))
        placed, started = min(placed, ended - 0.2), min(started, ended - 0.1)
        draw_state = draw.random()
        state = JobState.SUCCEEDED if draw_state < 0.9 else JobState.FAILED if draw_state < 0.97 else JobState.CANCELLED
        sizes = [(cluster, size // len(clusters)) for cluster in clusters]
        components = tuple(
            replace(component, exit_code=0, ended_at=ended)
            for component in self._components(ComponentState.ENDED, sizes, started - 0.5)
        )
        code = {JobState.SUCCEEDED: 0, JobState.FAILED: 1, JobState.CANCELLED: None}[state]
        attempt = Attempt(
            1, components, placed, barrier_at=started, launched_at=started, ended_at=ended, exit_code=code, nonce="5eed"
        )
        job = Job(
            next(self._ids),
            self._spec(size, len(clusters)),
            submitted,
            state,
            "" if code == 0 else "the program ended with exit code 1" if code else "cancelled",
            1,
            attempt,
            placed_at=placed,
            started_at=started,
            ended_at=ended,
            exit_code=code,
        )
        self._add(
            replace(job, queue_seq=job.id),
            (submitted, "submitted", JobState.QUEUED),
            (placed, "placed", JobState.PLACED),
            (started, "started", JobState.RUNNING),
            (ended, str(state), state),
        )

    def _add_running(self, started: float) -> None:
        """Add a running job on one to three connected clusters, and rarely on one that is away."""
        draw = self._random
        names = self.connected + self.away[: len(self.away) // 8]
        clusters = draw.sample(names, min(len(names), draw.choice((1, 1, 1, 2, 2, 3))))
        sizes = []
        for cluster in clusters:
            size = min(draw.choice((1, 2, 2, 4, 8)), self._unused[cluster] - self.nodes[cluster] // 4)
            if size > 0:
                self._first_host[cluster] = self.nodes[cluster] - self._unused[cluster]
                self._unused[cluster] -= size
                sizes.append((cluster, size))
        if not sizes:
            return
        placed = started - draw.uniform(1.0, 9.0)
        submitted = placed - draw.expovariate(1 / 600)
        components = self._components(ComponentState.RUNNING, sizes, started - 0.5)
        job = Job(
            next(self._ids),
            replace(
                self._spec(sum(size for _, size in sizes)),
                policy="worst-fit",
                request=NonFixedRequest(tuple(ComponentRequest(size) for _, size in sizes)),
            ),
            submitted,
            JobState.RUNNING,
            "",
            1,
            Attempt(1, components, placed, barrier_at=started, launched_at=started, nonce="5eed"),
            placed_at=placed,
            started_at=started,
        )
        self._add(
            replace(job, queue_seq=job.id),
            (submitted, "submitted", JobState.QUEUED),
            (placed, "placed", JobState.PLACED),
            (started, "started", JobState.RUNNING),
        )

    def _add_waiting(self, submitted: float, index: int) -> None:
        """Add a job that does not fit on the idle nodes, which are fewer than four on each cluster."""
        draw = self._random
        spec = self._spec(draw.choice((1800, 2000, 2400)) if self.scene.clusters > 3 else draw.choice((40, 60)))
        if index % 3 == 0:
            cluster = draw.choice(self.connected)
            spec = replace(
                spec,
                policy="fixed",
                request=FixedRequest((ComponentRequest(max(4, self.nodes[cluster] // 2), cluster),)),
            )
        priority = Priority.HIGH if index % 12 == 0 else Priority.LOW
        job = Job(next(self._ids), replace(spec, priority=priority), submitted)
        if index % 25 == 24:
            job = replace(job, state=JobState.HELD, reason="held")
        self._add(replace(job, queue_seq=job.id), (submitted, "submitted", JobState.QUEUED))

    def samples(self) -> Iterator[tuple[float, list[UseSum]]]:
        """Yield times with the use of all clusters and of each: for a week with nights, by the minute in the last six
        hours up to the present use. There is a gap of half an hour, and clusters without reports for an hour."""
        draw, used = Random(3), Counter(self._used_nodes())
        queued = float(sum(job.state is JobState.QUEUED for job in self.jobs))
        minutes = [*range(-7 * 1440, -360, 60), *range(-360, 1)]
        for minute in minutes:
            hour = minute / 60
            if -230 < minute < -200:
                continue
            uses = []
            for index, (name, nodes) in enumerate(self.nodes.items()):
                local = int(nodes * max(0.0, 0.35 + 0.3 * sin(index + hour / 3.8)))
                ours = used[name] if minute == 0 else int((nodes - local) * max(0.0, 0.6 + 0.4 * sin(index + hour / 9)))
                is_known = not (index % 3 == 1 and -3 < hour < -2) and not (name in self.away and hour > -1.2)
                is_idle = index % 9 == 8
                if not is_known:
                    uses.append(UseSum(0, name, 1, unknown=nodes))
                elif is_idle and minute:
                    uses.append(UseSum(0, name, 1, idle=nodes))
                else:
                    local = min(local, nodes - ours)
                    uses.append(UseSum(0, name, 1, ours, local, nodes - ours - local))
            started = int(draw.expovariate(1 / (self.scene.jobs / 360 + 0.5)))
            totals = {use: sum(getattr(one, use) for one in uses) for use in USES}
            jobs = {"queued": int(queued * (1 + 0.4 * sin(hour))), "started": started, "ended": int(started * 0.9)}
            uses.append(UseSum(0, "", 1, **totals, **jobs, startup=started * draw.uniform(1.0, 3.0)))
            yield self.now + 60.0 * minute, uses

    def _used_nodes(self) -> dict[str, int]:
        """Return the nodes of running components by cluster."""
        return {cluster: sum(component.size for _, component in held) for cluster, held in self._held().items()}

    def batch(self, epoch: int) -> Batch:
        """Return the transaction that stores all jobs."""
        return Batch(self.now, epoch, {job.id: job for job in self.jobs}, timeline=self.timeline)

    def events(self) -> Iterator[Event]:
        """Yield the events by which the scheduler learns the state of all clusters."""
        held = self._held()
        for index, name in enumerate(self.nodes):
            yield AgentConnected(name)
            yield InventoryReceived(
                name,
                Inventory(
                    tuple(
                        ComponentStatus(token, ComponentState.RUNNING, component.hosts, component.lrm_job, lease=7200.0)
                        for token, component in held[name]
                    )
                ),
            )
            yield Reported(name, self._report(name, index, held[name]))
            if name in self.away:
                yield ClusterDisconnected(name, "its agent is not connected", self.now - 4200.0 - index % 5)
        if len(self.connected) > 5 and self.scene.troubles:
            yield ClusterDrained(self.connected[4], "olga", "new disks on Monday")

    def _held(self) -> dict[str, list[tuple[str, Component]]]:
        """Return the components that have nodes, with their tokens, by cluster."""
        held: dict[str, list[tuple[str, Component]]] = {name: [] for name in self.nodes}
        for job in self.jobs:
            if job.state is JobState.RUNNING and job.attempt is not None:
                for component in job.attempt.components:
                    held[component.cluster].append((job.token(component.index), component))
        return held

    def sites(self) -> Sites:
        """Return the agents, which answer with the nodes of their clusters one by one."""
        held, answers = self._held(), {}
        for index, name in enumerate(self.connected):
            tokens = {host: token for token, component in held[name] for host in component.hosts}
            report = self._report(name, index, held[name])
            others = iter(["idle"] * report.idle + ["local"] * (report.background or 0) + ["down"] * report.down)
            nodes = []
            for host in (f"{name}-n{number}" for number in range(self.nodes[name])):
                state = "held" if host in tokens else next(others)
                reason = "down+drain: fan broken, ticket 4711" if state == "down" else ""
                token = tokens.get(host, "")
                node_class = "a100-256GB" if len(nodes) < self.nodes[name] // 4 else "haswell-64GB"
                nodes.append({"name": host, "state": state, "reason": reason, "token": token, "node_class": node_class})
            answers[name] = {"nodes": nodes, "age": 3.0}
        return Sites(nodes=answers)

    @staticmethod
    def _classes(total: int, idle: int) -> tuple[NodeClassReport, ...]:
        """Return two classes of nodes: three quarters of the nodes have no GPU."""
        big = total // 4
        return (
            NodeClassReport("haswell-64GB", total - big, idle, memory=64 * 2**30, cores=16, features=("haswell", "ib")),
            NodeClassReport("a100-256GB", big, 0, memory=256 * 2**30, cores=64, gpus=(Gpus(4, "a100"),)),
        )

    def _report(self, name: str, index: int, held: list[tuple[str, Component]]) -> ClusterReport:
        """Return the nodes of a cluster: local users have most of those that no component has."""
        total, used = self.nodes[name], sum(component.size for _, component in held)
        down = 1 if index % 7 == 3 and self.scene.troubles else 0
        idle = total - used - down
        if self.scene.jobs:
            idle = min(idle, index % 4)
        free = 2 * 2**30 if index % 11 == 6 and self.scene.troubles else 300 * 2**30
        problem = ""
        if index == 7 and self.scene.troubles:
            problem = "squeue: error: Unable to contact slurm controller (connect failure)"
        return ClusterReport(
            total,
            idle,
            total - used - down - idle,
            down,
            frozenset(token for token, _ in held),
            problem,
            disks=(Disk("spool", "/var/spool/koala", free, 500 * 2**30),),
            node_classes=self._classes(total, idle),
            versions=Versions("1.0.0", "Slurm 22.05.8", "4.1.4"),
            calls=(LrmCalls(LrmOperation.SNAPSHOT, 4000 + index, index % 3, 400.0, 0.9),),
        )


@contextmanager
def serve_scene(scene: str | Scene, folder: Path, **options: Any) -> Iterator[ServedDaemon]:
    """Serve the daemon and dashboard of a scene from a thread, with its database in ``folder``.

    ``options`` are those of ``serving``.
    """
    path = folder / "koala.db"
    maker = SceneMaker(SCENES[scene] if isinstance(scene, str) else scene, time.time())
    if maker.jobs:
        store = JobStore(Database(open_database(path)))
        store.write(maker.batch(store.epoch))
        samples = SampleStore(store.database)
        for at, uses in maker.samples():
            samples.add(uses, at)
        store.release_lease()
        store.close()
    # No agent connects: jobs of the clusters that are away must not become unknown while a viewer looks.
    rules, checks = Rules(unreachable_after=86400.0), AlertRules(hold=0.0, release=0.0)
    options |= {"cluster_nodes": maker.nodes, "links": maker.links, "alert_rules": checks, "simulates_apart": True}
    with daemon_in_thread(path, maker.sites(), rules=rules, has_dashboard=True, **options) as daemon:
        written = ThreadEvent()
        item = WorkItem(events=tuple(maker.events()), after_write=written.set)
        daemon.loop.call_soon_threadsafe(daemon.engine.post, item)
        assert written.wait(60), "the clusters of the scene were not stored"
        run_coroutine_threadsafe(daemon.alerts.run_checks(), daemon.loop).result(60)
        yield daemon


def main() -> None:
    with TemporaryDirectory() as folder, serve_scene(sys.argv[1], Path(folder)) as daemon:
        # As the daemon does when it is ready.
        gc.collect()
        gc.freeze()
        print(daemon.url, daemon.admin_token, flush=True)
        ThreadEvent().wait()


if __name__ == "__main__":
    main()
