"""Take pictures of the dashboard of a small busy grid for the documentation: ``make screenshots``."""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.dashboard.browser import DESKTOP, PHONE, Visitor, chromium
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

CLUSTERS = {
    "north": {"network": "127.0.31", "nodes": 24},
    "south": {"network": "127.0.32", "nodes": 40},
    "west": {"network": "127.0.33", "nodes": 16},
}
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@contextmanager
def start_busy_grid() -> Iterator[EmbeddedGrid]:
    """Start a grid with ended, running and waiting jobs, a local user, and a drained cluster."""
    with tempfile.TemporaryDirectory() as folder:
        grid = EmbeddedGrid(Path(folder) / "koala", KOALA_CLUSTERS=json.dumps(CLUSTERS)).start()
        try:
            grid.nodes = {name: section["nodes"] for name, section in CLUSTERS.items()}  # type: ignore[misc]
            wait_until(lambda: all(c["idle"] for c in grid.list_clusters()), "nodes that are idle")
            _submit_jobs(grid)
            yield grid
        finally:
            grid.stop_daemon()


def _submit_jobs(grid: EmbeddedGrid) -> None:
    owners = ("alice", "bruno", "chen")
    for number, owner in enumerate(owners * 2):
        parts = {"type": "flexible", "total_size": 6 + 4 * number}
        grid.wait_for_end(grid.submit(parts, "true", launcher="processes", name=f"warm-up-{number}", owner=owner))
    local = grid.start_local_job("west", 5)
    running = []
    for sizes, owner, name in (([12, 10], "alice", "wave"), ([14], "bruno", "poisson"), ([6, 6], "chen", "lammps")):
        parts = {"type": "nonfixed", "components": [{"size": size} for size in sizes]}
        running.append(grid.submit(parts, "sleep", "900", launcher="processes", name=name, owner=owner, walltime=1800))
    for job in running:
        grid.wait_for_state(job, "running")
    for number, (total, owner) in enumerate(((48, "alice"), (20, "chen"), (64, "bruno"), (30, "alice"))):
        parts = {"type": "flexible", "total_size": total}
        grid.submit(parts, "true", launcher="processes", name=f"sweep-{number}", owner=owner)
    grid.http.post("/api/v1/clusters/west/drain", json={"reason": "new disks on Monday"}).raise_for_status()
    assert local


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=PICTURES)
    parser.add_argument("--all", action="store_true", help="every page, light, dark and on a phone")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    pages = {"now": "/", "queue": "/queue", "job": "/jobs/7", "history": "/history", "new-job": "/jobs/new?from=7"}
    pages |= {"map": "/map", "timeline": "/timeline"}
    if given.all:
        all_pages = (
            "my-jobs",
            "clusters",
            "clusters/north",
            "capacity",
            "network",
            "scheduler",
            "users",
            "audit",
            "files",
        )
        pages |= {name: f"/{name}" for name in all_pages}
    with start_busy_grid() as grid, chromium() as browser:
        looks = {"": {}, "-dark": {"color_scheme": "dark"}, "-phone": {"viewport": PHONE}}
        for look, options in looks.items():
            visitor = Visitor(browser, grid.url, grid.admin_token, **({"viewport": DESKTOP} | options))
            for name, path in pages.items():
                if look and not given.all and name != "now":
                    continue
                page = visitor.open(path, live=not path.startswith("/jobs/new"))
                if name == "new-job":
                    page.locator("#command").wait_for()
                page.wait_for_timeout(300)
                page.screenshot(path=given.into / f"dashboard-{name.replace('/', '-')}{look}.png", full_page=given.all)
            visitor.close()


if __name__ == "__main__":
    main()
