"""Live updates of pages."""

from tests.dashboard.conftest import Visit
from tests.grid.embedded import EmbeddedGrid


def test_page_shows_changes_without_reload(visit: Visit, grid: EmbeddedGrid) -> None:
    page = visit().open("/")
    page.evaluate("window.loaded = 'once'")
    grid.http.post("/api/v1/clusters/north/drain", json={"reason": "new disks"}).raise_for_status()
    tile = page.locator("li.tile.drained", has_text="north")
    tile.wait_for()
    assert "new disks" in (tile.locator("a").get_attribute("title") or "")
    grid.http.post("/api/v1/clusters/north/resume", json={}).raise_for_status()
    tile.wait_for(state="detached")
    assert page.evaluate("window.loaded") == "once"
