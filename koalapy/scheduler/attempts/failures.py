"""Whose fault was it, and what follows for the job (semantics 6)."""

from collections.abc import Sequence

from koalapy.model.job import Component, Job, JobState
from koalapy.model.reports import Refusal
from koalapy.model.request import ClusterName
from koalapy.model.wording import nodes
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.cluster_health import ClusterHealth
from koalapy.scheduler.attempts.refusals import Refusals
from koalapy.scheduler.claims.claiming import Claiming
from koalapy.scheduler.claims.doubtful_nodes import DoubtfulNodes
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState
from koalapy.scheduler.timers import doubled

INFRASTRUCTURE_FAILURE = "infrastructure-failure"


class Failures:
    """Decides whether a job is tried again, and whether its cluster is to blame."""

    def __init__(
        self,
        state: SchedulerState,
        attempts: Attempts,
        claiming: Claiming,
        health: ClusterHealth,
        doubtful_nodes: DoubtfulNodes,
        refusals: Refusals,
    ) -> None:
        self._rules, self._ledger, self._grid, self._lrm_waits = state.rules, state.ledger, state.grid, state.lrm_waits
        self._attempts, self._claiming, self._health, self._doubtful_nodes = attempts, claiming, health, doubtful_nodes
        self._refusals = refusals

    def infrastructure_failed(self, job: Job, component: Component, why: AttemptFailure, error: str, now: float) -> Job:
        """A failure that is not the program's: the whole attempt ends and the job is tried again."""
        self._ledger.count_failed_attempt(component.cluster, why)
        if component.claimed_at is None:
            self._grid[component.cluster].evidence.failed(component.size, now)
        self._ledger.note(job, now, "error", error, component)
        self._health.count_error(component.cluster, error, now)
        return self.restart(job, f"{INFRASTRUCTURE_FAILURE}: {component.cluster}: {error}", now)

    def limit_exceeded(self, job: Job, component: Component, error: str, now: float) -> Job:
        """End a job of which a component exceeded a limit of its resource manager, such as that of its memory.

        It is not tried again, and no cluster is to blame, also where another component has told first what came of it,
        as of a lost MPI daemon.
        """
        reason = f"{component.cluster}: {error}"
        if (job.ending, job.reason) == (JobState.FAILED, reason):
            return job
        self._ledger.note(job, now, "error", error, component)
        for each in live(job).gang:
            self._health.count_success(each.cluster)
        job = self._ledger.change(job, retry_at=None)
        # Without an exit code, so that no infrastructure failure that is told later overrides it.
        return self._attempts.end(job, JobState.FAILED, reason, now)

    def refused(self, job: Job, component: Component, concerns: Refusal, error: str, now: float) -> Job:
        """Follow a refusal by a component's resource manager, by what it ``concerns``."""
        if concerns == "job":
            return self._refusals.fail_job(job, component, error, now)
        if concerns != "limit":
            return self._refusals.try_elsewhere(job, component, error, for_good=concerns == "unsuitable", now=now)
        cluster = component.cluster
        self._health.limit_reached(cluster, component.size, error, now)
        return self._claiming.component_failed(
            job, component, ClaimFailure.LIMIT, f"{cluster} takes no more: {error}", now
        )

    def program_started(self, cluster: ClusterName) -> None:
        """Take a cluster on probation for mended, and what it refused in unknown words meanwhile for over."""
        if self._health.trial_succeeded(cluster):
            self._refusals.forget_refusals(cluster, unknown_only=True)

    def claim_timed_out(self, job: Job, component: Component, now: float) -> Job:
        """A resource manager gave others what a component was to have: a claim that failed, and nobody's error."""
        cluster, token = component.cluster, job.token(component.index)
        if reason := self._lrm_problems([component]):
            why = ClaimFailure.RESOURCE_MANAGER
        elif pending := self._lrm_waits.reason(token):
            why, reason = ClaimFailure.NOT_STARTED, f"{cluster} did not start it: {pending}"
        elif kept := self._grid[cluster].still_to_leave(token):
            why, reason = ClaimFailure.KEPT, f"{cluster} does not let go of {nodes(kept)}"
        else:
            why, reason = ClaimFailure.LOCAL_USERS, f"local users of {cluster} were faster"
        job = self._claiming.component_failed(job, component, why, reason, now)
        self._doubtful_nodes.claim_failed(cluster, token, component.size, now, component.submitted_at or now)
        return job

    def timed_out(
        self, job: Job, component: Component, why: AttemptFailure, error: str, silent: Sequence[Component], now: float
    ) -> Job:
        """Something has not happened in time, maybe for what is the matter with the clusters of ``silent``."""
        said = "; ".join(filter(None, (error, self._lrm_problems(silent))))
        return self.infrastructure_failed(job, component, why, said, now)

    def _lrm_problems(self, components: Sequence[Component]) -> str:
        """What the clusters of components say is the matter with their resource managers."""
        problems = {c.cluster: self._grid[c.cluster].problem for c in components}
        return "; ".join(f"{cluster}: {problem}" for cluster, problem in sorted(problems.items()) if problem)

    def restart(self, job: Job, reason: str, now: float, *, exit_code: int | None = None) -> Job:
        """End the attempt and try the job again, unless it has been tried too often; the first time at once, then
        after pauses that double, so that trouble which is over in a while does not use up all tries."""
        rules = self._rules
        limit = job.spec.max_restarts if job.spec.max_restarts is not None else rules.max_restarts
        if limit is not None and job.restarts >= limit:
            reason = f"{reason} (gave up after {limit} restarts)"
            return self._attempts.end(job, JobState.FAILED, reason, now, exit_code=exit_code)
        number = job.restarts + 1
        pause = doubled(rules.restart_pause, number - 2, rules.restart_pause_max) if number > 1 else 0.0
        plan = f"restart {number}" if limit is None else f"restart {number} of {limit}"
        if pause:
            plan += f", next try after {pause:.3g} s"
        job = self._ledger.change(job, restarts=number, retry_at=now + pause if pause else None)
        return self._attempts.end(job, JobState.QUEUED, f"{reason} ({plan})", now, exit_code=exit_code)
