"""A resource manager in memory that can lie, with played runners on its nodes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from random import Random

from koalapy.agent.lrm.node_classes import KnownNode, NodePart, group_nodes
from koalapy.agent.lrm.port import (
    Finding,
    Lrm,
    LrmJob,
    LrmJobState,
    LrmSnapshot,
    LrmSubmission,
    ReservationOrder,
    report_reservations,
)
from koalapy.audit.facts import Output, Run, RunKind, Source
from koalapy.audit.readers import parse_token, token_of
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.system.clock import Clock
from tests.proof.runners import PlayedRunner, Port, Program

FIRST_ID = 101
START_S = 0.05
"""Seconds from free nodes to the start of a job."""
CORES = 4
"""Cores of each node. Jobs that share nodes take some of them."""


@dataclass
class HeldJob:
    """A job in the resource manager, with the nodes that it holds."""

    id: str
    """Other jobs may have had it before."""
    run_id: str
    submission: LrmSubmission
    state: LrmJobState = LrmJobState.QUEUED
    nodes: tuple[str, ...] = ()
    begin: float | None = None
    end: float | None = None
    is_cancelled: bool = False
    runners: list[asyncio.Task[int]] = field(default_factory=list)

    @property
    def cores(self) -> int:
        """Return how many cores of each node it takes."""
        requirement = self.submission.requirement
        return (requirement.cores or CORES) if requirement.share else CORES

    def as_listed(self) -> LrmJob:
        code = None if self.state is not LrmJobState.ENDED else 143 if self.is_cancelled else 0
        return LrmJob(self.id, self.submission.name, self.state, self.nodes, exit_code=code)


@dataclass
class Lies:
    """The probabilities of what a resource manager and the way to it do wrong. All 0: it is honest."""

    lose_reply: float = 0.0
    """An action succeeds, and its reply is lost."""
    reject: float = 0.0
    late_s: float = 0.0
    """Longest delay of an answer."""
    stale: float = 0.0
    """A snapshot is repeated from up to ``max_snapshot_age_s`` ago."""


class LyingCluster(Lrm):
    """The resource manager of one cluster: jobs wait for free nodes, start one by one, and end with their runners."""

    product = "the resource manager of the proof"
    max_snapshot_age_s = 20.0

    def __init__(
        self,
        name: str,
        node_count: int,
        random: Random,
        clock: Clock,
        key: bytes,
        plan_program: Callable[[str], tuple[float, int]],
    ) -> None:
        """``plan_program`` returns duration and exit code of the program of a component, by its token."""
        self._context = copy_context()
        """That of the cluster, which outlives its agents."""
        self.name, self._random, self._clock, self._key = name, random, clock, key
        self._plan_program = plan_program
        self.node_names = tuple(f"{name}-{index}" for index in range(node_count))
        self._groups = group_nodes([KnownNode(node, cores=CORES) for node in self.node_names], {})
        self.jobs: dict[str, HeldJob] = {}
        self._forgotten: list[HeldJob] = []
        self.programs: list[Program] = []
        self.local_use: set[str] = set()
        self.reservations: dict[str, tuple[ReservationOrder, tuple[str, ...]]] = {}
        """Orders and their nodes by name. They stay until the daemon releases them."""
        self.lies = Lies()
        self.port: Port | None = None
        self._snapshots: list[tuple[float, LrmSnapshot]] = []
        self._changed = asyncio.Event()
        self._next_id = FIRST_ID
        self._submitted = 0

    # What the agent asks

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    async def _be_late(self) -> None:
        if self.lies.late_s:
            await asyncio.sleep(self._random.uniform(0, self.lies.late_s))

    def _lose_reply(self) -> None:
        if self._random.random() < self.lies.lose_reply:
            raise SiteUnavailable("the reply was lost")

    async def submit_job(self, submission: LrmSubmission) -> str:
        await self._be_late()
        if self._random.random() < self.lies.reject:
            raise SiteRejected("no more jobs")
        while str(self._next_id) in self.jobs:
            self._next_id += 1
        self._submitted += 1
        job = HeldJob(str(self._next_id), f"run {self._submitted}", submission)
        self.jobs[job.id] = job
        self._schedule()
        await self._be_late()
        self._lose_reply()
        return job.id

    async def find_job(self, name: str, user: str = "") -> str | None:
        await self._be_late()
        self._lose_reply()
        return next((job.id for job in self.jobs.values() if job.submission.name == name), None)

    async def settling_time(self) -> float:
        return 1.0

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        await self._be_late()
        held = self.jobs.get(job)
        if held is not None and held.submission.name == name:
            self.end_job(held, is_cancelled=True)
        self._lose_reply()

    async def reserve_nodes(self, order: ReservationOrder) -> Sequence[str]:
        await self._be_late()
        if order.name not in self.reservations:
            free = [node for node in self.node_names if node not in self._reserved_nodes()]
            if self._random.random() < self.lies.reject or len(free) < order.nodes:
                raise SiteRejected("too few nodes can be reserved")
            self.reservations[order.name] = order, tuple(free[: order.nodes])
        self._lose_reply()
        return self.reservations[order.name][1]

    async def release_reservation(self, name: str) -> None:
        await self._be_late()
        self.reservations.pop(name, None)
        self._schedule()
        self._lose_reply()

    async def list_reservations(self, prefix: str) -> Sequence[str]:
        await self._be_late()
        self._lose_reply()
        return [name for name in self.reservations if name.startswith(prefix)]

    def _reserved_nodes(self) -> set[str]:
        return {node for _, nodes in self.reservations.values() for node in nodes}

    async def take_snapshot(self) -> LrmSnapshot:
        await self._be_late()
        self._lose_reply()
        now = self._clock.monotonic()
        cores = self.used_cores()
        used = {node for node, count in cores.items() if count}
        kept = (self.local_use | self._reserved_nodes()) - used
        idle = set(self.node_names) - used - kept
        # Of a reserved node only jobs of the reservation get a part.
        parts = {node: NodePart(cores[node]) for node in used - self._reserved_nodes() if cores[node] < CORES}
        snapshot = LrmSnapshot(
            len(self.node_names),
            len(idle),
            len(kept),
            0,
            tuple(job.as_listed() for job in self.jobs.values()),
            node_classes=self._groups.report(lambda nodes: len(idle & nodes), parts),
            shares=True,
            reservations=report_reservations(
                ((order.name, nodes, order.begins, order.ends) for order, nodes in self.reservations.values()),
                set(self.node_names),
                set(self.node_names) - used - self.local_use,
            ),
        )
        self._snapshots = [(at, old) for at, old in self._snapshots if at > now - self.max_snapshot_age_s] + [
            (now, snapshot)
        ]
        return self._snapshots[0][1] if self._random.random() < self.lies.stale else snapshot

    async def read_version(self) -> str:
        return "proof 1.0"

    async def check_setup(self) -> Sequence[Finding]:
        return []

    def runners_key(self) -> bytes:
        return self._key

    async def watch_changes(self) -> AsyncIterator[None]:
        while True:
            self._changed.clear()
            yield
            await self._changed.wait()

    # What happens in the cluster

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_later(START_S, self.start_jobs, context=self._context.copy())

    def used_cores(self) -> Counter[str]:
        """Return how many cores of each node running jobs take."""
        cores = Counter[str]()
        for job in self.jobs.values():
            if job.state is LrmJobState.RUNNING:
                cores.update(dict.fromkeys(job.nodes, job.cores))
        return cores

    def start_jobs(self) -> None:
        """Start waiting jobs in order while their nodes are free. Those of reservations are not kept back by others."""
        is_blocked = False
        for job in list(self.jobs.values()):
            reservation = job.submission.reservation
            if job.state is not LrmJobState.QUEUED or (is_blocked and not reservation):
                continue
            used = self.used_cores()
            eligible = set(self.node_names) - self._reserved_nodes()
            if reservation:
                eligible = set(self.reservations[reservation][1]) if reservation in self.reservations else set()
            having_room = (node for node in eligible - self.local_use if used[node] + job.cores <= CORES)
            free = sorted(having_room, key=lambda node: (-used[node], node))  # partly used nodes first
            if len(free) < job.submission.nodes:
                is_blocked = is_blocked or not reservation
                continue
            job.nodes, job.state, job.begin = (
                tuple(free[: job.submission.nodes]),
                LrmJobState.RUNNING,
                self._clock.now(),
            )
            parts = token_of(job.submission.name)
            assert parts is not None
            instance, token = parts
            duration, code = self._plan_program(token)
            for index, host in enumerate(job.nodes):
                program = Program(token, index, host, job.id, job.run_id)
                self.programs.append(program)
                runner = PlayedRunner(
                    instance,
                    program,
                    lambda: self.port,
                    self._key,
                    self._clock,
                    duration,
                    code,
                    f"{job.run_id}-{index}",
                )
                task = asyncio.create_task(runner.run(), context=self._context.copy())
                job.runners.append(task)
                task.add_done_callback(lambda _, job=job: self._runner_ended(job))  # type: ignore[misc]
        self._changed.set()

    def _runner_ended(self, job: HeldJob) -> None:
        if all(task.done() for task in job.runners):
            self.end_job(job)

    def end_job(self, job: HeldJob, *, is_cancelled: bool = False) -> None:
        """End a job and its runners, if it has not ended."""
        if job.state is LrmJobState.ENDED:
            return
        job.state, job.end, job.is_cancelled = LrmJobState.ENDED, self._clock.now(), is_cancelled
        for task in job.runners:
            task.cancel()
        self._changed.set()
        self._schedule()

    def forget_ended(self) -> None:
        """Drop ended jobs, as a resource manager does after a while. The accounting keeps them."""
        self._forgotten += [job for job in self.jobs.values() if job.state is LrmJobState.ENDED]
        self.jobs = {ident: job for ident, job in self.jobs.items() if job.state is not LrmJobState.ENDED}

    def reuse_ids(self) -> None:
        """Give new jobs the ids of forgotten ones."""
        self.forget_ended()
        self._next_id = FIRST_ID

    def list_unended(self) -> list[HeldJob]:
        return [job for job in self.jobs.values() if job.state is not LrmJobState.ENDED]

    def facts(self) -> list[Run | Output]:
        """Return what this cluster itself knows of its jobs and programs."""
        accounting, nodes = Source(f"accounting of {self.name}", "proof"), Source("nodes", "proof")
        runs: list[Run | Output] = []
        for job in [*self._forgotten, *self.jobs.values()]:
            if job.begin is not None:
                instance_and_token = token_of(job.submission.name)
                assert instance_and_token is not None
                token = parse_token(instance_and_token[1])
                runs.append(
                    Run(accounting, RunKind.HELD, token.job, token.attempt, token.part, self.name, job.begin, job.end,
                        job.end is not None, job.nodes, len(job.nodes), nonce=token.nonce, run_id=job.run_id)
                )  # fmt: skip
        for programs in self._programs_by_job():
            began = [program for program in programs if program.begin is not None]
            if began:
                token = parse_token(began[0].token)
                has_ended = all(program.end is not None for program in began)
                end = max(program.end or 0.0 for program in began) if has_ended else None
                codes = {program.code for program in began}
                code = codes.pop() if len(codes) == 1 else None
                runs.append(
                    Run(nodes, RunKind.PROGRAM, token.job, token.attempt, token.part, self.name,
                        min(program.begin or 0.0 for program in began), end, has_ended,
                        tuple(program.host for program in began), len(programs),
                        code, token.nonce, began[0].run_id)
                )  # fmt: skip
                if has_ended and code is not None:
                    written = sum(len(program.output) for program in began)
                    runs.append(Output(nodes, token.job, token.attempt, token.part, written))
        return runs

    def _programs_by_job(self) -> list[list[Program]]:
        by_job: dict[str, list[Program]] = {}
        for program in self.programs:
            by_job.setdefault(program.run_id, []).append(program)
        return list(by_job.values())
