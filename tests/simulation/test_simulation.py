"""The simulation: jobs, clusters and local users in virtual time."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.local_users import generate_local_users
from experiments.run_times import by_communication, by_number_of_clusters, by_speed, multi_site, multiply_models
from koalapy.model.array import TaskIndices
from koalapy.model.cluster import Link
from koalapy.model.errors import UsageError
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import JobSubmitted
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import JobOutcome, LocalUser, Outcome, PlannedJob
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid, Site

NORTH_SOUTH = {"north": SimulatedCluster(8), "south": SimulatedCluster(4)}


def create_grid(**changes: Any) -> SimulatedGrid:
    return SimulatedGrid(NORTH_SOUTH, **changes)


def make_job(arrival: float, nodes: int, lasts: float = 100.0, **spec: Any) -> PlannedJob:
    spec = {"policy": "cluster-minimization"} | spec
    return PlannedJob(arrival, JobSpec(FlexibleRequest(nodes), ("program",), **spec), lasts)


def run_jobs(jobs: Sequence[PlannedJob], simulated: SimulatedGrid | None = None, **options: Any) -> Outcome:
    return Simulation(simulated or create_grid(), **options).run(jobs)


def jobs_by_id(outcome: Outcome) -> dict[int, JobOutcome]:
    return {job.ident: job for job in outcome.jobs}


def test_job_runs_for_its_planned_time() -> None:
    outcome = run_jobs([make_job(5.0, 6)])
    (result,) = outcome.jobs
    assert (result.state, result.submitted, result.started, result.ended) == (JobState.SUCCEEDED, 5.0, 5.0, 105.0)
    assert result.gang == (("north", 6),)
    assert (result.response, result.waited, outcome.node_seconds, outcome.lasted) == (100.0, 0.0, 600.0, 105.0)


def test_job_on_two_clusters_takes_time_of_its_model() -> None:
    outcome = run_jobs(
        [make_job(0.0, 10)], run_time=multiply_models(by_number_of_clusters((1.0, 1.5)), multi_site(1.0))
    )
    (result,) = outcome.jobs
    assert result.gang == (("north", 8), ("south", 2))
    assert result.ended == 300.0


def test_job_on_faster_cluster_takes_less_time() -> None:
    simulated = SimulatedGrid({"fast": SimulatedCluster(4, speed=2.0), "slow": SimulatedCluster(4)})
    outcome = run_jobs(
        [make_job(0.0, 4, policy="fastest-one"), make_job(0.0, 4, policy="fastest-one")],
        simulated,
        run_time=by_speed(simulated.speeds),
    )
    assert {result.gang[0][0]: result.ended for result in outcome.jobs} == {"fast": 50.0, "slow": 100.0}


def test_job_arriving_at_an_end_gets_the_freed_nodes() -> None:
    outcome = jobs_by_id(run_jobs([make_job(0.0, 12), make_job(100.0, 12)]))
    assert outcome[2].placed == 100.0


def test_startup_delays_the_job_and_uses_nodes() -> None:
    outcome = run_jobs([make_job(0.0, 8)], create_grid(startup=7.0))
    assert (outcome.jobs[0].started, outcome.jobs[0].ended, outcome.node_seconds) == (7.0, 107.0, 856.0)


def test_failed_starts_are_retried() -> None:
    rules = Rules(max_restarts=None, error_threshold=1000)
    outcome = run_jobs(
        [make_job(float(arrival), 2) for arrival in range(200)], create_grid(failures=0.5), rules=rules, seed=3
    )
    assert {result.state for result in outcome.jobs} == {JobState.SUCCEEDED}
    assert sum(result.restarts for result in outcome.jobs) > 100
    assert all(result.attempts == result.restarts + 1 for result in outcome.jobs)


def test_cluster_failures_override_those_of_the_grid() -> None:
    simulated = SimulatedGrid(
        {"good": SimulatedCluster(4), "broken": SimulatedCluster(8, failures=0.999)}, failures=0.0
    )
    outcome = run_jobs(
        [make_job(float(arrival), 2) for arrival in range(20)],
        simulated,
        rules=Rules(max_restarts=None, probation=False),
    )
    assert all(result.gang == (("good", 2),) for result in outcome.jobs)
    assert sum(result.restarts for result in outcome.jobs) >= 3
    with pytest.raises(UsageError, match="failures"):
        SimulatedCluster(1, failures=1.0)


def test_start_delay_counts_from_first_to_last_estimate() -> None:
    simulated = create_grid(links={("north", "south"): Link(bandwidth=1e6)}, failures=0.9)
    files = (InputFile("data", 30_000_000, ("south",)),)
    request = FixedRequest((ComponentRequest(8, "north", inputs=files),))
    planned = PlannedJob(0.0, JobSpec(request, ("program",)), 10.0)
    rules = Rules(max_restarts=None, error_threshold=1000, restart_pause=0)
    (result,) = run_jobs([planned], simulated, rules=rules).jobs
    assert result.restarts > 0
    assert result.placed is not None
    assert result.start_delay == pytest.approx(result.placed)
    (undisturbed,) = run_jobs([planned], create_grid(links=simulated.links)).jobs
    assert undisturbed.start_delay == 0.0


def test_unreported_local_user_overtakes_a_claim() -> None:
    user = LocalUser(1.0, "north", 8, 60.0)
    outcome = run_jobs(
        [make_job(2.0, 8)], create_grid(look_every=30.0), local_users=[user], rules=Rules(claim_grace=5.0)
    )
    (result,) = outcome.jobs
    assert result.state is JobState.SUCCEEDED
    assert result.attempts > 1
    assert outcome.local_node_seconds == 480.0


def test_local_users_wait_in_queue_of_their_cluster() -> None:
    users = [LocalUser(1.0, "north", 8, 10.0), LocalUser(1.0, "north", 8, 10.0)]
    (result,) = run_jobs([make_job(2.0, 8)], local_users=users).jobs
    assert result.started == 21.0


def test_inputs_transfer_takes_time_by_link_bandwidth() -> None:
    simulated = create_grid(links={("north", "south"): Link(bandwidth=1e6)})
    files = (InputFile("data", 30_000_000, ("south",)),)
    request = FixedRequest((ComponentRequest(8, "north", inputs=files),))
    (result,) = run_jobs([PlannedJob(0.0, JobSpec(request, ("program",)), 10.0)], simulated).jobs
    assert (result.placed, result.started) == (0.0, 30.0)


def test_high_priority_job_preempts_low_priority_job() -> None:
    outcome = jobs_by_id(run_jobs([make_job(0.0, 12), make_job(10.0, 12, priority=Priority.HIGH)]))
    assert (outcome[2].started, outcome[1].attempts, outcome[1].started) == (10.0, 2, 110.0)


def test_job_with_nonzero_exit_code_fails() -> None:
    (result,) = run_jobs([PlannedJob(0.0, make_job(0.0, 10).spec, 10.0, exit_code=3)]).jobs
    assert result.state is JobState.FAILED


def test_impossible_job_is_listed_with_its_reason() -> None:
    outcome = run_jobs([make_job(0.0, 13), make_job(0.0, 12)])
    assert len(outcome.jobs) == 1
    (refused,) = outcome.not_run
    assert refused.planned.spec.request.total_size == 13
    assert "12" in refused.reason


def test_job_at_full_queue_is_submitted_later() -> None:
    outcome = run_jobs([make_job(0.0, 12) for _ in range(6)], rules=Rules(placement_queue_limit=2))
    assert len(outcome.jobs) == 6
    assert [result.submitted for result in outcome.jobs[:4]] == sorted(result.submitted for result in outcome.jobs[:4])
    assert outcome.jobs[-1].submitted > 0.0
    assert outcome.jobs[-1].response == 600.0


def test_simulation_with_end_time_lists_unfinished_jobs() -> None:
    outcome = run_jobs([make_job(0.0, 12), make_job(0.0, 12), make_job(500.0, 1)], until=150.0)
    assert len(outcome.jobs) == 1
    assert len(outcome.not_run) == 2


def test_simulation_with_unplaceable_job_ends() -> None:
    """No local user ever leaves."""
    outcome = run_jobs([make_job(2.0, 9)], local_users=[LocalUser(1.0, "north", 8, 1e12)], until=1e9)
    assert [result.planned.arrives_at for result in outcome.not_run] == [2.0]


def test_simulation_of_unordered_jobs_is_rejected() -> None:
    with pytest.raises(UsageError, match="arrives at 1"):
        run_jobs([make_job(5.0, 1), make_job(1.0, 1)])


@pytest.mark.parametrize(
    ("field", "changes"),
    [("startup", {"startup": -1.0}), ("failures", {"failures": 1.0}), ("look_every", {"look_every": float("inf")})],
)
def test_grid_with_invalid_value_is_rejected(field: str, changes: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=field):
        create_grid(**changes)


def test_communicating_lengthens_run_time_by_its_share() -> None:
    factor = by_communication(1.0, (1.0, 3.0))
    assert factor(make_job(0.0, 1), (("a", 1), ("b", 1))) == pytest.approx(2.0)
    assert factor(make_job(0.0, 1), (("a", 1),)) == 1.0


@given(curve=st.lists(st.floats(1, 10), min_size=1, max_size=4), clusters=st.integers(1, 12))
def test_run_time_curve_does_not_fall_beyond_its_end(curve: list[float], clusters: int) -> None:
    factor = by_number_of_clusters(curve)
    gang = [(f"cluster-{number}", 1) for number in range(clusters)]
    expected = curve[min(clusters, len(curve)) - 1] / curve[0]
    assert factor(make_job(0.0, 1), gang) >= expected * (1 - 1e-9) or clusters <= len(curve)


@pytest.mark.parametrize("failures", [0.0, 0.3])
@pytest.mark.parametrize("priorities", [(Priority.LOW,), (Priority.LOW, Priority.HIGH)])
def test_node_reports_without_local_users_change_nothing(
    failures: float, priorities: Sequence[Priority], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler derives the idle nodes from the reports of components."""
    draws = Random(5)
    jobs = [
        make_job(result.arrives_at, result.spec.request.total_size, result.lasts, priority=draws.choice(priorities))
        for result in random_jobs(5)
    ]
    expected = run_jobs(jobs, create_grid(failures=failures)).jobs
    begin = Site.__init__

    def tell_all(site: Site, *arguments: Any) -> None:
        begin(site, *arguments)
        site.tells_nodes = True

    monkeypatch.setattr(Site, "__init__", tell_all)
    assert run_jobs(jobs, create_grid(failures=failures)).jobs == expected
    assert any(result.attempts > 1 for result in expected) is (failures > 0 or len(priorities) > 1)


def test_watched_simulation_has_the_same_outcome_and_timelines() -> None:
    all_effects: list[Effects] = []
    watched = run_jobs(random_jobs(7), create_grid(failures=0.2), watch=lambda _, effects: all_effects.append(effects))
    simulation = Simulation(create_grid(failures=0.2))
    assert simulation.run(random_jobs(7)).jobs == watched.jobs
    assert any(effects.timeline for effects in all_effects)
    late = JobSubmitted(Job(1000, make_job(0.0, 1).spec, simulation.now))
    assert simulation.scheduler.step([late], simulation.now).timeline == []


def random_jobs(seed: int, number: int = 60) -> list[PlannedJob]:
    draws, arrival, jobs = Random(seed), 0.0, []
    for _ in range(number):
        arrival += draws.expovariate(0.05)
        jobs.append(make_job(arrival, draws.randint(1, 12), draws.uniform(1.0, 200.0)))
    return jobs


@given(seed=st.integers(0, 10_000), failures=st.sampled_from([0.0, 0.2]), look=st.sampled_from([0.0, 10.0]))
def test_simulation_never_shares_nodes_and_ends_every_job(seed: int, failures: float, look: float) -> None:
    used_nodes: dict[str, dict[tuple[int, int], int]] = {name: {} for name in NORTH_SOUTH}

    def watch(now: float, effects: Effects) -> None:
        for result in effects.jobs.values():
            for clusters in used_nodes.values():
                clusters.pop((result.id, 0), None)
            if result.state is JobState.RUNNING and result.attempt is not None:
                for component in result.attempt.gang:
                    on_cluster = used_nodes[component.cluster]
                    on_cluster[(result.id, 0)] = on_cluster.get((result.id, 0), 0) + component.size
        for name, on_cluster in used_nodes.items():
            assert sum(on_cluster.values()) <= NORTH_SOUTH[name].nodes

    users = generate_local_users({"north": 8, "south": 4}, 0.2, duration=1000.0, lasts=30.0, seed=seed)
    rules = Rules(max_restarts=None, error_threshold=1000)
    outcome = run_jobs(
        random_jobs(seed),
        create_grid(failures=failures, look_every=look),
        rules=rules,
        local_users=users,
        watch=watch,
        seed=seed,
    )
    assert len(outcome.jobs) == 60
    assert all(result.state is JobState.SUCCEEDED for result in outcome.jobs)
    assert all(earlier.ended <= later.ended for earlier, later in pairwise(outcome.jobs))


SAME = """
from tests.simulation.test_simulation import create_grid, random_jobs, run_jobs
from koalapy.scheduler.rules import Rules
from experiments.local_users import generate_local_users
users = generate_local_users({"north": 8, "south": 4}, 0.2, duration=1000.0, lasts=30.0, seed=7)
rules = Rules(max_restarts=None, error_threshold=1000)
grid = create_grid(failures=0.2, look_every=10.0)
for job in run_jobs(random_jobs(7), grid, rules=rules, local_users=users, seed=7).jobs:
    print(job.ident, job.started, job.ended, job.gang, job.attempts)
"""


@pytest.mark.processes
def test_simulation_with_equal_arguments_has_equal_outcome() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", SAME], env={"PYTHONHASHSEED": hashing}, capture_output=True, text=True, check=True
        ).stdout
        for hashing in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0].count("\n") == 60


@pytest.mark.parametrize("launcher", Launcher)
def test_program_on_two_clusters_ends_once(launcher: Launcher) -> None:
    (result,) = run_jobs([make_job(0.0, 10, launcher=launcher)]).jobs
    assert (result.state, result.ended, result.restarts) == (JobState.SUCCEEDED, 100.0, 0)


def test_each_task_of_an_array_runs_for_the_planned_time() -> None:
    outcome = run_jobs([make_job(0.0, 4, array=TaskIndices.parse("1-5%2")), make_job(1.0, 4)])
    results = jobs_by_id(outcome)
    assert sorted(results) == [1, 2, 3, 4, 5, 6, 7]
    assert [results[task].started for task in range(2, 7)] == [0.0, 0.0, 100.0, 100.0, 200.0]
    assert (results[1].state, results[1].ended, results[7].started) == (JobState.SUCCEEDED, 300.0, 1.0)
    assert outcome.node_seconds == 6 * 4 * 100.0
