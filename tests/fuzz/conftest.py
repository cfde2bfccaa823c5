"""Silence logging in fuzzers, and print the counts of timed runs."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.fuzz import campaign


@pytest.fixture(autouse=True)
def silent_logging() -> None:
    """Log only critical events of daemon and agents."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture
def attack_runner(tmp_path: Path) -> Iterator[campaign.AttackRunner]:
    runner = campaign.AttackRunner(tmp_path)
    yield runner
    runner.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if campaign.DURATION_S:
        terminalreporter.section(f"fuzzed from KOALA_FUZZ_SEED={campaign.SEED}")
        for figures in campaign.ALL_FIGURES:
            terminalreporter.write_line(str(figures))
