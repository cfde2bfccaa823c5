"""Every page that the navigation leads to, for everybody: as a page, as the part that changes, and as JSON."""

import re
from collections.abc import Iterator

import httpx2
import pytest

from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, token_of
from tests.grid.embedded import EmbeddedGrid


@pytest.fixture(scope="module")
def people(daemon: ServedDaemon) -> Iterator[dict[str, httpx2.Client]]:
    """A client for each role."""
    made = {}
    for role in ("user", "operator", "admin"):
        headers = {"Authorization": f"Bearer {token_of(daemon, role, role)}", "Accept": "text/html"}
        made[role] = httpx2.Client(base_url=daemon.url, headers=headers, timeout=60.0)
    yield made
    for client in made.values():
        client.close()


def pages(client: httpx2.Client) -> list[str]:
    """What the navigation has, a cluster, and a link."""
    found = re.findall(r'<a href="(/[^"]*)" data-key', client.get("/").text)
    return [*found, "/clusters/north", "/network/north/south", "/capacity?priority=high"]


@pytest.mark.parametrize("role", ["user", "operator", "admin"])
def test_each_page_is_there_as_html_as_a_part_and_as_json(people: dict[str, httpx2.Client], role: str) -> None:
    client = people[role]
    seen = pages(client)
    assert {"/", "/clusters", "/capacity", "/network"} <= set(seen)
    for path in seen:
        page = client.get(path)
        assert (page.status_code, "<!doctype html>" in page.text) == (200, True), path
        part = client.get(path, headers={"HX-Request": "true"})
        assert (part.status_code, "<!doctype" in part.text) == (200, False), path
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert " style=" not in page.text, path
        twin = re.search(r'<a href="([^"]+)">this page as JSON', page.text)
        assert twin is not None
        assert client.get(twin[1].replace("&amp;", "&")).json(), path


def test_a_cluster_tells_whose_nodes_its_users_have(grid: EmbeddedGrid) -> None:
    person = Person(grid, token_of(grid, "user"))
    assert "Load sharing" not in person.see("/clusters/north")
    both = [{"cluster": "north", "size": 1}, {"cluster": "south", "size": 2}]
    job = {"request": {"type": "fixed", "components": both}, "command": ["sleep", "600"], "launcher": "processes"}
    ident = grid.http.post("/api/v1/jobs", json=job | {"home_site": "north"}).raise_for_status().json()["id"]
    grid.http.post("/api/v1/jobs", json=job | {"home_site": "north"}).raise_for_status()
    wide = {"type": "fixed", "components": [{"cluster": "south", "size": 4}]}
    grid.http.post("/api/v1/jobs", json=job | {"home_site": "south", "request": wide}).raise_for_status()
    told = {name: person.told(f"/clusters/{name}.json")["homes"] for name in ("north", "south")}
    assert told == {
        "north": {"waiting": 0, "at_home": 2, "elsewhere": 4, "guests": 0},
        "south": {"waiting": 1, "at_home": 0, "elsewhere": 0, "guests": 4},
    }
    page = person.see("/clusters/south")
    assert "<b>4</b> nodes of other sites' users here" in page.replace("&#39;", "'")
    assert f"/jobs/{ident}" in page
    grid.http.post("/api/v1/jobs/cancel", json={"jobs": [ident, ident + 1, ident + 2]}).raise_for_status()
    person.close()


@pytest.mark.parametrize("path", ["/clusters/nowhere", "/network/north/nowhere", "/clusters/nowhere.json"])
def test_what_is_not_there_is_told_with_what_is(people: dict[str, httpx2.Client], path: str) -> None:
    answer = people["user"].get(path)
    assert (answer.status_code, "north" in answer.text) == (404, True)


def test_what_a_page_does_not_take_is_refused(people: dict[str, httpx2.Client]) -> None:
    for path in ("/capacity?priority=urgent", "/capacity?q=1", "/clusters?x=1"):
        assert people["user"].get(path).status_code == 422
