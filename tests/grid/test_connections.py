"""A daemon with few open files, to which many connect and say nothing."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid

pytestmark = [pytest.mark.processes, pytest.mark.grid]
MANY = 1500
HALVES = [b"", b"GET /api/v1/jobs HT", b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"]


class FewFiles(EmbeddedGrid):
    """Of which the system allows no more than the usual number."""

    @property
    def koala_command(self) -> list[str]:
        return ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", *super().koala_command]


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[FewFiles]:
    (tmp_path / "grid").mkdir()
    grid = FewFiles(tmp_path / "grid" / "data")
    grid.start()
    yield grid
    close_grid(grid)


@pytest.fixture
def many() -> Iterator[None]:
    """This process may open as many connections as it takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.evidence("N3")
@pytest.mark.usefixtures("many")
def test_idle_connections_and_half_requests_stop_nothing(grid: FewFiles) -> None:
    port = int(urlsplit(grid.url).port or 0)
    with contextlib.ExitStack() as held:
        for number in range(MANY):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(ConnectionError):
                connection.send(HALVES[number % len(HALVES)])
        job = grid.submit(grid.six_nodes, "true", launcher="processes")
        assert grid.wait_for_end(job)["state"] == "succeeded"
        assert {cluster["state"] for cluster in grid.list_clusters()} == {"usable"}
