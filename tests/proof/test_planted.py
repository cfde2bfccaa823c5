"""A planted fault: the judgement of a schedule finds what is wrong, so that its silence means something."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from tests.proof.runners import PlayedRunner
from tests.proof.schedules import Element, run_schedule

pytestmark = pytest.mark.processes

SEED = 2
JOBS = (Element("job0", 1.0, "fixed"), Element("job1", 2.0, "non-fixed"))
"""No faults of the schedule: only what is planted is wrong."""


@contextmanager
def forged_exit_code() -> Iterator[None]:
    """Let programs end with 9 and their runners report another exit code."""
    stop_program = PlayedRunner._stop_program

    def stop_otherwise(runner: PlayedRunner, code: int | None) -> None:
        stop_program(runner, None if code is None else 9)

    with patch.object(PlayedRunner, "_stop_program", stop_otherwise):
        yield


def test_jobs_without_faults_have_no_violation() -> None:
    assert run_schedule(SEED, elements=JOBS).violations == []


def test_forged_exit_code_planted_is_found() -> None:
    violations = run_schedule(SEED, fault=forged_exit_code, elements=JOBS).violations
    assert any(" 9" in violation for violation in violations), violations
