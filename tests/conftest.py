"""How the suite is played: benchmarks apart, and, with several workers, what belongs together in one of them."""

import sys

import pytest

# Benchmarks measure and do not test: they are collected by ``make bench`` only.
collect_ignore = [] if "--benchmark-only" in sys.argv else ["benchmarks"]


@pytest.hookimpl(tryfirst=True)  # before the distribution looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For ``--dist loadgroup``: a file's tests share a worker, and with it their daemon; so do all of the testbed's.

    There is only one testbed, and its tests mostly wait: they go first, so that another worker does the rest meanwhile.
    """
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: groups[item] != TESTBED)


TESTBED = "testbed"


def _group(item: pytest.Item) -> str:
    params = getattr(item, "callspec", None)
    if TESTBED in getattr(item, "fixturenames", ()) or (params and TESTBED in params.params.values()):
        return TESTBED
    return item.nodeid.partition("::")[0].replace("/", ".").removesuffix(".py")
