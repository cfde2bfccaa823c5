"""Fixtures: a browser, a daemon and a grid for all tests of a file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_in_process import ServedDaemon, daemon_in_thread
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.needs import CHROMIUM

Visit = Callable[..., Any]
SOON = {"KOALA_ALERTS__HOLD": "0.2", "KOALA_ALERTS__RELEASE": "0.2"}
"""Settings by which alerts are raised and end almost at once."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser, which uses the event loop of the thread: async tests need another file."""
    if not CHROMIUM.is_met:
        pytest.skip(CHROMIUM.reason)
    from tests.dashboard.browser import chromium

    with chromium() as started:
        yield started


@contextmanager
def running_grid(factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    """Run a daemon with two clusters of four nodes."""
    running = EmbeddedGrid(factory.mktemp("dashboard") / "koala", **SOON).start()
    running.wait_until_idle()
    yield running
    close_grid(running)


@pytest.fixture(scope="session")
def shared_grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    with running_grid(tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="module")
def grid(shared_grid: EmbeddedGrid) -> Iterator[EmbeddedGrid]:
    """A daemon with two clusters of four idle nodes, which has the ended jobs and users of other files."""
    yield shared_grid
    shared_grid.cancel_all_jobs()
    shared_grid.wait_until_idle()


@pytest.fixture(scope="module")
def new_grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    """A daemon that no other file uses, for tests that count all jobs."""
    with running_grid(tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDaemon]:
    """A daemon in this process, for tests without browser and running jobs."""
    with daemon_in_thread(tmp_path_factory.mktemp("dashboard") / "koala.db", has_dashboard=True) as served:
        yield served


@pytest.fixture
def visit(browser: Any, grid: EmbeddedGrid) -> Iterator[Visit]:
    """A factory of ``Visitor``, with the admin token by default."""
    from tests.dashboard.browser import Visitor

    visitors: list[Any] = []

    def start(token: str | None = None, **options: Any) -> Any:
        visitors.append(Visitor(browser, grid.url, grid.admin_token if token is None else token, **options))
        return visitors[-1]

    yield start
    for visitor in visitors:
        visitor.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests with a real grid to ring 2."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "grid" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
