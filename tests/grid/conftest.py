"""The worlds in which the scenarios are played: embedded clusters always, the testbed when it is up."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.grid.embedded import Embedded, close
from tests.grid.testbed import Testbed
from tests.grid.world import World
from tests.needs import TESTBED, TESTBED_UP

WORLDS = ["embedded", *(["testbed"] if TESTBED_UP.is_met else [])]

# The tests of a testbed cannot be played without one; a machine that must have it says so, and they are not left out.
collect_ignore_glob = [] if TESTBED_UP.is_met else ["test_testbed*.py"]
# The variable is taken out of the environment: daemons of the tests would warn that nothing reads it.
if os.environ.pop("KOALA_REQUIRE_TESTBED", "") and not TESTBED_UP.is_met:
    raise pytest.UsageError(f"there is no {TESTBED}: make testbed")


def pytest_report_header() -> str:
    return f"worlds of the grid's tests: {', '.join(WORLDS)}"


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """The one testbed; every module leaves it as it found it."""
    testbed = Testbed()
    testbed.start()
    yield testbed
    testbed.settle()
    testbed.close()


@pytest.fixture
def make_grid(tmp_path: Path) -> Iterator[Callable[..., Embedded]]:
    """Starts daemons with settings of their own; afterwards no process may be left of them."""
    grids: list[Embedded] = []

    def make(**environment: str) -> Embedded:
        directory = tmp_path / f"grid-{len(grids)}"
        directory.mkdir()
        grids.append(Embedded(directory / "data", **environment))
        return grids[-1].start()

    yield make
    for grid in grids:
        close(grid)


def world_of(request: pytest.FixtureRequest, **environment: str) -> Iterator[World]:
    """What a fixture over ``WORLDS`` yields for one test: embedded clusters with these settings, or the testbed."""
    if request.param == "testbed":
        yield from testbed_left_as_found(request)
    else:
        yield request.getfixturevalue("make_grid")(**environment)


def testbed_left_as_found(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    testbed: Testbed = request.getfixturevalue("testbed")
    yield testbed
    testbed.cancel_all()
    testbed.settle()


@pytest.fixture(scope="module", params=WORLDS)
def grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One daemon for the tests of a module that leave it as they found it."""
    if request.param == "testbed":
        yield from testbed_left_as_found(request)
        return
    embedded = Embedded(tmp_path_factory.mktemp("grid") / "data").start()
    yield embedded
    embedded.settle()
    close(embedded)
