"""Faults planted in the product or in the played clusters: the audit of a schedule must find each."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from koalapy.agent.components.barrier import Barrier
from koalapy.agent.components.component import Component
from koalapy.agent.core import lrm_jobs
from koalapy.agent.core.agent import Agent
from koalapy.agent.core.leases import Leases
from koalapy.agent.core.lrm_jobs import LrmJobs
from koalapy.agent.core.spool import JournalFolder
from koalapy.agent.lrm.port import LrmSubmission
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.jobs.submissions import IdempotencyKeys
from koalapy.model.array import Positions, without_first
from koalapy.scheduler import arrays
from koalapy.scheduler.queue.start_conditions import StartConditions
from koalapy.store.output import OutputStore
from koalapy.store.records import OutputPiece
from tests.proof.clusters import LyingCluster
from tests.proof.runners import PlayedRunner

Planted = Callable[[], AbstractContextManager[object]]
PLANTED: dict[str, Planted] = {}


def planted(name: str) -> Callable[[Callable[[], Iterator[None]]], Planted]:
    """Register a fault by its name."""
    return lambda plant: PLANTED.setdefault(name, contextmanager(plant))


@planted("forged exit code")
def report_other_exit_code() -> Iterator[None]:
    stop_program = PlayedRunner._stop_program

    def stop_otherwise(runner: PlayedRunner, code: int | None) -> None:
        stop_program(runner, None if code is None else 9)

    with patch.object(PlayedRunner, "_stop_program", stop_otherwise):
        yield


@planted("overlap after a lease")
def ignore_leases() -> Iterator[None]:
    async def watch_nothing(_: PlayedRunner) -> None:
        await asyncio.Event().wait()

    with patch.object(PlayedRunner, "_watch_lease", watch_nothing), patch.object(Leases, "end_expired", lambda _: None):
        yield


@planted("node given twice")
def forget_used_nodes() -> Iterator[None]:
    with patch.object(LyingCluster, "used_cores", lambda _: Counter()):
        yield


@planted("claim never ended")
def keep_cancelled_jobs() -> Iterator[None]:
    async def cancel_nothing(*_: object, **__: object) -> None:
        return

    with (
        patch.object(LyingCluster, "cancel_job", cancel_nothing),
        patch.object(PlayedRunner, "_conclude", lambda *_, **__: None),
    ):
        yield


@planted("submission happens twice")
def forget_keys() -> Iterator[None]:
    async def find_nothing(*_: object) -> None:
        return None

    with patch.object(IdempotencyKeys, "find_submission", find_nothing):
        yield


@planted("dependency started early")
def wait_for_nothing() -> Iterator[None]:
    with patch.object(StartConditions, "_must_wait", lambda *_: False):
        yield


@planted("index of an array lost")
def skip_index() -> Iterator[None]:
    def without_two(pending: tuple[Positions, ...]) -> tuple[Positions, ...]:
        rest = without_first(pending)
        return without_first(rest) if rest else rest

    with patch.object(arrays, "without_first", without_two):
        yield


@planted("index of an array run twice")
def repeat_index() -> Iterator[None]:
    repeated: set[object] = set()

    def with_first_again(pending: tuple[Positions, ...]) -> tuple[Positions, ...]:
        if pending in repeated:
            return without_first(pending)
        repeated.add(pending)
        return pending

    with patch.object(arrays, "without_first", with_first_again):
        yield


@planted("output cut")
def cut_output() -> Iterator[None]:
    append = OutputStore.append

    def append_less(store: OutputStore, token: str, pieces: Sequence[OutputPiece]) -> Any:
        shorter = [OutputPiece(piece.offset, piece.data[:-3], piece.missing) for piece in pieces]
        return append(store, token, shorter) + 3 if shorter else append(store, token, pieces)

    with patch.object(OutputStore, "append", append_less):
        yield


@planted("lost result")
def lose_exit_codes() -> Iterator[None]:
    with patch.object(Component, "_program_exit", lambda *_: None):
        yield


@contextmanager
def accept_second_jobs() -> Iterator[None]:
    """Remove what protects from two jobs of a component: only the first runner of a node counts, and others end."""
    admit_runner, select_job = Barrier.admit_runner, lrm_jobs.select_job

    def admit_any(barrier: Barrier, runner: Any, message: dict[str, Any]) -> bool:
        if component := barrier._reporter.components.get(runner.component):
            component.nodes[runner.node].life = ""
        return admit_runner(barrier, runner, message)

    with (
        patch.object(Barrier, "admit_runner", admit_any),
        patch.object(lrm_jobs, "select_job", lambda component, jobs: (select_job(component, jobs)[0], [])),
    ):
        yield


@planted("double start")
def submit_every_job_twice() -> Iterator[None]:
    submit_job = LyingCluster.submit_job

    async def submit_twice(cluster: LyingCluster, submission: LrmSubmission) -> str:
        await submit_job(cluster, submission)
        return await submit_job(cluster, submission)

    with patch.object(LyingCluster, "submit_job", submit_twice), accept_second_jobs():
        yield


@planted("command sent before commit")
def send_before_commit() -> Iterator[None]:
    build_batch, write = Engine._build_batch, Engine._write_with_retries

    def build_and_send(engine: Engine, *args: Any) -> Any:
        batch, messages = build_batch(engine, *args)
        for cluster, commands in messages.items():
            engine._sessions.send_commands(cluster, commands)  # type: ignore[union-attr]
        return batch, messages

    async def write_late(engine: Engine, work: Callable[[], None]) -> None:
        await asyncio.sleep(1.0)
        await write(engine, work)

    with patch.object(Engine, "_build_batch", build_and_send), patch.object(Engine, "_write_with_retries", write_late):
        yield


@planted("epoch ignored")
def obey_earlier_daemons() -> Iterator[None]:
    handle_command = Agent._handle_command

    def handle_any(agent: Agent, message: Any) -> None:
        handle_command(agent, message.model_copy(update={"epoch": agent._epoch}))

    with patch.object(Agent, "_handle_command", handle_any):
        yield


@planted("journal replayed twice")
def repeat_commands_of_journal() -> Iterator[None]:
    load_entries, submit = JournalFolder.load_entries, LrmJobs.submit_component

    def load_commands(folder: JournalFolder) -> dict[str, Any]:
        return {name: entry for name, entry in load_entries(folder).items() if name in ("submit", "open", "stop")}

    def submit_again(jobs: LrmJobs, component: Component, *, unsure: bool = False) -> None:
        del unsure
        submit(jobs, component)

    with (
        patch.object(JournalFolder, "load_entries", load_commands),
        patch.object(Component, "has_runners", property(lambda component: any(node.phase for node in component.nodes))),
        patch.object(LrmJobs, "submit_component", submit_again),
        accept_second_jobs(),
    ):
        yield
