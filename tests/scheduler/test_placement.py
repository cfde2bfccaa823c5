"""Eligible clusters: required folders, one Open MPI series, and invalid answers of policies."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, ClusterView, GridView, NodeClass
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.profile import ClusterProfile, Mpi, MpiSeries
from koalapy.model.reports import ClusterReport
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, Request, RequestType
from koalapy.model.users import Accounts
from koalapy.policies.policy import Policy
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.events import PeriodicScan, Reported
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.policy_answers import BrokenPolicy
from koalapy.scheduler.queue.policy_question import PolicyQuestion
from koalapy.scheduler.rules import Rules
from tests.policies.grids import NAMES, grid, grids, summary, with_state
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

MPI_5, MPI_4 = ClusterProfile(mpi=Mpi(MpiSeries.FIVE)), ClusterProfile(mpi=Mpi(MpiSeries.FOUR))
SCRATCH = ClusterProfile(scratch="/scratch")
BARE = ClusterProfile()


def evaluate_request(
    request: Request,
    view: GridView,
    profiles: dict[str, ClusterProfile],
    *command: str,
    launcher: Launcher = Launcher.OPENMPI,
    policy: Policy | None = None,
) -> Placement | Refusal:
    spec = JobSpec(request, command or ("true",), launcher=launcher)
    policy = policy or builtin_policies().resolve("", request)
    return PolicyQuestion(policy, spec, Eligibility(profiles, Accounts())).place(view)


def clusters_of(answer: Placement | Refusal) -> set[str]:
    assert isinstance(answer, Placement), answer
    return {component.cluster for component in answer.components}


# One series of Open MPI


def test_placement_never_combines_mpi_series() -> None:
    view = grid(east=3, north=4, south=2)
    profiles = {"east": MPI_5, "north": MPI_4, "south": MPI_5}
    assert clusters_of(evaluate_request(flexible(5), view, profiles)) == {"east", "south"}
    assert clusters_of(evaluate_request(nonfixed(3, 2), view, profiles)) == {"east", "south"}
    assert clusters_of(evaluate_request(flexible(4), view, profiles)) == {"east", "south"}, (
        "the series with the most idle nodes is tried first"
    )
    assert clusters_of(evaluate_request(nonfixed(4), view, profiles)) == {"north"}
    assert clusters_of(evaluate_request(flexible(5), view, profiles, launcher=Launcher.PROCESSES)) == {"east", "north"}


def test_placement_tie_of_series_is_decided_by_name() -> None:
    assert clusters_of(evaluate_request(flexible(2), grid(east=3, north=3), {"east": MPI_4, "north": MPI_5})) == {
        "east"
    }
    assert clusters_of(evaluate_request(flexible(2), grid(east=3, north=3), {"east": MPI_5, "north": MPI_4})) == {
        "east"
    }


def test_refusal_names_series_only_if_decisive() -> None:
    view, profiles = grid(north=4, south=3), {"north": MPI_5, "south": MPI_4}
    assert summary(evaluate_request(flexible(6), view, profiles)) == (
        "needs 6 nodes; 4 are idle (north 4); north has Open MPI 5, south 4: a job runs under one series"
    )
    assert summary(evaluate_request(flexible(9), view, profiles)) == "needs 9 nodes; 4 are idle (north 4)"


def test_placement_ignores_unusable_clusters() -> None:
    view = with_state(grid(north=4, south=3), "south", ClusterState.UNREACHABLE)
    refusal = evaluate_request(flexible(6), view, {"north": MPI_5, "south": MPI_4})
    assert summary(refusal) == "needs 6 nodes; 4 are idle (north 4; south unreachable)"


def test_fixed_request_over_two_series_is_refused() -> None:
    view, profiles = grid(east=4, north=4, south=4), {"east": MPI_5, "north": MPI_5, "south": MPI_4}
    reason = "north has Open MPI 5, south 4: a job runs under one series"
    assert summary(evaluate_request(fixed(north=1, south=1), view, profiles)) == reason
    assert clusters_of(evaluate_request(fixed(north=1, south=1), view, profiles, launcher=Launcher.PROCESSES)) == {
        "north",
        "south",
    }
    assert clusters_of(evaluate_request(fixed(north=1, east=1), view, profiles)) == {"east", "north"}
    assert clusters_of(evaluate_request(fixed(south=1), view, profiles)) == {"south"}


def test_policy_is_evaluated_once_for_one_series() -> None:
    views: list[GridView] = []

    class Asking(FixedAnswerPolicy):
        def place(self, request: Request, grid: GridView) -> Placement | Refusal:
            views.append(grid)
            return Refusal("no")

    view = grid(east=1, north=1)
    evaluate_request(flexible(9), view, {"east": MPI_4, "north": MPI_4}, policy=Asking(lambda: None))
    assert len(views) == 1
    assert views[0] is view
    assert Eligibility({"east": MPI_4, "north": MPI_4}, Accounts()).demands(JobSpec(flexible(9), ("true",))) == ()


def test_queue_jobs_of_equal_request_wait_for_own_reasons() -> None:
    world = World({"north": 2, "south": 2}, profiles={"north": MPI_5, "south": MPI_4})
    world.submit(flexible(4), launcher=Launcher.PROCESSES)
    mpi_job = world.submit(flexible(4), launcher=Launcher.OPENMPI)
    processes_job = world.submit(flexible(4), launcher=Launcher.PROCESSES)
    world.advance(30)
    assert world.state(processes_job) is JobState.SUCCEEDED
    assert world.state(mpi_job) is JobState.QUEUED
    assert world.queries.waiting_reason(world.job(mpi_job)).endswith(
        "north has Open MPI 5, south 4: a job runs under one series"
    )


# Folders


def test_placement_requires_scratch_folder() -> None:
    view, profiles = grid(north=4, south=2), {"north": BARE, "south": SCRATCH}
    assert clusters_of(evaluate_request(flexible(2), view, profiles)) == {"north"}
    assert clusters_of(evaluate_request(flexible(2), view, profiles, "{scratch}/x")) == {"south"}
    reason = summary(evaluate_request(flexible(3), view, profiles, "{scratch}/x"))
    assert reason == "needs 3 nodes; 2 are idle (south 2); cluster north has no scratch folder"


@pytest.mark.parametrize("cores", [None, 2])
def test_fixed_request_component_needs_only_its_folders(cores: int | None) -> None:
    view, profiles = grid(north=4, south=2), {"north": BARE, "south": SCRATCH}
    components = (ComponentRequest(1, "north", ("true",)), ComponentRequest(1, "south", cores=cores))
    assert clusters_of(evaluate_request(FixedRequest(components), view, profiles, "{scratch}/x")) == {"north", "south"}
    assert (
        summary(evaluate_request(fixed(north=1), view, profiles, "{scratch}")) == "cluster north has no scratch folder"
    )


def test_placement_combines_folder_and_series_rules() -> None:
    view = grid(east=2, north=5, south=4, west=1)
    profiles = {
        "east": ClusterProfile(scratch="/s"),
        "north": ClusterProfile(mpi=Mpi(MpiSeries.FIVE)),
        "south": ClusterProfile(scratch="/s", mpi=Mpi(MpiSeries.FOUR)),
        "west": ClusterProfile(scratch="/s"),
    }
    assert clusters_of(evaluate_request(flexible(3), view, profiles, "{scratch}")) == {"south"}
    assert summary(evaluate_request(flexible(5), view, profiles, "{scratch}")) == (
        "needs 5 nodes; 4 are idle (south 4); east and west have Open MPI 5, south 4: a job runs under one series; "
        "cluster north has no scratch folder"
    )


PROFILES = [ClusterProfile(scratch=s, mpi=Mpi(m)) for s, m in product([None, "/s"], MpiSeries)]
drawn_profiles = st.fixed_dictionaries({name: st.sampled_from(PROFILES) for name in NAMES})
drawn_requests = st.one_of(
    st.builds(flexible, st.integers(1, 8)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda sizes: nonfixed(*sizes)),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3), min_size=1).map(lambda sizes: fixed(**sizes)),
)
drawn_commands = st.sampled_from([("true",), ("{scratch}",)])


# Policies of others


class FixedAnswerPolicy:
    """A policy with a given answer."""

    name = "answering"
    serves: frozenset[RequestType] = frozenset({"flexible", "nonfixed", "fixed"})

    def __init__(self, answer: Callable[[], object]) -> None:
        self._answer = answer

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        return self._answer()  # type: ignore[return-value]

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return ()


def make_placement(*components: tuple[int, str] | tuple[int, str, int | None]) -> Placement:
    return Placement(tuple(PlacedComponent(*component) for component in components))


BOUNDED = FlexibleRequest(4, min_component_size=2, max_components=2)
SPLIT = FlexibleRequest(4, split_options=((3, 1), (4,)))
PAIR: FixedRequest = fixed(north=1, south=1)
INVALID_ANSWERS: list[tuple[Request, object, str]] = [
    (flexible(2), None, "it answered None, neither a placement nor a refusal"),
    (flexible(2), Placement(()), "it placed no components"),
    (flexible(2), Placement([PlacedComponent(2, "north")]), "it placed no components"),  # type: ignore[arg-type]
    (flexible(2), Placement(("x",)), "it placed 'x'"),  # type: ignore[arg-type]
    (flexible(2), make_placement((-1, "north"), (3, "south")), "it placed a component of the size -1"),
    (flexible(2), make_placement((2.0, "north")), "it placed a component of the size 2.0"),  # type: ignore[arg-type]
    (flexible(2), make_placement((2, "nowhere")), "it placed 2 nodes on nowhere, which it was not offered"),
    (flexible(2), make_placement((2, "east")), "it placed 2 nodes on east, which is drained"),
    (flexible(6), make_placement((3, "north"), (3, "north")), "it placed 6 nodes on north, where 4 are idle"),
    (flexible(2), make_placement((3, "north")), "it placed 3 nodes in place of 2"),
    (
        BOUNDED,
        make_placement((3, "north"), (1, "south")),
        "it placed a component of 1, below the min_component_size of 2",
    ),
    (
        FlexibleRequest(4, max_components=2),
        make_placement((2, "north"), (1, "south"), (1, "north")),
        "it placed 3 components, above the max_components of 2",
    ),
    (SPLIT, make_placement((2, "north"), (2, "south")), "it split into [2, 2], which is none of the split_options"),
    (nonfixed(1, 2), make_placement((3, "north", 0)), "it placed 1 components that are not the request's 2, each once"),
    (
        nonfixed(1, 1),
        make_placement((1, "north", 0), (1, "north", 0)),
        "it placed 2 components that are not the request's 2",
    ),
    (nonfixed(1, 2), make_placement((1, "north"), (2, "north")), "it placed 2 components that are not the request's 2"),
    (
        nonfixed(1, 2),
        make_placement((2, "north", 0), (1, "north", 1)),
        "it placed component 0 with 2 nodes in place of 1",
    ),
    (PAIR, make_placement((1, "north", 0), (1, "north", 1)), "it placed component 1 on north in place of south"),
]


@pytest.mark.parametrize(("request_", "answer", "problem"), INVALID_ANSWERS)
def test_policy_invalid_answer_is_reported(request_: Request, answer: object, problem: str) -> None:
    view = with_state(grid(east=4, north=4, south=4), "east", ClusterState.DRAINED)
    profiles = dict.fromkeys(("east", "north", "south"), BARE)
    with pytest.raises(BrokenPolicy) as error:
        evaluate_request(request_, view, profiles, policy=FixedAnswerPolicy(lambda: answer))
    assert error.value.message.startswith(f"policy answering is broken: {problem}")


def make_class_placement(*components: tuple[int, str, str]) -> Placement:
    return Placement(tuple(PlacedComponent(size, site, node_class=name) for size, site, name in components))


def create_classed_grid() -> GridView:
    """Create a view in which north has 3 fast nodes and one slow node."""
    return grid(east=4, north=4).with_clusters(
        [ClusterView("north", 4, 4, node_classes=(NodeClass("fast", 3, 2.0), NodeClass("slow", 1)))]
    )


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (make_class_placement((4, "north", "fast")), "it placed 4 nodes on north's class fast, where 3 are idle"),
        (make_class_placement((4, "east", "fast")), "it placed 4 nodes on east's class fast, which it has none of"),
        (
            make_class_placement((2, "north", "fast"), (2, "north", "fast")),
            "it placed 4 nodes on north's class fast, where 3 are idle",
        ),
    ],
)
def test_policy_answer_with_too_many_class_nodes_is_invalid(answer: Placement, problem: str) -> None:
    with pytest.raises(BrokenPolicy, match=problem):
        evaluate_request(
            flexible(4), create_classed_grid(), {"east": BARE, "north": BARE}, policy=FixedAnswerPolicy(lambda: answer)
        )


def test_policy_answer_may_split_component_into_classes() -> None:
    bounded = FlexibleRequest(4, min_component_size=2, max_components=1)
    answer = make_class_placement((3, "north", "fast"), (1, "north", "slow"))
    profiles = {"east": BARE, "north": BARE}
    assert (
        evaluate_request(bounded, create_classed_grid(), profiles, policy=FixedAnswerPolicy(lambda: answer)) == answer
    )


def test_policy_answer_with_other_series_is_invalid() -> None:
    with pytest.raises(BrokenPolicy, match="it placed 1 node on south, which it was not offered"):
        evaluate_request(
            flexible(2),
            grid(north=4, south=4),
            {"north": MPI_5, "south": MPI_4},
            policy=FixedAnswerPolicy(lambda: make_placement((1, "north"), (1, "south"))),
        )


def test_policy_broken_is_reported_once_and_keeps_jobs_waiting() -> None:
    policies = builtin_policies()
    answer: list[object] = [make_placement((9, "north"))]
    policies.register(FixedAnswerPolicy(lambda: answer[0]))
    world = World({"north": 4}, Rules(scan_interval=30), policies=policies)
    jobs = [world.submit(flexible(1), policy="answering") for _ in range(3)]
    other_job = world.submit(flexible(2))
    world.step([PeriodicScan(), PeriodicScan()])
    world.advance(100)
    warning = "policy answering is broken: it placed 9 nodes on north, where 4 are idle"
    assert world.state(other_job) is JobState.SUCCEEDED
    assert {world.state(job) for job in jobs} == {JobState.QUEUED}
    assert world.queries.waiting_reason(world.job(jobs[0])) == warning
    assert world.warnings == [warning]
    answer[0] = make_placement((1, "north"))
    world.advance(100)
    assert {world.state(job) for job in jobs} == {JobState.SUCCEEDED}


def test_policy_that_raises_is_reported_and_keeps_jobs_waiting() -> None:
    policies = builtin_policies()
    policies.register(FixedAnswerPolicy(lambda: 1 // 0))
    world = World({"north": 4}, Rules(scan_interval=30), policies=policies)
    job, other_job = world.submit(flexible(1), policy="answering"), world.submit(flexible(2))
    world.advance(100)
    warning = "policy answering is broken: it raised ZeroDivisionError('integer division or modulo by zero')"
    assert world.state(other_job) is JobState.SUCCEEDED
    assert world.state(job) is JobState.QUEUED
    assert world.queries.waiting_reason(world.job(job)) == warning
    assert world.warnings == [warning]


# Why not, cluster by cluster


def explain_clusters(
    request: Request, view: GridView, profiles: dict[str, ClusterProfile], *command: str, policy: Policy | None = None
) -> list[tuple[str, str, int | None]]:
    spec = JobSpec(request, command or ("true",))
    policy = policy or builtin_policies().resolve("", request)
    reasons = PolicyQuestion(policy, spec, Eligibility(profiles, Accounts())).explain(view)
    return [(reason.cluster, reason.reason, reason.missing) for reason in reasons]


def test_explanation_covers_folders_and_series() -> None:
    view = with_state(grid(east=(2, 4), north=5, south=(4, 9), west=1), "west", ClusterState.DRAINED, "by ops")
    profiles = {
        "east": ClusterProfile(scratch="/s"),
        "north": ClusterProfile(mpi=Mpi(MpiSeries.FIVE)),
        "south": ClusterProfile(scratch="/s", mpi=Mpi(MpiSeries.FOUR)),
        "west": ClusterProfile(scratch="/s"),
    }
    assert explain_clusters(flexible(4), view, profiles, "{scratch}") == []
    assert explain_clusters(flexible(6), view, profiles, "{scratch}") == [
        ("east", "2 of 4 nodes idle, the request needs 6 in all; only clusters with Open MPI 5 count beside it", None),
        ("north", "cluster north has no scratch folder", None),
        ("south", "4 of 9 nodes idle, the request needs 6 in all; only clusters with Open MPI 4 count beside it", 2),
        ("west", "drained by ops", None),
    ]


def test_explanation_of_fixed_request_covers_its_clusters() -> None:
    view, profiles = grid(east=4, north=4, south=(1, 4)), {"east": MPI_5, "north": SCRATCH, "south": MPI_4}
    reason = "north has Open MPI 5, south 4: a job runs under one series"
    assert explain_clusters(fixed(north=1, south=1), view, profiles) == [
        ("north", reason, None),
        ("south", reason, None),
    ]
    assert explain_clusters(fixed(south=2), view, profiles) == [
        ("south", "1 of 4 nodes idle, the request needs 2 here", 1)
    ]
    assert explain_clusters(fixed(east=1), view, profiles, "{scratch}") == [
        ("east", "cluster east has no scratch folder", None)
    ]
    assert explain_clusters(fixed(north=1), view, profiles, "{scratch}") == []


@given(drawn_requests, grids(), drawn_profiles, drawn_commands)
def test_explanation_exists_for_each_refusal(
    request: Request, view: GridView, profiles: dict[str, ClusterProfile], command: tuple[str]
) -> None:
    reasons = explain_clusters(request, view, profiles, *command)
    assert (reasons == []) == isinstance(
        evaluate_request(request, view, profiles, *command), Placement
    ) or not view.clusters
    if not isinstance(request, FixedRequest) and reasons:
        assert [name for name, _, _ in reasons] == sorted(cluster.name for cluster in view)


def test_explanation_of_silent_or_broken_policy_is_replaced() -> None:
    view, profiles = grid(north=(1, 4)), {"north": BARE}
    refusing_policy = FixedAnswerPolicy(lambda: Refusal("not today"))
    default_reason = [("north", "1 of 4 nodes idle, not today", None)]
    assert explain_clusters(flexible(1), view, profiles, policy=refusing_policy) == default_reason
    refusing_policy.explain = lambda request, grid: [None]  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(BrokenPolicy, match=r"it explained with \[None\], which are no reasons"):
        explain_clusters(flexible(1), view, profiles, policy=refusing_policy)
    raising_policy = FixedAnswerPolicy(lambda: 1 // 0)
    with pytest.raises(BrokenPolicy, match="policy answering is broken: it rai"):
        explain_clusters(flexible(1), view, profiles, policy=raising_policy)


# Failing resource managers


def test_placement_avoids_cluster_with_failing_resource_manager() -> None:
    world = World({"north": 4, "south": 4})
    running = world.submit(fixed(north=1), run_time=1000)
    world.advance(1)
    report = world.sites["north"].current_report()
    failing_report = Reported(
        "north", ClusterReport(report.total, report.idle, 0, 0, report.holding, "squeue did not answer")
    )
    effects = world.step([failing_report])
    cluster = world.queries.grid["north"]
    assert effects.clusters == {"north"}
    assert (cluster.state, cluster.state_reason) == (ClusterState.UNREACHABLE, "squeue did not answer")
    job = world.submit(fixed(north=1))
    assert world.state(job) is JobState.QUEUED
    assert "unreachable: squeue did not answer" in world.queries.waiting_reason(world.job(job))
    assert world.step([failing_report]).clusters == set(), "a repeated report changes nothing"
    world.step([Reported("north", report)])
    assert (cluster.state, cluster.state_reason) == (ClusterState.USABLE, "")
    assert world.state(job) is JobState.CLAIMING
    assert world.state(running) is JobState.RUNNING


def test_state_of_never_queried_cluster_names_reason() -> None:
    world = World({"north": 4})
    world.disconnect("north")
    cluster = world.queries.grid["north"]
    world.step([Reported("north", ClusterReport(0, 0, problem="there is no queue long.q"))])
    assert (cluster.state, cluster.state_reason) == (ClusterState.UNREACHABLE, "there is no queue long.q")
    world.disconnect("north", "its agent has gone")
    assert cluster.state_reason == "its agent has gone"
    world.connect("north")
    assert (cluster.state, cluster.state_reason, cluster.last_report.total) == (ClusterState.USABLE, "", 4)


def test_state_of_erroneous_cluster_outranks_resource_manager_problem() -> None:
    world = World({"north": 4})
    cluster = world.queries.grid["north"]
    cluster.health.unusable, cluster.health.note = True, "3 errors in a row"
    world.step([Reported("north", ClusterReport(4, 4, problem="squeue did not answer"))])
    assert (cluster.state, cluster.state_reason) == (ClusterState.UNUSABLE, "3 errors in a row")
