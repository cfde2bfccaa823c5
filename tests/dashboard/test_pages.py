"""Every page of the navigation, for each role, as page, stream and JSON."""

import re
from collections.abc import Iterator

import httpx2
import pytest

from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, create_token, stream_page
from tests.grid.embedded import EmbeddedGrid


@pytest.fixture(scope="module")
def clients(daemon: ServedDaemon) -> Iterator[dict[str, httpx2.Client]]:
    """A client for each role."""
    role_clients = {}
    for role in ("user", "operator", "admin"):
        headers = {"Authorization": f"Bearer {create_token(daemon, role, role)}", "Accept": "text/html"}
        role_clients[role] = httpx2.Client(base_url=daemon.url, headers=headers, timeout=60.0)
    yield role_clients
    for client in role_clients.values():
        client.close()


def list_paths(client: httpx2.Client) -> list[str]:
    """Return the paths of the navigation, and those of a cluster and a link."""
    paths = re.findall(r'<a href="(/[^"]*)" data-key', client.get("/").text)
    return [*paths, "/clusters/north", "/network/north/south", "/forecast?priority=high"]


@pytest.mark.parametrize("role", ["user", "operator", "admin"])
def test_page_is_served_as_html_stream_and_json(clients: dict[str, httpx2.Client], role: str) -> None:
    client = clients[role]
    paths = list_paths(client)
    assert {"/", "/clusters", "/forecast", "/network"} <= set(paths)
    for path in paths:
        page = client.get(path)
        assert (page.status_code, "<!doctype html>" in page.text) == (200, True), path
        if "data-events" in page.text:
            with stream_page(client, path) as contents:
                content = next(contents)
            assert "<h1" in content, path
            assert "<!doctype" not in content, path
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert " style=" not in page.text, path
        twin = re.search(r'<a href="([^"]+)">this page as JSON', page.text)
        assert twin is not None
        assert client.get(twin[1].replace("&amp;", "&")).json(), path


def test_cluster_page_shows_load_sharing(grid: EmbeddedGrid) -> None:
    person = Person(grid, create_token(grid, "user"))
    assert "Load sharing" not in person.get_page("/clusters/north")
    both = [{"cluster": "north", "size": 1}, {"cluster": "south", "size": 2}]
    job = {"request": {"type": "fixed", "components": both}, "command": ["sleep", "600"], "launcher": "processes"}
    ident = grid.http.post("/api/v1/jobs", json=job | {"home_site": "north"}).raise_for_status().json()["id"]
    grid.http.post("/api/v1/jobs", json=job | {"home_site": "north"}).raise_for_status()
    wide = {"type": "fixed", "components": [{"cluster": "south", "size": 4}]}
    grid.http.post("/api/v1/jobs", json=job | {"home_site": "south", "request": wide}).raise_for_status()
    homes = {name: person.get_json(f"/clusters/{name}.json")["homes"] for name in ("north", "south")}
    assert homes == {
        "north": {"waiting": 0, "at_home": 2, "elsewhere": 4, "guests": 0},
        "south": {"waiting": 1, "at_home": 0, "elsewhere": 0, "guests": 4},
    }
    grid.wait_for_state(ident, "running")
    page = person.get_page("/clusters/south")
    assert "<b>4</b> nodes of other sites' users here" in page.replace("&#39;", "'")
    assert f"/jobs/{ident}" in page
    grid.http.post("/api/v1/jobs/cancel", json={"jobs": [ident, ident + 1, ident + 2]}).raise_for_status()
    person.close()


@pytest.mark.parametrize("path", ["/clusters/nowhere", "/network/north/nowhere", "/clusters/nowhere.json"])
def test_page_of_unknown_cluster_returns_404(clients: dict[str, httpx2.Client], path: str) -> None:
    answer = clients["user"].get(path)
    assert (answer.status_code, "north" in answer.text) == (404, True)


def test_page_network_shows_the_map_above_the_links(clients: dict[str, httpx2.Client]) -> None:
    page = clients["user"].get("/network").text
    assert 0 < page.index('<svg class="map"') < page.index('<table class="heat"')


def test_former_address_redirects_with_its_query(clients: dict[str, httpx2.Client]) -> None:
    for old, new in {
        "/capacity?priority=high": "/forecast?priority=high",
        "/what-if?drain=north": "/forecast/what-if?drain=north",
        "/audit.json?user=ada": "/scheduler/audit.json?user=ada",
        "/map": "/network",
    }.items():
        answer = clients["user"].get(old, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (308, new)


def test_page_with_invalid_parameter_returns_422(clients: dict[str, httpx2.Client]) -> None:
    for path in ("/forecast?priority=urgent", "/forecast?q=1", "/clusters?x=1"):
        assert clients["user"].get(path).status_code == 422
