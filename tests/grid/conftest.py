"""Fixtures for grids with embedded clusters, and with the testbed when it is up."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import Grid
from tests.grid.testbed import Testbed
from tests.needs import TESTBED_ENV, TESTBED_UP

GRID_KINDS = ["embedded", *(["testbed"] if TESTBED_UP.is_met else [])]

# Tests of the testbed are ignored without one, unless KOALA_REQUIRE_TESTBED makes its absence an error.
collect_ignore_glob = [] if TESTBED_UP.is_met else ["test_testbed*.py"]
# The variable is removed from the environment, since daemons of the tests would warn about an unknown setting.
if os.environ.pop("KOALA_REQUIRE_TESTBED", "") and not TESTBED_UP.is_met:
    raise pytest.UsageError(f"there is no {TESTBED_ENV}: make testbed")


def pytest_report_header() -> str:
    return f"grids of the tests: {', '.join(GRID_KINDS)}"


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """Yield the only testbed; every module leaves it idle."""
    testbed = Testbed()
    testbed.start()
    yield testbed
    testbed.wait_until_idle()
    testbed.close()


@pytest.fixture
def make_grid(tmp_path: Path) -> Iterator[Callable[..., EmbeddedGrid]]:
    """Yield a function that starts a grid with settings; at the end no process of it may be left."""
    grids: list[EmbeddedGrid] = []

    def create(**environment: str) -> EmbeddedGrid:
        directory = tmp_path / f"grid-{len(grids)}"
        directory.mkdir()
        grids.append(EmbeddedGrid(directory / "data", **environment))
        return grids[-1].start()

    yield create
    for grid in grids:
        close_grid(grid)


def grid_of_kind(request: pytest.FixtureRequest, **environment: str) -> Iterator[Grid]:
    """Yield the testbed, or embedded clusters with these settings, as the parameter of the fixture says."""
    if request.param == "testbed":
        yield from restored_testbed(request)
    else:
        yield request.getfixturevalue("make_grid")(**environment)


def restored_testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    testbed: Testbed = request.getfixturevalue("testbed")
    yield testbed
    testbed.cancel_all_jobs()
    testbed.wait_until_idle()


def embedded_grid(folder: Path) -> Iterator[EmbeddedGrid]:
    embedded = EmbeddedGrid(folder / "data").start()
    yield embedded
    embedded.wait_until_idle()
    close_grid(embedded)


@pytest.fixture(scope="module", params=GRID_KINDS)
def grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    """Yield one grid for all tests of a module, each of which leaves it idle."""
    if request.param == "testbed":
        yield from restored_testbed(request)
        return
    yield from embedded_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module", params=GRID_KINDS)
def wide_grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    """Yield one grid for all tests of a module, with every resource manager: also with west of the testbed."""
    if request.param == "testbed":
        testbed: Testbed = request.getfixturevalue("testbed")
        with testbed.open_west():
            yield testbed
        return
    yield from embedded_grid(tmp_path_factory.mktemp("wide"))
