"""Live updates of pages."""

from tests.dashboard.conftest import Visit
from tests.grid.embedded import EmbeddedGrid


def test_page_shows_changes_without_reload(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/")
    page.evaluate("window.loaded = 'once'")
    grid.http.post("/api/v1/clusters/north/drain", json={"reason": "new disks"}).raise_for_status()
    page.get_by_text("new disks").wait_for()
    grid.http.post("/api/v1/clusters/north/resume", json={}).raise_for_status()
    page.get_by_text("new disks").wait_for(state="detached")
    assert page.evaluate("window.loaded") == "once"
