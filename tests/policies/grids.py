"""Short constructors of small grids and requests, and strategies that draw them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, ClusterView, GridView, Link
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.policies.policy import Policy

NAMES = ("east", "north", "south", "west")


def grid(**idle: int | tuple[int, int]) -> GridView:
    """Return a grid: ``grid(north=3, south=(2, 4))`` has 3 idle nodes of 3, and 2 of 4."""
    sizes = {name: (count, count) if isinstance(count, int) else count for name, count in idle.items()}
    return GridView(tuple(ClusterView(name, total, idle) for name, (idle, total) in sorted(sizes.items())))


def with_state(view: GridView, name: str, state: ClusterState, note: str = "") -> GridView:
    clusters = tuple(replace(c, state=state, note=note) if c.name == name else c for c in view)
    return GridView(clusters, view.links, view.waiting)


def with_idle(view: GridView, name: str, idle: int) -> GridView:
    clusters = tuple(replace(c, idle=idle) if c.name == name else c for c in view)
    return GridView(clusters, view.links, view.waiting)


def with_speeds(view: GridView, **speeds: float) -> GridView:
    clusters = tuple(replace(c, speed=speeds.get(c.name, c.speed)) for c in view)
    return GridView(clusters, view.links, view.waiting)


def with_links(view: GridView, links: Mapping[str, Link]) -> GridView:
    """Add links, such as ``{"north south":

    Link(0.001), "north": Link(0.0001)}``: between two clusters, or within one.
    """
    ends = {name: tuple(name.split()) for name in links}
    named_links = {(pair[0], pair[-1]): links[name] for name, pair in ends.items()}
    return GridView(view.clusters, named_links, view.waiting)


def nonfixed(*sizes: int) -> NonFixedRequest:
    return NonFixedRequest(tuple(ComponentRequest(size) for size in sizes))


def fixed(*components: tuple[int, str]) -> FixedRequest:
    return FixedRequest(tuple(ComponentRequest(size, cluster) for size, cluster in components))


def sites(answer: Placement | Refusal) -> list[tuple[int, str]]:
    """Return size and cluster of each component of a placement."""
    assert isinstance(answer, Placement), answer
    return [(component.size, component.cluster) for component in answer.components]


def summary(answer: Placement | Refusal) -> str:
    assert isinstance(answer, Refusal), answer
    return answer.summary


def explained(policy: Policy, request: object, view: GridView) -> list[tuple[str, str, int | None]]:
    return [(r.cluster, r.reason, r.missing) for r in policy.explain(request, view)]  # type: ignore[arg-type]


def fewest_missing(policy: Policy, request: object, view: GridView, name: str) -> int | None:
    """Search for the fewest additional idle nodes on one cluster that make the request placeable; None if none do."""
    cluster = view.get(name)
    if cluster is None or cluster.state is not ClusterState.USABLE:
        return None
    for idle in range(cluster.idle + 1, cluster.total + 1):
        if isinstance(policy.place(request, with_idle(view, name, idle)), Placement):  # type: ignore[arg-type]
            return idle - cluster.idle
    return None


@st.composite
def clusters(draw: st.DrawFn, name: str, largest: int = 6) -> ClusterView:
    total = draw(st.integers(0, largest))
    state = draw(st.sampled_from([ClusterState.USABLE] * 5 + list(ClusterState)))
    return ClusterView(name, total, draw(st.integers(0, total)), state)


@st.composite
def linked(draw: st.DrawFn, views: st.SearchStrategy[GridView]) -> GridView:
    """Draw a grid with speeds and with links that are measured, partly measured, unmeasured or unreachable."""
    view = draw(views)
    measured = st.none() | st.sampled_from([1.0, 2.0, 3.0])
    pairs = [(a.name, b.name) for a in view for b in view if a.name <= b.name]
    each = st.builds(Link, measured, measured)
    link = st.one_of(each, each, each, st.just(Link(unreachable=True)))
    links = {pair: draw(link) for pair in pairs if draw(st.integers(0, 3))}
    speeds = {c.name: draw(st.sampled_from([1.0, 1.5, 2.0])) for c in view}
    return GridView(with_speeds(view, **speeds).clusters, links)


@st.composite
def grids(draw: st.DrawFn, largest: int = 6) -> GridView:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    return GridView(tuple(draw(clusters(name, largest)) for name in sorted(names)))


@st.composite
def shuffled(draw: st.DrawFn, views: st.SearchStrategy[GridView]) -> tuple[GridView, GridView]:
    """Draw a grid, and the same grid with its clusters in another order."""
    view = draw(views)
    return view, GridView(tuple(draw(st.permutations(view.clusters))))


def splits(total: int, idle: list[int], min_size: int, max_count: int) -> Iterator[tuple[int, ...]]:
    """Yield each split: every cluster gets 0 or at least ``min_size`` nodes; at most ``max_count`` get any."""
    if not idle:
        if total == 0:
            yield ()
        return
    for later_sizes in splits(total, idle[1:], min_size, max_count):
        yield (0, *later_sizes)
    if max_count > 0:
        for size in range(min_size, min(idle[0], total) + 1):
            for later_sizes in splits(total - size, idle[1:], min_size, max_count - 1):
                yield (size, *later_sizes)


def can_be_assigned(sizes: list[int], idle: list[int]) -> bool:
    """Return whether an assignment of the sizes to clusters fits, by a search over all."""
    if not sizes:
        return True
    return any(
        room >= sizes[0] and can_be_assigned(sizes[1:], [*idle[:place], room - sizes[0], *idle[place + 1 :]])
        for place, room in enumerate(idle)
    )


@st.composite
def flexible_requests(draw: st.DrawFn, largest: int = 16) -> FlexibleRequest:
    total = draw(st.integers(1, largest))
    return FlexibleRequest(total, draw(st.integers(1, min(total, 5))), draw(st.none() | st.integers(1, 5)))


def make_split(*options: tuple[int, ...]) -> FlexibleRequest:
    return FlexibleRequest(sum(options[0]), split_options=options)


split_requests = st.lists(
    st.sampled_from([(6,), (5, 1), (1, 5), (4, 2), (3, 3), (2, 2, 2), (3, 2, 1)]), min_size=1, max_size=4
).map(lambda options: make_split(*options))
one_file = st.builds(
    InputFile, st.just("data"), st.integers(0, 3), st.lists(st.sampled_from(NAMES), unique=True, max_size=2).map(tuple)
)
files = st.lists(one_file, max_size=2).map(tuple)
requests_with_inputs = st.lists(
    st.builds(ComponentRequest, st.integers(1, 4), inputs=files), min_size=1, max_size=4
).map(lambda drawn: NonFixedRequest(tuple(drawn)))
