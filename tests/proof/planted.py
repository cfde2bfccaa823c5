"""Faults planted in the product or in the played clusters: the audit of a schedule must find each."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from koalapy.agent.core.leases import Leases
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
    with patch.object(LyingCluster, "used_nodes", lambda _: set()):
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
