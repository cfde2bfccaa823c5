"""Requirements of every page: access, accessibility, size, and use without scripts."""

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import closing

import httpx2
import pytest

from tests.dashboard.conftest import Visit
from tests.dashboard.pages import linked_pages
from tests.dashboard.people import Person, create_token
from tests.grid.embedded import EmbeddedGrid

MAX_COMPRESSED = 100 * 1024
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
SERIOUS = ("serious", "critical")
ROLES = ("user", "operator", "admin")


@pytest.fixture(scope="module")
def tokens(grid: EmbeddedGrid) -> dict[str, str]:
    """Tokens by role, each of another user."""
    return {role: create_token(grid, f"a-{role}", role) for role in ROLES}


@pytest.fixture(scope="module")
def jobs(grid: EmbeddedGrid) -> list[int]:
    """An ended, a running and a waiting job."""
    ended_job = grid.submit({"type": "flexible", "total_size": 2}, "true", launcher="processes", name="over")
    grid.wait_for_end(ended_job)
    seven = {"type": "nonfixed", "components": [{"size": 4}, {"size": 3}]}
    running_job = grid.submit(seven, "sleep", "600", launcher="processes")
    grid.wait_for_state(running_job, "running")
    waiting_job = grid.submit(seven, "true", launcher="processes")
    return [ended_job, running_job, waiting_job]


@pytest.fixture(scope="module")
def admin(grid: EmbeddedGrid, tokens: dict[str, str], jobs: list[int]) -> Iterator[httpx2.Client]:
    with closing(Person(grid, tokens["admin"])) as person:
        yield person.http


@pytest.fixture(scope="module")
def paths(admin: httpx2.Client) -> list[str]:
    """All pages of an administrator."""
    return linked_pages(admin)


@pytest.mark.parametrize("role", ROLES)
def test_linked_pages_of_role_are_shown(grid: EmbeddedGrid, tokens: dict[str, str], jobs: list[int], role: str) -> None:
    with closing(Person(grid, tokens[role])) as person:
        paths = linked_pages(person.http)
        assert {path: person.http.get(path).status_code for path in paths} == dict.fromkeys(paths, 200)


def test_page_with_resources_is_small(admin: httpx2.Client, paths: list[str]) -> None:
    for path in paths:
        page = admin.get(path).text
        loaded = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
        sizes = [len(gzip.compress(text)) for text in (page.encode(), *(admin.get(file).content for file in loaded))]
        assert sum(sizes) <= MAX_COMPRESSED, (path, sizes)


def test_page_links_to_its_json(admin: httpx2.Client, paths: list[str]) -> None:
    for path in paths:
        (twin,) = re.findall(r'<a href="([^"]+)">this page as JSON</a>', admin.get(path).text)
        answer = admin.get(twin.replace("&amp;", "&"))
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), path
        assert isinstance(answer.json(), dict)


def test_page_is_complete_without_scripts_and_has_no_inline_or_external_code(
    admin: httpx2.Client, paths: list[str]
) -> None:
    """The security policy allows styles and scripts only in files of the daemon."""
    for path in paths:
        answer = admin.get(path)
        assert "'unsafe" not in answer.headers["content-security-policy"]
        assert not re.search(r'\sstyle="|\son[a-z]+="|<style|<script(?! src="/static/)|="https?://', answer.text), path
        assert answer.text.count("<h1") == 1, path
        main = answer.text.partition("</h1>")[2].partition("</main>")[0]
        assert re.sub(r"<[^>]*>", "", main).strip(), path


def test_page_is_accessible_and_fits_the_screen(visit: Visit, admin: httpx2.Client, paths: list[str]) -> None:
    """Check the rules of WCAG 2.2 AA with axe-core and the width: light on a desktop, and dark on a phone."""
    from axe_playwright_python.sync_playwright import Axe

    from tests.dashboard.browser import DESKTOP, PHONE

    visitor, axe, problems = visit(), Axe(), {}
    for path in paths:
        visitor.open(path, live=False)
        for scheme, size in (("light", DESKTOP), ("dark", PHONE)):
            visitor.page.emulate_media(color_scheme=scheme)
            visitor.page.set_viewport_size(size)
            report = axe.run(visitor.page, options={"runOnly": RULES, "resultTypes": ["violations"]}).response
            violations = [
                (
                    violation["id"],
                    violation["nodes"][0]["html"][:150],
                    violation["nodes"][0].get("failureSummary", "")[:300],
                )
                for violation in report["violations"]
                if violation["impact"] in SERIOUS
            ]
            excess_width = visitor.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            if violations or excess_width > 0:
                problems[f"{path}, {scheme}"] = (violations, f"{excess_width} px too wide")
    assert not problems, json.dumps(problems, indent=1)
