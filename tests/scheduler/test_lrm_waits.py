"""Reasons that resource managers give for waiting components, and boots that claims wait for."""

import re
from dataclasses import replace

import pytest

from koalapy.model.job import ComponentState, JobState
from koalapy.model.job_sizes import BarredSizes
from koalapy.model.profile import ClusterProfile
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.scheduler.attempts.attempts import REFUSAL_PAUSE
from koalapy.scheduler.events import ClusterConfirmed, InventoryReceived, Reported
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed
from tests.scheduler.world import World

TOKEN = "1.1.0"
NOT_STARTED = "the nodes that it was starting had not all reported in time"
PRIORITY = "Slurm says Priority (jobs of higher priority come first)"


def component_report(state: str = "waiting", pending: str = "", starting: float = 0.0) -> Reported:
    hosts = () if state in ("submitted", "waiting") else ("n1", "n2")
    return Reported(
        "north", ComponentStatus(TOKEN, ComponentState(state), hosts, "5", pending=pending, starting=starting)
    )


def create_waiting_world(**rules: float) -> World:
    """Create a world in which a component of two nodes waits."""
    world = World({"north": 4}, Rules(claim_grace=10, barrier_timeout=60, **rules), manual=True)  # type: ignore[arg-type]
    world.step([InventoryReceived("north", Inventory(())), Reported("north", ClusterReport(4, 4, 0, 0, frozenset()))])
    world.submit(fixed(north=2))
    world.step([component_report()])
    return world


def step_at(world: World, time: float, *events: Reported) -> None:
    world.now = time
    world.step(list(events))
    world.step([ClusterConfirmed("north", time)])


def test_claim_failure_reason_quotes_resource_manager() -> None:
    world = create_waiting_world()
    step_at(world, 5, component_report(pending=PRIORITY))
    step_at(world, 10)
    assert world.reasons(1, "ending") == [f"claim-failed: north did not start it: {PRIORITY}"]
    assert world.queries.grid["north"].health.errors == 0


def test_claim_failure_without_reason_blames_local_users() -> None:
    world = create_waiting_world()
    step_at(world, 5, component_report(pending=PRIORITY))
    step_at(world, 6, component_report())
    step_at(world, 10)
    assert world.reasons(1, "ending") == ["claim-failed: local users of north were faster"]


@pytest.mark.parametrize("is_allocated", [False, True])
def test_booting_nodes_prolong_claim_without_error(is_allocated: bool) -> None:
    """The resource manager grants 300 s, more than the barrier timeout."""
    world = create_waiting_world()
    step_at(world, 1, component_report(pending="Slurm makes its nodes ready", starting=300.0))
    if is_allocated:
        world.step([Reported("north", ClusterReport(4, 2, 0, 0, frozenset({TOKEN})))])
    for time in (10, 60, 120, 299):
        step_at(world, time)
        assert world.state(1) is JobState.CLAIMING
        assert world.job(1).generation == 1
        assert "claim-failed" not in world.timeline_events(1)
    assert world.queries.grid["north"].health.errors == 0


def test_boot_timeout_ends_claim_with_error() -> None:
    world = create_waiting_world()
    step_at(world, 1, component_report(starting=100.0))
    world.step([Reported("north", ClusterReport(4, 2, 0, 0, frozenset({TOKEN})))])
    for time in range(10, 161, 10):
        step_at(world, time, component_report(starting=100.0))
        assert world.state(1) is JobState.CLAIMING, time
    step_at(world, 161)
    assert world.reasons(1, "error") == [NOT_STARTED]


def create_joint_world(north_state: ComponentState = ComponentState.CLAIMED, **limits: float) -> World:
    """Create a world in which the nodes of a job on south are being started, and those on north have a state."""
    profiles = {"north": ClusterProfile(), "south": ClusterProfile(**limits)}  # type: ignore[arg-type]
    world = World({"north": 4, "south": 4}, Rules(claim_grace=10, barrier_timeout=60), manual=True, profiles=profiles)
    for name in ("north", "south"):
        report = ClusterReport(4, 4, 0, 0, frozenset())
        world.step([InventoryReceived(name, Inventory(())), Reported(name, report)])
    world.submit(fixed(north=2, south=2))
    north, south = world.tokens(1)
    world.step([Reported("north", ComponentStatus(north, north_state, ("n1", "n2")))])
    world.step([Reported("south", ComponentStatus(south, ComponentState.WAITING, starting=1e10))])
    return world


def step_joint(world: World, time: float, *events: Reported) -> None:
    world.now = time
    world.step(list(events))
    world.step([ClusterConfirmed(name, time) for name in ("north", "south")])


@pytest.mark.parametrize(("limits", "limit"), [({}, 900.0), ({"node_start_limit": 100.0}, 100.0)])
@pytest.mark.parametrize("is_allocated", [False, True])
@pytest.mark.evidence("G11")
def test_endless_start_of_nodes_frees_nodes_of_other_clusters(
    limits: dict[str, float], limit: float, *, is_allocated: bool
) -> None:
    """Neither a pause in the reports nor one without hosts prolongs the wait."""
    world = create_joint_world(**limits)
    south = world.tokens(1)[1]
    holding = frozenset({south} if is_allocated else ())
    for time in range(5, int(limit) + 100, 5):
        state = ComponentState.CLAIMED if time % 3 else ComponentState.WAITING
        status = ComponentStatus(south, state, starting=1e10 if time % 2 or not is_allocated else 0.0)
        step_joint(world, time, Reported("south", status), Reported("south", ClusterReport(4, 2, holding=holding)))
        if world.job(1).ending is not None:
            break
    assert limit <= world.now <= limit + (75 if is_allocated else 15)
    assert world.reasons(1, "error") == [NOT_STARTED]
    assert world.queries.grid["south"].health.errors == 1
    assert world.queries.grid["north"].health.errors == 0
    assert ("Stop", world.tokens(1)[0]) in world.commands(1)


def test_reason_of_claiming_job_names_cluster_with_starting_nodes() -> None:
    world = create_joint_world()
    assert re.fullmatch(r"waits for south to start its nodes, until \S+ UTC at most", world.job(1).reason)
    step_joint(world, 5, Reported("south", ComponentStatus(world.tokens(1)[1], ComponentState.WAITING)))
    assert world.job(1).reason == "south has started its nodes"


def test_boot_repeated_ends_claim() -> None:
    """A resource manager may replace nodes that do not come up without end."""
    world = create_waiting_world()
    for time in range(1, 400, 20):
        step_at(world, time, component_report(pending="Resources"))
        step_at(world, time + 1, component_report(starting=100.0))
        step_at(world, time + 19, component_report(starting=100.0))
        if world.job(1).ending is not None:
            break
    assert world.reasons(1, "error") == [NOT_STARTED]
    assert 102 <= world.now <= 122


@pytest.mark.parametrize("rules", [{"claim_grace": 0.001}, {"barrier_timeout": 0.001, "claim_grace": 60.0}])
def test_boot_wait_requests_confirmation_once_per_second(rules: dict[str, float]) -> None:
    """Each confirmation queries the resource manager, so a short timeout must not raise the rate."""
    world = World({"north": 4}, Rules(**rules), manual=True)  # type: ignore[arg-type]
    world.step([InventoryReceived("north", Inventory(())), Reported("north", ClusterReport(4, 4, 0, 0, frozenset()))])
    world.submit(fixed(north=2))
    world.step([component_report(starting=300.0)])
    request_count = 0
    while request_count < 100 and (wakeup := world.scheduler.next_wakeup()) is not None and wakeup <= 20.0:
        world.now = max(world.now, wakeup)
        request_count += bool(world.step().confirm)
        world.step([ClusterConfirmed("north", world.now)])
    assert request_count <= 21
    assert world.state(1) is JobState.CLAIMING


def test_boot_report_missing_once_is_ignored() -> None:
    world = create_waiting_world()
    step_at(world, 1, component_report(starting=100.0))
    step_at(world, 5, component_report())
    step_at(world, 6, component_report(starting=100.0))
    for time in (10, 60, 100):
        step_at(world, time)
        assert world.state(1) is JobState.CLAIMING
        assert world.job(1).ending is None


def test_barrier_timeout_starts_after_boot() -> None:
    world = create_waiting_world()
    step_at(world, 1, component_report(starting=300.0))
    world.step([Reported("north", ClusterReport(4, 2, 0, 0, frozenset({TOKEN})))])
    step_at(world, 60)
    step_at(world, 70, component_report())
    step_at(world, 120)
    assert world.state(1) is JobState.CLAIMING
    step_at(world, 130)
    assert world.reasons(1, "error") == ["its nodes had not all reported after 60 s"]


@pytest.mark.parametrize("state", ["claimed", "running", "delivering", "ended"])
def test_lrm_waits_of_started_component_are_removed(state: str) -> None:
    world = create_joint_world(north_state=ComponentState.WAITING)
    waits, south = world.queries.lrm_waits, world.tokens(1)[1]
    assert waits.up_by(south) == 900.0
    step_joint(world, 2, Reported("south", ComponentStatus(south, ComponentState(state), ("n1", "n2"))))
    assert waits._waits == {}


def test_lrm_waits_of_unknown_component_are_removed() -> None:
    world = create_waiting_world()
    waits = world.queries.lrm_waits
    step_at(world, 1, component_report(pending=PRIORITY))
    assert waits.reason(TOKEN)
    world.cancel(1)
    step_at(world, 2, component_report(pending=PRIORITY), component_report("ended"))
    step_at(world, 3, component_report(pending=PRIORITY))
    assert waits._waits == {}


def test_explanation_quotes_lrm_wait_reason() -> None:
    world = create_waiting_world()
    step_at(world, 5, component_report(pending=PRIORITY))
    assert f"; north: {PRIORITY}" in explain(world.queries, world.job(1), world.timeline, world.now).headline
    step_at(world, 6, component_report(pending="Slurm makes its nodes ready", starting=300.0))
    headline = explain(world.queries, world.job(1), world.timeline, world.now).headline
    assert re.fullmatch(
        r"the nodes of component 0 on north are being started, which takes until \S+ at most; "
        r"north: Slurm makes its nodes ready",
        headline,
    )


LIMIT = "Slurm says AssocGrpNodeLimit (a limit of its account)"


def report_wait(state: str = "waiting", pending: str = "", *, limited: bool = False) -> Reported:
    hosts = () if state == "waiting" else ("n1", "n2")
    return Reported(
        "north", ComponentStatus(TOKEN, ComponentState(state), hosts, "5", pending=pending, limited=limited)
    )


def test_doubt_quotes_reason_of_resource_manager() -> None:
    world = create_waiting_world()
    step_at(world, 5, component_report(pending=PRIORITY))
    step_at(world, 10)
    world.step([Reported("north", ComponentStatus(TOKEN, ComponentState.ENDED, (), "5"))])
    reason = world.queries.waiting_reason(world.job(1))
    assert reason.endswith(f"a claim for 2 nodes was in vain: {PRIORITY}")


def test_account_limit_restricts_size_in_place_of_doubt() -> None:
    world = create_waiting_world()
    step_at(world, 5, report_wait(pending=LIMIT, limited=True))
    step_at(world, 10)
    world.step([Reported("north", ComponentStatus(TOKEN, ComponentState.ENDED, (), "5"))])
    cluster = world.queries.grid["north"]
    assert (cluster.health.doubt, cluster.nodes.available) == (None, 1)
    text = f"north takes nothing of 2 nodes or more until 1970-01-01 00:00:25: {LIMIT}"
    assert world.queries.waiting_reason(world.job(1)).replace("until 00:", "until 1970-01-01 00:") == text
    explanation = explain(world.queries, world.job(1), (), world.now)
    assert LIMIT in explanation.clusters[0].reason


def test_account_limit_of_mapped_cluster_bars_only_that_job() -> None:
    accounts = Accounts(Users({"ann": User({"north": "ann"})}, []), {"north": Domain("mapped")})
    world = World({"north": 4}, Rules(claim_grace=10, barrier_timeout=60), manual=True, accounts=accounts)
    world.step([InventoryReceived("north", Inventory(())), Reported("north", ClusterReport(4, 4, 0, 0, frozenset()))])
    world.submit(fixed(north=2), owner="ann")
    world.step([report_wait(pending=LIMIT, limited=True)])
    step_at(world, 10)
    cluster = world.queries.grid["north"]
    assert (cluster.health.doubt, cluster.health.limit) == (None, None)
    assert world.job(1).barred_sizes(11) == {BarredSizes("north", 2)}
    assert not world.job(1).barred_sizes(10 + REFUSAL_PAUSE)


def test_running_job_says_where_it_is_suspended() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=2), run_time=500)
    world.advance(2)
    site = world.sites["north"]
    status = site._status(next(iter(site.runners.values())))
    for pending, text in (("suspended by Slurm", "suspended on north by Slurm"), ("", "")):
        world.step([Reported("north", replace(status, pending=pending))])
        assert world.state(job) is JobState.RUNNING
        assert world.queries.lrm_waits.describe(world.job(job)) == text
        assert (
            "suspended on north by Slurm" in explain(world.queries, world.job(job), (), world.now).headline
        ) == bool(text)
