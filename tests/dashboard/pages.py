"""List the pages of the dashboard, and draw their jobs and timelines."""

import re
from collections.abc import Sequence

import httpx2

from koalapy.dashboard.job_table import JOBS
from koalapy.dashboard.rendering import ENVIRONMENT, render
from koalapy.dashboard.rows import JobRow
from koalapy.dashboard.timeline import Timeline

DETAIL = re.compile(r'href="(/(?:jobs|clusters|network|users)/[^"?#]+)"')


def linked_pages(client: httpx2.Client) -> list[str]:
    """Return the pages of the navigation, and the first linked page of each kind below them."""
    navigation = client.get("/").text.partition("<nav")[2].partition("</nav>")[0]
    paths = list(dict.fromkeys(re.findall(r'href="(/[^"]*)"', navigation)))
    kinds: dict[str, str] = {}
    for path in paths:
        for link in DETAIL.findall(client.get(path).text):
            _, section, _, *rest = link.split("/")
            kinds.setdefault(f"{section} {rest if section == 'clusters' else len(rest)}", link)
    return paths + [link for link in kinds.values() if link not in paths]


def draw_timeline(timeline: Timeline) -> str:
    """Return a timeline as SVG; empty without content."""
    return render("parts/timeline.html", {"timeline": timeline}).strip()


def draw_jobs(rows: Sequence[JobRow], now: float) -> str:
    """Return jobs as a table with the usual columns."""
    return str(ENVIRONMENT.get_template("parts/tables.html").module.table(JOBS, None, rows, now))  # type: ignore[attr-defined]
