"""What follows from a deadline that has passed."""

from collections.abc import Iterable

from koalapy.model.job import Component, ComponentState, Job, JobState
from koalapy.model.wording import nodes
from koalapy.scheduling.claiming.claiming import Claiming
from koalapy.scheduling.ledger import live
from koalapy.scheduling.lifecycle.attempt_endings import AttemptEndings
from koalapy.scheduling.lifecycle.components import Components
from koalapy.scheduling.lifecycle.confirmations import Confirmations
from koalapy.scheduling.lifecycle.doubtful_nodes import DoubtfulNodes
from koalapy.scheduling.lifecycle.faults import Faults
from koalapy.scheduling.queueing.placement_queues import PlacementQueues
from koalapy.scheduling.state import SchedulerState
from koalapy.scheduling.timers import SHORTEST_PAUSE, Deadline, Timer

RESULT_PAUSE = 5.0
"""Seconds until it is looked again whether the exit code of a program is there that has ended."""


class Deadlines:
    """Looks whether a deadline still matters and whether all is known that it hangs on; then it has consequences."""

    def __init__(
        self,
        state: SchedulerState,
        news: Confirmations,
        claiming: Claiming,
        faults: Faults,
        doubts: DoubtfulNodes,
        components: Components,
        queues: PlacementQueues,
        endings: AttemptEndings,
    ) -> None:
        self._rules, self._ledger, self._grid, self._timers = state.rules, state.ledger, state.grid, state.timers
        self._news, self._claiming, self._faults, self._doubts = news, claiming, faults, doubts
        self._components, self._queues, self._endings = components, queues, endings

    def fire(self, timer: Timer, now: float) -> None:
        """Do what is to be done about a deadline that has come."""
        if timer.kind in (Deadline.UNREACHABLE, Deadline.LOST):
            self._contact_is_overdue(timer, now)
            return
        if timer.kind is Deadline.PROBATION:
            self._faults.begin_probation(timer.cluster, timer.at)
            return
        if timer.kind is Deadline.LIMIT:
            self._faults.lift_limit(timer.cluster, timer.at)
            return
        if timer.kind is Deadline.DOUBT:
            self._doubts.pause_is_over(timer.cluster, timer.at)
            return
        job = self._ledger.get(timer.job)
        if timer.kind is Deadline.RETRY:
            if job is not None and job.state is JobState.QUEUED and job.retry_at == timer.at:
                self._queues.come_back(job)
            return
        if job is None or job.generation != timer.generation or not job.state.is_active:
            return
        if _is_moot(timer, job) or self._news.is_old_for(timer, job, now):
            return
        if timer.kind is Deadline.STOP:
            self._claiming.stop_components(job)
        elif timer.kind is Deadline.CLAIM_GRACE and not self._is_overtaken(job, timer, now):
            self._timers.postpone(timer, now + max(self._rules.claim_grace, SHORTEST_PAUSE))
        elif timer.kind is Deadline.WALLTIME and self._news.is_over(job):
            self._timers.postpone(timer, now + RESULT_PAUSE)
        elif timer.kind is Deadline.BARRIER and _only_files_are_missing(job):
            self._timers.postpone(timer, now + max(self._rules.barrier_timeout, SHORTEST_PAUSE))
        elif timer.kind is Deadline.BARRIER and (due := self._started_nodes_are_due(job)) > now:
            self._timers.postpone(timer, min(due, now + max(self._rules.barrier_timeout, SHORTEST_PAUSE)))
        else:
            self._endings.settle_job(self._deadline_passed(job, timer, now), now)

    def _is_overtaken(self, job: Job, timer: Timer, now: float) -> bool:
        """Whether a runner waits for local users: not for the jobs whose nodes it was promised, unless those never
        let go, nor on its own nodes, from where it has not been heard; that has limits of its own."""
        component = live(job).components[timer.component]
        cluster, token = self._grid[component.cluster], job.token(component.index)
        waited = now - (component.submitted_at or now)
        last = waited + self._rules.claim_grace >= self._rules.barrier_timeout
        starting = (self._components.waits.up_by(token) or 0.0) > now
        return not starting and not cluster.holds(token) and (last or not cluster.still_to_leave(token))

    def _started_nodes_are_due(self, job: Job) -> float:
        """When the nodes of a gang that had to be started first should have reported: as long after they are up as
        others after they were asked for. 0 where none had to be."""
        moments = [self._components.waits.up_by(job.token(c.index)) for c in live(job).gang]
        up_by = [moment for moment in moments if moment is not None]
        return max(up_by) + self._rules.barrier_timeout if up_by else 0.0

    def _deadline_passed(self, job: Job, timer: Timer, now: float) -> Job:
        attempt = live(job)
        match timer.kind:
            case Deadline.CLAIM_GRACE:
                return self._overtaken(job, attempt.components[timer.component], now)
            case Deadline.CLAIM:
                return self._claiming.claim_is_due(job, timer.at, now)
            case Deadline.BARRIER:
                claimed = (ComponentState.CLAIMED, None)
                late = [c for c in attempt.gang if (c.state, c.unknown_since) != claimed] or [attempt.head]
                silent = [c for c in late if not self._is_queued(job, c)]
                if not silent:
                    return self._overtaken(job, late[0], now)
                error = f"its nodes had not all reported after {self._rules.barrier_timeout:g} s"
                error = "; ".join(filter(None, (error, self._trouble(silent[:1]))))
                return self._faults.infrastructure_failed(job, silent[0], error, now)
            case Deadline.LAUNCH:
                error = f"the program was not launched within {self._rules.barrier_timeout:g} s"
                error = "; ".join(filter(None, (error, self._trouble(attempt.gang))))
                return self._faults.infrastructure_failed(job, attempt.head, error, now)
            case Deadline.WALLTIME:
                reason = f"walltime of {job.spec.walltime:g} s exceeded"
                return self._claiming.end(job, JobState.FAILED, reason, now)
        return job

    def _is_queued(self, job: Job, component: Component) -> bool:
        """Whether a component has no nodes because its resource manager has not given it any."""
        waits = component.state is ComponentState.WAITING and component.unknown_since is None
        return waits and not self._grid[component.cluster].holds(job.token(component.index))

    def _overtaken(self, job: Job, component: Component, now: float) -> Job:
        """A resource manager gave others what a component was to have: a claim that failed, and nobody's error."""
        cluster, token = component.cluster, job.token(component.index)
        kept = self._grid[cluster].still_to_leave(token)
        in_the_way = f"{cluster} does not let go of {nodes(kept)}" if kept else f"local users of {cluster} were faster"
        told = self._components.waits.reason(token)
        reason = self._trouble([component]) or (f"{cluster} did not start it: {told}" if told else in_the_way)
        job = self._claiming.overtaken(job, component, reason, now)
        self._doubts.claim_failed(cluster, token, component.size, now, component.submitted_at or now)
        return job

    def _trouble(self, components: Iterable[Component]) -> str:
        """What the clusters of components say is the matter with their resource managers."""
        problems = {c.cluster: self._grid[c.cluster].problem for c in components}
        return "; ".join(f"{cluster}: {problem}" for cluster, problem in sorted(problems.items()) if problem)

    def _contact_is_overdue(self, timer: Timer, now: float) -> None:
        cluster = self._grid[timer.cluster]
        if self._news.has_given_up_asking(cluster, now):
            self._news.look_again(cluster.name)
        heard = cluster.last_heard
        span = self._rules.lost_after if timer.kind is Deadline.LOST else self._rules.unreachable_after
        if heard is None or not self._news.is_silent_for(cluster, span, now):
            return
        if timer.kind is Deadline.LOST:
            cluster.asked_in_vain_since = None  # whatever of it is asked about next is new
        with self._faults.one_event(cluster.name):
            for token in cluster.awaited:
                if timer.kind is Deadline.LOST:
                    self._components.lose(token, f"not heard of for {self._rules.lost_after:g} s", now)
                else:
                    self._components.lose_sight(token, heard, now)
                self._endings.settle(token, now)
        self._news.look_again(cluster.name)
        if timer.kind is Deadline.UNREACHABLE:
            self._news.go_on_watching(cluster, now)


def _is_moot(timer: Timer, job: Job) -> bool:
    """Whether what a deadline was set for has happened, or is not awaited any more."""
    attempt = live(job)
    match timer.kind:
        case Deadline.STOP:
            return False
        case Deadline.CLAIM_GRACE:
            done = attempt.components[timer.component].state is not ComponentState.WAITING
        case Deadline.BARRIER:
            done = attempt.barrier_at is not None or timer.component != len(attempt.components)
        case Deadline.LAUNCH:
            done = attempt.launched_at is not None
        case _:
            done = False
    return done or job.ending is not None


def _only_files_are_missing(job: Job) -> bool:
    """Whether a gang waits at the barrier for nothing but its files, whose transfers have limits of their own."""
    gang = live(job).gang
    return any(c.awaits_files for c in gang) and all(
        c.state is ComponentState.CLAIMED and c.unknown_since is None for c in gang
    )
