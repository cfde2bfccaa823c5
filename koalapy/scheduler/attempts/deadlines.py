"""Handle deadlines that have passed."""

from koalapy.model.job import Component, ComponentState, Job
from koalapy.scheduler.attempts.facts import awaits_relays, find_overdue_transfer, is_program_over, only_awaits_files
from koalapy.scheduler.effects import AttemptFailure
from koalapy.scheduler.ledger import live
from koalapy.scheduler.parts import Parts
from koalapy.scheduler.state import MIN_RETRY_PAUSE, Deadline, Timer

RESULT_PAUSE = 5.0
"""Seconds between two checks for the exit code of an ended program."""

SLOW_SHARE = 0.01
"""Share of the assumed bandwidth at which a transfer is not yet too slow for the nodes that wait for it."""


class Deadlines:
    """The handler of passed deadlines. A deadline waits until the reports that it depends on are confirmed."""

    def __init__(self, parts: Parts) -> None:
        self._state, self._rules, self._timers = parts.state, parts.state.rules, parts.state.timers
        self._confirmations, self._contact, self._attempts = parts.confirmations, parts.contact, parts.attempts
        self._claiming, self._failures, self._health = parts.claiming, parts.failures, parts.health
        self._conditions, self._link_paths, self._drains = parts.conditions, parts.link_paths, parts.drains

    def handle(self, timer: Timer, now: float) -> None:
        """Perform the action of a passed deadline."""
        match timer.kind:
            case Deadline.UNREACHABLE | Deadline.LOST:
                for token in self._contact.handle_silence(timer, now):
                    self._attempts.settle_job_of(token, now)
            case Deadline.PROBATION:
                self._health.begin_probation(timer.cluster, timer.at)
            case Deadline.DRAIN:
                self._drains.handle_due(timer.cluster, now)
            case Deadline.LIMIT:
                self._health.lift_limit(timer.cluster, timer.at)
            case Deadline.REFUSAL:
                self._failures.end_refusal_pause(timer.job)
            case Deadline.DIRECT_RETRY:
                self._link_paths.retry_direct(now)
            case Deadline.DOUBT:
                self._health.retry_doubted_nodes(timer.cluster, timer.at)
            case Deadline.RETRY:
                self._attempts.end_pause(timer.job, timer.at)
            case Deadline.BEGIN:
                self._conditions.begin(timer.job, now)
            case Deadline.LATEST_START:
                self._conditions.expire(timer.job, now)
            case _:
                if (job := self._handle_of_attempt(timer, now)) is not None:
                    self._attempts.settle_job(job, now)

    def _handle_of_attempt(self, timer: Timer, now: float) -> Job | None:
        """Return the job after its deadline; None if the deadline does not apply any more or was postponed."""
        job = self._state.ledger.get(timer.job)
        if job is None or job.generation != timer.generation or not job.state.is_active:
            return None
        if _is_moot(timer, job) or self._confirmations.is_awaited(timer, job, now):
            return None
        if timer.kind is Deadline.STOP:
            self._attempts.stop_all(job)
            return None
        postponed = self._postponed(timer, job, now)
        if postponed is not None:
            if timer.kind is Deadline.CLAIM_GRACE:
                self._claiming.preempt_overdue_jobs(job, live(job).components[timer.component], now)
            self._timers.postpone(timer, postponed)
            return None
        attempt, rules = live(job), self._rules
        match timer.kind:
            case Deadline.CLAIM:
                return self._claiming.handle_due_claim(job, timer.at, now)
            case Deadline.CLAIM_GRACE:
                component = attempt.components[timer.component]
                if self._state.lrm_waits.has_missed_start(job.token(component.index), now):
                    return self._handle_missed_report(job, component, now)
                return self._failures.handle_claim_timeout(job, component, now)
            case Deadline.BARRIER if only_awaits_files(job):
                component = self._find_overdue_transfer(job, now) or attempt.head
                error = "its input files had not arrived long after all nodes of the job had reported"
                return self._failures.handle_timeout(job, component, AttemptFailure.FILES, error, [component], now)
            case Deadline.BARRIER:
                claimed = (ComponentState.CLAIMED, None)
                late = [c for c in attempt.gang if (c.state, c.unknown_since) != claimed]
                if not late:
                    ready = self._state.grid.relays.ready if awaits_relays(job, self._state.grid) else frozenset()
                    late = [c for c in attempt.gang if ready and c.cluster not in ready] or [attempt.head]
                queued = ComponentState.WAITING, None  # its resource manager has not given it any nodes
                silent = [c for c in late if (c.state, c.unknown_since) != queued or self._has_nodes(job, c, now)]
                if not silent:
                    return self._failures.handle_claim_timeout(job, late[0], now)
                return self._handle_missed_report(job, silent[0], now)
            case Deadline.LAUNCH:
                error = f"the program was not launched within {rules.barrier_timeout:g} s"
                return self._failures.handle_timeout(
                    job, attempt.head, AttemptFailure.NOT_LAUNCHED, error, attempt.gang, now
                )
            case Deadline.WALLTIME:
                return self._attempts.end_after_walltime(job, now)
            case Deadline.DEADLINE:
                return self._attempts.end_at_deadline(job, now)
        return None

    def _find_overdue_transfer(self, job: Job, now: float) -> Component | None:
        return find_overdue_transfer(job, self._state.grid, SLOW_SHARE * self._rules.assumed_bandwidth, now)

    def _has_nodes(self, job: Job, component: Component, now: float) -> bool:
        """Return whether a component has nodes, or should have: those that were started for it."""
        token = job.token(component.index)
        return self._state.grid[component.cluster].nodes.holds(token) or self._state.lrm_waits.has_missed_start(
            token, now
        )

    def _handle_missed_report(self, job: Job, component: Component, now: float) -> Job:
        """Handle a component with nodes that have not all reported in time, an error of its cluster."""
        awaited = "the relays of its clusters were not ready"
        if not awaits_relays(job, self._state.grid):
            awaited = "its nodes had not all reported"
        error = f"{awaited} after {self._rules.barrier_timeout:g} s"
        if self._state.lrm_waits.has_missed_start(job.token(component.index), now):
            error = "the nodes that it was starting had not all reported in time"
        return self._failures.handle_timeout(job, component, AttemptFailure.NOT_REPORTED, error, [component], now)

    def _postponed(self, timer: Timer, job: Job, now: float) -> float | None:
        """Return the new time of a deadline if its event may still happen without a fault; None if it has failed."""
        at_barrier = now + max(self._rules.barrier_timeout, MIN_RETRY_PAUSE)
        match timer.kind:
            case Deadline.CLAIM_GRACE if not self._is_claim_timed_out(job, timer, now):
                return now + max(self._rules.claim_grace, MIN_RETRY_PAUSE)
            case Deadline.WALLTIME | Deadline.DEADLINE if is_program_over(job, self._state.grid):
                return now + RESULT_PAUSE
            case Deadline.BARRIER if only_awaits_files(job):
                return None if self._find_overdue_transfer(job, now) else at_barrier
            case Deadline.BARRIER if (due := self._nodes_are_due(job)) > now:
                return min(due, at_barrier)
        return None

    def _is_claim_timed_out(self, job: Job, timer: Timer, now: float) -> bool:
        """Return whether a runner waits for local users, not for promised nodes or nodes that boot."""
        component = live(job).components[timer.component]
        cluster, token = self._state.grid[component.cluster], job.token(component.index)
        waited = now - max(component.submitted_at or now, cluster.nodes.release_deadline(token))
        last = waited + self._rules.claim_grace >= self._rules.barrier_timeout
        starting = (self._state.lrm_waits.up_by(token) or 0.0) > now
        return not starting and not cluster.nodes.holds(token) and (last or not cluster.nodes.unreleased_nodes(token))

    def _nodes_are_due(self, job: Job) -> float:
        """Return when nodes that boot, or are released after a grace, should have reported; 0 without such nodes."""
        moments = [self._state.lrm_waits.up_by(job.token(c.index)) or 0.0 for c in live(job).gang]
        moments += [self._state.grid[c.cluster].nodes.release_deadline(job.token(c.index)) for c in live(job).gang]
        there_by = max(moments)
        return there_by + self._rules.barrier_timeout if there_by else 0.0


def _is_moot(timer: Timer, job: Job) -> bool:
    """Return whether the awaited event has happened, or the attempt is ending anyway."""
    attempt = live(job)
    match timer.kind:
        case Deadline.STOP:
            return False
        case Deadline.CLAIM_GRACE:
            is_over = attempt.components[timer.component].state is not ComponentState.WAITING
        case Deadline.BARRIER:
            is_over = attempt.barrier_at is not None or timer.component != len(attempt.components)
        case Deadline.LAUNCH:
            is_over = attempt.launched_at is not None
        case _:
            is_over = False
    return is_over or job.ending is not None
