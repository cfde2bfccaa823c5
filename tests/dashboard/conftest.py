"""Fixtures: a browser, a daemon and a grid for all tests of a file."""

from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    """A daemon with two clusters of four nodes."""
    running = EmbeddedGrid(tmp_path_factory.mktemp("dashboard") / "koala", **SOON).start()
    running.wait_until_idle()
    yield running
    close_grid(running)


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
