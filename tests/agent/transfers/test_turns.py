"""Turns: a limited number at a time, in order of arrival."""

import asyncio
from collections.abc import Callable

import pytest

from koalapy.agent.transfers.pull import Turns


class Waiter:
    """A task that waits for a turn and keeps it until `over` is set."""

    def __init__(self, turns: Turns, started: list[str], name: str, position: int | None = None) -> None:
        self._turns, self._had, self.name = turns, started, name
        self._place = turns.next_position() if position is None else position
        self.over = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._turns.wait_turn(self._place):
            self._had.append(self.name)
            await self.over.wait()


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def started() -> list[str]:
    return []


async def test_turns_are_limited_and_ordered(started: list[str]) -> None:
    turns = Turns(2)
    waiters = [Waiter(turns, started, name) for name in "abcd"]
    await settle()
    assert started == ["a", "b"]
    waiters[1].over.set()
    await settle()
    assert started == ["a", "b", "c"]
    for waiter in waiters:
        waiter.over.set()
    await asyncio.gather(*(waiter.task for waiter in waiters))
    assert started == ["a", "b", "c", "d"]


async def test_returning_waiter_keeps_its_position(started: list[str]) -> None:
    turns = Turns(1)
    early = turns.next_position()
    waiters = [Waiter(turns, started, name) for name in "abc"]
    await settle()
    waiters.append(Waiter(turns, started, "early", early))
    await settle()
    for waiter in waiters:
        waiter.over.set()
    await asyncio.gather(*(waiter.task for waiter in waiters))
    assert started == ["a", "early", "b", "c"]


async def test_turn_ends_after_error() -> None:
    turns = Turns(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with turns.wait_turn(turns.next_position()):
                raise ZeroDivisionError


def cancel_waiting(first: Waiter, second: Waiter) -> None:
    second.task.cancel()


def cancel_then_end(first: Waiter, second: Waiter) -> None:
    second.task.cancel()
    first.over.set()


def end_and_cancel(first: Waiter, second: Waiter) -> None:
    first.over.set()
    second.task.cancel()


def end_then_cancel(first: Waiter, second: Waiter) -> None:
    first.task.cancel()
    asyncio.get_running_loop().call_soon(second.task.cancel)


@pytest.mark.parametrize("action", [cancel_waiting, cancel_then_end, end_and_cancel, end_then_cancel])
async def test_cancelled_turn_is_passed_on_once(started: list[str], action: Callable[[Waiter, Waiter], None]) -> None:
    turns = Turns(1)
    first, second, third, fourth = (Waiter(turns, started, name) for name in ("1", "2", "3", "4"))
    await settle()
    action(first, second)
    await settle()
    assert second.task.cancelled()
    assert "2" not in started
    first.over.set()
    await settle()
    assert started == ["1", "3"], "the turn was passed on once"
    third.over.set()
    fourth.over.set()
    await asyncio.gather(third.task, fourth.task)
    assert turns._waiting == []
    assert turns._free == 1
