"""Logging in with a browser, and what its cookie is good for."""

import re
from collections.abc import Iterator

import httpx2
import pytest

from tests.daemon_in_process import ServedDaemon
from tests.dashboard.conftest import Visit
from tests.grid.embedded import EmbeddedGrid

FORM = "application/x-www-form-urlencoded"


@pytest.fixture
def anybody(daemon: ServedDaemon) -> Iterator[httpx2.Client]:
    """A browser without a login."""
    with httpx2.Client(base_url=daemon.url, headers={"Accept": "text/html"}, timeout=60.0) as client:
        yield client


def logged_in(client: httpx2.Client, token: str, **more: str) -> httpx2.Response:
    headers = {"Origin": str(client.base_url).rstrip("/"), "Content-Type": FORM}
    return client.post("/login", data={"token": token, **more}, headers=headers)


def test_a_page_is_shown_after_the_login_that_it_asks_for(visit: Visit, grid: EmbeddedGrid) -> None:
    visitor = visit(token="")
    visitor.log_in(grid.admin_token, where="/?")
    assert visitor.page.url == f"{grid.url}/"
    visitor.open("/")
    assert visitor.page.locator("section.lane").count() == len(grid.list_clusters())
    (cookie,) = visitor.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert visitor.page.evaluate("document.cookie") == ""


def test_after_the_log_out_the_cookie_holds_no_longer(visit: Visit) -> None:
    visitor = visit()
    visitor.open("/")
    (cookie,) = visitor.context.cookies()
    visitor.page.get_by_role("button", name="Log out").click()
    visitor.page.wait_for_url("**/login")
    visitor.context.add_cookies([cookie])
    visitor.page.goto("/")
    assert "/login" in visitor.page.url


def test_a_wrong_token_gets_no_cookie(anybody: httpx2.Client) -> None:
    answer = logged_in(anybody, "wrong")
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    assert "This token is unknown, expired or revoked." in answer.text


@pytest.mark.parametrize("wanted", ["//evil.example", "https://evil.example", "/\\evil.example", "/login?next=/login"])
def test_a_login_leads_to_no_page_of_others(anybody: httpx2.Client, daemon: ServedDaemon, wanted: str) -> None:
    answer = logged_in(anybody, daemon.admin_token, next=wanted)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


@pytest.mark.parametrize("origin", [None, "http://evil.example", "null"])
def test_no_other_page_logs_anybody_in(anybody: httpx2.Client, daemon: ServedDaemon, origin: str | None) -> None:
    headers = {"Content-Type": FORM} | ({"Origin": origin} if origin else {})
    answer = anybody.post("/login", data={"token": daemon.admin_token}, headers=headers)
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


def test_a_cookie_reads_and_changes_nothing_of_the_api(anybody: httpx2.Client, daemon: ServedDaemon) -> None:
    assert logged_in(anybody, daemon.admin_token).status_code == 303
    assert anybody.get("/api/v1/clusters").status_code == 200
    origin = {"Origin": daemon.url}
    assert anybody.post("/api/v1/clusters/north/drain", json={}, headers=origin).status_code == 401


def test_a_form_without_what_our_pages_say_changes_nothing(anybody: httpx2.Client, daemon: ServedDaemon) -> None:
    assert logged_in(anybody, daemon.admin_token).status_code == 303
    headers = {"Origin": daemon.url, "Content-Type": FORM}
    assert anybody.post("/logout", data={"csrf": "x"}, headers=headers).status_code == 403
    shown = re.search(r'name="csrf" value="(\w+)"', anybody.get("/").text)
    assert shown is not None
    other = {"Origin": "http://evil.example", "Content-Type": FORM}
    assert anybody.post("/logout", data={"csrf": shown[1]}, headers=other).status_code == 403
    assert anybody.get("/").status_code == 200
    assert anybody.post("/logout", data={"csrf": shown[1]}, headers=headers).status_code == 303
    assert anybody.get("/").status_code == 303


def test_a_token_of_the_daemons_own_is_no_cookie(anybody: httpx2.Client, daemon: ServedDaemon) -> None:
    port = daemon.url.rpartition(":")[2]
    assert anybody.get("/", headers={"Cookie": f"koala_{port}={daemon.admin_token}"}).status_code == 303


@pytest.mark.parametrize("others", ['other={"a":"b"}', "bad name=1", "x[1]=a b", 'x="', "x", "path=/", "x=\xe9"])
def test_what_others_of_the_host_keep_in_a_browser_hides_no_login(
    anybody: httpx2.Client, daemon: ServedDaemon, others: str
) -> None:
    assert logged_in(anybody, daemon.admin_token).status_code == 303
    ((name, token),) = anybody.cookies.items()
    for cookies in (f"{others}; {name}={token}", f"{name}={token}; {others}"):
        assert httpx2.get(f"{daemon.url}/", headers={"Cookie": cookies.encode()}, timeout=60.0).status_code == 200


def test_of_two_cookies_of_its_name_none_is_believed(anybody: httpx2.Client, daemon: ServedDaemon) -> None:
    assert logged_in(anybody, daemon.admin_token).status_code == 303
    ((name, token),) = anybody.cookies.items()
    for cookies in (f"{name}={token}; {name}=other", f"{name}=other; {name}={token}"):
        answer = httpx2.get(f"{daemon.url}/", headers={"Cookie": cookies, "Accept": "text/html"}, timeout=60.0)
        assert answer.headers["location"].startswith("/login")
