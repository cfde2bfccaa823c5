"""Run the workload of mohamed-2005 on simulated clusters on which many component starts fail."""

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from koalapy.model.cluster import Link
from koalapy.model.errors import BusyError
from koalapy.model.job import Attempt, Job, JobState, Token
from koalapy.model.request import ComponentRequest, NonFixedRequest
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.rules import Rules
from tests.experiments.m05 import BANDWIDTH, CLUSTERS, QUEUE_LIMIT, LocalUser, Outcome, PlannedJob, Run, workload
from tests.scheduler.sites import Site
from tests.scheduler.world import World

FAILING = 0.3
LONGEST = 10_000.0
"""Virtual seconds after which a run counts as stuck."""

RULES = Rules(
    scan_interval=4.0,
    claim_epsilon=0.2,
    claim_grace=0.5,
    plan_after=None,
    preemption_order="jst",
    max_restarts=None,
    restart_pause=0,
    placement_queue_limit=QUEUE_LIMIT,
    error_threshold=25,
    probation_pause=2.0,
    probation_pause_max=16.0,
)
"""Times are a sixtieth of the paper's.

With a failure probability of 0.3, many errors in a row are chance: clusters are excluded, and return by probation.
"""


class Experiment(World):
    """A simulated grid with failing components and a measured load."""

    def __init__(self, rules: Rules, failing: float, seed: int) -> None:
        links = {("north", "south"): Link(bandwidth=BANDWIDTH)}
        self._failing, self._draws = failing, random.Random(seed)
        self._measured: tuple[float, int, int] = (0.0, 0, 0)
        self._outside: deque[PlannedJob] = deque()
        self.node_seconds = {"ours": 0.0, "local": 0.0}
        self.past: list[Attempt] = []
        """Attempts that a later attempt replaced."""
        super().__init__(CLUSTERS, rules, links=links, strict=False)

    def apply_effects(self, effects: Effects) -> Effects:
        self.past += [attempt for _, attempt in effects.attempts]
        return super().apply_effects(effects)

    def _report_claimed(self, site: Site, token: Token) -> None:
        if token not in site.startable():
            return
        if self._draws.random() < self._failing:
            site.fail_component(token, "the start failed")
            site.end_component(token)
        else:
            super()._report_claimed(site, token)

    def _next_event_at(self) -> float:
        since, ours, local = self._measured
        self.node_seconds["ours"] += ours * (self.now - since)
        self.node_seconds["local"] += local * (self.now - since)
        held = [(name in site.local_users, size) for site in self.sites.values() for name, size in site.held.items()]
        locals_have = sum(size for is_local, size in held if is_local)
        self._measured = (self.now, sum(size for _, size in held) - locals_have, locals_have)
        return super()._next_event_at()

    # Workload

    def arrives(self, job: PlannedJob) -> None:
        """Submit a job if the placement queue has room and no earlier job is waiting to enter it."""
        self._outside.append(job)
        if len(self._outside) == 1:
            self._let_in()

    def _let_in(self) -> None:
        while self._outside and self._submit_planned(self._outside[0]):
            self._outside.popleft()
        if self._outside:
            self.schedule(0.5, self._let_in)

    def _submit_planned(self, job: PlannedJob) -> bool:
        components = tuple(ComponentRequest(size, inputs=(job.file,)) for size in job.sizes)
        try:
            self.submit(NonFixedRequest(components), run_time=job.lasts, priority=job.priority, policy="close-to-files")
        except BusyError:
            return False
        return True

    def comes(self, user: LocalUser) -> None:
        site = self.sites[user.cluster]
        name = site.add_local_user(user.nodes)

        def leaves() -> None:
            # Jobs that had to wait for nodes still use them.
            if name in site.held:
                site.remove_local_user(name)
            else:
                self.schedule(user.lasts, leaves)

        self.schedule(user.lasts, leaves)

    # Results

    def at_barriers(self) -> tuple[float, float]:
        """Return the node-seconds of waiting for components or files that led to a start, and of those that did not."""
        before, without = 0.0, 0.0
        for attempt in [*self.past, *(job.attempt for job in self.jobs.values() if job.attempt is not None)]:
            for component in attempt.components:
                if component.claimed_at is None:
                    continue
                if attempt.barrier_at is None or component.superseded:
                    until = component.ended_at if component.ended_at is not None else self.now
                    without += component.size * (until - component.claimed_at)
                else:
                    before += component.size * (attempt.barrier_at - component.claimed_at)
        return before, without


def with_rules(**changes: Any) -> Rules:
    return replace(RULES, **changes)


def run(rules: Rules, *, jobs: int = 500, failing: float = FAILING, seed: int = 2005) -> tuple[Run, Experiment]:
    """Run the workload once."""
    world = Experiment(rules, failing, seed)
    plan = workload(jobs, seed=seed)
    arrivals: list[tuple[float, Callable[[], None]]] = []
    arrivals += [(job.arrives, lambda job=job: world.arrives(job)) for job in plan.jobs]  # type: ignore[misc]
    arrivals += [(user.arrives, lambda user=user: world.comes(user)) for user in plan.local_users]  # type: ignore[misc]
    for at, arrive in arrivals:
        world.schedule(at, arrive)
    began = time.monotonic()
    while world.now < LONGEST and not _over(world, jobs):
        world.advance(10.0)
    assert _over(world, jobs), f"stuck: {Counter(str(job.state) for job in world.jobs.values())}"
    lasted = max(job.ended_at or world.now for job in world.jobs.values())
    offered = sum(CLUSTERS.values()) * lasted
    ours, local = (world.node_seconds[who] / offered for who in ("ours", "local"))
    outcomes = [_outcome(job) for job in world.jobs.values()]
    done = Run(str(rules.claiming), outcomes, ours, local, lasted, time.monotonic() - began, *world.at_barriers())
    return done, world


def _over(world: World, jobs: int) -> bool:
    return len(world.jobs) == jobs and all(job.state.is_final for job in world.jobs.values())


def _outcome(job: Job) -> Outcome:
    assert job.attempt is not None
    assert job.attempt.start_estimate is not None
    assert job.first_start_estimate is not None
    return Outcome(
        job.spec.priority,
        job.state is JobState.SUCCEEDED,
        (job.placed_at or 0) - job.submitted_at,
        job.attempt.start_estimate - job.first_start_estimate,
        (job.started_at or 0) - job.submitted_at,
        (job.ended_at or 0) - job.submitted_at,
        job.placement_tries,
        job.claiming_tries,
        job.restarts,
    )
