"""The map of the grid and the timeline: well-formed at any size, and hostile texts stay texts."""

from collections.abc import Sequence
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.dashboard.charts import NodeCounts
from koalapy.dashboard.cluster_table import cluster_path
from koalapy.dashboard.grid_map import MAX_RING, MapJob, MapLink, drawn_jobs, lay_out_map
from koalapy.dashboard.rendering import render
from koalapy.dashboard.rows import ClusterRow
from koalapy.dashboard.timeline import ExpectedStart, Phase, Timeline, TimelineBar, TimelineLane, component_phases, pack
from koalapy.model.history import PastComponent, UseSum
from tests.dashboard.pages import draw_timeline

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "</title></svg><b>",
    "&lt;b&gt;&quot;",
    "../../etc?x=1#y",
    "{{ 7 * 7 }}",
    "%3Cscript%3E",
)
ELEMENTS = {"svg", "a", "g", "title", "text", "rect", "path", "line", "circle"}


def make_row(name: str, state: str, nodes: NodeCounts, stale: bool) -> ClusterRow:
    """Return a cluster with nodes in some states."""
    return ClusterRow(name, "slurm", state, "", nodes, nodes.total, None, stale, True, "", None, 0)


def draw_map(clusters: int, jobs: int = 4) -> tuple[str, int]:
    """Return the picture of clusters in all states and of their jobs, with all links between those on the ellipse; and
    the number of links."""
    states = ("usable", "drained", "unreachable")
    shown = [
        make_row(f"site-{n:03}.example", states[n % 3], NodeCounts(n % 7, n % 2, n % 3, 1, 4), n % 3 == 2)
        for n in range(clusters)
    ]
    links = [
        MapLink((one.cluster, other.cluster), "measured", 1e8 * (index + 1), 0.001, is_relayed=index % 2 == 1)
        for index, (one, other) in enumerate(combinations(shown[:MAX_RING], 2))
    ]
    on = [row.cluster for row in shown]
    mapped = [MapJob(n + 1, "running", {on[n % clusters]: 4, on[(n + 1) % clusters]: 2}) for n in range(jobs)]
    return render_map(shown, links, mapped if clusters > 1 else []), len(links)


def render_map(clusters: Sequence[ClusterRow], links: Sequence[MapLink], jobs: Sequence[MapJob]) -> str:
    return render("parts/map.html", {"map": lay_out_map(clusters, links, jobs)})


def check(picture: str) -> ElementTree.Element:
    """Check that a picture has only our elements and attributes, and links to pages of this daemon."""
    root = ElementTree.fromstring(picture)
    for element in root.iter():
        assert element.tag in ELEMENTS
        assert not [name for name in element.attrib if name.startswith("on") or name in ("style", "xlink:href")]
        assert element.get("href", "/").startswith(("/clusters/", "/jobs/", "/network/", "/"))
        assert not element.get("href", "/").startswith("//")
    return root


@pytest.mark.parametrize("clusters", [1, 2, 3, MAX_RING, 60, 500])
def test_grid_map_shows_each_cluster_inside_the_picture(clusters: int) -> None:
    jobs = 4 if clusters > 1 else 0
    picture, links = draw_map(clusters, jobs)
    root = check(picture)
    discs = [element for element in root.iter("circle") if element.get("class") == "disc"]
    assert len(discs) == clusters
    _, _, width, height = map(float, root.get("viewBox", "").split())
    boxes = []
    for disc in discs:
        x, y, radius = (float(disc.get(name, "")) for name in ("cx", "cy", "r"))
        assert radius <= x <= width - radius
        assert radius <= y <= height - radius
        boxes.append((x, y, radius))
    for (x1, y1, r1), (x2, y2, r2) in combinations(boxes, 2):
        assert ((x1 - x2) ** 2 + (y1 - y2) ** 2) ** 0.5 >= (r1 + r2) * 0.9, "discs cover each other"
        if clusters <= MAX_RING and abs(x1 - x2) < max(r1, r2):
            assert abs(y1 - y2) >= r1 + r2 + 16, "a disc covers the name of another"
    assert len([e for e in root.iter("path") if "job" in e.get("class", "")]) == jobs
    if 1 < clusters <= MAX_RING:
        assert len([e for e in root.iter("line") if "link" in e.get("class", "")]) == links


def test_clusters_without_report_are_small_and_last() -> None:
    shown = [make_row(f"site-{n:02}", "usable", NodeCounts(idle=64), n < 48) for n in range(60)]
    root = check(render_map(shown, [], [MapJob(1, "running", {"site-48": 4, "site-59": 2})]))
    heights = {
        link.get("href", "").rpartition("/")[2]: float(disc.get("cy", ""))
        for link in root.iter("a")
        if (disc := link.find("circle")) is not None
    }
    first = min(heights[f"site-{n:02}"] for n in range(48))
    assert all(heights[f"site-{n:02}"] < first for n in range(48, 60))
    assert float(root.get("height", "")) < 900
    assert [e.text for e in root.iter("text") if e.get("class") == "name"][2:] == [f"site-{n}" for n in range(49, 59)]


def test_drawn_jobs_fit_on_the_ellipse() -> None:
    jobs = [MapJob(n, "running", {f"c{n}": 2, f"c{n + 1}": 1}) for n in range(0, 100, 2)]
    shown = drawn_jobs(jobs)
    assert len(shown) == MAX_RING // 2
    assert len({name for job in shown for name in job.nodes}) == MAX_RING


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_inject_no_element(text: str) -> None:
    counts = NodeCounts(1, 1, 1, 1, 1)
    rows = [make_row(text, text, counts, False), make_row("z", "usable", counts, True)]
    links = [MapLink((text, "z"), text, 1e8, 0.1, is_relayed=True)]
    root = check(render_map(rows, links, [MapJob(7, text, {text: 2, "z": 1})]))
    assert any(text in element.get("aria-label", "") for element in root.iter("a"))
    bar = TimelineBar(7, 2, [Phase("running", 1.0, 5.0)], 2, is_shared=True, error=text)
    shown = Timeline(
        0.0,
        9.0,
        6.0,
        [TimelineLane(text, 4, [bar], cluster_path(text), [UseSum(0, text, 2, local=4, idle=4)])],
        [ExpectedStart(8, 2, 6.5, 7.0, 8.0)],
        slot_s=6,
    )
    root = check(draw_timeline(shown))
    assert any(text in element.get("aria-label", "") for element in root.iter("a"))


spans = st.tuples(st.floats(0, 1000), st.floats(0.001, 1000), st.integers(1, 40))


@given(st.lists(spans, max_size=30), st.integers(1, 40), st.floats(0, 2500))
def test_timeline_keeps_bars_in_their_lane(drawn: list[tuple[float, float, int]], nodes: int, now: float) -> None:
    bars = [TimelineBar(n, size, [Phase("running", at, at + span)]) for n, (at, span, size) in enumerate(drawn)]
    placed = pack(bars, nodes)
    assert sorted(bar.job for bar, _ in placed) == list(range(len(bars)))
    for bar, offset in placed:
        assert 0 <= offset <= max(0, nodes - bar.size)
    uses = [UseSum(0, "north", 1, local=1, idle=1)] if bars else []
    lane = TimelineLane("north", nodes, bars, cluster_path("north"), uses)
    picture = draw_timeline(Timeline(0.0, 2000.0, now, [lane], slot_s=900))
    if not bars:
        assert picture == ""
        return
    root = check(picture)
    for rect in root.iter("rect"):
        x, y, wide, tall = (float(rect.get(name, "").rstrip("%")) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + wide <= 100.2
        assert y >= 0
        assert y + tall <= float(root.get("height", "")) + 1


def test_pack_puts_bars_that_fit_beside_each_other() -> None:
    bars = [TimelineBar(n, 2, [Phase("running", at, at + 10.0)]) for n, at in enumerate((0.0, 1.0, 2.0, 10.5))]
    assert [(bar.job, offset) for bar, offset in pack(bars, 6)] == [(0, 0), (1, 2), (2, 4), (3, 0)]


def test_component_phases_show_wait_at_barrier() -> None:
    part = PastComponent(7, 1, "north", 2, 10.0, 14.0, 15.0, 40.0, "", is_shared=True)
    assert component_phases(part, 99.0) == [Phase("claimed", 10.0, 15.0), Phase("running", 15.0, 40.0)]
    waiting = PastComponent(7, 1, "north", 2, 10.0, None, None, None, "", is_shared=True)
    assert component_phases(waiting, 12.0) == [Phase("claimed", 10.0, 12.0)]
    assert component_phases(PastComponent(7, 1, "north", 2, None, None, None, None, "", is_shared=False), 12.0) == []
