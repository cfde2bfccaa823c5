"""Where a job may run at all: folders it needs, one series of Open MPI; and policies that answer nonsense."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, ClusterView, GridView, NodeClass
from koalapy.model.job import JobSpec, JobState, Launcher
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.profile import ClusterProfile, Mpi
from koalapy.model.reports import ClusterReport
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, Request, RequestType
from koalapy.model.users import Accounts
from koalapy.policies.policy import Policy
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.events import PeriodicScan, Reported
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.policy_calls import BrokenPolicy, PolicyCalls
from koalapy.scheduler.rules import Rules
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.submission import check_submission
from tests.policies.grids import NAMES, grid, grids, summary, with_state
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

FIVE, FOUR = ClusterProfile(mpi=Mpi(5)), ClusterProfile(mpi=Mpi(4))
SCRATCH = ClusterProfile(scratch="/scratch")
BARE = ClusterProfile()


def ask(
    request: Request,
    view: GridView,
    profiles: dict[str, ClusterProfile],
    *command: str,
    launcher: Launcher = Launcher.OPENMPI,
    policy: Policy | None = None,
) -> Placement | Refusal:
    spec = JobSpec(request, command or ("true",), launcher=launcher)
    return PolicyCalls(Eligibility(profiles, Accounts())).evaluate(
        policy or builtin_policies().resolve("", request), spec, view
    )


def clusters(answer: Placement | Refusal) -> set[str]:
    assert isinstance(answer, Placement), answer
    return {component.cluster for component in answer.components}


# One series of Open MPI


def test_clusters_of_two_series_are_never_combined() -> None:
    view = grid(east=3, north=4, south=2)
    profiles = {"east": FIVE, "north": FOUR, "south": FIVE}
    assert clusters(ask(flexible(5), view, profiles)) == {"east", "south"}
    assert clusters(ask(nonfixed(3, 2), view, profiles)) == {"east", "south"}
    assert clusters(ask(flexible(4), view, profiles)) == {"east", "south"}, "the series with the most idle nodes first"
    assert clusters(ask(nonfixed(4), view, profiles)) == {"north"}
    assert clusters(ask(flexible(5), view, profiles, launcher=Launcher.PROCESSES)) == {"east", "north"}


def test_a_tie_of_two_series_goes_by_name() -> None:
    assert clusters(ask(flexible(2), grid(east=3, north=3), {"east": FOUR, "north": FIVE})) == {"east"}
    assert clusters(ask(flexible(2), grid(east=3, north=3), {"east": FIVE, "north": FOUR})) == {"east"}


def test_the_refusal_says_when_only_the_series_stand_in_the_way() -> None:
    view, profiles = grid(north=4, south=3), {"north": FIVE, "south": FOUR}
    assert summary(ask(flexible(6), view, profiles)) == (
        "needs 6 nodes; 4 are idle (north 4); north has Open MPI 5, south 4: a job runs under one series"
    )
    assert summary(ask(flexible(9), view, profiles)) == "needs 9 nodes; 4 are idle (north 4)"


def test_only_usable_clusters_count() -> None:
    view = with_state(grid(north=4, south=3), "south", ClusterState.UNREACHABLE)
    refused = ask(flexible(6), view, {"north": FIVE, "south": FOUR})
    assert summary(refused) == "needs 6 nodes; 4 are idle (north 4; south unreachable)"


def test_a_fixed_request_over_two_series() -> None:
    view, profiles = grid(east=4, north=4, south=4), {"east": FIVE, "north": FIVE, "south": FOUR}
    said = "north has Open MPI 5, south 4: a job runs under one series"
    assert summary(ask(fixed(north=1, south=1), view, profiles)) == said
    assert clusters(ask(fixed(north=1, south=1), view, profiles, launcher=Launcher.PROCESSES)) == {"north", "south"}
    assert clusters(ask(fixed(north=1, east=1), view, profiles)) == {"east", "north"}
    assert clusters(ask(fixed(south=1), view, profiles)) == {"south"}


def test_with_one_series_a_job_is_asked_for_once() -> None:
    asked: list[GridView] = []

    class Asking(Answering):
        def place(self, request: Request, grid: GridView) -> Placement | Refusal:
            asked.append(grid)
            return Refusal("no")

    view = grid(east=1, north=1)
    ask(flexible(9), view, {"east": FOUR, "north": FOUR}, policy=Asking(lambda: None))
    assert len(asked) == 1
    assert asked[0] is view
    assert Eligibility({"east": FOUR, "north": FOUR}, Accounts()).demands(JobSpec(flexible(9), ("true",))) == ()


def test_jobs_of_one_request_wait_for_different_reasons() -> None:
    world = World({"north": 2, "south": 2}, profiles={"north": FIVE, "south": FOUR})
    world.submit(flexible(4), launcher=Launcher.PROCESSES)
    mpi = world.submit(flexible(4), launcher=Launcher.OPENMPI)
    plain = world.submit(flexible(4), launcher=Launcher.PROCESSES)
    world.advance(30)
    assert world.state(plain) is JobState.SUCCEEDED
    assert world.state(mpi) is JobState.QUEUED
    assert world.queries.waiting_reason(world.job(mpi)).endswith(
        "north has Open MPI 5, south 4: a job runs under one series"
    )


# Folders


def test_a_job_goes_where_there_is_the_folder_that_it_needs() -> None:
    view, profiles = grid(north=4, south=2), {"north": BARE, "south": SCRATCH}
    assert clusters(ask(flexible(2), view, profiles)) == {"north"}
    assert clusters(ask(flexible(2), view, profiles, "{scratch}/x")) == {"south"}
    refused = summary(ask(flexible(3), view, profiles, "{scratch}/x"))
    assert refused == "needs 3 nodes; 2 are idle (south 2); cluster north has no scratch folder"


def test_each_component_of_a_fixed_request_needs_only_what_it_names() -> None:
    view, profiles = grid(north=4, south=2), {"north": BARE, "south": SCRATCH}
    own = (ComponentRequest(1, "north", ("true",)), ComponentRequest(1, "south"))
    assert clusters(ask(FixedRequest(own), view, profiles, "{scratch}/x")) == {"north", "south"}
    assert summary(ask(fixed(north=1), view, profiles, "{scratch}")) == "cluster north has no scratch folder"


def test_both_rules_together() -> None:
    view = grid(east=2, north=5, south=4, west=1)
    profiles = {
        "east": ClusterProfile(scratch="/s"),
        "north": ClusterProfile(mpi=Mpi(5)),
        "south": ClusterProfile(scratch="/s", mpi=Mpi(4)),
        "west": ClusterProfile(scratch="/s"),
    }
    assert clusters(ask(flexible(3), view, profiles, "{scratch}")) == {"south"}
    assert summary(ask(flexible(5), view, profiles, "{scratch}")) == (
        "needs 5 nodes; 4 are idle (south 4); east and west have Open MPI 5, south 4: a job runs under one series; "
        "cluster north has no scratch folder"
    )


PROFILES = [ClusterProfile(scratch=s, mpi=Mpi(m)) for s, m in product([None, "/s"], [4, 5])]
profiles_drawn = st.fixed_dictionaries({name: st.sampled_from(PROFILES) for name in NAMES})
requests = st.one_of(
    st.builds(flexible, st.integers(1, 8)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda sizes: nonfixed(*sizes)),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3), min_size=1).map(lambda sizes: fixed(**sizes)),
)
commands = st.sampled_from([("true",), ("{scratch}",)])


@given(requests, grids(), profiles_drawn, commands, st.sampled_from(Launcher))
def test_whatever_is_placed_can_run_there(
    request: Request, view: GridView, profiles: dict[str, ClusterProfile], command: tuple[str], launcher: Launcher
) -> None:
    answer = ask(request, view, profiles, *command, launcher=launcher)
    if isinstance(answer, Refusal):
        return
    used = [profiles[component.cluster] for component in answer.components]
    if launcher is Launcher.OPENMPI:
        assert len({profile.mpi.series for profile in used}) == 1
    if command == ("{scratch}",):
        assert all(profile.scratch for profile in used)


@given(requests, grids(), profiles_drawn, commands, st.sampled_from(Launcher))
def test_what_could_be_placed_is_not_refused_at_submission(
    request: Request, view: GridView, profiles: dict[str, ClusterProfile], command: tuple[str], launcher: Launcher
) -> None:
    """On the grid as it would be with all nodes idle, and all clusters usable."""
    empty = grid(**{cluster.name: cluster.total for cluster in view})
    limits = [ClusterLimits(cluster.name, cluster.total, profiles[cluster.name]) for cluster in empty]
    answer = ask(request, empty, profiles, *command, launcher=launcher)
    if isinstance(answer, Placement):
        check_submission(JobSpec(request, command, launcher=launcher), Limits(limits, builtin_policies()))


# Policies of others


class Answering:
    """A policy that answers as it is told."""

    name = "answering"
    serves: frozenset[RequestType] = frozenset({"flexible", "nonfixed", "fixed"})

    def __init__(self, answer: Callable[[], object]) -> None:
        self._answer = answer

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        return self._answer()  # type: ignore[return-value]

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return ()


def placed(*components: tuple[int, str] | tuple[int, str, int | None]) -> Placement:
    return Placement(tuple(PlacedComponent(*component) for component in components))


BOUNDED = FlexibleRequest(4, min_component_size=2, max_components=2)
SPLIT = FlexibleRequest(4, split_options=((3, 1), (4,)))
PAIR: FixedRequest = fixed(north=1, south=1)
NONSENSE: list[tuple[Request, object, str]] = [
    (flexible(2), None, "it answered None, neither a placement nor a refusal"),
    (flexible(2), Placement(()), "it placed no components"),
    (flexible(2), Placement([PlacedComponent(2, "north")]), "it placed no components"),  # type: ignore[arg-type]
    (flexible(2), Placement(("x",)), "it placed 'x'"),  # type: ignore[arg-type]
    (flexible(2), placed((-1, "north"), (3, "south")), "it placed a component of the size -1"),
    (flexible(2), placed((2.0, "north")), "it placed a component of the size 2.0"),  # type: ignore[arg-type]
    (flexible(2), placed((2, "nowhere")), "it placed 2 nodes on nowhere, which it was not offered"),
    (flexible(2), placed((2, "east")), "it placed 2 nodes on east, which is drained"),
    (flexible(6), placed((3, "north"), (3, "north")), "it placed 6 nodes on north, where 4 are idle"),
    (flexible(2), placed((3, "north")), "it placed 3 nodes in place of 2"),
    (BOUNDED, placed((3, "north"), (1, "south")), "it placed a component of 1, below the min_component_size of 2"),
    (
        FlexibleRequest(4, max_components=2),
        placed((2, "north"), (1, "south"), (1, "north")),
        "it placed 3 components, above the max_components of 2",
    ),
    (SPLIT, placed((2, "north"), (2, "south")), "it split into [2, 2], which is none of the split_options"),
    (nonfixed(1, 2), placed((3, "north", 0)), "it placed 1 components that are not the request's 2, each once"),
    (nonfixed(1, 1), placed((1, "north", 0), (1, "north", 0)), "it placed 2 components that are not the request's 2"),
    (nonfixed(1, 2), placed((1, "north"), (2, "north")), "it placed 2 components that are not the request's 2"),
    (nonfixed(1, 2), placed((2, "north", 0), (1, "north", 1)), "it placed component 0 with 2 nodes in place of 1"),
    (PAIR, placed((1, "north", 0), (1, "north", 1)), "it placed component 1 on north in place of south"),
]


@pytest.mark.parametrize(("request_", "answer", "problem"), NONSENSE)
def test_nonsense_is_told_as_such(request_: Request, answer: object, problem: str) -> None:
    view = with_state(grid(east=4, north=4, south=4), "east", ClusterState.DRAINED)
    profiles = dict.fromkeys(("east", "north", "south"), BARE)
    with pytest.raises(BrokenPolicy) as error:
        ask(request_, view, profiles, policy=Answering(lambda: answer))
    assert error.value.message.startswith(f"policy answering is broken: {problem}")


def of_classes(*components: tuple[int, str, str]) -> Placement:
    return Placement(tuple(PlacedComponent(size, site, node_class=name) for size, site, name in components))


def classed() -> GridView:
    """north has 3 fast nodes and one slow one."""
    return grid(east=4, north=4).with_clusters(
        [ClusterView("north", 4, 4, node_classes=(NodeClass("fast", 3, 2.0), NodeClass("slow", 1)))]
    )


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (of_classes((4, "north", "fast")), "it placed 4 nodes on north's class fast, where 3 are idle"),
        (of_classes((4, "east", "fast")), "it placed 4 nodes on east's class fast, which it has none of"),
        (
            of_classes((2, "north", "fast"), (2, "north", "fast")),
            "it placed 4 nodes on north's class fast, where 3 are idle",
        ),
    ],
)
def test_nodes_of_a_class_are_counted_too(answer: Placement, problem: str) -> None:
    with pytest.raises(BrokenPolicy, match=problem):
        ask(flexible(4), classed(), {"east": BARE, "north": BARE}, policy=Answering(lambda: answer))


def test_classes_of_one_cluster_are_one_component_before_the_requests_bounds() -> None:
    bounded = FlexibleRequest(4, min_component_size=2, max_components=1)
    answer = of_classes((3, "north", "fast"), (1, "north", "slow"))
    profiles = {"east": BARE, "north": BARE}
    assert ask(bounded, classed(), profiles, policy=Answering(lambda: answer)) == answer


def test_a_cluster_of_another_series_was_not_offered() -> None:
    with pytest.raises(BrokenPolicy, match="it placed 1 node on south, which it was not offered"):
        ask(
            flexible(2),
            grid(north=4, south=4),
            {"north": FIVE, "south": FOUR},
            policy=Answering(lambda: placed((1, "north"), (1, "south"))),
        )


def test_a_broken_policy_keeps_its_jobs_waiting_is_told_of_once_and_disturbs_nobody() -> None:
    policies = builtin_policies()
    answer: list[object] = [placed((9, "north"))]
    policies.register(Answering(lambda: answer[0]))
    world = World({"north": 4}, Rules(scan_interval=30), policies=policies)
    jobs = [world.submit(flexible(1), policy="answering") for _ in range(3)]
    other = world.submit(flexible(2))
    world.step([PeriodicScan(), PeriodicScan()])
    world.advance(100)
    said = "policy answering is broken: it placed 9 nodes on north, where 4 are idle"
    assert world.state(other) is JobState.SUCCEEDED
    assert {world.state(job) for job in jobs} == {JobState.QUEUED}
    assert world.queries.waiting_reason(world.job(jobs[0])) == said
    assert world.warnings == [said]
    answer[0] = placed((1, "north"))
    world.advance(100)
    assert {world.state(job) for job in jobs} == {JobState.SUCCEEDED}


def test_a_policy_that_raises_is_broken_and_disturbs_nobody() -> None:
    policies = builtin_policies()
    policies.register(Answering(lambda: 1 // 0))
    world = World({"north": 4}, Rules(scan_interval=30), policies=policies)
    job, other = world.submit(flexible(1), policy="answering"), world.submit(flexible(2))
    world.advance(100)
    said = "policy answering is broken: it raised ZeroDivisionError('integer division or modulo by zero')"
    assert world.state(other) is JobState.SUCCEEDED
    assert world.state(job) is JobState.QUEUED
    assert world.queries.waiting_reason(world.job(job)) == said
    assert world.warnings == [said]


# Why not, cluster by cluster


def explained(
    request: Request, view: GridView, profiles: dict[str, ClusterProfile], *command: str, policy: Policy | None = None
) -> list[tuple[str, str, int | None]]:
    spec = JobSpec(request, command or ("true",))
    calls, chosen = PolicyCalls(Eligibility(profiles, Accounts())), policy or builtin_policies().resolve("", request)
    reasons = calls.explain(chosen, spec, view)
    return [(reason.cluster, reason.reason, reason.missing) for reason in reasons]


def test_folders_and_series_are_explained() -> None:
    view = with_state(grid(east=(2, 4), north=5, south=(4, 9), west=1), "west", ClusterState.DRAINED, "by ops")
    profiles = {
        "east": ClusterProfile(scratch="/s"),
        "north": ClusterProfile(mpi=Mpi(5)),
        "south": ClusterProfile(scratch="/s", mpi=Mpi(4)),
        "west": ClusterProfile(scratch="/s"),
    }
    assert explained(flexible(4), view, profiles, "{scratch}") == []
    assert explained(flexible(6), view, profiles, "{scratch}") == [
        ("east", "2 of 4 nodes idle, the request needs 6 in all; only clusters with Open MPI 5 count beside it", None),
        ("north", "cluster north has no scratch folder", None),
        ("south", "4 of 9 nodes idle, the request needs 6 in all; only clusters with Open MPI 4 count beside it", 2),
        ("west", "drained by ops", None),
    ]


def test_a_fixed_request_is_explained_where_it_is_to_run() -> None:
    view, profiles = grid(east=4, north=4, south=(1, 4)), {"east": FIVE, "north": SCRATCH, "south": FOUR}
    said = "north has Open MPI 5, south 4: a job runs under one series"
    assert explained(fixed(north=1, south=1), view, profiles) == [("north", said, None), ("south", said, None)]
    assert explained(fixed(south=2), view, profiles) == [("south", "1 of 4 nodes idle, the request needs 2 here", 1)]
    assert explained(fixed(east=1), view, profiles, "{scratch}") == [
        ("east", "cluster east has no scratch folder", None)
    ]
    assert explained(fixed(north=1), view, profiles, "{scratch}") == []


@given(requests, grids(), profiles_drawn, commands)
def test_whatever_is_refused_is_explained(
    request: Request, view: GridView, profiles: dict[str, ClusterProfile], command: tuple[str]
) -> None:
    reasons = explained(request, view, profiles, *command)
    assert (reasons == []) == isinstance(ask(request, view, profiles, *command), Placement) or not view.clusters
    if not isinstance(request, FixedRequest) and reasons:
        assert [name for name, _, _ in reasons] == sorted(cluster.name for cluster in view)


def test_a_policy_of_another_that_explains_nothing_or_nonsense() -> None:
    view, profiles = grid(north=(1, 4)), {"north": BARE}
    refusing = Answering(lambda: Refusal("not today"))
    silent = [("north", "1 of 4 nodes idle, policy answering does not say why not", None)]
    assert explained(flexible(1), view, profiles, policy=refusing) == silent
    refusing.explain = lambda request, grid: [None]  # type: ignore[method-assign,assignment,return-value]
    broken = "policy answering is broken: it explained with [None], which are no reasons"
    assert explained(flexible(1), view, profiles, policy=refusing) == [("north", broken, None)]
    raising = Answering(lambda: 1 // 0)
    assert explained(flexible(1), view, profiles, policy=raising)[0][1].startswith("policy answering is broken: it rai")


# Clusters whose resource manager is out of order


def test_a_cluster_whose_resource_manager_cannot_be_asked_is_not_placed_on_until_it_can() -> None:
    world = World({"north": 4, "south": 4})
    running = world.submit(fixed(north=1), run_time=1000)
    world.advance(1)
    seen = world.sites["north"].current_report()
    away = Reported("north", ClusterReport(seen.total, seen.idle, 0, 0, seen.holding, "squeue did not answer"))
    effects = world.step([away])
    cluster = world.queries.grid["north"]
    assert effects.clusters == {"north"}
    assert (cluster.state, cluster.state_reason) == (ClusterState.UNREACHABLE, "squeue did not answer")
    job = world.submit(fixed(north=1))
    assert world.state(job) is JobState.QUEUED
    assert "unreachable: squeue did not answer" in world.queries.waiting_reason(world.job(job))
    assert world.step([away]).clusters == set(), "it is not news"
    world.step([Reported("north", seen)])
    assert (cluster.state, cluster.state_reason) == (ClusterState.USABLE, "")
    assert world.state(job) is JobState.CLAIMING
    assert world.state(running) is JobState.RUNNING


def test_one_that_could_never_be_asked_says_why() -> None:
    world = World({"north": 4})
    world.disconnect("north")
    cluster = world.queries.grid["north"]
    world.step([Reported("north", ClusterReport(0, 0, problem="there is no queue long.q"))])
    assert (cluster.state, cluster.state_reason) == (ClusterState.UNREACHABLE, "there is no queue long.q")
    world.disconnect("north", "its agent has gone")
    assert cluster.state_reason == "its agent has gone"
    world.connect("north")
    assert (cluster.state, cluster.state_reason, cluster.total) == (ClusterState.USABLE, "", 4)


def test_errors_counted_are_shown_before_a_resource_manager_that_cannot_be_asked() -> None:
    world = World({"north": 4})
    cluster = world.queries.grid["north"]
    cluster.health.unusable, cluster.health.note = True, "3 errors in a row"
    world.step([Reported("north", ClusterReport(4, 4, problem="squeue did not answer"))])
    assert (cluster.state, cluster.state_reason) == (ClusterState.UNUSABLE, "3 errors in a row")
