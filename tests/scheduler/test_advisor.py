"""The advisor in the scheduler: it learns, it waits no longer than it should, and it says why."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from koalapy.model.advice import AdvisedPlacement
from koalapy.model.job import JobId, JobSpec, JobState, Token, parse_token
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
    """Programs of two applications: co-allocated, wave takes three times as long, and prime as long as ever."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.advised: list[AdvisedPlacement] = []
        super().__init__(*arguments, **more)

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

    def ask_for(self, application: str, total: int = 4, **more: Any) -> JobId:
        return self.submit(flexible(total), application=application, policy="auto", **more)

    def block(self, names: Sequence[str] = ("north", "south"), **more: Any) -> list[JobId]:
        """A node of each cluster is taken, for how long nobody can know."""
        more = {"run_time": 1e6, "command": ("sh", "-c", "x")} | more
        return [self.submit(fixed(**{name: 1}), **more) for name in names]

    def unblock(self, jobs: Sequence[JobId]) -> None:
        for job in jobs:
            self.cancel(job)
        self.advance(5.0)


def experienced(runs: int = 20) -> Grid:
    """After as many runs of both, every other one on a grid without room in any one cluster."""
    grid = Grid({"north": 4, "south": 4})
    for number in range(runs):
        for application in ("wave", "prime"):
            blockers = grid.block() if number % 2 else []
            job = grid.ask_for(application)
            grid.advance(1.0)
            if grid.state(job) is JobState.QUEUED:
                grid.unblock(blockers)
            grid.advance(40.0)
            assert grid.state(job) is JobState.SUCCEEDED
            grid.unblock([blocker for blocker in blockers if not grid.state(blocker).is_final])
    return grid


def test_it_learns_to_co_allocate_prime_and_to_keep_wave_in_one_cluster() -> None:
    grid = experienced()
    experience = grid.queries.experience
    seen = {(name, len(s.where) or 1): s.runs for name in experience.applications() for s in experience.seen(name)}
    assert seen["prime", 2] == 10
    assert seen["wave", 2] <= 2, "twice was enough"
    blockers = grid.block()
    wave = grid.ask_for("wave")
    assert "a slowdown of" in grid.queries.waiting_reason(grid.job(wave))
    prime = grid.ask_for("prime")
    grid.advance(1.0)
    assert grid.clusters_of(prime) == {"north", "south"}
    assert grid.state(wave) is JobState.QUEUED
    grid.unblock([blockers[0]])
    grid.advance(20.0)
    assert grid.clusters_of(wave) == {"north"}


def test_its_predictions_come_true_and_are_kept_with_the_job() -> None:
    grid = experienced(6)
    last = {given.application: given for given in grid.advised}
    for application, given in last.items():
        job = grid.job(given.job)
        assert (given.generation, given.clusters) == (job.generation, len(grid.clusters_of(job.id)))
        assert given.predicted == pytest.approx(SECONDS[application], rel=0.1)
        assert job.ended_at is not None
        assert job.started_at is not None
        assert job.ended_at - job.started_at == pytest.approx(given.predicted, rel=0.1)
        assert grid.reasons(job.id, "placed")[-1] == given.reason


def test_it_waits_for_nodes_whose_release_it_foresees_and_is_asked_again_when_they_are_free() -> None:
    grid = experienced(6)
    blocker = grid.submit(fixed(north=4), run_time=15.0, application="known", walltime=15.0)
    others = grid.block(["south"])
    grid.advance(1.0)
    wave = grid.ask_for("wave")
    grid.advance(1.0)
    assert grid.state(wave) is JobState.QUEUED
    grid.advance(14.0)
    assert grid.state(blocker).is_final
    assert grid.state(wave) is JobState.RUNNING
    assert grid.clusters_of(wave) == {"north"}
    grid.unblock(others)


def test_a_prediction_that_did_not_come_true_is_not_waited_for_for_ever() -> None:
    """The blocker runs on and on; when it has run for longer than wave would on two clusters, wave goes there."""
    grid = experienced(6)
    for _ in range(3):
        grid.submit(fixed(north=1), run_time=5.0, application="usually-short")
        grid.advance(10.0)
    long = grid.submit(fixed(north=1, south=1), run_time=1e6, application="usually-short")
    grid.advance(1.0)
    wave = grid.ask_for("wave")
    grid.advance(2.0)
    assert grid.state(wave) is JobState.QUEUED
    grid.advance(2 * grid.rules.high_scans_per_low * grid.rules.scan_interval)
    assert grid.clusters_of(wave) == {"north", "south"}
    assert grid.state(long) is JobState.RUNNING


def sure(rules: Rules | None = None) -> Grid:
    """Where nobody doubts that wave takes 10 s on one cluster and 30 s on two."""
    grid = Grid({"north": 4, "south": 4}, rules)
    for _ in range(5):
        for request in (fixed(north=4), fixed(north=2, south=2)):
            grid.submit(request, application="wave")
            grid.advance(40.0)
    return grid


def pass_by(grid: Grid, seconds: float) -> None:
    """Every 8 s a job of one node comes to each cluster. That it ends 12 s later is known; not, that more will come."""
    until = grid.now + seconds
    while grid.now < until:
        for name in grid.sites:
            grid.submit(fixed(**{name: 1}), run_time=12.0, command=("sh", "-c", "x"), walltime=13.0)
        grid.advance(8.0)


def test_without_aging_it_is_not_passed_for_ever_by_jobs_that_come_later() -> None:
    """Each wait that it prefers is short, and none comes true."""
    grid = sure(Rules(aging=False))
    pass_by(grid, 16.0)
    wave = grid.ask_for("wave")
    pass_by(grid, 24.0)
    assert grid.state(wave) is JobState.QUEUED
    pass_by(grid, 24.0)
    assert grid.clusters_of(wave) == {"north", "south"}
    assert "it has waited 3" in grid.reasons(wave, "placed")[-1]


def test_a_wait_for_nodes_that_are_nowhere_is_not_one_that_it_preferred() -> None:
    grid = sure()
    full = [grid.submit(fixed(**{name: 3}), run_time=1e6, command=("sh", "-c", "x")) for name in grid.sites]
    grid.block(walltime=500.0, run_time=500.0)
    wave = grid.ask_for("wave")
    grid.advance(485.0)
    for job in full:
        grid.cancel(job)
    grid.advance(5.0)
    assert grid.state(wave) is JobState.QUEUED, "soon there will be room in one cluster"
    grid.advance(15.0)
    assert len(grid.clusters_of(wave)) == 1


def test_where_no_cluster_can_hold_it_it_is_co_allocated_whatever_the_slowdown() -> None:
    grid = experienced(4)
    wave = grid.ask_for("wave", 6)
    grid.advance(1.0)
    assert grid.clusters_of(wave) == {"north", "south"}
    assert "no cluster could hold it alone" in grid.reasons(wave, "placed")[-1]


def test_the_nodes_it_waits_for_are_kept_for_it_once_it_has_waited_long() -> None:
    grid = Grid({"north": 4, "south": 4}, Rules(aging_tries=2, scan_interval=10.0))
    blockers = grid.block()
    harmful = {"application": "all-to-all", "policy": "auto", "communication": 0.9}
    waits = grid.submit(flexible(4), run_time=5.0, **harmful)
    grid.advance(60.0)
    assert grid.queries.reservation == waits
    small = grid.submit(flexible(1), run_time=1.0)
    grid.advance(1.0)
    kept = [name for name in ("north", "south") if name not in grid.clusters_of(small)]
    assert len(kept) == 1, "one cluster is kept whole"
    grid.unblock(blockers)
    grid.advance(20.0)
    assert grid.state(waits) is JobState.SUCCEEDED
    assert len(grid.clusters_of(waits)) == 1


def test_jobs_of_one_request_and_different_applications_are_refused_each_for_itself() -> None:
    grid = experienced(6)
    blockers = grid.block()
    waves = [grid.ask_for("wave") for _ in range(3)]
    prime = grid.ask_for("prime")
    grid.advance(1.0)
    assert [grid.state(wave) for wave in waves] == [JobState.QUEUED] * 3
    assert grid.state(prime) is not JobState.QUEUED
    grid.unblock(blockers)


class Counting(Auto):
    """Counts how often it is asked."""

    name = "counting"
    asked = 0

    def informed(self, knowledge: Knowledge) -> Auto:
        self.asked += 1
        return super().informed(knowledge)


def test_jobs_of_applications_that_nobody_knows_yet_are_refused_together() -> None:
    """Each may have a name of its own, such as that of a script; a scan must not cost what there are jobs."""
    policies = builtin_policies()
    policies.register(counting := Counting())
    grid = Grid({"north": 4, "south": 4}, Rules(high_scans_per_low=1), policies=policies)
    grid.block()
    for number in range(50):
        grid.submit(flexible(4), application=f"run-{number}", policy="counting", communication=0.9)
    grid.advance(1.0)
    counting.asked = 0
    grid.advance(grid.rules.scan_interval)
    assert 0 < counting.asked <= 2


def test_a_waiting_job_whose_application_becomes_known_is_not_held_back_by_others() -> None:
    grid = Grid({"north": 4, "south": 4})
    grid.block()
    stranger = grid.ask_for("stranger", communication=0.45)
    first, second = (grid.ask_for("tiny", communication=0.45) for _ in range(2))
    grid.advance(1.0)
    assert grid.queries.position(first) == 2
    grid.submit(fixed(north=2), application="tiny", run_time=0.5)
    grid.advance(10.0)
    assert grid.clusters_of(first) == {"north", "south"}, "the blockers have run for longer than it would"
    grid.advance(30.0)
    assert grid.state(second) is not JobState.QUEUED
    assert grid.state(stranger) is JobState.QUEUED


def test_when_others_will_end_is_asked_only_for_jobs_that_may_have_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of many jobs that fit would cost what there are running ones."""
    grid = experienced(4)
    expected, asked = grid.queries.experience.expected, []

    def counted(spec: JobSpec, clusters: Collection[str]) -> float | None:
        asked.append(spec)
        return expected(spec, clusters)

    monkeypatch.setattr(grid.queries.experience, "expected", counted)
    for name in ("north", "south") * 3:
        grid.submit(fixed(**{name: 1}), application="prime", policy="auto", run_time=100.0)
    assert not asked
    grid.ask_for("wave", 2)
    assert len(asked) == 6


def test_why_it_waits_and_what_would_start_it_now() -> None:
    grid = experienced(6)
    grid.block()
    wave = grid.ask_for("wave")
    grid.advance(1.0)
    found = explain(grid.queries, grid.job(wave), [e for e in grid.timeline if e.job == wave], grid.now)
    assert found.headline.startswith("waits for 4 nodes in one cluster, such as north: a slowdown of")
    assert found.suffices == ("1 more idle node in north", "1 more idle node in south")
    change = found.smallest_change
    assert change is not None
    assert (change.field, change.value) == ("policy", "cluster-minimization")
    assert {component.cluster for component in change.placement.components} == {"north", "south"}


def test_a_restarted_daemon_goes_on_with_what_is_given_to_it() -> None:
    """The virtual world's daemon has no store to learn from: it begins anew, and nothing of that disturbs it."""
    grid = experienced(3)
    blockers = grid.block()
    wave = grid.ask_for("wave", communication=0.9)
    grid.advance(1.0)
    grid.restart()
    for name in grid.sites:
        grid.connect(name)
    grid.unblock(blockers)
    grid.advance(60.0)
    assert grid.state(wave) is JobState.SUCCEEDED


def test_a_job_that_is_never_to_be_co_allocated_waits_for_one_cluster() -> None:
    grid = experienced(4)
    blockers = grid.block()
    prime = grid.ask_for("prime", coallocation=1)
    grid.advance(1.0)
    assert grid.state(prime) is JobState.QUEUED
    grid.unblock(blockers)
    grid.advance(1.0)
    assert len(grid.clusters_of(prime)) == 1


def test_one_that_waits_at_the_head_of_a_strict_queue_lets_nobody_pass() -> None:
    grid = Grid({"north": 4, "south": 4}, Rules(queue="fcfs"))
    blockers = grid.block()
    wave = grid.submit(flexible(4), run_time=5.0, application="all-to-all", policy="auto", communication=0.9)
    behind = grid.submit(flexible(1), run_time=5.0)
    grid.advance(1.0)
    assert (grid.state(wave), grid.state(behind)) == (JobState.QUEUED, JobState.QUEUED)
    grid.unblock(blockers)
    grid.advance(20.0)
    assert (grid.state(wave), grid.state(behind)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)


class Careless(Auto):
    """Learns, or so it says."""

    name = "careless"

    def __init__(self, answer: object = None) -> None:
        super().__init__()
        self.answer = answer

    def informed(self, knowledge: Knowledge) -> Auto:
        if self.answer is None:
            raise ValueError(knowledge.application)
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "mistake"),
    [(None, "it raised ValueError('wave')"), ("nonsense", "informed, it was 'nonsense', which is no policy")],
)
def test_a_policy_that_fails_to_learn_disturbs_nobody(answer: object, mistake: str) -> None:
    policies = builtin_policies()
    policies.register(Careless(answer))
    grid = Grid({"north": 4}, policies=policies)
    job, other = grid.submit(flexible(1), policy="careless", application="wave"), grid.submit(flexible(1))
    grid.advance(1.0)
    assert grid.state(other) is JobState.RUNNING
    assert grid.queries.waiting_reason(grid.job(job)) == f"policy careless is broken: {mistake}"
    assert grid.warnings == [f"policy careless is broken: {mistake}"]
