"""How the suite is played: benchmarks apart, and, with several workers, what belongs together in one of them."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import structlog

from tests import needs
from tests.rings import is_on_testbed

# What a shell runs in the background without job control ignores SIGINT, and so do all that it starts: here they are
# to be interrupted by the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Whoever plays the tests may want their own Python unbuffered: the end of a line that is printed is a write of its own
# then, and mpirun of series 4 puts what others have written between the two.
os.environ.pop("PYTHONUNBUFFERED", None)

# Benchmarks measure and do not test: they are collected by ``make bench`` only.
collect_ignore = [] if "--benchmark-only" in sys.argv else ["benchmarks"]

TESTBED = "testbed"


@pytest.fixture(scope="session", autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder for this run's files has its name from the account: before a test says that it is another one."""
    tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """What a command that is played in this process has configured is not the next test's."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each thing that is missing here, with what it would enable and how to get it."""
    lines = list(left_out(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())))
    if lines:
        terminalreporter.section("not played on this machine")
        for line in lines:
            terminalreporter.write_line(line)


def left_out(reasons: Iterable[str], all_needs: Sequence[needs.Need] = needs.ALL) -> Iterator[str]:
    """From the reasons of skipped tests, and from what is known to be missing."""
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    for need in all_needs:
        found = [reason for reason in counts if reason.split(":")[0] == need.reason]
        number = sum(counts.pop(reason) for reason in found)
        told = [f"{number} test{'' if number == 1 else 's'} skipped"] if number else []
        told += [need.left_out] if need.left_out and not need.is_met else []
        if told:
            yield f"{need.reason}: {', '.join(told)}; {need.remedy}"
    yield from (f"{number} skipped: {reason}" for reason, number in counts.items())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """There is only one testbed, and its tests mostly wait: they go first, beside all others."""
    items.sort(key=lambda item: group_of(item.nodeid) != TESTBED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share a worker, and with it their daemon; so do all that are played on the testbed."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Together(config, log)


def group_of(nodeid: str) -> str:
    """``testbed``, or the test's own file."""
    return TESTBED if is_on_testbed(nodeid) else nodeid.partition("::")[0]
