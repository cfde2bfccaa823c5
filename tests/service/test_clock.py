"""The daemon's clock."""

import time

import pytest

from koalapy.service.clock import steady_clock


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
