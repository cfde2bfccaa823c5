"""Many idle connections to a daemon with a low limit of open files."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid

pytestmark = [pytest.mark.processes, pytest.mark.grid]
CONNECTION_COUNT = 1500
INCOMPLETE_REQUESTS = [b"", b"GET /api/v1/jobs HT", b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"]


class GridWithFewFiles(EmbeddedGrid):
    """A grid with a daemon that may open 1,024 files, the usual limit."""

    @property
    def koala_command(self) -> list[str]:
        return ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", *super().koala_command]


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[GridWithFewFiles]:
    (tmp_path / "grid").mkdir()
    grid = GridWithFewFiles(tmp_path / "grid" / "data")
    grid.start()
    yield grid
    close_grid(grid)


@pytest.fixture
def raised_file_limit() -> Iterator[None]:
    """Raise the file limit of this process for the connections of the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.evidence("N3")
@pytest.mark.usefixtures("raised_file_limit")
def test_daemon_runs_jobs_despite_many_idle_connections(grid: GridWithFewFiles) -> None:
    port = int(urlsplit(grid.url).port or 0)
    with contextlib.ExitStack() as connections:
        for number in range(CONNECTION_COUNT):
            connection = connections.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(ConnectionError):
                connection.send(INCOMPLETE_REQUESTS[number % len(INCOMPLETE_REQUESTS)])
        job = grid.submit(grid.six_nodes, "true", launcher="processes")
        assert grid.wait_for_end(job)["state"] == "succeeded"
        assert {cluster["state"] for cluster in grid.list_clusters()} == {"usable"}
