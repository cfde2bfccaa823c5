"""The daemon's clock."""

import time

import pytest

from koalapy.daemon.engine.engine import steady_clock
from koalapy.daemon.jobs.retention import removal_clock


def test_steady_clock_ignores_steps_of_machine_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    start = clock()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86400)
    assert clock() >= start
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    assert clock() < start + 3600


def test_steady_clock_starts_at_time_of_day() -> None:
    assert abs(steady_clock()() - time.time()) < 5


def test_removal_clock_after_wrong_start_uses_machine_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 10 * 365 * 86400)
    clock = removal_clock(steady_clock())
    monkeypatch.setattr(time, "time", real)
    assert clock() < real() + 60, "it was set right"
    monkeypatch.setattr(time, "time", lambda: real() + 10 * 365 * 86400)
    assert removal_clock(lambda: 5.0)() == 5.0, "nor by one that goes ahead meanwhile"
