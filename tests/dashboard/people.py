"""Users of several roles who use pages and forms without scripts."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from typing import Any

import httpx2

from tests.daemon_in_process import ServedDaemon
from tests.grid.embedded import EmbeddedGrid


def create_token(grid: EmbeddedGrid | ServedDaemon, user: str, role: str = "user") -> str:
    response = grid.http.post("/api/v1/tokens", json={"user": user, "role": role}).raise_for_status()
    return str(response.json()["token"])


@contextmanager
def stream_page(client: httpx2.Client, path: str, last: str = "") -> Iterator[Iterator[str]]:
    """Open the stream of a page; yield its contents as they come."""
    path, _, query = path.partition("?")
    address = f"{'/now' if path == '/' else path}.events?{query}".rstrip("?")
    with client.stream("GET", address, headers={"Last-Event-ID": last}) as answer:
        assert answer.status_code == 200, answer.read()
        yield _read_contents(answer)


def _read_contents(answer: httpx2.Response) -> Iterator[str]:
    text = ""
    for piece in answer.iter_text():
        *events, text = (text + piece).split("\n\n")
        for event in events:
            if event != ":":
                lines = event.split("\n")
                assert lines.pop().startswith("id: ")
                yield "\n".join(line.removeprefix("data: ") for line in lines)


class Person:
    """A logged-in user."""

    def __init__(self, grid: EmbeddedGrid | ServedDaemon, token: str) -> None:
        self.origin = {"Origin": grid.url}
        self.http = httpx2.Client(base_url=grid.url, headers={"Accept": "text/html"}, timeout=60)
        assert self.http.post("/login", data={"token": token}, headers=self.origin).status_code == 303

    def get_page(self, path: str, status: int = 200) -> str:
        response = self.http.get(path)
        assert response.status_code == status, response.text
        return response.text

    def get_json(self, path: str, **query: Any) -> Any:
        """Return the content of a JSON page."""
        response = self.http.get(path, params=query or None)
        assert response.status_code == 200, response.text
        return response.json()

    def send_form(self, page: str, action: str, **changes: str) -> httpx2.Response:
        """Send the form of a page with some changed fields."""
        form = re.search(rf'<form[^>]*action="{re.escape(action)}".*?</form>', self.get_page(page), re.DOTALL)
        assert form is not None, f"no form goes to {action}"
        fields = re.findall(r'name="(\w+)" value="([^"]*)"', form[0])
        sent = {name: unescape(value) for name, value in fields} | changes
        return self.http.post(action, data=sent, headers=self.origin)

    def close(self) -> None:
        self.http.close()
