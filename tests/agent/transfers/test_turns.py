"""Only so many at once, in the order of arrival, whatever becomes of those that wait."""

import asyncio
from collections.abc import Callable

import pytest

from koalapy.agent.transfers.sharing import Turns


class Runner:
    """Somebody who wants a turn, and has it until told to end."""

    def __init__(self, turns: Turns, had: list[str], name: str, place: int | None = None) -> None:
        self._turns, self._had, self.name = turns, had, name
        self._place = turns.next_position() if place is None else place
        self.over = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._turns.wait_turn(self._place):
            self._had.append(self.name)
            await self.over.wait()


async def settle() -> None:
    """Let everybody go as far as it goes."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def had() -> list[str]:
    return []


async def test_turns_are_limited_and_ordered(had: list[str]) -> None:
    turns = Turns(2)
    runners = [Runner(turns, had, name) for name in "abcd"]
    await settle()
    assert had == ["a", "b"]
    runners[1].over.set()
    await settle()
    assert had == ["a", "b", "c"]
    for runner in runners:
        runner.over.set()
    await asyncio.gather(*(runner.task for runner in runners))
    assert had == ["a", "b", "c", "d"]


async def test_returning_waiter_keeps_its_position(had: list[str]) -> None:
    turns = Turns(1)
    early = turns.next_position()
    runners = [Runner(turns, had, name) for name in "abc"]
    await settle()
    runners.append(Runner(turns, had, "early", early))
    await settle()
    for runner in runners:
        runner.over.set()
    await asyncio.gather(*(runner.task for runner in runners))
    assert had == ["a", "early", "b", "c"]


async def test_turn_ends_after_error() -> None:
    turns = Turns(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with turns.wait_turn(turns.next_position()):
                raise ZeroDivisionError


def cancel_waiting(first: Runner, second: Runner) -> None:
    second.task.cancel()


def cancel_then_end(first: Runner, second: Runner) -> None:
    second.task.cancel()
    first.over.set()


def end_and_cancel(first: Runner, second: Runner) -> None:
    first.over.set()
    second.task.cancel()


def end_then_cancel(first: Runner, second: Runner) -> None:
    first.task.cancel()
    asyncio.get_running_loop().call_soon(second.task.cancel)


@pytest.mark.parametrize("happens", [cancel_waiting, cancel_then_end, end_and_cancel, end_then_cancel])
async def test_cancelled_turn_is_passed_on_once(had: list[str], happens: Callable[[Runner, Runner], None]) -> None:
    turns = Turns(1)
    first, second, third, fourth = (Runner(turns, had, name) for name in ("1", "2", "3", "4"))
    await settle()
    happens(first, second)
    await settle()
    assert second.task.cancelled()
    assert "2" not in had
    first.over.set()
    await settle()
    assert had == ["1", "3"], "one turn, and it has been handed on once"
    third.over.set()
    fourth.over.set()
    await asyncio.gather(third.task, fourth.task)
    assert turns._waiting == []
    assert turns._free == 1
