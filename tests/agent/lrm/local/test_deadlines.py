"""Things that locald, and the runner, do later: one for each name, moved by setting it anew."""

from collections.abc import Callable

import pytest

from koalapy.agent.lrm.local.runs import Deadlines
from koalapy.runner.link import Loop

Setter = Callable[[str, float, Callable[[], None]], None]
Ways = tuple[Setter, Callable[[str], None], Callable[[], None]]


def of_locald() -> Ways:
    deadlines = Deadlines()
    return deadlines.set, deadlines.drop, deadlines.run_due


def of_the_runner() -> Ways:
    loop = Loop()
    return loop.after, loop.cancel, loop.turn


@pytest.mark.parametrize("timers", [of_locald, of_the_runner])
def test_what_an_earlier_one_moves_or_drops_is_not_done_with_it(timers: Callable[[], Ways]) -> None:
    later, drop, turn = timers()
    done: list[str] = []

    def again() -> None:
        done.append("again")

    def first() -> None:
        done.append("first")
        later("moved", 0.0, again)
        drop("dropped")

    later("first", 0.0, first)
    later("moved", 0.0, again)
    later("dropped", 0.0, lambda: done.append("dropped"))
    turn()
    assert done == ["first"]
    turn()
    assert done == ["first", "again"], "what was moved is not lost"
