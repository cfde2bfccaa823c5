"""Login with a browser, and its cookie."""

import re
from collections.abc import Iterator
from urllib.parse import quote

import httpx2
import pytest

from tests.daemon_in_process import ServedDaemon
from tests.dashboard.conftest import Visit
from tests.grid.embedded import EmbeddedGrid

FORM = "application/x-www-form-urlencoded"


@pytest.fixture
def client(daemon: ServedDaemon) -> Iterator[httpx2.Client]:
    """A browser without a login."""
    with httpx2.Client(base_url=daemon.url, headers={"Accept": "text/html"}, timeout=60.0) as client:
        yield client


def log_in(client: httpx2.Client, token: str, **fields: str) -> httpx2.Response:
    headers = {"Origin": str(client.base_url).rstrip("/"), "Content-Type": FORM}
    return client.post("/login", data={"token": token, **fields}, headers=headers)


def test_login_leads_to_requested_page(visit: Visit, grid: EmbeddedGrid) -> None:
    visitor = visit(token="")
    visitor.log_in(grid.admin_token, path="/?")
    assert visitor.page.url == f"{grid.url}/"
    visitor.open("/")
    assert visitor.page.locator("li.tile").count() == len(grid.list_clusters())
    (cookie,) = visitor.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert visitor.page.evaluate("document.cookie") == ""


def test_cookie_after_logout_is_invalid(visit: Visit) -> None:
    visitor = visit()
    visitor.open("/")
    (cookie,) = visitor.context.cookies()
    visitor.page.get_by_role("button", name="Log out").click()
    visitor.page.wait_for_url("**/login")
    visitor.context.add_cookies([cookie])
    visitor.page.goto("/")
    assert "/login" in visitor.page.url


@pytest.mark.parametrize(
    ("method", "headers", "status", "leads_to"),
    [
        ("POST", {"Referer": "{url}/jobs/new?copy=7#top"}, 303, "/jobs/new?copy=7"),
        ("POST", {"Referer": "http://evil.example"}, 303, "/"),
        ("POST", {"HX-Request": "true", "HX-Current-URL": "{url}/jobs/new"}, 401, None),
        ("GET", {"HX-Request": "true", "HX-Current-URL": "{url}/queue?q=a"}, 401, "/queue?q=a"),
        ("GET", {}, 303, "/jobs/new?source=1"),
    ],
)
def test_request_without_login_leads_to_login_and_back_to_its_page(
    client: httpx2.Client, daemon: ServedDaemon, method: str, headers: dict[str, str], status: int, leads_to: str | None
) -> None:
    sent = {name: value.format(url=daemon.url) for name, value in headers.items()} | {"Origin": daemon.url}
    response = client.request(method, "/jobs/new?source=1", headers=sent)
    assert response.status_code == status
    address = response.headers.get("location") or response.headers.get("hx-redirect")
    assert address == (leads_to and f"/login?next={quote(leads_to, safe='')}")


def test_forms_without_login_are_one_rejection_in_the_audit(client: httpx2.Client, daemon: ServedDaemon) -> None:
    for _ in range(3):
        assert client.post("/jobs/new", headers={"Origin": daemon.url}).status_code == 303
    entries = daemon.http.get("/api/v1/audit?action=POST").json()["entries"]
    assert [(entry["outcome"], entry["detail"]) for entry in entries] == [("refused", "401 no valid token was sent")]


def test_login_with_wrong_token_is_rejected(client: httpx2.Client) -> None:
    response = log_in(client, "wrong")
    assert (response.status_code, "set-cookie" in response.headers) == (401, False)
    assert "This token is unknown, expired or revoked." in response.text


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "/login?next=/login"])
def test_login_ignores_foreign_next_page(client: httpx2.Client, daemon: ServedDaemon, target: str) -> None:
    response = log_in(client, daemon.admin_token, next=target)
    assert (response.status_code, response.headers["location"]) == (303, "/")


@pytest.mark.parametrize("origin", [None, "http://evil.example", "null"])
def test_login_from_foreign_origin_is_rejected(client: httpx2.Client, daemon: ServedDaemon, origin: str | None) -> None:
    headers = {"Content-Type": FORM} | ({"Origin": origin} if origin else {})
    answer = client.post("/login", data={"token": daemon.admin_token}, headers=headers)
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


def test_cookie_allows_only_reading_the_api(client: httpx2.Client, daemon: ServedDaemon) -> None:
    assert log_in(client, daemon.admin_token).status_code == 303
    assert client.get("/api/v1/clusters").status_code == 200
    origin = {"Origin": daemon.url}
    assert client.post("/api/v1/clusters/north/drain", json={}, headers=origin).status_code == 401


def test_form_without_csrf_or_origin_is_rejected(client: httpx2.Client, daemon: ServedDaemon) -> None:
    assert log_in(client, daemon.admin_token).status_code == 303
    headers = {"Origin": daemon.url, "Content-Type": FORM}
    assert client.post("/logout", data={"csrf": "x"}, headers=headers).status_code == 403
    csrf_field = re.search(r'name="csrf" value="(\w+)"', client.get("/").text)
    assert csrf_field is not None
    foreign_headers = {"Origin": "http://evil.example", "Content-Type": FORM}
    assert client.post("/logout", data={"csrf": csrf_field[1]}, headers=foreign_headers).status_code == 403
    assert client.get("/").status_code == 200
    assert client.post("/logout", data={"csrf": csrf_field[1]}, headers=headers).status_code == 303
    assert client.get("/").status_code == 303


def test_admin_token_as_cookie_is_rejected(client: httpx2.Client, daemon: ServedDaemon) -> None:
    port = daemon.url.rpartition(":")[2]
    assert client.get("/", headers={"Cookie": f"koala_{port}={daemon.admin_token}"}).status_code == 303


@pytest.mark.parametrize(
    "foreign_cookies", ['other={"a":"b"}', "bad name=1", "x[1]=a b", 'x="', "x", "path=/", "x=\xe9"]
)
def test_cookie_is_found_among_invalid_cookies(
    client: httpx2.Client, daemon: ServedDaemon, foreign_cookies: str
) -> None:
    assert log_in(client, daemon.admin_token).status_code == 303
    ((name, token),) = client.cookies.items()
    for cookies in (f"{foreign_cookies}; {name}={token}", f"{name}={token}; {foreign_cookies}"):
        assert httpx2.get(f"{daemon.url}/", headers={"Cookie": cookies.encode()}, timeout=60.0).status_code == 200


def test_duplicate_cookies_are_rejected(client: httpx2.Client, daemon: ServedDaemon) -> None:
    assert log_in(client, daemon.admin_token).status_code == 303
    ((name, token),) = client.cookies.items()
    for cookies in (f"{name}={token}; {name}=other", f"{name}=other; {name}={token}"):
        answer = httpx2.get(f"{daemon.url}/", headers={"Cookie": cookies, "Accept": "text/html"}, timeout=60.0)
        assert answer.headers["location"].startswith("/login")
