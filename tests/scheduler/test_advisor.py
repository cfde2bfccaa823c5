"""Advice in the scheduler: learned slowdowns, waits for predicted releases, and reasons."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from koalapy.model.advice import AdvisedPlacement
from koalapy.model.job import JobId, JobState, Token, parse_token
from koalapy.model.job_spec import JobSpec
from koalapy.policies.auto import Auto
from koalapy.policies.knowledge import Knowledge
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.sites import Site
from tests.scheduler.world import Program, World

SECONDS = {"wave": 10.0, "prime": 10.0}
SLOWDOWN = {"wave": 3.0, "prime": 1.0}


class Grid(World):
    """A grid with two applications: co-allocated, wave takes three times as long and prime the same time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.advised: list[AdvisedPlacement] = []
        super().__init__(*arguments, **options)

    def apply_effects(self, effects: Effects) -> Effects:
        self.advised += effects.advised
        return super().apply_effects(effects)

    def _start_program(self, site: Site, token: Token) -> None:
        job = self.jobs[parse_token(token)[0]]
        name = job.spec.application
        if name in SECONDS:
            factor = SLOWDOWN[name] if len(self.clusters_of(job.id)) > 1 else 1.0
            self.programs[job.id] = Program((SECONDS[name] * factor,))
        super()._start_program(site, token)

    def clusters_of(self, job: JobId) -> set[str]:
        attempt = self.jobs[job].attempt
        return {component.cluster for component in attempt.gang} if attempt else set()

    def submit_application(self, application: str, total: int = 4, **options: Any) -> JobId:
        return self.submit(flexible(total), application=application, policy="auto", **options)

    def block_clusters(self, names: Sequence[str] = ("north", "south"), **options: Any) -> list[JobId]:
        """Occupy a node of each cluster for an unpredictable time."""
        options = {"run_time": 1e6, "command": ("sh", "-c", "x")} | options
        return [self.submit(fixed(**{name: 1}), **options) for name in names]

    def cancel_blockers(self, jobs: Sequence[JobId]) -> None:
        for job in jobs:
            self.cancel(job)
        self.advance(5.0)


def create_experienced_grid(runs: int = 20) -> Grid:
    """Run both applications several times, every second time with a blocked node in each cluster."""
    grid = Grid({"north": 4, "south": 4})
    for number in range(runs):
        for application in ("wave", "prime"):
            blockers = grid.block_clusters() if number % 2 else []
            job = grid.submit_application(application)
            grid.advance(1.0)
            if grid.state(job) is JobState.QUEUED:
                grid.cancel_blockers(blockers)
            grid.advance(40.0)
            assert grid.state(job) is JobState.SUCCEEDED
            grid.cancel_blockers([blocker for blocker in blockers if not grid.state(blocker).is_final])
    return grid


def test_advice_with_experience_coallocates_only_harmless_application() -> None:
    grid = create_experienced_grid()
    experience = grid.queries.experience
    run_counts = {
        (name, len(s.where) or 1): s.runs for name in experience.applications() for s in experience.seen(name)
    }
    assert run_counts["prime", 2] == 10
    assert run_counts["wave", 2] <= 2, "two runs were enough to learn"
    blockers = grid.block_clusters()
    wave = grid.submit_application("wave")
    assert "a slowdown of" in grid.queries.waiting_reason(grid.job(wave))
    prime = grid.submit_application("prime")
    grid.advance(1.0)
    assert grid.clusters_of(prime) == {"north", "south"}
    assert grid.state(wave) is JobState.QUEUED
    grid.cancel_blockers([blockers[0]])
    grid.advance(20.0)
    assert grid.clusters_of(wave) == {"north"}


def test_advice_with_experience_stores_accurate_predictions() -> None:
    grid = create_experienced_grid(6)
    last_advice = {advice.application: advice for advice in grid.advised}
    for application, advice in last_advice.items():
        job = grid.job(advice.job)
        assert (advice.generation, advice.clusters) == (job.generation, len(grid.clusters_of(job.id)))
        assert advice.predicted == pytest.approx(SECONDS[application], rel=0.1)
        assert job.ended_at is not None
        assert job.started_at is not None
        assert job.ended_at - job.started_at == pytest.approx(advice.predicted, rel=0.1)
        assert grid.reasons(job.id, "placed")[-1] == advice.reason


def test_advice_waits_for_predicted_release_then_starts() -> None:
    grid = create_experienced_grid(6)
    blocker = grid.submit(fixed(north=4), run_time=15.0, application="known", walltime=15.0)
    blockers = grid.block_clusters(["south"])
    grid.advance(1.0)
    wave = grid.submit_application("wave")
    grid.advance(1.0)
    assert grid.state(wave) is JobState.QUEUED
    grid.advance(14.0)
    assert grid.state(blocker).is_final
    assert grid.state(wave) is JobState.RUNNING
    assert grid.clusters_of(wave) == {"north"}
    grid.cancel_blockers(blockers)


def test_advice_with_wrong_prediction_coallocates_later() -> None:
    """Once the blocker has run longer than wave would on two clusters, wave is placed on both."""
    grid = create_experienced_grid(6)
    for _ in range(3):
        grid.submit(fixed(north=1), run_time=5.0, application="usually-short")
        grid.advance(10.0)
    long = grid.submit(fixed(north=1, south=1), run_time=1e6, application="usually-short")
    grid.advance(1.0)
    wave = grid.submit_application("wave")
    grid.advance(2.0)
    assert grid.state(wave) is JobState.QUEUED
    grid.advance(2 * grid.rules.high_scans_per_low * grid.rules.scan_interval)
    assert grid.clusters_of(wave) == {"north", "south"}
    assert grid.state(long) is JobState.RUNNING


def create_certain_grid(rules: Rules | None = None) -> Grid:
    """Create a grid with five runs each that show that wave takes 10 s on one cluster and 30 s on two."""
    grid = Grid({"north": 4, "south": 4}, rules)
    for _ in range(5):
        for request in (fixed(north=4), fixed(north=2, south=2)):
            grid.submit(request, application="wave")
            grid.advance(40.0)
    return grid


def submit_passing_jobs(grid: Grid, seconds: float) -> None:
    """Submit a job of one node to each cluster every 8 s; each ends as predicted after 12 s."""
    until = grid.now + seconds
    while grid.now < until:
        for name in grid.sites:
            grid.submit(fixed(**{name: 1}), run_time=12.0, command=("sh", "-c", "x"), walltime=13.0)
        grid.advance(8.0)


def test_advice_without_plan_stops_preferring_waits() -> None:
    """Each preferred wait is short, and none leads to a start."""
    grid = create_certain_grid(Rules(plan_after=None))
    submit_passing_jobs(grid, 16.0)
    wave = grid.submit_application("wave")
    submit_passing_jobs(grid, 24.0)
    assert grid.state(wave) is JobState.QUEUED
    submit_passing_jobs(grid, 24.0)
    assert grid.clusters_of(wave) == {"north", "south"}
    assert "it has waited 3" in grid.reasons(wave, "placed")[-1]


def test_advice_wait_without_total_capacity_does_not_count() -> None:
    grid = create_certain_grid()
    full = [grid.submit(fixed(**{name: 3}), run_time=1e6, command=("sh", "-c", "x")) for name in grid.sites]
    grid.block_clusters(walltime=500.0, run_time=500.0)
    wave = grid.submit_application("wave")
    grid.advance(485.0)
    for job in full:
        grid.cancel(job)
    grid.advance(5.0)
    assert grid.state(wave) is JobState.QUEUED, "one cluster will soon have capacity"
    grid.advance(15.0)
    assert len(grid.clusters_of(wave)) == 1


def test_advice_job_larger_than_any_cluster_is_coallocated() -> None:
    grid = create_experienced_grid(4)
    wave = grid.submit_application("wave", 6)
    grid.advance(1.0)
    assert grid.clusters_of(wave) == {"north", "south"}
    assert "no cluster could hold it alone" in grid.reasons(wave, "placed")[-1]


def test_advice_waiting_job_receives_planned_start() -> None:
    grid = Grid({"north": 4, "south": 4}, Rules(plan_after=0, scan_interval=10.0))
    blockers = grid.block_clusters()
    harmful: dict[str, Any] = {"application": "all-to-all", "policy": "auto", "communication": 0.9}
    waiting_job = grid.submit(flexible(4), run_time=5.0, **harmful)
    grid.advance(60.0)
    assert grid.queries.planned_job == waiting_job
    small = grid.submit(flexible(1), run_time=1.0)
    grid.advance(1.0)
    reserved = [name for name in ("north", "south") if name not in grid.clusters_of(small)]
    assert len(reserved) == 1, "one cluster is reserved completely"
    grid.cancel_blockers(blockers)
    grid.advance(20.0)
    assert grid.state(waiting_job) is JobState.SUCCEEDED
    assert len(grid.clusters_of(waiting_job)) == 1


def test_advice_rejects_equal_requests_per_application() -> None:
    grid = create_experienced_grid(6)
    blockers = grid.block_clusters()
    waves = [grid.submit_application("wave") for _ in range(3)]
    prime = grid.submit_application("prime")
    grid.advance(1.0)
    assert [grid.state(wave) for wave in waves] == [JobState.QUEUED] * 3
    assert grid.state(prime) is not JobState.QUEUED
    grid.cancel_blockers(blockers)


class Counting(Auto):
    """A policy that counts its evaluations."""

    name = "counting"
    evaluations = 0

    def informed(self, knowledge: Knowledge) -> Auto:
        self.evaluations += 1
        return super().informed(knowledge)


def test_advice_unknown_applications_are_evaluated_once_per_scan() -> None:
    """Script names may all differ; a scan must not cost one evaluation for each job."""
    policies = builtin_policies()
    policies.register(counting := Counting())
    grid = Grid({"north": 4, "south": 4}, Rules(high_scans_per_low=1), policies=policies)
    grid.block_clusters()
    for number in range(50):
        grid.submit(flexible(4), application=f"run-{number}", policy="counting", communication=0.9)
    grid.advance(1.0)
    counting.evaluations = 0
    grid.advance(grid.rules.scan_interval)
    assert 0 < counting.evaluations <= 2


def test_advice_newly_known_application_is_not_blocked() -> None:
    grid = Grid({"north": 4, "south": 4})
    grid.block_clusters()
    stranger = grid.submit_application("stranger", communication=0.45)
    first, second = (grid.submit_application("tiny", communication=0.45) for _ in range(2))
    grid.advance(1.0)
    assert grid.queries.position(first) == 2
    grid.submit(fixed(north=2), application="tiny", run_time=0.5)
    grid.advance(10.0)
    assert grid.clusters_of(first) == {"north", "south"}, "the blockers have run longer than its predicted run time"
    grid.advance(30.0)
    assert grid.state(second) is not JobState.QUEUED
    assert grid.state(stranger) is JobState.QUEUED


def test_advice_fitting_jobs_need_no_release_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each job that fits would cost a prediction for every running job."""
    grid = create_experienced_grid(4)
    expected, predicted_specs = grid.queries.experience.expected, []

    def record_prediction(spec: JobSpec, clusters: Collection[str]) -> float | None:
        predicted_specs.append(spec)
        return expected(spec, clusters)

    monkeypatch.setattr(grid.queries.experience, "expected", record_prediction)
    for name in ("north", "south") * 3:
        grid.submit(fixed(**{name: 1}), application="prime", policy="auto", run_time=100.0)
    assert not predicted_specs
    grid.submit_application("wave", 2)
    assert len(predicted_specs) == 6


def test_explanation_of_advised_wait_names_smallest_change() -> None:
    grid = create_experienced_grid(6)
    grid.block_clusters()
    wave = grid.submit_application("wave")
    grid.advance(1.0)
    explanation = explain(grid.queries, grid.job(wave), [e for e in grid.timeline if e.job == wave], grid.now)
    assert explanation.headline.startswith("waits for 4 nodes in one cluster, such as north: a slowdown of")
    assert explanation.suffices == ("1 more idle node in north", "1 more idle node in south")
    change = explanation.smallest_change
    assert change is not None
    assert (change.field, change.value) == ("policy", "cluster-minimization")
    assert {component.cluster for component in change.placement.components} == {"north", "south"}


def test_advice_restarted_daemon_starts_waiting_job() -> None:
    """The simulated daemon has no stored experience and starts without any."""
    grid = create_experienced_grid(3)
    blockers = grid.block_clusters()
    wave = grid.submit_application("wave", communication=0.9)
    grid.advance(1.0)
    grid.restart()
    for name in grid.sites:
        grid.connect(name)
    grid.cancel_blockers(blockers)
    grid.advance(60.0)
    assert grid.state(wave) is JobState.SUCCEEDED


def test_advice_single_cluster_job_waits_for_one_cluster() -> None:
    grid = create_experienced_grid(4)
    blockers = grid.block_clusters()
    prime = grid.submit_application("prime", coallocation=1)
    grid.advance(1.0)
    assert grid.state(prime) is JobState.QUEUED
    grid.cancel_blockers(blockers)
    grid.advance(1.0)
    assert len(grid.clusters_of(prime)) == 1


def test_advice_waiting_head_of_fcfs_queue_blocks_others() -> None:
    grid = Grid({"north": 4, "south": 4}, Rules(queue="fcfs"))
    blockers = grid.block_clusters()
    wave = grid.submit(flexible(4), run_time=5.0, application="all-to-all", policy="auto", communication=0.9)
    next_job = grid.submit(flexible(1), run_time=5.0)
    grid.advance(1.0)
    assert (grid.state(wave), grid.state(next_job)) == (JobState.QUEUED, JobState.QUEUED)
    grid.cancel_blockers(blockers)
    grid.advance(20.0)
    assert (grid.state(wave), grid.state(next_job)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)


class Careless(Auto):
    """A policy with an ``informed`` method that fails or returns a wrong value."""

    name = "careless"

    def __init__(self, answer: object = None) -> None:
        super().__init__()
        self.answer = answer

    def informed(self, knowledge: Knowledge) -> Auto:
        if self.answer is None:
            raise ValueError(knowledge.application)
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "description"),
    [(None, "it raised ValueError('wave')"), ("nonsense", "informed, it was 'nonsense', which is not a policy")],
)
def test_advice_broken_policy_is_reported_and_skipped(answer: object, description: str) -> None:
    policies = builtin_policies()
    policies.register(Careless(answer))
    grid = Grid({"north": 4}, policies=policies)
    job, other_job = grid.submit(flexible(1), policy="careless", application="wave"), grid.submit(flexible(1))
    grid.advance(1.0)
    assert grid.state(other_job) is JobState.RUNNING
    assert grid.queries.waiting_reason(grid.job(job)) == f"policy careless is broken: {description}"
    assert grid.warnings == [f"policy careless is broken: {description}"]
