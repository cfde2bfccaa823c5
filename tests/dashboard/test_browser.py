"""Use of 60 clusters in a browser: by keys alone, without layout shifts, and with hostile texts in every field."""

import asyncio
import re
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_in_process import ServedDaemon
from tests.dashboard.scenes import serve_scene

pytestmark = pytest.mark.processes

PAYLOADS = (
    "<x-injected>",
    '"><x-injected a="',
    "' onfocus=x-injected autofocus '",
    '<img src=x onerror="window.injected=1">',
    "</title></textarea></script></style><x-injected>",
    "<svg onload=window.injected=1>",
    "javascript:window.injected=1",
    "&lt;x-injected&gt;",
    "{{ 7 * 7 }}{% raw %}",
    "-->]]><x-injected>",
)
COUNT_INJECTED = """[...document.querySelectorAll("*")].filter((node) =>
  node.localName === "x-injected" || [...node.attributes].some((a) => /^on/.test(a.name) || /^javascript:/.test(a.value)
  && a.name !== "value")).length + (window.injected ? 1 : 0)"""


@pytest.fixture(scope="module")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDaemon]:
    """A daemon with 60 clusters of which 48 are away."""
    with serve_scene("sixty", tmp_path_factory.mktemp("sixty")) as daemon:
        yield daemon


FIT_SCREEN = """() => {
  const shown = [...document.querySelectorAll("main *, header *, footer *")].filter((node) => node.checkVisibility());
  const name = (node) => `${node.localName}.${node.getAttribute("class")} ${node.textContent.trim().slice(0, 30)}`;
  const problems = [], canvas = document.createElement("canvas").getContext("2d"), isPhone = innerWidth < 600;
  const root = document.documentElement, excess = root.scrollWidth - root.clientWidth;
  const overlap = (one, other) => one.left < other.right - 1 && other.left < one.right - 1 && one.top < other.bottom - 3
    && other.top < one.bottom - 3;
  if (excess > 0) problems.push(`${excess} px too wide`);
  if (isPhone && root.scrollHeight > 7 * innerHeight) problems.push(`${root.scrollHeight} px long`);
  for (const node of shown) {
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    if (node.matches(".wide:not(:has(.heat)), pre, figure, section") && node.scrollWidth > node.clientWidth + 1)
      problems.push(`cut by ${node.scrollWidth - node.clientWidth} px: ${name(node)}`);
    if (style.overflowX === "hidden" && node.scrollWidth > node.clientWidth + 1
        && !node.matches(".unseen, .hidden, .name, .plot, .plot *")) problems.push(`ends in dots: ${name(node)}`);
    if (node.localName === "input" && node.placeholder) {
      canvas.font = style.font;
      const room = node.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      if (canvas.measureText(node.placeholder).width > room + 1) problems.push(`cut: ${node.placeholder}`);
    }
    if (isPhone && node.matches("button, .button, select, summary, input, .chips a, header a, .tile a")
        && box.height < 39.5 && !node.closest("label:has(input)") && !node.matches(".choose input, .unseen"))
      problems.push(`${Math.round(box.height)} px high: ${name(node)}`);
    if (node.matches("svg text:not(.nodes *)") && node.textContent && box.height < 9)
      problems.push(`tiny: ${name(node)}`);
    if (node.localName === "svg") {
      const texts = [...node.querySelectorAll("text")].filter((text) => text.textContent && text.checkVisibility());
      const boxes = texts.map((text) => text.getBoundingClientRect());
      boxes.forEach((one, index) => {
        for (let later = index + 1; later < boxes.length; later++)
          if (overlap(one, boxes[later]))
            problems.push(`collide: ${texts[index].textContent}, ${texts[later].textContent}`);
      });
    }
  }
  return [...new Set(problems)].slice(0, 12);
}"""
"""Describes what of a page a screen does not show, or a finger does not hit."""


@pytest.fixture
def visitor(browser: Any, sixty: ServedDaemon) -> Iterator[Any]:
    from tests.dashboard.browser import Visitor

    visitor = Visitor(browser, sixty.url, sixty.admin_token)
    yield visitor
    visitor.close()


def test_keys_alone_find_a_job_and_submit_another(visitor: Any, sixty: ServedDaemon) -> None:
    page, press = visitor.open("/"), visitor.page.keyboard.press
    press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    press("g")
    press("q")
    page.wait_for_url("**/queue")
    page.wait_for_selector("#live[data-state=on]")
    press("/")
    page.keyboard.type("state:waiting user:alice")
    press("Enter")
    page.wait_for_url("**/queue?q=*")
    press("j")
    number = page.locator("tr[data-here]").get_attribute("id").removeprefix("job-")
    press("Enter")
    page.wait_for_url(f"**/jobs/{number}")
    page.goto(f"/jobs/new?from={number}")
    page.locator("#check", has_text="koala submit").wait_for()
    for _ in range(3):  # from the nodes, where the page begins, to the name
        press("Tab")
    press("End")
    page.keyboard.type(" again")
    page.locator("#command", has_text="again").wait_for()
    press("Enter")
    page.wait_for_url(lambda url: url.rpartition("/")[2].isdecimal() and not url.endswith(f"/{number}"))
    assert "again" in page.locator("h1").inner_text()


def test_skip_link_leads_to_first_job_in_few_presses(visitor: Any) -> None:
    page, press = visitor.open("/queue"), visitor.page.keyboard.press
    press("Tab")
    press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the rows"
    press("Enter")
    presses = 0
    while not page.evaluate("document.activeElement.matches('#rows td a')"):
        press("Tab")
        presses += 1
        assert presses < 4


def test_menu_has_groups_of_pages_with_counts(visitor: Any, sixty: ServedDaemon) -> None:
    menu = visitor.open("/queue").locator("#pages")
    assert [text.lower() for text in menu.locator("h2").all_inner_texts()] == ["grid", "work", "insight", "admin"]
    assert menu.locator("a[href='/clusters'] small").inner_text() == "60"
    table = sixty.http.get("/queue.json").json()["table"]
    assert menu.locator("a[href='/queue'] small").inner_text() == f"{table['total']}"
    assert menu.locator("a[aria-current=page]").get_attribute("href") == "/queue"
    visitor.page.set_viewport_size({"width": 390, "height": 800})
    assert not menu.is_visible()
    visitor.page.get_by_role("button", name="Pages").click()
    assert menu.locator("a[href='/maintenance']").is_visible()


def test_sixty_clusters_are_shown_without_layout_shift(visitor: Any, sixty: ServedDaemon) -> None:
    visitor.page.add_init_script(
        "window.shift = 0; new PerformanceObserver((list) => { for (const entry of list.getEntries())"
        " window.shift += entry.value; }).observe({type: 'layout-shift', buffered: true});"
    )
    for path in ("/", "/clusters", "/queue", "/network"):
        page = visitor.open(path)
        page.evaluate(
            "document.body.addEventListener('htmx:after:swap', () => { document.body.dataset.swapped = ''; })"
        )
        sixty.http.post("/api/v1/clusters/leiden-1/drain", json={"reason": path}).raise_for_status()
        page.wait_for_selector("body[data-swapped]")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        sixty.http.post("/api/v1/clusters/leiden-1/resume", json={}).raise_for_status()
        assert page.evaluate("window.shift") < 0.05, path


@pytest.mark.parametrize("scene", ["small", "wide"])
def test_each_page_fits_phone_desktop_and_zoom(browser: Any, scene: str, tmp_path: Path) -> None:
    from tests.dashboard.browser import DESKTOP, PHONE, Visitor
    from tests.dashboard.screenshots import scene_pages

    zoomed = {"width": DESKTOP["width"] // 2, "height": DESKTOP["height"] // 2}
    with serve_scene(scene, tmp_path) as daemon:
        visitor, problems = Visitor(browser, daemon.url, daemon.admin_token), {}
        for name, path in scene_pages(visitor).items():
            if name in ("drain", "what-if-answer"):  # simulations, which take long
                continue
            page = visitor.open(path, live=False)
            for size in (DESKTOP, zoomed, PHONE):
                page.set_viewport_size(size)
                problems[f"{path} at {size['width']} px"] = page.evaluate(FIT_SCREEN)
        visitor.close()
    assert {path: found for path, found in problems.items() if found} == {}


class Network:
    """A way to the daemon, in the daemon's loop, that can be interrupted."""

    def __init__(self, daemon: ServedDaemon) -> None:
        self._daemon, self._writers, self._is_down = daemon, list[asyncio.StreamWriter](), False
        server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._server = server

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._daemon.loop).result(60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", int(self._daemon.url.rpartition(":")[2]))
        self._writers += [writer, forth]
        await self._set_down(self._is_down)
        await asyncio.gather(_copy(reader, forth), _copy(back, writer))

    async def _set_down(self, is_down: bool) -> None:
        self._is_down = is_down
        for writer in self._writers if is_down else ():
            writer.transport.abort()

    def set_down(self, is_down: bool) -> None:
        """Close all connections, and those to come, or end that."""
        self._run(self._set_down(is_down))

    def close(self) -> None:
        self.set_down(True)
        self._daemon.loop.call_soon_threadsafe(self._server.close)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


def test_hidden_and_disconnected_pages_catch_up(browser: Any, sixty: ServedDaemon) -> None:
    from tests.dashboard.browser import Visitor

    def drain(reason: str) -> None:
        sixty.http.post("/api/v1/clusters/leiden-1/drain", json={"reason": reason}).raise_for_status()

    network = Network(sixty)
    visitor = Visitor(browser, network.url, sixty.admin_token)
    page, content = visitor.open("/clusters"), visitor.page.locator("#main")
    page.evaluate("window.loaded = 'once'")
    show = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
    show += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(show, True)
    page.get_by_text("paused").wait_for()
    drain("while hidden")
    page.evaluate(show, False)
    content.get_by_text("while hidden").first.wait_for()
    network.set_down(True)
    page.wait_for_selector("#live[data-state=off]")
    drain("while away")
    network.set_down(False)
    content.get_by_text("while away").first.wait_for()
    assert page.evaluate("window.loaded") == "once"
    visitor.close()
    network.close()
    sixty.http.post("/api/v1/clusters/leiden-1/resume", json={}).raise_for_status()


def test_page_of_hanging_daemon_shows_age_and_turns_amber(visitor: Any, sixty: ServedDaemon) -> None:
    visitor.page.clock.install()
    page = visitor.open("/clusters")
    page.clock.run_for(3000)
    live = page.locator("#live")
    age = re.fullmatch(r"0:(\d\d) ago", live.get_attribute("data-age"))
    assert age
    assert 2 <= int(age[1]) < 12, "the clock of the page also runs by itself"
    assert live.get_attribute("data-state") == "on"
    page.clock.run_for(10_000)
    page.wait_for_selector("#live[data-state=late]", timeout=1000)
    assert live.inner_text() == "no answer, last news"
    sixty.http.post("/api/v1/clusters/leiden-1/drain", json={"reason": "news"}).raise_for_status()
    page.wait_for_selector("#live[data-state=on]")
    sixty.http.post("/api/v1/clusters/leiden-1/resume", json={}).raise_for_status()


def test_drain_has_typed_times_without_and_with_prediction(visitor: Any, sixty: ServedDaemon) -> None:
    begins = ["2027-03-01T08:00:00.000Z", "2027-03-02T08:00:00.000Z"]
    for begin, is_predicted in zip(begins, (False, True), strict=True):
        page = visitor.page
        page.goto("/clusters/leiden-1/drain")
        page.get_by_label("Begin in UTC").fill(begin)
        page.get_by_label("End in UTC").fill("2027-03-03T08:00:00Z")
        if is_predicted:
            page.get_by_role("button", name="Predict").click()
            page.wait_for_url("**/drain?begin=*")
        page.get_by_label("Reason").fill("new disks")
        page.get_by_role("button", name="Drain leiden-1").click()
        page.wait_for_url("**/clusters/leiden-1")
    cluster = sixty.http.get("/api/v1/clusters/leiden-1").json()
    assert (cluster["drained"], [drain["begins_at"] for drain in cluster["planned_drains"]]) == (None, begins)
    sixty.http.post("/api/v1/clusters/leiden-1/resume", json={"planned": True}).raise_for_status()
    actions = {entry["action"] for entry in sixty.http.get("/api/v1/audit").json()["entries"]}
    assert actions >= {"drain_cluster", "resume_cluster"}
    assert "preview_drain" not in actions


def test_form_of_time_keeps_typed_text_and_fits_phone(visitor: Any, sixty: ServedDaemon) -> None:
    page = visitor.open("/")
    page.set_viewport_size({"width": 390, "height": 800})
    page.get_by_text("From–to").click()
    page.get_by_label("From, UTC").fill("2026-01-02T03:04")
    page.get_by_label("To, UTC").focus()
    content = sixty.http.get("/", headers={"Accept": "text/html"}).text.partition("<main")[2].partition("</main>")[0]
    later = re.sub('(name="since" value=")[^"]*', r"\g<1>2026-01-01T00:00", content.partition(">")[2])
    order = "(text) => htmx.swap({text, sourceElement: main, target: main, swap: 'innerMorph'})"
    page.evaluate(order, f"{later}<i id='later'></i>")
    page.wait_for_selector("#later", state="attached")
    assert page.get_by_label("From, UTC").input_value() == "2026-01-02T03:04"
    assert page.evaluate("(nav) => nav.scrollWidth - nav.clientWidth", page.query_selector("[aria-label=Time]")) == 0


def test_pages_without_scripts_show_no_dead_parts(browser: Any, sixty: ServedDaemon) -> None:
    from tests.dashboard.browser import Visitor

    visitor = Visitor(browser, sixty.url, sixty.admin_token, java_script_enabled=False)
    dead = {"/": ".plot", "/timeline": ".scripted", "/clusters/leiden-1/drain": "progress", "/clusters": "footer kbd"}
    for path, selector in dead.items():
        found = visitor.open(path, live=False).locator(selector)
        assert found.count() > 0, path
        assert not any(part.is_visible() for part in found.all()), path
    assert (
        visitor.open("/clusters/leiden-1/drain", live=False).get_by_role("link", name="Simulate without").is_visible()
    )
    visitor.close()


def test_print_of_dark_pages_is_light_and_complete(browser: Any, sixty: ServedDaemon) -> None:
    from tests.dashboard.browser import Visitor

    visitor = Visitor(browser, sixty.url, sixty.admin_token, color_scheme="dark")
    stroke = "document.querySelector('.plot .u-legend .u-marker').style.borderColor"
    for path in ("/", "/clusters", "/queue", "/network", "/timeline?since=7d", "/history", "/users", "/forecast"):
        page = visitor.open(path)
        dark = page.evaluate(stroke) if path == "/" else ""
        page.emulate_media(media="print")
        page.set_viewport_size({"width": 680, "height": 1000})  # A4 without its margins
        if dark:
            page.wait_for_function(f"(dark) => {stroke} !== dark", arg=dark)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)", path
        problems = page.evaluate(FIT_SCREEN)
        assert problems == [], path
        page.emulate_media(media="screen")
        page.set_viewport_size({"width": 1280, "height": 800})
    visitor.close()


def test_page_without_login_leads_to_login(visitor: Any, sixty: ServedDaemon) -> None:
    page = visitor.open("/clusters")
    other = visitor.context.new_page()
    other.goto("/")
    other.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login?next=%2Fclusters")
    visitor.complaints[:] = [text for text in visitor.complaints if "status of 401" not in text]


def test_hostile_texts_in_every_field_inject_no_node(visitor: Any, sixty: ServedDaemon) -> None:
    jobs = []
    for text in PAYLOADS:
        body = {
            "request": {"type": "flexible", "total_size": 4},
            "command": [text, text],
            "name": text,
            "owner": "mallory",
            "application": text,
            "environment": {"A": text},
            "script": f"#!/bin/sh\n{text}",
            "workdir": f"/{text}",
            "collect": [text],
            "begin": "now+1h",
        }
        answer = sixty.http.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        jobs.append(answer.json()["id"])
        sixty.http.post(f"/api/v1/jobs/{jobs[-1]}/hold", json={"reason": text}).raise_for_status()
    sixty.http.post(f"/api/v1/jobs/{jobs[0]}/cancel", json={"reason": "".join(PAYLOADS)}).raise_for_status()
    sixty.http.post("/api/v1/clusters/delft-1/drain", json={"reason": "".join(PAYLOADS)}).raise_for_status()
    every = "".join(PAYLOADS)
    columns = "&columns=".join(("", "id", "name", "application", "policy", "user", "reason"))
    visitor.page.goto("/")
    paths = [
        "/",
        "/clusters",
        "/clusters/delft-1",
        "/scheduler/audit",
        "/maintenance",
        "/users?user=mallory",
        "/network",
        "/timeline",
        "/forecast",
    ]
    paths += [f"/queue?q=user:mallory+state:any{columns}", "/queue/confirm?action=cancel&all=true&q=user:mallory"]
    paths += [f"/jobs/{job}" for job in jobs] + [f"/jobs/new?from={jobs[4]}"]
    for path in paths:
        visitor.page.goto(path)
        assert visitor.page.evaluate(COUNT_INJECTED) == 0, path
        assert visitor.page.locator("h1").count() == 1, path
    for path in ("/queue", "/clusters", "/scheduler/audit", "/files", "/users"):
        name = {"/scheduler/audit": "target", "/files": "name"}.get(path, "q")
        for text in (PAYLOADS[1], every[:190]):
            visitor.page.goto(f"{path}?{name}=" + visitor.page.evaluate("encodeURIComponent", text))
            assert visitor.page.evaluate(COUNT_INJECTED) == 0, (path, text)
    sixty.http.post("/api/v1/clusters/delft-1/resume", json={}).raise_for_status()
    visitor.complaints[:] = [text for text in visitor.complaints if "status of 4" not in text]
    assert not visitor.complaints
