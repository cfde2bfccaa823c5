"""The scheduler: it takes events and the time, and returns effects. It uses no clock, socket or database.

A live, embedded or simulated environment calls ``step`` with the events and the time, stores the effects, and then
sends their commands. It calls ``step`` again at ``next_wakeup`` at the latest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from koalapy.model.job import Attempt, Component, ComponentState, Job
from koalapy.model.job_spec import Priority
from koalapy.model.reservation import Reservation
from koalapy.scheduler.attempts.attempts import MAX_REFUSAL_PAUSE
from koalapy.scheduler.attempts.facts import filter_of
from koalapy.scheduler.claims.claim import Nonces
from koalapy.scheduler.cycle import Cycle
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import Event
from koalapy.scheduler.ledger import live
from koalapy.scheduler.parts import Parts
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.queue.candidates import Clock
from koalapy.scheduler.state import SchedulerState


class Scheduler:
    """The scheduler of one grid: constructs its components and runs scheduling cycles."""

    def __init__(
        self, state: SchedulerState, nonces: Nonces, clock: Clock | None = None, *, keeps_effects: bool = True
    ) -> None:
        """Construct the components of the scheduler.

        ``clock`` measures how long a step places jobs: after ``step_budget`` seconds the remaining jobs are left to the
        next step, which is due at once. None means no limit. ``keeps_effects``: whether the caller uses jobs of the
        effects after the next step; they are copied for that.
        """
        self._state, self._grid, self._ledger = state, state.grid, state.ledger
        parts = Parts(state, nonces, clock)
        self._queues, self._candidates, self._arrays = parts.queues, parts.candidates, parts.arrays
        self._health, self._link_paths, self._attempts = parts.health, parts.link_paths, parts.attempts
        self._conditions, self._claiming, self._failures = parts.conditions, parts.claiming, parts.failures
        self._contact, self._drains = parts.contact, parts.drains
        self._cycle = Cycle(parts, keeps_effects=keeps_effects)
        self.queries = Queries(
            state, parts.queues, parts.offers, parts.questions, parts.reasons, parts.arrays, parts.conditions
        )

    def step(self, events: Sequence[Event], now: float) -> Effects:
        """Run a scheduling cycle: apply events, place jobs, and return the changes and the commands to send."""
        return self._cycle.run(events, now)

    def apply(self, event: Event, now: float) -> None:
        """Apply one event before the next step. Raise ``KoalaError`` for an action that is not possible now."""
        self._cycle.apply(event, now)

    def next_wakeup(self) -> float | None:
        """Return when ``step`` must be called at the latest, even without events; None if never."""
        return self._state.now if self.is_unfinished else self._state.timers.next_at()

    @property
    def is_unfinished(self) -> bool:
        """Return whether the last step ran out of time before all candidates were tried."""
        return self._candidates.is_unfinished

    def disable_timelines(self) -> None:
        """Omit timeline entries from the effects from now on."""
        self._ledger.records_timelines = False

    # Jobs of an earlier daemon run

    def restore(
        self,
        jobs: Iterable[Job],
        now: float,
        scans: Mapping[Priority, int] | None = None,
        reservations: Iterable[Reservation] = (),
    ) -> None:
        """Load the jobs, scan counts and reservations of an earlier daemon run. All clusters start out of reach."""
        for reservation in reservations:
            self._state.store_reservation(replace(reservation, changed_at=min(reservation.changed_at, now)))
        for job in sorted(jobs, key=lambda job: job.queue_seq):
            correction = corrected(job, now, self._state.rules.restart_pause_max)
            self._ledger.restore(correction)
            if correction != job:
                self._ledger.store_job(correction)
        self._contact.began = now
        self._link_paths.restore(now)
        restored = list(self._ledger.jobs.values())
        self._arrays.restore(restored)
        self._queues.restore(restored, scans or {})
        for job in restored:
            self._failures.restore_timers(job)
            self._conditions.restore(job)
            if job.is_placed:
                self._restore_attempt(job, now)
            elif job.retry_at is not None:
                self._attempts.pause_job(job, job.retry_at)
        self._restore_nodes(now)
        self._drains.restore()
        for cluster in self._grid.clusters():
            self._contact.await_return(cluster, now)
            if cluster.health.unusable:
                self._health.plan_probation(cluster.name, now)

    def _restore_nodes(self, now: float) -> None:
        """Restore which components have nodes. Leaving components come first, since their nodes may be promised to
        others."""
        assigned: list[tuple[Job, Component]] = []
        for job in (job for job in self._ledger.jobs.values() if job.is_placed):
            for component in live(job).components:
                cluster, token = self._grid[component.cluster], job.token(component.index)
                if component.state is ComponentState.DELIVERING:
                    cluster.nodes.mark_delivering(token)
                elif component.state is ComponentState.STOPPING:
                    nodes, reservation = filter_of(job.spec, component), self._state.reservations.site_name(job.spec)
                    cluster.nodes.promise(token, component.size, nodes, reservation=reservation)
                    self._attempts.expect_release_after_grace(job, component)
                elif component.state not in (ComponentState.PLACED, ComponentState.ENDED):
                    assigned.append((job, component))
        for job, component in assigned:
            self._attempts.promise(job, component, now)
            if component.warned_at is not None:
                self._attempts.expect_release_after_grace(job, component)

    def _restore_attempt(self, job: Job, now: float) -> None:
        """Set the deadlines of an attempt from an earlier daemon run, as far as that attempt had got."""
        earliest = self._contact.return_by(now)
        if job.ending is None:
            self._attempts.set_end_at_deadline(job)
        if job.ending is None and live(job).barrier_at is None:
            self._claiming.restore(job, now, earliest)
        else:
            self._attempts.set_phase_deadline(job, now, earliest)


def corrected(job: Job, now: float, longest_pause: float) -> Job:
    """Return a job without timestamps in the future, and with planned times no farther ahead than they were."""
    longest = max(longest_pause, MAX_REFUSAL_PAUSE) if job.refusals else longest_pause
    until = now + MAX_REFUSAL_PAUSE
    return replace(
        job,
        attempt=job.attempt and _corrected_attempt(job.attempt, now),
        tasks=job.tasks and replace(job.tasks, waits_since=min(job.tasks.waits_since, now)),
        planned_start=job.planned_start and job.planned_start.moved_back(now),
        refusals=tuple(replace(r, until=r.until and min(r.until, until)) for r in job.refusals),
        **{**_past_times(job, now), "retry_at": job.retry_at and min(job.retry_at, now + longest)},
    )


def _corrected_attempt(attempt: Attempt, now: float) -> Attempt:
    """Return an attempt with no timestamp after ``now``; its planned times move back as far as its placement."""
    ahead = max(0.0, attempt.placed_at - now)
    planned = {"start_estimate": attempt.start_estimate, "claim_at": attempt.claim_at}
    moved = {name: time if time is None else time - ahead for name, time in planned.items()}
    # The time of a coming loss is recomputed, since this daemon run has received no message yet.
    components = tuple(
        replace(c, **_past_times(c, now) | ({} if c.has_ended else {"lost_at": None})) for c in attempt.components
    )
    return replace(attempt, components=components, **{**_past_times(attempt, now), **moved})


def _past_times(value: Job | Attempt | Component, now: float) -> dict[str, Any]:
    """Return the timestamps of a job, attempt or component, by name, each of them ``now`` at the latest."""
    names = [field.name for field in fields(value) if field.name.endswith(("_at", "_since"))]
    return {name: time if time is None else min(time, now) for name in names for time in [getattr(value, name)]}
