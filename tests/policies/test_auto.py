"""The advisor: one cluster, several clusters or a wait, decided by the application's statistics."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.advice import Option
from koalapy.model.cluster import ClusterState, GridView, Link
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FixedRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.policies.alternatives import find_multi_cluster_now, find_single_cluster_later, find_single_cluster_now
from koalapy.policies.auto import MAX_WAIT, Auto
from koalapy.policies.knowledge import (
    PAYS_UP_TO,
    SURE,
    Capacity,
    Knowledge,
    LogNormal,
    Release,
    RunTimes,
    Slowdowns,
    assume_slowdown,
)
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.queue.policy_answers import call_policy
from tests.policies.grids import (
    NAMES,
    fewest_missing,
    fixed,
    grid,
    grids,
    linked,
    nonfixed,
    shuffled,
    sites,
    with_links,
    with_speeds,
)

POLICIES = builtin_policies()

seconds = st.sampled_from([0.5, 10.0, 100.0])
times = st.builds(LogNormal, seconds.map(log), st.sampled_from([0.01, 0.3]))
wheres = st.sets(st.sampled_from(NAMES), min_size=2, max_size=4).map(lambda names: tuple(sorted(names)))
run_times = st.just(RunTimes()) | st.builds(RunTimes, times, st.dictionaries(wheres, times, max_size=3))
beliefs = st.builds(LogNormal, st.floats(-0.5, 1.5), st.sampled_from([0.02, 0.1, 0.5]))
slowdowns = st.sampled_from([None, 0.0, 0.1, 0.25, 0.5, 1.0]).map(
    lambda share: Slowdowns(assume_slowdown(share))
) | st.builds(Slowdowns, beliefs, st.dictionaries(wheres, beliefs, max_size=3), st.integers(0, 9))
releases = st.lists(st.builds(Release, seconds, st.integers(1, 4), seconds), max_size=3)
unknown = st.lists(st.builds(Release, st.none(), st.integers(1, 4), seconds), max_size=2)
capacities = st.builds(
    lambda most, known, others: Capacity(
        most, (*sorted(known, key=lambda r: r.seconds), *sorted(others, key=lambda r: r.age))
    ),
    st.integers(0, 6),
    releases,
    unknown,
)
knowledge = st.builds(
    Knowledge,
    st.just("wave"),
    run_times,
    slowdowns,
    st.none() | st.just(0.25),
    st.just(()),
    st.dictionaries(st.sampled_from(NAMES), capacities),
    st.booleans(),
    probing=st.sampled_from([None, lambda harmless: True, lambda harmless: harmless > 0.3]),
)
choosing = st.one_of(
    st.integers(1, 12).flatmap(
        lambda total: st.builds(
            FlexibleRequest, st.just(total), st.integers(1, min(3, total)), st.sampled_from([None, 1, 2, 3])
        )
    ),
    st.sampled_from([((6,), (4, 2)), ((3, 3), (2, 2, 2))]).map(lambda ways: FlexibleRequest(6, split_options=ways)),
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda sizes: nonfixed(*sizes)),
)
requests = choosing | st.dictionaries(st.sampled_from(NAMES), st.integers(1, 4), min_size=1).map(
    lambda wanted: fixed(*((size, name) for name, size in wanted.items()))
)


# Rules for every request, grid and knowledge


@given(request=requests, view=linked(grids()), knowledge=knowledge)
def test_auto_placement_is_valid_and_lists_alternatives(request: Request, view: GridView, knowledge: Knowledge) -> None:
    answer = call_policy(Auto().informed(knowledge), request, view)
    if isinstance(answer, Placement):
        assert answer.advice is not None
        assert set(answer.advice.chosen_option.clusters) == {component.cluster for component in answer.components}
        assert answer.reason


@given(request=choosing, view=linked(grids()), knowledge=knowledge)
def test_auto_choice_has_the_best_prediction(
    request: FlexibleRequest | NonFixedRequest, view: GridView, knowledge: Knowledge
) -> None:
    answer = Auto(knowledge).place(request, view)
    if isinstance(answer, Placement):
        assert answer.advice is not None
        responses = [option.response for option in answer.advice.options if option.response is not None]
        if (chosen := answer.advice.chosen_option.response) is not None and not knowledge.loaded:
            assert chosen <= min(responses)
        return
    together = find_multi_cluster_now(request, view, knowledge)
    if isinstance(together, Refusal):
        return  # there was no option to choose from
    assert find_single_cluster_now(request, view, knowledge) is None
    later = find_single_cluster_later(request, view, knowledge)
    assert later is not None, "it only ever waits for room that there will be"
    now, then = together[0].option.response, later.option.response
    is_unsure = knowledge.slowdowns.harmless_probability(together[0].option.clusters) < SURE
    is_too_slow = is_unsure or together[0].option.slowdown > PAYS_UP_TO
    is_forbidden = knowledge.loaded and is_unsure
    assert is_forbidden or (is_too_slow if now is None or then is None else then < now)


@given(request=choosing, view=linked(grids()), knowledge=knowledge)
def test_auto_without_future_single_cluster_coallocates(
    request: FlexibleRequest | NonFixedRequest, view: GridView, knowledge: Knowledge
) -> None:
    """Every request that the default policy places is placed, even on several clusters with any slowdown."""
    never = replace(
        knowledge, capacities={name: replace(capacity, max_idle=0) for name, capacity in knowledge.capacities.items()}
    )
    placed = isinstance(Auto(never).place(request, view), Placement)
    assert placed == isinstance(POLICIES.resolve("", request).place(request, view), Placement)


@given(request=requests, views=shuffled(grids()), knowledge=knowledge)
def test_auto_does_not_depend_on_cluster_order(
    request: Request, views: tuple[GridView, GridView], knowledge: Knowledge
) -> None:
    first, second = (Auto(knowledge).place(request, view) for view in views)
    if isinstance(first, Placement) and isinstance(second, Placement):
        assert first.components == second.components
    else:
        assert type(first) is type(second)


@given(request=choosing, view=grids(), knowledge=knowledge)
def test_auto_explains_each_cluster_with_sufficient_nodes(
    request: FlexibleRequest | NonFixedRequest, view: GridView, knowledge: Knowledge
) -> None:
    policy = Auto(knowledge)
    reasons = policy.explain(request, view)
    if isinstance(policy.place(request, view), Placement):
        assert reasons == ()
        return
    assert [reason.cluster for reason in reasons] == sorted(cluster.name for cluster in view)
    for reason in reasons:
        assert reason.missing == fewest_missing(policy, request, view, reason.cluster)


# Rules from the literature


def capacities_of(max_idle: int = 4, *releases: Release) -> dict[str, Capacity]:
    """Return the capacities of both clusters of the grid below, with their releases."""
    return {name: Capacity(max_idle, releases) for name in ("north", "south")}


SPLIT = grid(north=(3, 4), south=(3, 4))
FOUR = FlexibleRequest(4)
UNKNOWN = capacities_of(4, Release(None, 1, 5.0))


def knowledge_of(factor: float, alone: float = 100.0, runs: int = 20) -> Knowledge:
    """Return knowledge of an application that ran as often on one cluster as on two."""
    both = {("north", "south"): LogNormal(log(alone * factor), 0.02)}
    slowdowns = Slowdowns(LogNormal(log(factor), 0.1), {("north", "south"): LogNormal(log(factor), 0.02)}, runs)
    return Knowledge("wave", RunTimes(LogNormal(log(alone), 0.02), both), slowdowns, capacities=UNKNOWN)


def knowledge_without_runs(share: float | None, **fields: Any) -> Knowledge:
    """Return knowledge of an application without runs, with its declared share of communication or None."""
    return Knowledge(
        "new", slowdowns=Slowdowns(assume_slowdown(share)), communication=share, capacities=UNKNOWN, **fields
    )


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("share", "co_allocated"), [(0.0, True), (0.1, True), (0.2, True), (1 / 3, False), (0.35, False), (1.0, False)]
)
def test_auto_without_runs_uses_declared_communication(share: float, loaded: bool, co_allocated: bool) -> None:
    assert isinstance(Auto(knowledge_without_runs(share, loaded=loaded)).place(FOUR, SPLIT), Placement) == co_allocated


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("probes", [False, True])
def test_auto_unknown_application_is_coallocated_only_to_probe(loaded: bool, probes: bool) -> None:
    probabilities: list[float] = []

    def probing(harmless: float) -> bool:
        probabilities.append(harmless)
        return probes

    answer = Auto(knowledge_without_runs(None, loaded=loaded, probing=probing)).place(FOUR, SPLIT)
    assert isinstance(answer, Placement) == probes
    assert probabilities == [Slowdowns().harmless_probability(("north", "south"))]
    assert 0.2 < probabilities[0] < SURE
    if isinstance(answer, Placement):
        assert "a slowdown of 1.15 (1.00 to 2.37, assumed) on 2 clusters now is not known well enough" in answer.reason
    else:
        assert answer.summary.endswith("may be too much while others wait" if loaded else "may be more than 1.25")


def test_auto_without_application_name_never_probes() -> None:
    """Statistics are kept by application name, so a probe would teach nothing."""
    assert isinstance(Auto(replace(knowledge_without_runs(None), application="")).place(FOUR, SPLIT), Refusal)


def test_auto_slowdown_is_harmless_only_if_precise() -> None:
    for deviation, co_allocated in ((0.05, True), (0.6, False)):
        slowdowns = Slowdowns(LogNormal(log(1.15), deviation), {}, 9)
        knowledge = replace(knowledge_without_runs(None, loaded=True), slowdowns=slowdowns)
        assert isinstance(Auto(knowledge).place(FOUR, SPLIT), Placement) == co_allocated


@pytest.mark.parametrize(("factor", "co_allocated"), [(1.0, True), (1.2, True), (1.35, False), (3.0, False)])
def test_auto_with_unknown_wait_decides_by_slowdown(factor: float, co_allocated: bool) -> None:
    assert isinstance(Auto(knowledge_of(factor)).place(FOUR, SPLIT), Placement) == co_allocated


@pytest.mark.parametrize(
    ("factor", "wait", "loaded", "co_allocated"),
    [
        (1.2, 10.0, False, False),  # 120 s now, 110 s later
        (1.2, 30.0, False, True),
        (3.0, 150.0, False, False),
        (3.0, 250.0, False, True),
        (3.0, 250.0, True, False),  # other jobs wait
        (1.0, 0.1, True, True),
    ],
)
def test_auto_with_known_times_takes_shorter_response(
    factor: float, wait: float, loaded: bool, co_allocated: bool
) -> None:
    knowledge = replace(knowledge_of(factor), capacities=capacities_of(4, Release(wait, 1)), loaded=loaded)
    assert isinstance(Auto(knowledge).place(FOUR, SPLIT), Placement) == co_allocated


def test_auto_does_not_wait_for_long_running_jobs() -> None:
    knowledge = replace(knowledge_of(3.0), capacities=capacities_of(4, Release(None, 1, 299.0)), loaded=True)
    assert isinstance(Auto(knowledge).place(FOUR, SPLIT), Refusal)
    knowledge = replace(knowledge, capacities=capacities_of(4, Release(None, 1, 300.0)))
    assert isinstance(Auto(knowledge).place(FOUR, SPLIT), Placement)


@pytest.mark.parametrize(
    ("knowledge", "patience"),
    [
        (knowledge_of(3.0), 300.0),
        (replace(knowledge_of(3.0), capacities=capacities_of(4, Release(1.0, 1))), 300.0),
        (knowledge_without_runs(0.9), MAX_WAIT),
    ],
)
def test_auto_waits_at_most_its_run_time(knowledge: Knowledge, patience: float) -> None:
    """Without this limit, later jobs could repeatedly take the awaited nodes."""
    assert isinstance(Auto(replace(knowledge, waited=0.99 * patience)).place(FOUR, SPLIT), Refusal)
    answer = Auto(replace(knowledge, waited=patience)).place(FOUR, SPLIT)
    assert isinstance(answer, Placement)
    assert f"it has waited {patience:g} s with room on several clusters" in answer.reason


def test_auto_harmful_job_waits_while_others_wait() -> None:
    """A CCR of 0.5 and more prevents co-allocation under load (sonmez-2010 VI-C)."""
    answer = Auto(replace(knowledge_of(3.0), loaded=True, waited=1e6)).place(FOUR, SPLIT)
    assert isinstance(answer, Refusal)
    assert "too much while others wait" in answer.summary


def test_auto_does_not_wait_for_local_users() -> None:
    """The end of their jobs is unknown."""
    knowledge = replace(knowledge_of(3.0), capacities=capacities_of(3))
    answer = Auto(knowledge).place(FOUR, SPLIT)
    assert isinstance(answer, Placement)
    assert answer.reason.endswith("no cluster could hold it alone; predicted to run 300 s")


def test_auto_takes_the_tightest_single_cluster() -> None:
    assert sites(Auto(knowledge_of(1.0)).place(FOUR, grid(north=6, south=5, west=3))) == [(4, "south")]


def test_auto_takes_single_cluster_with_earliest_end() -> None:
    view = with_speeds(grid(north=6, south=6), south=2.0)
    assert sites(Auto(knowledge_of(1.0)).place(FOUR, view)) == [(4, "south")]
    near = with_links(grid(north=6, south=5), {"north": Link(1e-5), "south": Link(1e-4)})
    assert sites(Auto(knowledge_of(1.0)).place(FOUR, near)) == [(4, "north")]


def test_auto_may_prefer_fast_clusters_to_a_slow_one() -> None:
    view = with_speeds(grid(north=4, south=3, west=3), south=2.0, west=2.0)
    assert sites(Auto(knowledge_of(1.2)).place(FOUR, view)) == [(3, "south"), (1, "west")]
    assert sites(Auto(knowledge_of(3.0)).place(FOUR, view)) == [(4, "north")]
    assert sites(Auto().place(FOUR, view)) == [(4, "north")], "nothing is known that speaks for it"


def test_auto_prefers_split_mostly_on_one_cluster() -> None:
    """With 9 of 10 nodes in north, hardly any traffic crosses a link, so the fastest link is of little use."""
    links = {"west south": Link(1e-4), "north south": Link(1e-2), "north west": Link(1e-2)}
    view = with_links(grid(north=9, south=5, west=5), links)
    assert sites(Auto().place(FlexibleRequest(10), view)) == [(9, "north"), (1, "south")]
    unmeasured = with_links(view, {"west south": Link(1e-4)})
    assert sites(Auto().place(FlexibleRequest(10), unmeasured)) == [(5, "south"), (5, "west")]
    view = with_links(grid(north=6, south=5, west=5), links)
    assert sites(Auto().place(FlexibleRequest(10), view)) == [(5, "south"), (5, "west")]


def test_auto_places_components_on_few_clusters() -> None:
    """Worst fit would use three clusters."""
    view = grid(north=5, south=5, west=4)
    placed = Auto().place(nonfixed(2, 2, 2), view)
    assert {name for _, name in sites(placed)} == {"north", "south"}
    assert {name for _, name in sites(Auto().place(nonfixed(2, 2), view))} == {"west"}


def test_auto_places_components_on_near_clusters() -> None:
    """Most idle nodes are in north and west, but the link between them is slow or unmeasured."""
    view = grid(north=5, south=3, west=5)
    slow = with_links(view, {"north south": Link(1e-4), "north west": Link(1e-1), "south west": Link(1e-2)})
    assert sites(Auto().place(nonfixed(3, 3), slow)) == [(3, "north"), (3, "south")]
    unmeasured = with_links(view, {"north south": Link(1e-4), "south west": Link(1e-4)})
    assert {name for _, name in sites(Auto().place(nonfixed(4, 3), unmeasured))} in (
        {"north", "south"},
        {"south", "west"},
    )
    assert {name for _, name in sites(Auto().place(nonfixed(4, 4), unmeasured))} == {"north", "west"}, "no other way"


def test_auto_includes_transfers_in_response_time() -> None:
    view = with_links(grid(north=4, south=4), {"north south": Link(bandwidth=1e6)})
    component = replace(nonfixed(2).components[0], inputs=(InputFile("data", 10**7, ("south",)),))
    answer = Auto(knowledge_of(1.0)).place(NonFixedRequest((component,)), view)
    assert isinstance(answer, Placement)
    assert [(c.cluster, c.sources, c.transfer_time) for c in answer.components] == [("south", ("south",), 0.0)]
    flexible = replace(knowledge_of(1.0), inputs=(InputFile("data", 10**7, ("south",)),))
    assert sites(Auto(flexible).place(FlexibleRequest(2), view)) == [(2, "south")]


def test_auto_fixed_request_is_placed_as_requested() -> None:
    request: FixedRequest = fixed((2, "north"), (2, "south"))
    answer = Auto(knowledge_of(3.0)).place(request, SPLIT)
    assert isinstance(answer, Placement)
    assert answer.advice is not None
    assert answer.advice.options == (Option(("north", "south"), pytest.approx(3.0), run=pytest.approx(300.0)),)


# Messages for users


def test_auto_refusal_names_awaited_nodes_and_time() -> None:
    knowledge = replace(knowledge_of(3.0), capacities=capacities_of(4, Release(90.0, 1)), now=1_800_000_000.0)
    answer = Auto(knowledge).place(FOUR, SPLIT)
    assert str(answer) == (
        "waits for 4 nodes in north, expected at 08:01:30: predicted are 300 s with a slowdown of 3.00 "
        "(2.92 to 3.08, from 20 runs) on 2 clusters now, 190 s in north from 08:01:30"
    )
    reason = Auto(knowledge).explain(FOUR, SPLIT)[0]
    assert reason.reason == "3 of 4 nodes idle, the request needs 4 in all, which are expected here at 08:01:30"
    assert reason.missing == 1


def test_auto_refusal_without_time_names_the_slowdown() -> None:
    slowdown = "a slowdown of 3.00 (2.92 to 3.08, from 20 runs) on 2 clusters now"
    expected = f"waits for 4 nodes in one cluster, such as north: {slowdown}"
    assert str(Auto(knowledge_of(3.0)).place(FOUR, SPLIT)) == f"{expected} is more than 1.25"
    loaded = Auto(replace(knowledge_of(3.0), loaded=True)).place(FOUR, SPLIT)
    assert str(loaded) == f"{expected} is too much while others wait"


def test_auto_refusal_for_too_few_nodes_counts_them() -> None:
    answer = Auto(knowledge_of(1.0)).place(FlexibleRequest(8), SPLIT)
    assert str(answer) == "needs 8 nodes; 6 are idle (north 3, south 3)"
    closed = GridView(tuple(replace(c, state=ClusterState.DRAINED) for c in SPLIT))
    assert str(Auto().place(FOUR, closed)) == "no cluster is usable (north drained, south drained)"
