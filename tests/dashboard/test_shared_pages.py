"""Pages that many browsers share: compression with gaps, the tokens of sessions, and contents sent after changes."""

import asyncio
import gzip
import re
import zlib
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.daemon.jobs.changes import Changes
from koalapy.dashboard.shared_pages import (
    GZIP_HEADER,
    LivePages,
    LiveSource,
    SharedPage,
    as_event_data,
    compress_page,
    store,
)
from koalapy.model.errors import NotFoundError
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, create_token, stream_page

PLACEHOLDER = "5f" * 32
TIMEOUT_S = 30.0


@given(st.lists(st.text(max_size=300), min_size=1, max_size=5), st.binary(max_size=70))
def test_page_has_inserted_text_in_each_gap(pieces: list[str], inserted: bytes) -> None:
    page = compress_page(PLACEHOLDER.join(pieces), PLACEHOLDER)
    expected = inserted.join(piece.encode() for piece in pieces)
    assert page.as_bytes(inserted) == expected
    assert gzip.decompress(page.as_gzip(inserted)) == expected
    stream = zlib.decompressobj(31)
    assert stream.decompress(GZIP_HEADER) == b""
    for _ in range(2):
        assert stream.decompress(page.as_deflate(inserted) + store(b"end")) == expected + b"end"


@given(st.text(st.sampled_from("a\r\n:\u2028 "), max_size=40))
def test_event_has_lines_of_text(text: str) -> None:
    lines = as_event_data(text).split("\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\r" not in line for line in lines)
    received = "\n".join(line.removeprefix("data: ") for line in lines)
    assert received == text.replace("\r\n", "\n").replace("\r", "\n")


class Source:
    """A page whose view is a text."""

    def __init__(self) -> None:
        self.view, self.counts, self.counted = "", Counter[str](), asyncio.Condition()
        self.error: Exception | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def count(self, what: str) -> None:
        self.counts[what] += 1
        async with self.counted:
            self.counted.notify_all()

    async def wait_for(self, what: str, number: int) -> None:
        async with self.counted:
            await self.counted.wait_for(lambda: self.counts[what] == number)

    async def load(self) -> str:
        await self.count("loaded")
        try:
            await self.may_load.wait()
        except asyncio.CancelledError:
            await self.count("cancelled")
            raise
        if self.error is not None:
            raise self.error
        return self.view

    async def render(self, view: str) -> tuple[SharedPage, float]:
        await self.count("rendered")
        return compress_page(view, ""), 0.0

    def follow(self, pages: LivePages, *key: str, subject: str = "", since: str = "") -> AsyncGenerator[str]:
        """Yield the contents of the page with the key, without the signs of life."""
        source = LiveSource(self.load, self.render, "family", subject, 1.0)

        async def contents() -> AsyncGenerator[str]:
            async with aclosing(pages.follow(key, source, since)) as all_contents:
                async for content in all_contents:
                    if content is not None:
                        yield content[1].as_bytes(b"").decode()

        return contents()


@pytest.fixture
def changes() -> Changes:
    return Changes()


async def test_page_is_rendered_once_for_all_and_only_if_it_differs(changes: Changes) -> None:
    pages, source, other = LivePages(changes), Source(), Source()
    source.view = other.view = "first"
    async with asyncio.timeout(TIMEOUT_S):
        viewers = [source.follow(pages, "a") for _ in range(3)]
        assert [await anext(viewer) for viewer in viewers] == ["first"] * 3
        equal = other.follow(pages, "b")
        assert await anext(equal) == "first"
        assert (source.counts, other.counts) == ({"loaded": 1, "rendered": 1}, {"loaded": 1}), "shared as it is equal"
        waiting = [asyncio.ensure_future(anext(viewer)) for viewer in viewers]
        await asyncio.sleep(0)
        changes.note_change("jobs")
        await source.wait_for("loaded", 2)
        assert source.counts["rendered"] == 1, "the view did not differ"
        source.view = "second"
        changes.note_change("jobs")
        assert [await one for one in waiting] == ["second"] * 3
        assert source.counts == {"loaded": 3, "rendered": 2}
        for viewer in (*viewers, equal):
            await viewer.aclose()
        assert changes.subjects is None, "nothing is followed any more"


async def test_slow_reader_gets_newest_content_and_costs_nothing(changes: Changes) -> None:
    pages, slow = LivePages(changes), Source()
    fast = Source()
    async with asyncio.timeout(TIMEOUT_S):
        reading, other = slow.follow(pages, "slow"), fast.follow(pages, "fast")
        await anext(reading)
        await anext(other)
        for number in range(2):
            slow.view = fast.view = f"content {number}"
            changes.note_change("jobs")
            assert await anext(other) == fast.view
        assert slow.counts["loaded"] == 1, "a page is not computed while its only reader is still reading"
        assert await anext(reading) == "content 1"
        await reading.aclose()
        await other.aclose()


async def test_viewer_with_current_version_receives_only_later_content(changes: Changes) -> None:
    pages, source = LivePages(changes), Source()
    changes.note_change("jobs")
    async with asyncio.timeout(TIMEOUT_S):
        viewer = source.follow(pages, "a", since=changes.version)
        waiting = asyncio.ensure_future(anext(viewer))
        await asyncio.sleep(0)
        assert source.counts["loaded"] == 0
        source.view = "later"
        changes.note_change("jobs")
        assert await waiting == "later"
        await viewer.aclose()
        for version in ("", "x", "0.5", changes.version + "9", "٣"):
            returning = source.follow(pages, "a", since=version)
            assert await anext(returning) == "later", version
            await returning.aclose()


async def test_page_of_changed_subject_is_refreshed_first(changes: Changes) -> None:
    pages, order = LivePages(changes), list[str]()
    async with asyncio.timeout(TIMEOUT_S):
        sources = {name: Source() for name in ("job 1", "job 2", "job 3")}
        viewers = {name: source.follow(pages, name, subject=name) for name, source in sources.items()}
        for viewer in viewers.values():
            await anext(viewer)

        async def note(name: str) -> None:
            await anext(viewers[name])
            order.append(name)

        for name, source in sources.items():
            source.view = name
        noting = [asyncio.create_task(note(name)) for name in sources]
        await asyncio.sleep(0)
        changes.note_change("jobs", subjects=["job 3", "user alice"])
        await asyncio.gather(*noting)
        assert order == ["job 3", "job 1", "job 2"], "the others follow, since they may depend on it"
        for viewer in viewers.values():
            await viewer.aclose()


async def test_error_is_raised_first_and_later_ends_all_streams(changes: Changes) -> None:
    pages, source = LivePages(changes), Source()
    async with asyncio.timeout(TIMEOUT_S):
        viewers = [source.follow(pages, "a") for _ in range(2)]
        for viewer in viewers:
            await anext(viewer)
        waiting = [asyncio.ensure_future(anext(viewer, "over")) for viewer in viewers]
        await asyncio.sleep(0)
        source.error = NotFoundError("there is no job 1")
        changes.note_change("jobs")
        assert [await one for one in waiting] == ["over"] * 2
        with pytest.raises(NotFoundError):
            await anext(source.follow(pages, "a"))
        source.error, source.view = None, "again"
        last = source.follow(pages, "a")
        assert await anext(last) == "again"
        changes.end_followers()
        assert [content async for content in last] == []


async def test_leaving_viewer_cancels_only_its_own_page(changes: Changes) -> None:
    pages, source = LivePages(changes), Source()
    source.may_load.clear()
    async with asyncio.timeout(TIMEOUT_S):
        first, second = (asyncio.ensure_future(anext(source.follow(pages, "a"))) for _ in range(2))
        await source.wait_for("loaded", 1)
        first.cancel()
        await asyncio.wait([first])
        source.may_load.set()
        assert await second == ""
        assert source.counts == {"loaded": 1, "rendered": 1}
        source.may_load.clear()
        third = asyncio.ensure_future(anext(source.follow(pages, "b")))
        await source.wait_for("loaded", 2)
        third.cancel()
        await asyncio.wait([third])
        await source.wait_for("cancelled", 1)


def test_stream_has_token_of_each_session(daemon: ServedDaemon) -> None:
    seen = []
    for name in ("olga", "oscar"):
        with closing(Person(daemon, create_token(daemon, name, "operator"))) as person:
            with stream_page(person.http, "/clusters/north") as contents:
                (token,) = set(re.findall(r'name="csrf" value="([^"]*)"', next(contents)))
            assert token in person.get_page("/clusters/north")
            form = {"csrf": token, "reason": f"by {name}"}
            assert person.http.post("/clusters/north/drain", data=form, headers=person.origin).status_code == 303
            seen.append(token)
            daemon.http.post("/api/v1/clusters/north/resume", json={}).raise_for_status()
    assert seen[0] != seen[1]


def test_streams_of_users_show_only_what_they_may_see(daemon: ServedDaemon) -> None:
    body = {"request": {"type": "flexible", "total_size": 4}, "command": ["true"], "begin": "now+1h"}
    with (
        closing(Person(daemon, create_token(daemon, "anna"))) as anna,
        closing(Person(daemon, create_token(daemon, "boris"))) as boris,
    ):
        owned = {"owner": "anna", "name": "secret-of-anna"}
        job = daemon.http.post("/api/v1/jobs", json=body | owned).raise_for_status().json()["id"]
        paths = ("/my-jobs", "/queue", f"/jobs/{job}", "/")
        for path in paths:
            with stream_page(anna.http, path) as hers, stream_page(boris.http, path) as his:
                texts = next(hers), next(his)
                daemon.http.post(f"/api/v1/jobs/{job}/hold", json={"reason": "secret"}).raise_for_status()
                daemon.http.post(f"/api/v1/jobs/{job}/release", json={}).raise_for_status()
            assert "secret" in texts[0] or path == "/", path
            assert "secret" not in texts[1], path
            assert "secret" not in boris.get_page(path), path
        daemon.http.post(f"/api/v1/jobs/{job}/cancel", json={"reason": "over"}).raise_for_status()


def test_stream_shows_change_and_ends_with_login(daemon: ServedDaemon) -> None:
    with closing(Person(daemon, create_token(daemon, "ines"))) as ines:
        with stream_page(ines.http, "/clusters") as contents, httpx2.Client(base_url=daemon.url) as other:
            assert "new switch" not in next(contents)
            daemon.http.post("/api/v1/clusters/south/drain", json={"reason": "new switch"}).raise_for_status()
            assert "new switch" in next(contents)
            daemon.http.post("/api/v1/clusters/south/resume", json={}).raise_for_status()
            csrf = re.search(r'name="csrf" value="(\w+)"', ines.get_page("/"))
            assert csrf is not None
            cookies = {"Cookie": "; ".join(f"{name}={value}" for name, value in ines.http.cookies.items())}
            other.post("/logout", data={"csrf": csrf[1]}, headers=ines.origin | cookies)
            with pytest.raises(httpx2.RemoteProtocolError):
                list(contents)
        response = ines.http.get("/clusters.events", headers={"Accept": "text/event-stream"})
        assert response.status_code in (303, 401)
