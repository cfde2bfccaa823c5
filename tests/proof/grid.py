"""A whole grid in one process and in virtual time: the real daemon and agents, and clusters that a schedule attacks."""

import asyncio
import functools
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest.mock import patch

from koalapy.agent.core import agent
from koalapy.agent.core.settings import AgentSettings, AgentTimeouts
from koalapy.agent.lrm.port import Lrm
from koalapy.agent.runners import runners, uplink
from koalapy.api.job_views import JobSubmission
from koalapy.audit.facts import CLOCK_OFFSET_S, Fact, Source, Submission
from koalapy.audit.readers import read_database, read_output, read_spool
from koalapy.audit.rules import Finding, find_violations
from koalapy.config.settings import Settings
from koalapy.daemon import main
from koalapy.daemon.reservations import CHECK_INTERVAL, ReservationOrder
from koalapy.daemon.services import Services
from koalapy.model.errors import KoalaError, StoreUnavailable, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.request import Request
from koalapy.runner.session import derive_key
from koalapy.store import opening
from tests.agent.memory_agent import find_no_open_mpi
from tests.fuzz.daemon import WatchedDaemon, running_daemon
from tests.proof.clusters import LyingCluster
from tests.proof.databases import make_similar_engine
from tests.proof.links import Path as Way
from tests.proof.loop import OWNER, SingleThreadLoop
from tests.proof.runners import Port
from tests.virtual_time import VirtualClock

NODE_COUNT = 4
USER = Identity("user", Role.ADMIN, "the proof")
POLL_INTERVAL_S = 20.0
TIMEOUTS = AgentTimeouts(
    report_interval_s=2 * POLL_INTERVAL_S, retry_s=10.0, disk_check_s=60.0, sweep_interval_s=3600.0
)
"""Polls and reports without a change are rare, and no folder of a runner is there to be removed: that takes most of the
processor time of a quiet grid."""
ANSWER_TIMEOUT_S = 90.0
"""Virtual seconds for which a user waits for a reservation."""
NO_PROCESS = 2**22
"""A number that no process has."""
SETTLING_S = 1800.0
"""Virtual seconds after which a healed grid must have finished all jobs."""


class ProofGrid:
    """Daemon, agents and clusters of one schedule."""

    def __init__(self, directory: Path, seed: int, settings: Settings) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SingleThreadLoop)
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.daemon_clock = VirtualClock(loop)
        """That of the daemon's host. A step of it counts from the next daemon on."""
        self.directory, self.seed = directory, seed
        self.programs: dict[int, tuple[float, int]] = {}
        """Duration and exit code of the programs of a job."""
        self.settings, clusters = settings, settings.clusters
        self.clusters = {
            name: LyingCluster(
                name, NODE_COUNT, Random(f"{seed} {name}"), self.clock, derive_key(b"proof", name), self._plan_program
            )
            for name in clusters
        }
        self.clocks = {name: VirtualClock(loop) for name in clusters}
        """The clocks of the agents' hosts."""
        self.ways = {name: Way(Random(f"{seed} way {name}"), functools.partial(self._serve, name)) for name in clusters}
        self._acknowledged: list[Submission] = []
        self._agents: dict[str, asyncio.Task[None]] = {}
        self._owners: dict[str, str] = {}
        self._starts = self._lives = 0
        self._skew_s = 0.0
        """Most seconds by which a daemon's clock was wrong."""
        self.daemon: WatchedDaemon | None = None
        self._stack: AsyncExitStack | None = None
        self.data = directory

    def _plan_program(self, token: str) -> tuple[float, int]:
        return self.programs.get(int(token.split(".")[0]), (10.0, 0))

    # The daemon

    async def start_daemon(self) -> None:
        """Start a daemon on the data on the disk."""
        self._starts += 1
        self._skew_s = max(self._skew_s, abs(self.daemon_clock.offset))
        self._stack = AsyncExitStack()
        self.daemon = await self._stack.enter_async_context(
            running_daemon(self.settings, self.data, clock=self.daemon_clock, first_nonce=self._starts << 32)
        )
        self.services: Services = self.daemon.app
        self._stack.callback(asyncio.create_task(self._check_reservations()).cancel)

    async def crash_daemon(self) -> None:
        """End the daemon with the present content of its disk; its last messages are lost."""
        assert self.daemon is not None
        assert self._stack is not None
        kept = self.directory.with_name(f"{self.directory.name}-daemon-{self._starts}")
        shutil.copytree(self.data, kept, ignore=shutil.ignore_patterns("*.lock"))
        with closing(sqlite3.connect(kept / "koala.db")) as database, database:
            database.execute("UPDATE lease SET holder = replace(holder, ?, ?)", (f":{os.getpid()}", f":{NO_PROCESS}"))
        self.daemon = None
        for way in self.ways.values():
            way.break_all()
        await self._stack.aclose()
        self.data = kept

    def _serve(self, cluster: str, connection: Any) -> Any:
        if self.daemon is None:
            raise ConnectionRefusedError("no daemon")
        return self.daemon.hub.serve_connection(cluster, connection)

    # Agents

    def spool(self, name: str) -> Path:
        return self.directory / f"agent-{name}" / "spool"

    def start_agent(self, name: str) -> None:
        """Start a cluster's agent on what its spool holds, unless it runs."""
        if name in self._agents:
            return
        settings = AgentSettings(
            name,
            f"http://{name}",
            self.settings.clusters[name].token or "",
            self.spool(name),
            poll_interval=POLL_INTERVAL_S,
        )
        self.spool(name).mkdir(parents=True, exist_ok=True)
        running = agent.run_agent(
            settings,
            cast(Lrm, self.clusters[name]),
            timeouts=TIMEOUTS,
            clock=self.clocks[name],
            find_open_mpi=find_no_open_mpi,
        )
        self._lives += 1
        context = copy_context()
        context.run(OWNER.set, f"{name} {self._lives}")
        self._agents[name] = asyncio.create_task(running, context=context)
        self._owners[name] = f"{name} {self._lives}"

    def kill_agent(self, name: str) -> None:
        """End an agent without a word; its durable state is its spool."""
        if self._agents.pop(name, None) is not None:
            self.loop.killed.add(self._owners[name])
        self.ways[name].break_all()
        if (port := self.clusters[name].port) is not None:
            port.break_all()

    # Users

    async def submit(self, body: dict[str, Any], duration_s: float, code: int = 0, key: str = "") -> int | None:
        """Submit a job; None if the daemon is away, 0 if it can never start after another."""
        if (daemon := self.daemon) is None:
            return None
        try:
            spec = JobSubmission.model_validate(body).to_model()
            job = (await self.services.jobs.submit(spec, USER, key or None))[0].job.id
        except StoreUnavailable:
            return None
        except UsageError as error:
            if error.field not in ("after", "reservation", "request"):
                raise
            return 0
        if self.daemon is not daemon:
            return None  # it was killed: its answer is lost
        if key:
            self._acknowledged.append(Submission(Source("users"), key, job))
        self.programs[job] = (duration_s, code)
        return job

    async def reserve(self, request: Request, name: str, duration_s: float) -> bool:
        """Reserve nodes from now on; return whether the daemon has done so."""
        if self.daemon is None:
            return False
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                order = ReservationOrder(request, self.daemon.engine.clock(), duration_s, name)
                await self.services.reservations.make(order, USER)
        except (KoalaError, TimeoutError):
            return False
        return True

    async def _check_reservations(self) -> None:
        """Do the duty of the daemon that this grid needs besides its engine."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            with suppress(KoalaError):
                await self.services.reservations.check()

    async def cancel(self, job: int) -> None:
        """Cancel a job, unless the daemon is away or the job has ended."""
        if self.daemon is not None:
            with suppress(KoalaError):
                await self.services.jobs.cancel(job, USER, "")

    # The end

    async def heal(self) -> None:
        """End all lies, start all parts that are down, and free the nodes of local users."""
        for name, cluster in self.clusters.items():
            cluster.lies = type(cluster.lies)()
            cluster.local_use.clear()
            cluster.start_jobs()
            self.ways[name].heal()
            self.ways[name].slowness_s = 0.0
            self.start_agent(name)
        if self.daemon is None:
            await self.start_daemon()

    async def come_to_rest(self) -> list[str]:
        """Wait until all jobs are final and nothing is left in the clusters. Return the remains after the deadline."""
        assert self.daemon is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLING_S + self._skew_s  # reservations last until the daemon's clock says so
        while loop.time() < deadline:
            open_jobs = [job for job in self.daemon.queries.jobs() if not job.state.is_final]
            left = [job for cluster in self.clusters.values() for job in cluster.list_unended()]
            reserved = [name for cluster in self.clusters.values() for name in cluster.reservations]
            if not open_jobs and not left and not reserved:
                return []
            await asyncio.sleep(5.0)
        return (
            [f"job {job.id} is {job.state}" for job in open_jobs]
            + [f"{name} is reserved" for name in reserved]
            + [f"{job.submission.name} is {job.state}" for job in left]
        )

    def describe_end(self) -> tuple[int, int, str]:
        """Return the numbers of jobs and attempts, and a text of what the database and the clusters hold."""
        with closing(sqlite3.connect(self.data / "koala.db")) as database:
            jobs = database.execute("SELECT * FROM jobs ORDER BY id").fetchall()
            attempts = database.execute("SELECT count(*) FROM attempts").fetchone()[0]
            timeline = database.execute("SELECT * FROM timeline ORDER BY id").fetchall()
        programs = [program for cluster in self.clusters.values() for program in cluster.programs]
        return len(jobs), attempts, repr((jobs, timeline, programs))

    def find_violations(self) -> list[Finding]:
        """Let the auditor judge what every side wrote."""
        facts: list[Fact] = [
            replace(fact, source=replace(fact.source, offset_s=CLOCK_OFFSET_S + self._skew_s))
            for fact in read_database(f"sqlite:///{self.data}/koala.db")
        ]
        facts += [*read_output(self.data / "output"), *self._acknowledged]
        for name, cluster in self.clusters.items():
            facts += [*read_spool(self.spool(name), name), *cluster.facts()]
        return list(find_violations(facts))


@asynccontextmanager
async def proof_grid(directory: Path, seed: int, settings: Settings) -> AsyncIterator[ProofGrid]:
    """Run a grid until the end of the block."""
    grid, clusters = ProofGrid(directory, seed, settings), settings.clusters
    by_url = {f"ws://{name}": name for name in clusters}

    def connect(url: str, **_: object) -> Any:
        return grid.ways[next(name for prefix, name in by_url.items() if url.startswith(prefix))].connect()

    async def listen(connection: Callable[[], Any], host: str, port: int) -> Port:
        opened = Port(connection)
        cluster = next(name for name, agent in grid._agents.items() if agent is asyncio.current_task())
        grid.clusters[cluster].port = opened
        return opened

    async def nothing_waits(*_: object) -> None:
        return

    with (
        patch.object(main, "build_application", lambda core, services, *_: services),
        patch.object(opening, "upgrade", lambda _: None),
        patch.object(opening, "make_engine", make_similar_engine),
        patch.object(uplink, "connect", connect),
        patch.object(runners, "_listen", listen),
        patch.object(runners, "accept_waiting", nothing_waits),
        patch.object(runners.RunnerConnection, "read_pending", nothing_waits),
    ):
        await grid.start_daemon()
        for name in clusters:
            grid.start_agent(name)
        try:
            yield grid
        finally:
            for name in clusters:
                grid.kill_agent(name)
                for job in grid.clusters[name].list_unended():
                    grid.clusters[name].end_job(job)
            if grid._stack is not None and grid.daemon is not None:
                await grid._stack.aclose()
