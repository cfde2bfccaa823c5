"""What is refused by the thousand is not worth a line each; at the end there are figures, where minutes were played."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.fuzz import campaign


@pytest.fixture(autouse=True)
def silent() -> None:
    """Of what the daemon and agents log only what ends them."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[campaign.Ground]:
    made = campaign.Ground(tmp_path)
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if campaign.SECONDS:
        terminalreporter.section(f"fuzzed from KOALA_FUZZ_SEED={campaign.SEED}")
        for figures in campaign.TOLD:
            terminalreporter.write_line(str(figures))
