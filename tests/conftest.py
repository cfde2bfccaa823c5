"""How the suite is played: benchmarks apart, and, with several workers, what belongs together in one of them."""

import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Benchmarks measure and do not test: they are collected by ``make bench`` only.
collect_ignore = [] if "--benchmark-only" in sys.argv else ["benchmarks"]

# Property tests assert what is true, never how fast it is found.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

TESTBED = "testbed"


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
    file, _, name = nodeid.partition("::")
    return TESTBED if "/test_testbed" in file or "[testbed" in name else file
