"""How a job goes on whose claim is not complete: when it is claimed for again, and whether it holds what it has until
then (semantics 5)."""

from collections.abc import Sequence
from dataclasses import dataclass

from koalapy.model.job import ClaimingMode, Component, ComponentState, Job
from koalapy.scheduler.attempts.attempt_facts import unclaimed
from koalapy.scheduler.claims.claim_try import ClaimTry
from koalapy.scheduler.claims.prospects import Prospects
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState

PRICED = "priced"
HOLDING = (ComponentState.SUBMITTED, ComponentState.WAITING, ComponentState.CLAIMED)
"""A component that has nodes, or asks for them, while the barrier is closed."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a job goes on that is not complete."""

    next_try: float | None
    """None: it queues again."""
    holds: bool = True
    """Whether it holds meanwhile what it can have."""


class Bargain:
    """Sets the terms: by the series of claiming tries of the paper, and by their price where that is wanted."""

    def __init__(self, state: SchedulerState, prospects: Prospects) -> None:
        self._rules, self._ledger, self._grid, self._prospects = state.rules, state.ledger, state.grid, prospects

    def factor(self, job: Job) -> float:
        """L, as the job's claims that failed have left it."""
        return self._rules.claim_factor if job.claim_factor is None else job.claim_factor

    def mode(self, job: Job) -> ClaimingMode:
        """A job that names a threshold and no mode wants it to be heeded."""
        spec, rules = job.spec, self._rules
        heeds = ClaimingMode.INCREMENTAL if rules.claiming is ClaimingMode.ATOMIC else rules.claiming
        return spec.claiming or (heeds if spec.claim_threshold is not None else rules.claiming)

    def next_try(self, job: Job, now: float) -> float | None:
        """The JCT that follows on one at this moment; None when it is as good as the JST, or no later than now."""
        start_estimate = live(job).start_estimate or now
        following = now + self.factor(job) * (start_estimate - now)
        nearest = self._rules.claim_epsilon
        if self.mode(job) is ClaimingMode.PRICED:
            nearest = max(nearest, self._prospects.runner_wait(job, now))
        later = following > now and start_estimate - following >= nearest
        return following if later else None

    def after_try(self, job: Job, this: ClaimTry, now: float) -> tuple[Job, Terms]:
        """The terms of a job that could start some of its components."""
        following = self.next_try(job, now)
        waits = bool(this.blocked) or (following is not None and any(c.awaits_files for c in live(job).gang))
        if not waits or self.mode(job) is not ClaimingMode.PRICED:
            return job, Terms(following)
        return self._weigh(job, [*held(job), *this.startable], this.blocked, following, now)

    def after_failure(self, job: Job, component: Component, now: float) -> tuple[Job, Terms]:
        """The terms of a job one of whose components gets no nodes, whatever the others have."""
        following = self.next_try(job, now)
        if self.mode(job) is not ClaimingMode.PRICED:
            return job, Terms(following)
        others = [other for other in held(job) if other.index != component.index]
        return self._weigh(job, others, [component, *self._lacking(job)], following, now)

    def after_delay(self, job: Job, now: float) -> tuple[Job, Terms]:
        """The terms of a job whose files come later than was thought; it may go on as it is."""
        following, holding = self.next_try(job, now), held(job)
        if following is None or not holding or self.mode(job) is not ClaimingMode.PRICED:
            return job, Terms(following)
        return self._weigh(job, holding, self._lacking(job), following, now)

    def _weigh(
        self, job: Job, holding: Sequence[Component], lacking: Sequence[Component], following: float | None, now: float
    ) -> tuple[Job, Terms]:
        """Weigh what it costs to hold components while others are lacking, or files, and tell it."""
        if not holding:
            return job, Terms(following)
        if following is not None:
            outlook = self._prospects.until_next_try(job, holding, lacking, following, now)
            done = "held" if outlook.holds else "let go until the next try"
        else:
            outlook = self._prospects.beyond_start_time(job, holding, lacking, now)
            done = "waits on" if outlook.holds else "let go"
        self._ledger.note(job, now, PRICED, f"{done}: {outlook}")
        if following is None and outlook.holds:
            following = now + max(self._rules.claim_epsilon, self.factor(job) * outlook.seconds)
            job = self._ledger.change_attempt(job, start_estimate=max(following, now + outlook.seconds))
        return job, Terms(following, outlook.holds)

    def _lacking(self, job: Job) -> list[Component]:
        """The components to be claimed for that there is no room for where they are."""
        return [c for c in unclaimed(job) if self._grid[c.cluster].available_of(c.node_class) < c.size]


def held(job: Job) -> list[Component]:
    """The components that have nodes, or ask for them, while the barrier is closed."""
    return [component for component in live(job).gang if component.state in HOLDING]
