"""The event loops of locald and the runner: timers, and a listener without free file descriptors."""

import errno
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from koalapy.agent.lrm.local.jobs import JobTable, Journal
from koalapy.agent.lrm.local.locald import Server
from koalapy.agent.lrm.local.runs import Runs, Timers
from koalapy.runner.connections import Loop

TimerCalls = tuple[Callable[[str, float, Callable[[], None]], None], Callable[[str], None], Callable[[], None]]
"""Functions that set a timer, cancel it and run due timers."""


def timers_of_locald() -> TimerCalls:
    timers = Timers()
    return timers.set, timers.cancel, timers.run_due


def timers_of_runner() -> TimerCalls:
    loop = Loop()
    return loop.set_alarm, loop.cancel_alarm, loop.turn


@pytest.mark.parametrize("make_timers", [timers_of_locald, timers_of_runner])
def test_run_due_skips_timers_that_earlier_calls_change(make_timers: Callable[[], TimerCalls]) -> None:
    set_timer, cancel, run_due = make_timers()
    calls: list[str] = []

    def again() -> None:
        calls.append("again")

    def first() -> None:
        calls.append("first")
        set_timer("moved", 0.0, again)
        cancel("cancelled")

    set_timer("first", 0.0, first)
    set_timer("moved", 0.0, again)
    set_timer("cancelled", 0.0, lambda: calls.append("cancelled"))
    run_due()
    assert calls == ["first"]
    run_due()
    assert calls == ["first", "again"]


class FullSocket(socket.socket):
    """A listener in a process that has no free file descriptor."""

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")


def test_server_without_descriptors_stops_listening_for_a_while(tmp_path: Path) -> None:
    timers = Timers()
    with FullSocket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        jobs = cast(JobTable, type("Empty", (), {"seq": 0}))
        server = Server(jobs, cast(Runs, None), timers, cast(Journal, None), listener, settings={}, linger_s=1.0)
        server._selector = selector
        server.listen()
        server.accept_client()
        assert listener not in selector.get_map()
        assert timers.seconds_left() is not None
        server.listen()
        assert listener in selector.get_map()
