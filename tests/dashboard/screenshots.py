"""Take pictures of the dashboard for the documentation: ``make screenshots``.

``python -m tests.dashboard.screenshots --scene large --into DIRECTORY`` takes those of every page of a scene.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from tests.dashboard.browser import PHONE, Visitor, chromium
from tests.dashboard.scenes import SCENES, serve_scene
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import Load, wait_until

CLUSTERS = {
    "north": {"network": "127.0.31", "nodes": 24},
    "south": {"network": "127.0.32", "nodes": 40},
    "west": {"network": "127.0.33", "nodes": 16},
}
PAGES = (
    "my-jobs", "queue", "clusters", "timeline", "network", "maintenance", "users", "files", "history", "forecast",
    "scheduler",
)  # fmt: skip
FORMS = ("/jobs/new", "/forecast/what-if", "/queue/confirm")
"""Pages without updates."""
LOOKS: dict[str, dict[str, Any]] = {
    f"{width}-{scheme}": {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    for width in (1400, 390)
    for scheme in ("light", "dark")
}
MAX_HEIGHT = 5000
"""Pixels of a page below which the picture of a scene ends."""
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@contextmanager
def start_busy_grid() -> Iterator[EmbeddedGrid]:
    """Start a grid with ended, running and waiting jobs, a local user, and a drained cluster."""
    with tempfile.TemporaryDirectory() as folder:
        grid = EmbeddedGrid(Path(folder) / "koala", KOALA_CLUSTERS=json.dumps(CLUSTERS)).start()
        try:
            grid.nodes = {name: section["nodes"] for name, section in CLUSTERS.items()}  # type: ignore[misc]
            wait_until(lambda: all(c["idle"] for c in grid.list_clusters()), "nodes that are idle")
            local_load = _submit_jobs(grid)
            try:
                yield grid
            finally:
                local_load.stop()
        finally:
            close_grid(grid)


def _submit_jobs(grid: EmbeddedGrid) -> Load:
    """Submit the jobs and drain a cluster; return the job of the local user."""
    owners = ("alice", "bruno", "chen")
    for number, owner in enumerate(owners * 2):
        parts = {"type": "flexible", "total_size": 6 + 4 * number}
        grid.wait_for_end(grid.submit(parts, "true", launcher="processes", name=f"warm-up-{number}", owner=owner))
    local_load = grid.start_local_job("west", 5)
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
    return local_load


def scene_pages(visitor: Visitor) -> dict[str, str]:
    """Return the paths of all pages by name: of the first cluster, and of the newest job in each state."""

    def read(path: str) -> Any:
        return visitor.page.request.get(path).json()

    pages = {name: f"/{name}" for name in PAGES} | {"overview": "/", "new-job": "/jobs/new"}
    pages |= {"ended": "/queue?q=state:over", "queue-filter": "/queue?q=user:alice+state:waiting"}
    one, other = list(read("/clusters.json")["clusters"])[:2]
    pages |= {
        "nodes": f"/clusters/{one['cluster']}/nodes",
        "drain": f"/clusters/{one['cluster']}/drain",
        "link": f"/network/{one['cluster']}/{other['cluster']}",
        "week": "/timeline?since=7d",
        "overview-week": "/?since=7d",
        "cluster-week": f"/clusters/{one['cluster']}?since=7d",
        "compared": f"/history?since=7d&name={one['cluster']}&name={other['cluster']}",
        "cluster": f"/clusters/{one['cluster']}",
        "timeline-table": "/timeline?table=true",
        "audit": "/scheduler/audit",
        "what-if-answer": f"/forecast/what-if?ask=true&drain={one['cluster']}",
        "confirm": "/queue/confirm?action=cancel&all=true&q=state:waiting",
    }
    for state in ("waiting", "running", "failed"):
        for job in read(f"/queue.json?q=state:{state}&limit=1")["jobs"]:
            pages[f"job-{state}"] = f"/jobs/{job['id']}"
    return pages


def picture_scene(name: str, folder: Path, looks: list[str], pages: list[str]) -> None:
    """Take pictures of these pages of a scene, or of each one, in these looks."""
    with tempfile.TemporaryDirectory() as data, serve_scene(name, Path(data)) as daemon, chromium() as browser:
        for look in looks:
            visitor, options = Visitor(browser, daemon.url, daemon.admin_token, **LOOKS[look]), LOOKS[look]
            for page_name, path in scene_pages(visitor).items():
                if pages and page_name not in pages:
                    continue
                is_live = not path.startswith(FORMS) and not path.endswith("/drain")
                page = visitor.open(path, live=is_live)
                page.wait_for_timeout(200 if is_live else 2000)
                height = page.evaluate("document.documentElement.scrollHeight")
                clip = {"x": 0, "y": 0, "width": options["viewport"]["width"], "height": min(height, MAX_HEIGHT)}
                page.screenshot(path=folder / f"{name}-{page_name}-{look}.png", full_page=True, clip=clip)
            visitor.close()


def picture_documentation(folder: Path) -> None:
    """Take the pictures of the documentation: of a busy grid with output, and of a scene with its last hours."""
    with chromium() as browser:
        with start_busy_grid() as grid:
            visitor = Visitor(browser, grid.url, grid.admin_token)
            for name, path in {"queue": "/queue", "job": "/jobs/7", "new-job": "/jobs/new?from=7"}.items():
                page = visitor.open(path, live=name != "new-job")
                if name == "new-job":
                    page.locator("#command").wait_for()
                    page.get_by_text(re.compile("Starts (about|within)")).wait_for(timeout=90_000)
                page.wait_for_timeout(300)
                page.screenshot(path=folder / f"dashboard-{name}.png")
            visitor.close()
        overviews = {"now": {}, "now-dark": {"color_scheme": "dark"}, "now-phone": {"viewport": PHONE}}
        _picture_pages(browser, "sixty", dict.fromkeys(overviews, "/"), folder, overviews)
        others = {"map": "/network", "timeline": "/timeline?since=1h", "history": "/history"}
        _picture_pages(browser, "small", others, folder)


def _picture_pages(
    browser: Browser, scene: str, pages: dict[str, str], folder: Path, options: dict[str, dict[str, Any]] | None = None
) -> None:
    """Take pictures of pages of a scene, each with its options of a browser."""
    with tempfile.TemporaryDirectory() as data, serve_scene(scene, Path(data)) as daemon:
        for name, path in pages.items():
            visitor = Visitor(browser, daemon.url, daemon.admin_token, **(options or {}).get(name, {}))
            page = visitor.open(path)
            page.wait_for_timeout(300)
            page.screenshot(path=folder / f"dashboard-{name}.png")
            visitor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=PICTURES)
    parser.add_argument(
        "--scene", choices=SCENES, help="every page of this scene instead of the documentation's pictures"
    )
    parser.add_argument("--look", choices=LOOKS, nargs="+", default=list(LOOKS), help="with --scene: only these looks")
    parser.add_argument("--page", nargs="+", default=[], help="with --scene: only these pages, such as overview")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    if arguments.scene:
        picture_scene(arguments.scene, arguments.into, arguments.look, arguments.page)
    else:
        picture_documentation(arguments.into)


if __name__ == "__main__":
    main()
