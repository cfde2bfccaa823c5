"""The site is built without a warning, has every page, has no link into nothing, and loads nothing from elsewhere."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.needs import CHROMIUM, needs

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("source", "src"), ("iframe", "src"), ("object", "data")}
NO_SOURCE = {"canonical", "next", "prev"}


class Links(HTMLParser):
    """What a page loads, where it leads, the names of its places, and what its paragraphs begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.leads: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        for name, value in given.items():
            if (tag, name) in LOADED and given.get("rel") not in NO_SOURCE:
                self.loaded.add(value)
        if tag == "a" and "href" in given:
            self.leads.add(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    found = {}
    for path in site.rglob("*.html"):
        found[path] = Links()
        found[path].feed(path.read_text(encoding="utf-8"))
    return found


def test_every_page_is_there(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(sources) > 30
    made = {path.relative_to(site) for path in site.rglob("*.html")}
    assert [
        source for source in sources if not {source.with_suffix(".html"), source.with_name("index.html")} & made
    ] == []


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Links]) -> None:
    broken = [
        f"{path.relative_to(site)}: {link}"
        for path, links in pages.items()
        if path.name != "404.html"  # whose links are from the root of a server on
        for link in links.leads
        if not urlsplit(link).scheme and not leads_somewhere(path, link, pages)
    ]
    assert broken == []


def leads_somewhere(page: Path, link: str, pages: dict[Path, Links]) -> bool:
    target, _, place = link.partition("#")
    path = (page.parent / unquote(target)).resolve() if target else page
    if path not in pages:
        return path.is_file()
    return not place or unquote(place) in pages[path].ids


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Links]) -> None:
    for path, links in pages.items():
        assert [link for link in links.loaded if urlsplit(link).scheme not in ("", "data")] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", path.read_text(encoding="utf-8")), path


def test_what_is_written_is_understood(site: Path) -> None:
    """A list, a table or a block of code that MkDocs takes for a part of a paragraph shows in it as it was written."""
    assert [found for path in site.rglob("*.html") for found in left_as_written(path)] == []


def left_as_written(path: Path) -> Iterator[str]:
    for paragraph in re.findall(r"<p>(.*?)</p>", path.read_text(encoding="utf-8"), re.DOTALL):
        for line in paragraph.splitlines():
            if re.match(r"\s*([-*] |\d+\. |\||```|#+ )", line):
                yield f"{path.name}: {line[:100]}"


def test_the_reference_names_every_operation(site: Path, pages: dict[Path, Links]) -> None:
    told = json.loads((site / "openapi.json").read_text(encoding="utf-8"))
    operations = {one["operationId"] for all_ in told["paths"].values() for one in all_.values()}
    assert len(operations) > 40
    assert operations | {f"schema-{name}" for name in told["components"]["schemas"]} <= pages[site / "rest.html"].ids


@needs(CHROMIUM)
def test_it_is_read_and_searched_from_a_disk_and_asks_nobody(site: Path) -> None:
    """In a browser that would tell of any other request; on a phone nothing is wider than it."""
    from tests.dashboard.browser import PHONE, chromium

    asked, complaints = set[str](), list[str]()
    with chromium() as browser:
        page = browser.new_page(viewport=PHONE)
        page.on("request", lambda request: asked.add(urlsplit(request.url).scheme))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for name in ("index", "coming-from-slurm", "policies/adaptive", "operating", "settings", "rest"):
            page.goto(f"file://{site}/{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], name
        page.set_viewport_size({"width": 1280, "height": 800})
        page.keyboard.press("s")
        page.get_by_placeholder("Search").press_sequentially("preemption")
        page.locator(".md-search-result__link").first.wait_for()
    assert asked <= {"file", "data"}
    assert complaints == []
