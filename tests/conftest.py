"""Hooks of the whole suite: exclude benchmarks, group tests by worker, and report unmet needs of the machine."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import structlog
from fastapi.dependencies import models

from tests import needs
from tests.rings import is_on_testbed

# A shell without job control starts background commands with SIGINT ignored, and their children inherit that. Tests
# interrupt processes by SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With unbuffered output, Python writes the end of a printed line separately, and mpirun of Open MPI 4 inserts output of
# other ranks between the two writes.
os.environ.pop("PYTHONUNBUFFERED", None)

# Only ``make bench`` collects the benchmarks.
collect_ignore = [] if "--benchmark-only" in sys.argv else ["benchmarks"]

TESTBED = "testbed"


@pytest.fixture(scope="session", autouse=True)
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Create the folder of this run, named after the account, before a test pretends to be another account."""
    tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the configuration of logging, which a command that ran in this process may have changed."""
    configuration = structlog.get_config()
    yield
    structlog.configure(**configuration)


@pytest.fixture(autouse=True)
def forgotten_apps() -> Iterator[None]:
    """Let FastAPI forget the functions of the last 60 apps, which keep their services and stores in memory."""
    yield
    for function in vars(models).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line for each unmet need of the machine, with the skipped tests and the remedy."""
    lines = list(list_unmet_needs(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())))
    if lines:
        terminalreporter.section("not tested on this machine")
        for line in lines:
            terminalreporter.write_line(line)


def list_unmet_needs(reasons: Iterable[str], all_needs: Sequence[needs.Need] = needs.ALL) -> Iterator[str]:
    """Yield one line for each unmet need, from the reasons of skipped tests and from the needs themselves."""
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    for need in all_needs:
        matching_reasons = [reason for reason in counts if reason.split(":")[0] == need.reason]
        number = sum(counts.pop(reason) for reason in matching_reasons)
        consequences = [f"{number} test{'' if number == 1 else 's'} skipped"] if number else []
        consequences += [need.untested] if need.untested and not need.is_met else []
        if consequences:
            yield f"{need.reason}: {', '.join(consequences)}; {need.remedy}"
    yield from (f"{number} skipped: {reason}" for reason, number in counts.items())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the only testbed first: they mostly wait, while other workers run the others."""
    items.sort(key=lambda item: group_of(item.nodeid) != TESTBED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one worker, where they share a daemon, and all tests of the testbed in one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)


def group_of(nodeid: str) -> str:
    """Return ``testbed``, or the file of the test."""
    return TESTBED if is_on_testbed(nodeid) else nodeid.partition("::")[0]
