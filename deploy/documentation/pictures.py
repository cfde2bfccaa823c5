"""Draw the pictures of the policies' pages in ``docs/policies/``: ``python -m deploy.documentation.pictures``.

Each shows the placement of the page's example by its policy, on the grid of all these pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from koalapy.model.cluster import ClusterView, GridView, Link, Uplink
from koalapy.model.placement import Placement
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.policies.knowledge import Knowledge
from koalapy.policies.registry import builtin_policies

FOLDER = Path(__file__).parents[2] / "docs" / "policies"
FILE = InputFile("mesh", 6 * 10**9, ("west",))
GRID = GridView(
    (
        ClusterView("north", 10, 8, speed=1.0),
        ClusterView("south", 8, 7, speed=1.5),
        ClusterView("west", 8, 6, speed=1.4),
    ),
    {
        ("north", "south"): Link(50e-3, 50e6),
        ("north", "west"): Link(1e-3, 125e6),
        ("south", "west"): Link(1e-3, 250e6),
        ("north", "north"): Link(20e-6),
        ("south", "south"): Link(10e-6),
        ("west", "west"): Link(15e-6),
    },
    uplinks={"north": Uplink(125e6), "south": Uplink(125e6), "west": Uplink(60e6)},
)


@dataclass(frozen=True, slots=True)
class Example:
    """A request as options and as an object, and the fact shown for each cluster."""

    arguments: str
    request: Request
    fact: Callable[[ClusterView], str]
    waiting: tuple[Request, ...] = ()
    note: str = ""
    """Further text below the request."""
    knowledge: Knowledge | None = None
    """The job's declarations about its program."""


def _size(cluster: ClusterView) -> str:
    return f"{cluster.idle} idle"


def _speed(cluster: ClusterView) -> str:
    return f"{cluster.idle} idle, speed {cluster.speed:g}"


def _latency(cluster: ClusterView) -> str:
    within = GRID.link_between(cluster.name, cluster.name).latency or 0.0
    return f"{cluster.idle} idle, {within * 1e6:.0f} us within"


def _uplink(cluster: ClusterView) -> str:
    capacity = GRID.uplinks[cluster.name].capacity or 0.0
    return f"{_speed(cluster)}, uplink {capacity / 1e6:.0f} MB/s"


def _file(cluster: ClusterView) -> str:
    bandwidth = GRID.link_between("west", cluster.name).bandwidth
    return (
        "mesh is here"
        if cluster.name in FILE.sites or bandwidth is None
        else f"{FILE.size / bandwidth:.0f} s from west"
    )


def _nonfixed(*sizes: int, inputs: tuple[InputFile, ...] = ()) -> NonFixedRequest:
    return NonFixedRequest(tuple(ComponentRequest(size, inputs=inputs) for size in sizes))


LATENCIES = "between north and south 50 ms, west and either 1 ms"
TWO_FIXED = FixedRequest((ComponentRequest(2, "north"), ComponentRequest(4, "south")))
EXAMPLES = {
    "fixed": Example("--fixed north:2,south:4", TWO_FIXED, _size),
    "worst-fit": Example("--nonfixed 4,4,2", _nonfixed(4, 4, 2), _size),
    "close-to-files": Example(
        "--nonfixed 4,4 --policy close-to-files --input mesh",
        _nonfixed(4, 4, inputs=(FILE,)),
        _file,
        note="mesh is a file of 6 GB",
    ),
    "cluster-minimization": Example("--flexible 12", FlexibleRequest(12), _size),
    "communication-aware": Example(
        "--flexible 12 --policy communication-aware", FlexibleRequest(12), _latency, note=LATENCIES
    ),
    "resource-matching": Example(
        "--flexible 12 --policy resource-matching --communication 0.6 --per-node-bandwidth 25MB",
        FlexibleRequest(12),
        _uplink,
        knowledge=Knowledge(communication=0.6, bandwidth=25e6),
    ),
    "larger-first": Example("--flexible 12 --policy larger-first", FlexibleRequest(12), _size),
    "faster-first": Example("--flexible 12 --policy faster-first", FlexibleRequest(12), _speed),
    "best-fit": Example("--nonfixed 5 --policy best-fit", _nonfixed(5), _size),
    "fastest-one": Example("--nonfixed 5 --policy fastest-one", _nonfixed(5), _speed),
    "adaptive": Example(
        "--nonfixed 5 --policy adaptive",
        _nonfixed(5),
        _speed,
        waiting=(FixedRequest((ComponentRequest(6, "south"),)),),
        note="a job that waits wants 6 nodes of south",
    ),
    "auto": Example("--flexible 12 --policy auto", FlexibleRequest(12), _latency, note=LATENCIES),
}


def placement(name: str) -> Placement:
    """Return the placement of a policy's example."""
    example = EXAMPLES[name]
    policy: Any = builtin_policies().resolve(name, example.request)
    if example.knowledge is not None:
        policy = policy.informed(example.knowledge)
    answer = policy.place(example.request, replace(GRID, waiting=example.waiting))
    assert isinstance(answer, Placement), answer
    return answer


def result(answer: Placement) -> str:
    """Format a placement as ``north 8, south 4``."""
    names = dict.fromkeys(component.cluster for component in answer.components)
    return ", ".join(f"{name} {answer.nodes_on(name)}" for name in names)


# The drawing: one lane for each cluster, one square for each node

WIDTH, LEFT, TOP, LANE, NODE, GAP = 700, 90, 62, 52, 30, 6
STYLE = """
.card { fill: #ffffff; stroke: #c4ccd3; } .words, .name { font: 600 14px system-ui, sans-serif; fill: #1c2329; }
.fact, .key { font: 12px system-ui, sans-serif; fill: #4a555f; }
.idle { fill: none; stroke: #5d6b77; stroke-width: 1.5; }
.busy { fill: #d4dae0; stroke: none; } .cross { stroke: #7b8894; stroke-width: 1.5; }
.c0 { fill: #00695c; } .c1 { fill: #b23c17; } .c2 { fill: #5e35b1; }
.mark { font: 600 13px system-ui, sans-serif; fill: #ffffff; text-anchor: middle; }
@media (prefers-color-scheme: dark) {
.card { fill: #1d242b; stroke: #3d4954; } .words, .name { fill: #eef2f5; } .fact, .key { fill: #b4c0ca; }
.idle { stroke: #93a1ad; } .busy { fill: #39444e; } .cross { stroke: #7b8894; }
.c0 { fill: #00796b; } .c1 { fill: #c4491f; } .c2 { fill: #7449c9; }
}
""".strip()


def picture(name: str) -> str:
    """Return the SVG of a policy's example."""
    example, answer = EXAMPLES[name], placement(name)
    height = TOP + LANE * len(GRID.clusters) + 40
    title = f"{name} places koala submit {example.arguments} as {result(answer)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text("words", 16, 28, f"koala submit {example.arguments}"),
        *([_text("fact", 16, 47, example.note)] if example.note else []),
    ]
    for number, cluster in enumerate(GRID):
        lines += _lane(cluster, answer, TOP + LANE * number, example.fact(cluster))
    lines += [*_key(TOP + LANE * len(GRID.clusters) + 8), "</svg>"]
    return "\n".join(lines) + "\n"


def _lane(cluster: ClusterView, answer: Placement, y: int, fact: str) -> Iterator[str]:
    yield _text("name", 16, y + 21, cluster.name)
    components = [
        number for number, c in enumerate(answer.components) for _ in range(c.size) if c.cluster == cluster.name
    ]
    for node in range(cluster.total):
        x = LEFT + node * (NODE + GAP)
        square = f'x="{x}" y="{y}" width="{NODE}" height="{NODE}" rx="4"'
        if node < len(components):
            yield f'<rect class="c{components[node]}" {square}/>'
            yield _text("mark", x + NODE // 2, y + 20, str(components[node]))
        elif node < cluster.idle:
            yield f'<rect class="idle" {square}/>'
        else:
            yield f'<rect class="busy" {square}/>'
            yield f'<path class="cross" d="M{x + 9} {y + 9}l12 12m0 -12l-12 12"/>'
    yield _text("fact", LEFT + 10 * (NODE + GAP) + 10, y + 20, fact)


def _key(y: int) -> Iterator[str]:
    yield f'<rect class="c0" x="{LEFT}" y="{y}" width="14" height="14" rx="2"/>'
    yield _text("key", LEFT + 20, y + 12, "taken, with the number of its component")
    yield f'<rect class="idle" x="{LEFT + 290}" y="{y}" width="14" height="14" rx="2"/>'
    yield _text("key", LEFT + 310, y + 12, "idle")
    yield f'<rect class="busy" x="{LEFT + 370}" y="{y}" width="14" height="14" rx="2"/>'
    yield f'<path class="cross" d="M{LEFT + 374} {y + 4}l6 6m0 -6l-6 6"/>'
    yield _text("key", LEFT + 390, y + 12, "others have it")


def _text(kind: str, x: int, y: int, text: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in EXAMPLES:
        (FOLDER / f"{name}.svg").write_text(picture(name), encoding="utf-8")


if __name__ == "__main__":
    main()
