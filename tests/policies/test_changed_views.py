"""Views derived from earlier views, which equal newly created views."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import MAX_LASTING, ClusterState, ClusterView, GridView, Link, Uplink
from koalapy.model.errors import UsageError
from koalapy.model.request import ComponentRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.policies.registry import builtin_policies
from tests.policies.grids import clusters, fixed, grid, grids, linked, nonfixed, with_links

POLICIES = builtin_policies()
FILE = InputFile("data", 10, ("north", "west"))
PART = frozenset({"north", "south"})
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(FlexibleRequest, st.integers(1, 9), st.integers(1, 3), st.sampled_from([None, 1, 2])),
    st.just(FlexibleRequest(4, split_options=((3, 1), (2, 2)))),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda sizes: nonfixed(*sizes)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
        lambda sizes: NonFixedRequest(tuple(ComponentRequest(size, inputs=(FILE,)) for size in sizes))
    ),
    st.tuples(st.integers(1, 3), st.sampled_from(["north", "south"])).map(lambda component: fixed(component)),
)


@st.composite
def histories(draw: st.DrawFn) -> list[list[ClusterView]]:
    """Draw the clusters that change in each of several steps."""
    view = draw(linked(grids()))
    steps = [list(view)]
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.sets(st.sampled_from([c.name for c in view]))) if view.clusters else set()
        steps.append([replace(draw(clusters(name)), speed=draw(st.sampled_from([1.0, 2.0]))) for name in sorted(names)])
    return steps


def look(view: GridView) -> object:
    """Compute all derived values of a view, so that the next view can reuse them."""
    return view.by_idle, view.by_speed, view.usable_idle, [view.get(c.name) for c in view], list(view)


def answers(request: Request, view: GridView) -> dict[str, object]:
    by_policy: dict[str, object] = {}
    for name in POLICIES.names():
        try:
            policy = POLICIES.resolve(name, request)
        except UsageError:
            continue
        by_policy[name] = policy.place(request, view), policy.explain(request, view)
    return by_policy


@given(histories(), requests, requests, st.sampled_from([{}, {("north", "south"): Link(1.0, 2.0)}]))
def test_policies_answer_alike_on_changed_and_new_view(
    history: list[list[ClusterView]], earlier: Request, request: Request, links: dict[tuple[str, str], Link]
) -> None:
    first, *steps = history
    view = GridView(tuple(first), links)
    for step in steps:
        look(view)
        answers(earlier, view)
        answers(earlier, view.select_clusters(PART))
        view = view.with_clusters(step)
    new = GridView(view.clusters, view.links, view.waiting, view.replicas, view.cut_off)
    assert look(view) == look(new)
    assert answers(request, view) == answers(request, new)
    assert answers(request, view.select_clusters(PART)) == answers(request, new.select_clusters(PART))


def test_changed_view_keeps_its_uplinks() -> None:
    uplinks = {"north": Uplink(1e9, 1e6)}
    view = replace(grid(north=4, south=2), uplinks=uplinks)
    assert view.with_clusters([ClusterView("north", 4, 1)]).uplinks is uplinks
    assert view.with_waiting(()).uplinks is uplinks
    assert view.select_clusters(PART).uplinks is uplinks


def test_changing_a_view_leaves_the_original_unchanged() -> None:
    original = grid(north=4, south=2)
    look(original)
    changed = original.with_clusters([ClusterView("north", 4, 1)])
    assert [c.name for c in original.by_idle] == ["north", "south"]
    assert [c.name for c in changed.by_idle] == ["south", "north"]
    assert (original.usable_idle, changed.usable_idle) == (6, 3)
    assert original.with_clusters([]) is original


def test_compute_lasting_recomputes_after_relevant_changes() -> None:
    looks: list[GridView] = []

    def work(view: GridView) -> int:
        looks.append(view)
        return len(looks)

    view = grid(north=4, south=2)
    assert view.compute_lasting("key", work) == 1
    assert view.with_clusters([ClusterView("north", 4, 0)]).compute_lasting("key", work) == 1
    assert view.with_waiting((nonfixed(1),)).compute_lasting("key", work) == 1
    for different in (ClusterView("north", 4, 4, ClusterState.DRAINED), ClusterView("north", 4, 4, speed=2.0)):
        assert view.with_clusters([different]).compute_lasting("key", work) == len(looks)
    assert len(looks) == 3
    part = frozenset({"north"})
    assert view.select_clusters(part).compute_lasting("key", work) == 4
    assert view.with_clusters([ClusterView("south", 2, 0)]).select_clusters(part).compute_lasting("key", work) == 4
    assert with_links(view, {"north": Link(1.0)}).compute_lasting("key", work) == 5


def test_compute_lasting_cache_is_bounded() -> None:
    view, worked = grid(north=4), list[int]()

    def ask(key: int) -> None:
        def work(_: GridView) -> int:
            worked.append(key)
            return key

        assert view.compute_lasting(key, work) == key

    for key in [*range(MAX_LASTING), 0, MAX_LASTING]:
        ask(key)
    worked.clear()
    for key in (0, MAX_LASTING, 1):
        ask(key)
    assert worked == [1], "what was asked for least lately has been forgotten"


def test_view_with_waiting_jobs_shares_computed_values() -> None:
    view, waiting = grid(north=4, south=6), (nonfixed(2),)
    beside = view.with_waiting(waiting)
    assert beside == GridView(view.clusters, waiting=waiting)
    assert look(beside) == look(view)
    assert beside.with_clusters([ClusterView("south", 6, 1)]).waiting == waiting
