"""The daemon's clock."""

import time

import pytest

from koalapy.daemon.engine.engine import steady_clock
from koalapy.daemon.jobs.retention import removal_clock


def test_a_step_of_the_machines_clock_is_not_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86400)
    assert clock() >= before
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    assert clock() < before + 3600


def test_it_begins_with_the_time_of_day() -> None:
    assert abs(steady_clock()() - time.time()) < 5


def test_nothing_is_removed_by_a_clock_that_was_ahead_when_the_daemon_started(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 10 * 365 * 86400)
    clock = removal_clock(steady_clock())
    monkeypatch.setattr(time, "time", real)
    assert clock() < real() + 60, "it was set right"
    monkeypatch.setattr(time, "time", lambda: real() + 10 * 365 * 86400)
    assert removal_clock(lambda: 5.0)() == 5.0, "nor by one that goes ahead meanwhile"
