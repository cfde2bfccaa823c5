"""The site is built without warnings, has every page, no broken links, and loads nothing from other hosts."""

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
    """The loaded resources, links and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.targets: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.ids |= {attributes[name] for name in ("id", "name") if name in attributes}
        for name, value in attributes.items():
            if (tag, name) in LOADED and attributes.get("rel") not in NO_SOURCE:
                self.loaded.add(value)
        if tag == "a" and "href" in attributes:
            self.targets.add(attributes["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert build.returncode == 0, build.stdout + build.stderr
    assert "WARNING" not in build.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    links_by_page = {}
    for path in site.rglob("*.html"):
        links_by_page[path] = Links()
        links_by_page[path].feed(path.read_text(encoding="utf-8"))
    return links_by_page


def test_site_has_a_page_for_each_source(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(sources) > 30
    built_pages = {path.relative_to(site) for path in site.rglob("*.html")}
    assert [
        source for source in sources if not {source.with_suffix(".html"), source.with_name("index.html")} & built_pages
    ] == []


def test_links_of_site_have_targets(site: Path, pages: dict[Path, Links]) -> None:
    broken = [
        f"{path.relative_to(site)}: {link}"
        for path, links in pages.items()
        if path.name != "404.html"  # its links start at the root of a server
        for link in links.targets
        if not urlsplit(link).scheme and not has_target(path, link, pages)
    ]
    assert broken == []


def has_target(page: Path, link: str, pages: dict[Path, Links]) -> bool:
    target, _, place = link.partition("#")
    path = (page.parent / unquote(target)).resolve() if target else page
    if path not in pages:
        return path.is_file()
    return not place or unquote(place) in pages[path].ids


def test_site_loads_nothing_from_other_hosts(site: Path, pages: dict[Path, Links]) -> None:
    for path, links in pages.items():
        assert [link for link in links.loaded if urlsplit(link).scheme not in ("", "data")] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", path.read_text(encoding="utf-8")), path


def test_markup_of_site_is_rendered(site: Path) -> None:
    """MkDocs shows a list, table or code block within a paragraph as plain text."""
    assert [markup for path in site.rglob("*.html") for markup in find_unrendered_markup(path)] == []


def find_unrendered_markup(path: Path) -> Iterator[str]:
    for paragraph in re.findall(r"<p>(.*?)</p>", path.read_text(encoding="utf-8"), re.DOTALL):
        for line in paragraph.splitlines():
            if re.match(r"\s*([-*] |\d+\. |\||```|#+ )", line):
                yield f"{path.name}: {line[:100]}"


def test_rest_reference_lists_every_operation(site: Path, pages: dict[Path, Links]) -> None:
    api_document = json.loads((site / "openapi.json").read_text(encoding="utf-8"))
    operations = {operation["operationId"] for all_ in api_document["paths"].values() for operation in all_.values()}
    assert len(operations) > 40
    assert (
        operations | {f"schema-{name}" for name in api_document["components"]["schemas"]}
        <= pages[site / "rest.html"].ids
    )


@needs(CHROMIUM)
def test_site_on_disk_is_read_and_searched_without_requests(site: Path) -> None:
    """Chromium requests nothing but files, and no page is wider than a phone."""
    from tests.dashboard.browser import PHONE, chromium

    requested_schemes, complaints = set[str](), list[str]()
    with chromium() as browser:
        page = browser.new_page(viewport=PHONE)
        page.on("request", lambda request: requested_schemes.add(urlsplit(request.url).scheme))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for name in ("index", "coming-from-slurm", "policies/adaptive", "operating", "settings", "rest"):
            page.goto(f"file://{site}/{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], name
        page.set_viewport_size({"width": 1280, "height": 800})
        page.keyboard.press("s")
        page.get_by_placeholder("Search").press_sequentially("preemption")
        page.locator(".md-search-result__link").first.wait_for()
    assert requested_schemes <= {"file", "data"}
    assert complaints == []
