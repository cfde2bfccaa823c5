"""The simulated world: what a real one does, by a virtual clock."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.local_users import poisson
from experiments.run_times import by_number_of_clusters, by_speed, communicating, multi_site, product
from koalapy.model.cluster import Link
from koalapy.model.errors import UsageError
from koalapy.model.job import Job, JobSpec, JobState, Launcher, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import JobSubmitted
from koalapy.scheduler.rules import Rules
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import LocalUser, PlannedJob
from koalapy.simulation.outcome import JobOutcome, Outcome
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import Site

NORTH_SOUTH = {"north": SimulatedCluster(8), "south": SimulatedCluster(4)}


def grid(**changes: Any) -> SimulatedGrid:
    return SimulatedGrid(NORTH_SOUTH, **changes)


def job(at: float, nodes: int, lasts: float = 100.0, **spec: Any) -> PlannedJob:
    spec = {"policy": "cluster-minimization"} | spec
    return PlannedJob(at, JobSpec(FlexibleRequest(nodes), ("program",), **spec), lasts)


def run(jobs: Sequence[PlannedJob], where: SimulatedGrid | None = None, **options: Any) -> Outcome:
    return Simulation(where or grid(), **options).run(jobs)


def by_ident(outcome: Outcome) -> dict[int, JobOutcome]:
    return {each.ident: each for each in outcome.jobs}


def test_a_job_runs_as_long_as_it_is_meant_to() -> None:
    outcome = run([job(5.0, 6)])
    (one,) = outcome.jobs
    assert (one.state, one.submitted, one.started, one.ended) == (JobState.SUCCEEDED, 5.0, 5.0, 105.0)
    assert one.gang == (("north", 6),)
    assert (one.response, one.waited, outcome.node_seconds, outcome.lasted) == (100.0, 0.0, 600.0, 105.0)


def test_a_job_over_two_clusters_takes_longer_by_its_run_time_model() -> None:
    outcome = run([job(0.0, 10)], run_time=product(by_number_of_clusters((1.0, 1.5)), multi_site(1.0)))
    (one,) = outcome.jobs
    assert one.gang == (("north", 8), ("south", 2))
    assert one.ended == 300.0


def test_a_cluster_that_is_twice_as_fast_takes_half_the_time() -> None:
    where = SimulatedGrid({"fast": SimulatedCluster(4, speed=2.0), "slow": SimulatedCluster(4)})
    outcome = run(
        [job(0.0, 4, policy="fastest-one"), job(0.0, 4, policy="fastest-one")], where, run_time=by_speed(where.speeds)
    )
    assert {each.gang[0][0]: each.ended for each in outcome.jobs} == {"fast": 50.0, "slow": 100.0}


def test_whoever_finds_no_nodes_waits_for_those_who_have_them() -> None:
    outcome = by_ident(run([job(0.0, 12), job(10.0, 12), job(20.0, 1)], rules=Rules(queue="fcfs")))
    assert [outcome[ident].started for ident in (1, 2, 3)] == [0.0, 100.0, 200.0]


def test_what_ends_and_who_arrives_at_one_moment_is_one_step() -> None:
    """The nodes that are given back are there for who arrives at that moment."""
    outcome = by_ident(run([job(0.0, 12), job(100.0, 12)]))
    assert outcome[2].placed == 100.0


def test_startup_takes_its_time_and_holds_nodes() -> None:
    outcome = run([job(0.0, 8)], grid(startup=7.0))
    assert (outcome.jobs[0].started, outcome.jobs[0].ended, outcome.node_seconds) == (7.0, 107.0, 856.0)


def test_starts_that_fail_are_tried_again() -> None:
    rules = Rules(max_restarts=None, error_threshold=1000)
    outcome = run([job(float(at), 2) for at in range(200)], grid(failures=0.5), rules=rules, seed=3)
    assert {each.state for each in outcome.jobs} == {JobState.SUCCEEDED}
    assert sum(each.restarts for each in outcome.jobs) > 100
    assert all(each.attempts == each.restarts + 1 for each in outcome.jobs)


def test_a_cluster_may_fail_more_often_than_the_others() -> None:
    where = SimulatedGrid({"good": SimulatedCluster(4), "broken": SimulatedCluster(8, failures=0.999)}, failures=0.0)
    outcome = run([job(float(at), 2) for at in range(20)], where, rules=Rules(max_restarts=None, probation=False))
    assert all(each.gang == (("good", 2),) for each in outcome.jobs)
    assert sum(each.restarts for each in outcome.jobs) >= 3
    with pytest.raises(UsageError, match="failures"):
        SimulatedCluster(1, failures=1.0)


def test_the_start_delay_is_from_the_first_estimate_to_the_last() -> None:
    where = grid(links={("north", "south"): Link(bandwidth=1e6)}, failures=0.9)
    files = (InputFile("data", 30_000_000, ("south",)),)
    request = FixedRequest((ComponentRequest(8, "north", inputs=files),))
    planned = PlannedJob(0.0, JobSpec(request, ("program",)), 10.0)
    rules = Rules(max_restarts=None, error_threshold=1000, restart_pause=0)
    (one,) = run([planned], where, rules=rules).jobs
    assert one.restarts > 0
    assert one.placed is not None
    assert one.start_delay == pytest.approx(one.placed)
    (whole,) = run([planned], grid(links=where.links)).jobs
    assert whole.start_delay == 0.0


def test_local_users_whom_nobody_has_seen_yet_overtake_a_claim() -> None:
    user = LocalUser(1.0, "north", 8, 60.0)
    outcome = run([job(2.0, 8)], grid(look_every=30.0), local_users=[user], rules=Rules(claim_grace=5.0))
    (one,) = outcome.jobs
    assert one.state is JobState.SUCCEEDED
    assert one.attempts > 1
    assert outcome.local_node_seconds == 480.0


def test_local_users_wait_in_the_queue_of_their_cluster() -> None:
    users = [LocalUser(1.0, "north", 8, 10.0), LocalUser(1.0, "north", 8, 10.0)]
    (one,) = run([job(2.0, 8)], local_users=users).jobs
    assert one.started == 21.0


def test_inputs_are_brought_by_the_bandwidth_of_their_link() -> None:
    where = grid(links={("north", "south"): Link(bandwidth=1e6)})
    files = (InputFile("data", 30_000_000, ("south",)),)
    request = FixedRequest((ComponentRequest(8, "north", inputs=files),))
    (one,) = run([PlannedJob(0.0, JobSpec(request, ("program",)), 10.0)], where).jobs
    assert (one.placed, one.started) == (0.0, 30.0)


def test_high_jobs_preempt_low_ones() -> None:
    outcome = by_ident(run([job(0.0, 12), job(10.0, 12, priority=Priority.HIGH)]))
    assert (outcome[2].started, outcome[1].attempts, outcome[1].started) == (10.0, 2, 110.0)


def test_a_program_that_fails_is_the_jobs_result() -> None:
    (one,) = run([PlannedJob(0.0, job(0.0, 10).spec, 10.0, exit_code=3)]).jobs
    assert one.state is JobState.FAILED


def test_jobs_that_could_never_run_are_listed_with_the_reason() -> None:
    outcome = run([job(0.0, 13), job(0.0, 12)])
    assert len(outcome.jobs) == 1
    (refused,) = outcome.not_run
    assert refused.planned.spec.request.total_size == 13
    assert "12" in refused.reason


def test_whoever_finds_the_queue_full_is_let_in_later() -> None:
    outcome = run([job(0.0, 12) for _ in range(6)], rules=Rules(placement_queue_limit=2))
    assert len(outcome.jobs) == 6
    assert [each.submitted for each in outcome.jobs[:4]] == sorted(each.submitted for each in outcome.jobs[:4])
    assert outcome.jobs[-1].submitted > 0.0
    assert outcome.jobs[-1].response == 600.0


def test_a_simulation_that_is_cut_off_lists_who_was_not_over() -> None:
    outcome = run([job(0.0, 12), job(0.0, 12), job(500.0, 1)], until=150.0)
    assert len(outcome.jobs) == 1
    assert len(outcome.not_run) == 2


def test_jobs_that_nothing_will_ever_place_do_not_let_it_run_for_ever() -> None:
    """No local user ever leaves."""
    outcome = run([job(2.0, 9)], local_users=[LocalUser(1.0, "north", 8, 1e12)], until=1e9)
    assert [each.planned.arrives_at for each in outcome.not_run] == [2.0]


def test_jobs_in_no_order_are_refused() -> None:
    with pytest.raises(UsageError, match="arrives at 1"):
        run([job(5.0, 1), job(1.0, 1)])


@pytest.mark.parametrize(
    ("what", "changes"),
    [("startup", {"startup": -1.0}), ("failures", {"failures": 1.0}), ("look_every", {"look_every": float("inf")})],
)
def test_a_grid_that_cannot_be_is_refused(what: str, changes: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=what):
        grid(**changes)


def test_communication_makes_a_program_longer_by_its_share() -> None:
    factor = communicating(1.0, (1.0, 3.0))
    assert factor(job(0.0, 1), (("a", 1), ("b", 1))) == pytest.approx(2.0)
    assert factor(job(0.0, 1), (("a", 1),)) == 1.0


@given(curve=st.lists(st.floats(1, 10), min_size=1, max_size=4), clusters=st.integers(1, 12))
def test_a_curve_goes_on_beyond_its_end_and_never_falls_there(curve: list[float], clusters: int) -> None:
    factor = by_number_of_clusters(curve)
    gang = [(f"cluster-{number}", 1) for number in range(clusters)]
    expected = curve[min(clusters, len(curve)) - 1] / curve[0]
    assert factor(job(0.0, 1), gang) >= expected * (1 - 1e-9) or clusters <= len(curve)


@pytest.mark.parametrize("failures", [0.0, 0.3])
@pytest.mark.parametrize("priorities", [(Priority.LOW,), (Priority.LOW, Priority.HIGH)])
def test_what_agents_do_not_tell_where_nobody_else_is_follows_from_what_they_do(
    failures: float, priorities: Sequence[Priority], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clusters of which each change is told the same is made."""
    draws = Random(5)
    jobs = [
        job(each.arrives_at, each.spec.request.total_size, each.lasts, priority=draws.choice(priorities))
        for each in stream(5)
    ]
    expected = run(jobs, grid(failures=failures)).jobs
    begin = Site.__init__

    def tell_all(site: Site, *given: Any) -> None:
        begin(site, *given)
        site.tells_nodes = True

    monkeypatch.setattr(Site, "__init__", tell_all)
    assert run(jobs, grid(failures=failures)).jobs == expected
    assert any(each.attempts > 1 for each in expected) is (failures > 0 or len(priorities) > 1)


def test_whether_somebody_looks_on_changes_nothing_and_timelines_are_for_who_does() -> None:
    told: list[Effects] = []
    watched = run(stream(7), grid(failures=0.2), watch=lambda _, effects: told.append(effects))
    simulation = Simulation(grid(failures=0.2))
    assert simulation.run(stream(7)).jobs == watched.jobs
    assert any(effects.timeline for effects in told)
    late = JobSubmitted(Job(1000, job(0.0, 1).spec, simulation.now))
    assert simulation.scheduler.step([late], simulation.now).timeline == []


def stream(seed: int, number: int = 60) -> list[PlannedJob]:
    draws, at, jobs = Random(seed), 0.0, []
    for _ in range(number):
        at += draws.expovariate(0.05)
        jobs.append(job(at, draws.randint(1, 12), draws.uniform(1.0, 200.0)))
    return jobs


@given(seed=st.integers(0, 10_000), failures=st.sampled_from([0.0, 0.2]), look=st.sampled_from([0.0, 10.0]))
def test_no_node_is_ever_in_two_hands_and_every_job_comes_to_its_end(seed: int, failures: float, look: float) -> None:
    held: dict[str, dict[tuple[int, int], int]] = {name: {} for name in NORTH_SOUTH}

    def watch(now: float, effects: Effects) -> None:
        for each in effects.jobs.values():
            for clusters in held.values():
                clusters.pop((each.id, 0), None)
            if each.state is JobState.RUNNING and each.attempt is not None:
                for component in each.attempt.gang:
                    taken = held[component.cluster]
                    taken[(each.id, 0)] = taken.get((each.id, 0), 0) + component.size
        for name, taken in held.items():
            assert sum(taken.values()) <= NORTH_SOUTH[name].nodes

    users = poisson({"north": 8, "south": 4}, 0.2, duration=1000.0, lasts=30.0, seed=seed)
    rules = Rules(max_restarts=None, error_threshold=1000)
    outcome = run(
        stream(seed), grid(failures=failures, look_every=look), rules=rules, local_users=users, watch=watch, seed=seed
    )
    assert len(outcome.jobs) == 60
    assert all(each.state is JobState.SUCCEEDED for each in outcome.jobs)
    assert all(one.ended <= other.ended for one, other in pairwise(outcome.jobs))


SAME = """
from tests.simulation.test_simulation import grid, run, stream
from koalapy.scheduler.rules import Rules
from experiments.local_users import poisson
users = poisson({"north": 8, "south": 4}, 0.2, duration=1000.0, lasts=30.0, seed=7)
rules = Rules(max_restarts=None, error_threshold=1000)
for each in run(stream(7), grid(failures=0.2, look_every=10.0), rules=rules, local_users=users, seed=7).jobs:
    print(each.ident, each.started, each.ended, each.gang, each.attempts)
"""


@pytest.mark.processes
def test_equal_arguments_give_equal_outcomes_in_any_process() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", SAME], env={"PYTHONHASHSEED": hashing}, capture_output=True, text=True, check=True
        ).stdout
        for hashing in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0].count("\n") == 60


@pytest.mark.parametrize("launcher", Launcher)
def test_a_program_on_two_clusters_ends_once_however_it_was_launched(launcher: Launcher) -> None:
    (one,) = run([job(0.0, 10, launcher=launcher)]).jobs
    assert (one.state, one.ended, one.restarts) == (JobState.SUCCEEDED, 100.0, 0)


def test_components_that_users_spelled_out_are_placed_as_one_job() -> None:
    request = NonFixedRequest((ComponentRequest(6), ComponentRequest(4)))
    (one,) = run([PlannedJob(0.0, JobSpec(request, ("program",)), 10.0)]).jobs
    assert sorted(one.gang) == [("north", 6), ("south", 4)]
