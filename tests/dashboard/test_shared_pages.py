"""Streams of open pages: contents that viewers share, sent after changes, and the tokens of sessions in their forms."""

import asyncio
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
from koalapy.dashboard.shared_pages import GZIP_HEADER, KEEP_ALIVE, LivePages, as_event_data, make_event
from koalapy.model.errors import NotFoundError
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, create_token, stream_page

TIMEOUT_S = 30.0


@given(st.lists(st.text(max_size=300), max_size=5))
def test_compressed_events_are_one_gzip_stream_in_any_order(texts: list[str]) -> None:
    events = [make_event(text, "a.1") for text in texts]
    for one in (events, events[::-1]):
        stream = zlib.decompressobj(31)
        assert stream.decompress(GZIP_HEADER) == b""
        for event in (*one, KEEP_ALIVE):
            assert stream.decompress(event.compressed) == event.plain


@given(st.text(st.sampled_from("a\r\n:\u2028 "), max_size=40))
def test_event_has_lines_of_text(text: str) -> None:
    lines = as_event_data(text).split("\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\r" not in line for line in lines)
    received = "\n".join(line.removeprefix("data: ") for line in lines)
    assert received == text.replace("\r\n", "\n").replace("\r", "\n")


class Source:
    """A page with a text as its view."""

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

    async def render(self, view: str) -> tuple[str, float]:
        await self.count("rendered")
        return view, 0.0

    def follow(self, pages: LivePages, key: str, since: str = "") -> AsyncGenerator[str]:
        """Yield the contents of the page with the key, without the signs of life."""

        async def contents() -> AsyncGenerator[str]:
            async with aclosing(pages.follow(key, self.load, self.render, since=since)) as events:
                async for event in events:
                    if event is not KEEP_ALIVE:
                        yield event.plain.decode().removeprefix("data: ").partition("\nid: ")[0]

        return contents()


@pytest.fixture
def changes() -> Changes:
    return Changes()


async def test_page_is_rendered_once_for_all_and_only_if_it_differs(changes: Changes) -> None:
    pages, source = LivePages(changes), Source()
    source.view = "first"
    async with asyncio.timeout(TIMEOUT_S):
        viewers = [source.follow(pages, "a") for _ in range(3)]
        assert await asyncio.gather(*map(anext, viewers)) == ["first"] * 3
        assert source.counts == {"loaded": 1, "rendered": 1}
        waiting = [asyncio.ensure_future(anext(viewer)) for viewer in viewers]
        await asyncio.sleep(0)
        changes.note_change("jobs")
        await source.wait_for("loaded", 2)
        assert source.counts["rendered"] == 1, "the view did not differ"
        source.view = "second"
        changes.note_change("jobs")
        assert [await one for one in waiting] == ["second"] * 3
        assert source.counts == {"loaded": 3, "rendered": 2}
        for viewer in viewers:
            await viewer.aclose()


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
        changes.note_change("jobs")
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


async def test_pages_that_need_much_time_are_refreshed_less_often(changes: Changes) -> None:
    pages, source = LivePages(changes), Source()

    async def render(view: str) -> tuple[str, float]:
        return view, 0.1

    async with asyncio.timeout(TIMEOUT_S):
        viewer = pages.follow("a", source.load, render)
        await anext(viewer)
        began = asyncio.get_running_loop().time()
        assert b"first" not in (await anext(viewer)).plain
        source.view = "first"
        changes.note_change("jobs")
        assert b"first" in (await anext(viewer)).plain
        assert asyncio.get_running_loop().time() - began > 2.0, "0.1 s are 3.5 % of 2.9 s"
        await viewer.aclose()


async def test_page_of_many_viewers_is_refreshed_more_often(changes: Changes) -> None:
    pages, few, many = LivePages(changes), Source(), Source()

    def note_changes() -> None:
        changes.note_change("jobs")
        if not changes.ended:
            asyncio.get_running_loop().call_later(0.1, note_changes)

    async def follow(key: str, source: Source) -> None:
        async def render(view: str) -> tuple[str, float]:
            source.view += "."
            await source.count("rendered")
            return view, 0.03

        async for _ in pages.follow(key, source.load, render):
            pass

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        for key, source in (("few", few), *[("many", many)] * 16):
            group.create_task(follow(key, source))
        note_changes()
        await few.wait_for("rendered", 2)
        changes.end_followers()
    assert many.counts["rendered"] >= 4, "the pauses of one and of 16 viewers are 4.3 and 1.1 s"


async def test_viewer_hears_of_daemon_while_its_page_waits_for_its_turn(changes: Changes) -> None:
    pages, source = LivePages(changes), Source()

    async def render(view: str) -> tuple[str, float]:
        return view, 1.1

    async with asyncio.timeout(2 * TIMEOUT_S):
        viewer, loop = pages.follow("a", source.load, render), asyncio.get_running_loop()
        await anext(viewer)
        await anext(viewer)
        began = told = loop.time()
        source.view = "second"
        changes.note_change("jobs")
        async for event in viewer:
            assert loop.time() - told < 12.0, "then browsers show that the daemon does not answer"
            told = loop.time()
            if event is not KEEP_ALIVE:
                break
        assert told - began > 24.0, "1.1 s are 3.5 % of 31 s"
        await viewer.aclose()


async def test_streams_of_one_user_lengthen_the_pauses_of_others_little(changes: Changes) -> None:
    pages, one, many = LivePages(changes), Source(), Source()

    async def render(view: str) -> tuple[str, float]:
        return view, 0.02

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:

        async def follow() -> None:
            async for _ in pages.follow("many", many.load, render):
                pass

        for _ in range(1000):
            group.create_task(follow())
        await many.wait_for("loaded", 1)
        viewer, loop = pages.follow("one", one.load, render), asyncio.get_running_loop()
        await anext(viewer)
        await anext(viewer)
        waiting = asyncio.ensure_future(anext(viewer))
        await asyncio.sleep(0)
        began = loop.time()
        changes.note_change("jobs")
        await waiting
        assert loop.time() - began < 9.0, "6.3 s, and 37 s if each stream counted"
        changes.end_followers()
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


def test_forms_of_stream_have_no_token_and_those_of_page_that_of_the_session(daemon: ServedDaemon) -> None:
    seen = []
    for name in ("olga", "oscar"):
        with closing(Person(daemon, create_token(daemon, name, "operator"))) as person:
            with stream_page(person.http, "/clusters/north") as contents:
                assert set(re.findall(r'name="csrf" value="([^"]*)"', next(contents))) == {""}
            (token,) = set(re.findall(r'name="csrf" value="([^"]*)"', person.get_page("/clusters/north")))
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
