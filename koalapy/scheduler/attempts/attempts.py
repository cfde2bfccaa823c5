"""Move an attempt from the submission of its first component to its end, and its job to the next state."""

from dataclasses import replace
from math import inf

from koalapy.model.bounds import MAX_NODES
from koalapy.model.job import (
    ClusterRefusal,
    Component,
    ComponentState,
    Job,
    JobId,
    JobState,
    RefusalCause,
    Token,
    add_refusal,
)
from koalapy.model.request import ClusterName, StopWarning
from koalapy.model.wording import format_bytes, format_list, format_time
from koalapy.scheduler.attempts.facts import (
    awaits_relays,
    filter_of,
    link_demand,
    program_result,
    walltime_ends,
    warning_of,
)
from koalapy.scheduler.attempts.health import ClusterHealth
from koalapy.scheduler.claims.preemption import is_preemptible
from koalapy.scheduler.effects import (
    ForgetComponent,
    OpenBarrier,
    StageComponent,
    StopComponent,
    SubmitComponent,
    UnstageComponent,
)
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.start_conditions import find_missed_deadline, latest_start, warning_grace
from koalapy.scheduler.state import Deadline, SchedulerState, backoff_pause

REFUSAL_PAUSE = 30.0
"""Seconds for which a job avoids a cluster after an unrecognized rejection; each further one doubles it."""
MAX_REFUSAL_PAUSE = 3600.0
END_GRACE = 2.0
"""Seconds in which components may end by themselves after the program succeeded."""
TO_THE_BARRIER = (Deadline.CLAIM, Deadline.CLAIM_GRACE, Deadline.BARRIER)
"""Deadlines that end once the barrier is open."""


class Attempts:
    """The transitions of components and their jobs to their next states, with the assignment and release of nodes."""

    def __init__(self, state: SchedulerState, health: ClusterHealth, queues: PlacementQueues) -> None:
        self._state, self._rules, self._ledger = state, state.rules, state.ledger
        self._grid, self._timers, self._sharing = state.grid, state.timers, state.sharing
        self._health, self._queues = health, queues
        self._warned: set[Token] = set()
        """Components stopped with a warning that have not ended yet."""
        self._missing: dict[Token, str] = {}
        """What the timeline says is missing of the output of components that still send the rest."""

    def set_deadline(self, job: Job, kind: Deadline, due_at: float, component: int = 0) -> None:
        """Set a deadline for the job's live attempt. It is cancelled with the attempt."""
        self._timers.add(due_at, kind, job=job.id, generation=job.generation, component=component)

    # From submission to launch

    def submit(self, job: Job, component: Component, now: float) -> Job:
        """Submit a component's runner to its resource manager and promise it its nodes."""
        self.promise(job, component, now)
        self._ledger.send_command(SubmitComponent(component.cluster, job.token(component.index)))
        return self._ledger.update_component(job, component.index, state=ComponentState.SUBMITTED, submitted_at=now)

    def promise(self, job: Job, component: Component, now: float) -> None:
        """Promise nodes of its cluster to a component."""
        makes_room, cluster = is_preemptible(job), self._grid[component.cluster]
        is_guest = self._sharing.reclaims and job.spec.home_site != component.cluster
        cluster.nodes.promise(
            job.token(component.index),
            component.size,
            filter_of(job.spec, component),
            preemptible=makes_room,
            guest=is_guest,
            demand=link_demand(job, component),
            reservation=self._state.reservations.site_name(job.spec),
        )

    def mark_waiting(self, job: Job, component: Component, now: float) -> Job:
        """Mark a component as waiting: the resource manager has queued its runner. Local users may have been faster."""
        self.set_claim_timeout(job, component, now)
        return self._ledger.update_component(job, component.index, state=ComponentState.WAITING)

    def set_claim_timeout(self, job: Job, component: Component, now: float) -> None:
        """Set the time after which a component fails if it still waits for its nodes (``claim_grace``)."""
        self.set_deadline(job, Deadline.CLAIM_GRACE, now + self._rules.claim_grace, component.index)

    def set_phase_deadline(self, job: Job, now: float, earliest: float = -inf) -> None:
        """Set the deadline of the phase that an attempt is in, when the phase begins and after a restart of the daemon.

        All nodes must have reported ``barrier_timeout`` after the claiming time, and the program must be launched so
        long after the barrier. Components that are added later make the first of these void. ``earliest``: the first
        time at which one of these two may be missed; agents that cannot connect before must report these events first.
        """
        attempt, patience = live(job), self._rules.barrier_timeout
        if job.ending is not None:
            if job.ending is JobState.SUCCEEDED and attempt.ended_at is not None:
                self.set_deadline(job, Deadline.STOP, attempt.ended_at + END_GRACE)
        elif attempt.launched_at is not None:
            if (walltime_end := walltime_ends(job)) is not None:
                self.set_deadline(job, Deadline.WALLTIME, walltime_end)
        else:
            began, kind, count = attempt.barrier_at, Deadline.LAUNCH, 0
            if began is None:
                began, kind, count = attempt.claim_at, Deadline.BARRIER, len(attempt.components)
            due_at = (now if began is None else min(began, now)) + patience
            self.set_deadline(job, kind, max(due_at, earliest), count)

    def mark_claimed(self, job: Job, component: Component, now: float) -> Job:
        """Mark a component of which all nodes have reported."""
        job = self._ledger.update_component(job, component.index, state=ComponentState.CLAIMED, claimed_at=now)
        self._ledger.record_event(job, now, "claimed", f"{component.size} nodes on {component.cluster}", component)
        return job

    def open_barrier_if_complete(self, job: Job, now: float) -> Job:
        """Open the barrier, which holds the program until all nodes have reported and all input files have arrived.

        Do nothing if a component is missing or out of reach, or while a relay that the job needs is not ready.
        """
        if job.state is not JobState.CLAIMING or (attempt := live(job)).barrier_at is not None:
            return job
        # Check the last components first: components usually report in order, so this is fast for large gangs.
        if any(c.state is not ComponentState.CLAIMED or c.awaits_files for c in reversed(attempt.gang)):
            return job
        if awaits_relays(job, self._grid):
            return job
        planned_start = self._queues.promises.note_start(job.planned_start)
        reason = "every node has reported: the barrier is open"
        job = self._ledger.change_state(
            job, JobState.STARTING, now, "started", reason, started_at=now, planned_start=planned_start
        )
        job = self._ledger.change_attempt(job, barrier_at=now)
        for component in attempt.gang:
            self._ledger.send_command(OpenBarrier(component.cluster, job.token(component.index)))
        self._timers.cancel(job.id, job.generation, *TO_THE_BARRIER)
        self.set_phase_deadline(job, now)
        return job

    def mark_launched(self, job: Job, now: float) -> Job:
        """Mark the attempt as launched, as the program runs on all nodes."""
        attempt = live(job)
        if attempt.launched_at is not None or attempt.barrier_at is None:
            return job
        job = self._ledger.change_attempt(job, launched_at=now)
        self._timers.cancel(job.id, job.generation, Deadline.LAUNCH)
        self.set_phase_deadline(job, now)
        if job.state is JobState.STARTING and job.ending is None:
            job = self._ledger.change_state(job, JobState.RUNNING, now, "running")
        return job

    # The end

    def end_attempt(
        self,
        job: Job,
        becomes: JobState,
        reason: str,
        now: float,
        *,
        exit_code: int | None = None,
        by: str = "",
        warn: bool = False,
    ) -> Job:
        """End the attempt; the job enters the state ``becomes`` when every component has ended.

        After a success the components end by themselves, and are stopped only after ``END_GRACE``. Otherwise they are
        stopped at once, or with ``warn`` after the grace that the job requested.
        """
        ended_at = live(job).ended_at
        job = self._ledger.change_attempt(
            job, end_reason=reason, exit_code=exit_code, ended_at=now if ended_at is None else ended_at
        )
        job = self._ledger.change_job(job, ending=becomes, reason=reason)
        self._ledger.record_event(job, now, "ending", reason, by=by)
        job = self._keep_released_nodes(job)
        if becomes is JobState.SUCCEEDED:
            for component in live(job).components:
                self._grid[component.cluster].nodes.clear_preemptible(job.token(component.index))
            self.set_phase_deadline(job, now)
            return job
        if not warn:
            self.end_grace(job)
        return self.stop_all(job, warning_of(job, self._rules) if warn else None, now)

    def cancel(self, job: Job, reason: str, now: float, *, by: str = "", warn: bool = False) -> None:
        """Cancel a job: end its attempt if it has one, otherwise remove it from its queue.

        A second cancellation without a warning ends the grace that the first one gave the program.
        """
        if job.state.is_active:
            if job.ending is None or job.ending is JobState.QUEUED:
                self.settle_job(self.end_attempt(job, JobState.CANCELLED, reason, now, by=by, warn=warn), now)
            elif job.ending is JobState.CANCELLED and not warn:
                self.end_grace(job)
            return
        if job.state is JobState.QUEUED:
            job = self._queues.remove(job)
        self._ledger.change_state(job, JobState.CANCELLED, now, "cancelled", reason, by=by, ended_at=now)

    def end_grace(self, job: Job) -> None:
        """Stop the warned components of a job now, before their grace is over."""
        if job.spec.warning is None:
            return
        attempt = live(job)
        for component in attempt.components:
            if component.state is ComponentState.STOPPING:
                token = job.token(component.index)
                self._warned.discard(token)
                self._ledger.send_command(StopComponent(component.cluster, token, attempt.end_reason))
                self._grid[component.cluster].nodes.expect_release(token)

    def stop_all(self, job: Job, warning: StopWarning | None = None, now: float = 0.0) -> Job:
        """Stop every component that has not ended; running ones with the warning, if there is one."""
        attempt = live(job)
        for component in attempt.components:
            if component.state is ComponentState.PLACED:
                job = self._ledger.update_component(
                    job, component.index, state=ComponentState.ENDED, ended_at=attempt.ended_at
                )
            elif not component.has_ended and component.state is not ComponentState.STOPPING:
                runs = component.state is ComponentState.RUNNING
                job = self.stop_component(job, component, attempt.end_reason, warning if runs else None, now)
        return job

    def stop_component(
        self, job: Job, component: Component, reason: str, warning: StopWarning | None = None, now: float = 0.0
    ) -> Job:
        """Stop a component and expect its nodes soon, or after the grace of its warning."""
        token = job.token(component.index)
        self._ledger.send_command(StopComponent(component.cluster, token, reason, warning=warning))
        if warning is not None:
            self._warned.add(token)
        self._grid[component.cluster].nodes.expect_release(token, None if warning is None else now + warning.grace)
        return self._ledger.update_component(job, component.index, state=ComponentState.STOPPING)

    def mark_delivering(self, job: Job, component: Component, now: float, missing: str) -> Job:
        """Mark a component that has released its nodes and still sends output, without the ``missing`` part.

        The job may be tried again before it has sent the rest, and its later reports then count for nothing.
        """
        if component.state is ComponentState.DELIVERING:
            return job
        self._note_no_warning(job, component, now)
        self._note_missing_output(job, component, missing, now)
        self._grid[component.cluster].nodes.mark_delivering(job.token(component.index))
        job = self._ledger.update_component(job, component.index, state=ComponentState.DELIVERING, ended_at=now)
        return self._keep_released_nodes(job)

    def mark_ended(self, job: Job, component: Component, now: float, missing: str = "") -> Job:
        """Mark a component that has ended and sent everything; ``missing`` names the lost part of its output."""
        token = job.token(component.index)
        self._note_no_warning(job, component, now)
        self._grid[component.cluster].nodes.release(token)
        self._ledger.send_command(ForgetComponent(component.cluster, token))
        self._note_missing_output(job, component, missing, now)
        self._missing.pop(token, None)
        ended_at = component.ended_at if component.has_ended else now
        job = self._ledger.update_component(job, component.index, state=ComponentState.ENDED, ended_at=ended_at)
        return self._keep_released_nodes(job)

    def _keep_released_nodes(self, job: Job) -> Job:
        """Keep the nodes of an ended component for its job if that is to run again after a failure."""
        if job.ending is JobState.QUEUED:
            self._queues.kept.keep_for_restart(job)
        else:
            self._queues.kept.release_kept(job.id)
        return job

    def give_up_component(self, job: Job, component: Component, now: float) -> None:
        """Stop waiting for a component that has not ended, as its attempt is over."""
        token = job.token(component.index)
        self._warned.discard(token)
        self._missing.pop(token, None)
        self._grid[component.cluster].nodes.release(token)
        if job.ending is not JobState.QUEUED:
            self.note_lost_output(job, component, f"{component.cluster} is out of reach", now)

    def mark_warned(self, job: Job, component: Component, now: float) -> Job:
        """Record that a component's program was warned of its stop."""
        if job.spec.warning is None or component.warned_at is not None:
            return job
        warning = job.spec.warning
        text = f"SIG{warning.signal}, {warning.grace:g} s before it is stopped"
        self._ledger.record_event(job, now, "warned", text, component)
        job = self._ledger.update_component(job, component.index, warned_at=now)
        if job.ending is None:
            self.expect_release_after_grace(job, component)
        return job

    def expect_release_after_grace(self, job: Job, component: Component) -> None:
        """Expect a warned component to keep its nodes until the end of its grace, or of its walltime."""
        attempt, warning = live(job), warning_of(job, self._rules)
        deadline = None
        if job.ending is None:
            deadline = walltime_ends(job)
        elif job.ending is JobState.QUEUED and attempt.ended_at is not None and warning is not None:
            deadline = attempt.ended_at + warning.grace
        self._grid[component.cluster].nodes.expect_release(job.token(component.index), deadline)

    def end_after_walltime(self, job: Job, now: float) -> Job:
        """Fail a job after its walltime."""
        if job.spec.warning is not None:
            self._warned.update(job.token(c.index) for c in live(job).gang if c.state is ComponentState.RUNNING)
        return self.end_attempt(job, JobState.FAILED, f"walltime of {job.spec.walltime:g} s exceeded", now)

    def set_end_at_deadline(self, job: Job) -> None:
        """Set when a job with an attempt is stopped for its deadline: earlier by the grace of its warning."""
        if job.spec.deadline is not None:
            warned_at = job.spec.deadline - warning_grace(job.spec, self._rules)
            self.set_deadline(job, Deadline.DEADLINE, warned_at)

    def end_at_deadline(self, job: Job, now: float) -> Job:
        """Fail a job at its deadline; its program gets its warning before."""
        deadline = format_time(job.spec.deadline or now, now, exact=True)
        return self.end_attempt(job, JobState.FAILED, f"deadline {deadline} UTC reached", now, warn=True)

    def _note_no_warning(self, job: Job, component: Component, now: float) -> None:
        """Record in the timeline that a program was stopped without the requested warning."""
        token = job.token(component.index)
        if token in self._warned:
            self._warned.remove(token)
            if component.warned_at is None and component.exit_code is None and program_result(job) is None:
                reason = (
                    f"{component.cluster} stopped it at once: its agent or runner is of an earlier version, or was away"
                )
                self._ledger.record_event(job, now, "not-warned", reason, component)

    def _note_missing_output(self, job: Job, component: Component, missing: str, now: float) -> None:
        """Record which part of its output a component has lost, unless that is known."""
        if missing and self._missing.get(token := job.token(component.index)) != missing:
            self._missing[token], text = missing, f"of its output there is missing {missing}"
            self._ledger.record_event(job, now, "output-missing", text, component)

    def note_lost_output(self, job: Job, component: Component, reason: str, now: float) -> None:
        """Record that the output of a started program that has not arrived yet is lost."""
        if live(job).launched_at is not None:
            kinds = "output and results" if job.spec.collect else "output"
            text = f"of its {kinds} there is missing what had not come yet: {reason}"
            self._ledger.record_event(job, now, "output-missing", text, component)

    # The stage: the folder for a component's files on its cluster

    def begin_staging(self, job: Job, component: Component, now: float) -> None:
        """Transfer a component's files to its cluster."""
        if not component.staging:
            return
        self._ledger.send_command(StageComponent(component.cluster, job.stage_token(component)))
        files = job.spec.inputs_of(component.request_index)
        away = [(f, s) for f, s in zip(files, component.sources, strict=False) if s != component.cluster]
        if away:
            files_text = format_list(
                [f"{file.name} ({format_bytes(file.size)}) from {source}" for file, source in away]
            )
            about = f", about {component.transfer_time:.3g} s" if component.transfer_time else ""
            self._ledger.record_event(job, now, "transfer", f"{files_text} to {component.cluster}{about}", component)

    def end_staging(self, job: Job, component: Component) -> None:
        """Remove a component's files from its cluster."""
        if component.staging:
            self._ledger.send_command(UnstageComponent(component.cluster, job.stage_token(component)))

    # The next state of the job

    def settle_job_of(self, token: Token, now: float) -> None:
        """Settle the job with the component of this token, if there is one."""
        match = self._ledger.find(token)
        if match is not None:
            self.settle_job(match[0], now)

    def settle_job(self, job: Job, now: float) -> None:
        """Move a job to its next state once no component of its ended attempt must be awaited."""
        if job.ending is None:
            return
        # Check the last components first: components usually end in order, so this is fast for large gangs.
        if any(_must_be_awaited(job, component) for component in reversed(live(job).components)):
            return
        attempt = live(job)
        for component in attempt.components:
            if component.state is not ComponentState.ENDED:
                self.give_up_component(job, component, now)
        for component in attempt.gang:
            self.end_staging(job, component)
        self._timers.cancel(job.id, job.generation)
        becomes, reason = job.ending, attempt.end_reason
        if becomes is JobState.QUEUED and (missed := find_missed_deadline(job.spec, self._rules, now)):
            becomes, reason = JobState.FAILED, f"{reason}; {missed}"
        if becomes is JobState.QUEUED:
            self._requeue(self._ledger.change_state(job, becomes, now, "requeued", reason, ending=None), now)
            return
        # A program that ended by itself counts as a success of its clusters, whatever its exit code.
        if becomes is JobState.SUCCEEDED or (becomes is JobState.FAILED and attempt.exit_code is not None):
            for component in attempt.gang:
                self._health.count_success(component.cluster)
            self._forget_failures_of_array(job)
        event = str(becomes)
        job = self._ledger.change_state(
            job,
            becomes,
            now,
            event,
            reason,
            ending=None,
            ended_at=attempt.ended_at,
            exit_code=attempt.exit_code,
            retry_at=None,
        )
        self._state.experience.learn(job)

    def _forget_failures_of_array(self, task: Job) -> None:
        """Let an array count its failures anew on the clusters where one of its tasks has come to its end."""
        array = None if task.array_job is None else self._ledger.get(task.array_job)
        if array is not None and array.refusals:
            ended = {component.cluster for component in live(task).gang}
            refusals = tuple(
                entry
                for entry in array.refusals
                if entry.cause is not RefusalCause.FAILURE or entry.cluster not in ended
            )
            if refusals != array.refusals:
                self._queues.regroup_job(self._ledger.change_job(array, refusals=refusals))

    def _requeue(self, job: Job, now: float) -> None:
        """Requeue a job at once, or after the pause that follows its failures."""
        if (latest := latest_start(job.spec, self._rules)) is not None:
            self._timers.add(latest, Deadline.LATEST_START, job=job.id)
        if job.retry_at is None or job.retry_at <= now:
            self._queues.requeue(job)
        else:
            self.pause_job(job, job.retry_at)

    def end_pause(self, job_id: JobId, due_at: float) -> None:
        """Requeue a job after its pause, unless it was held or cancelled since."""
        job = self._ledger.get(job_id)
        if job is not None and job.state is JobState.QUEUED and job.retry_at == due_at:
            self._queues.requeue(job)

    def bar_cluster(
        self,
        job: Job,
        cluster: ClusterName,
        problem: str,
        now: float,
        sizes: tuple[int, int] = (1, MAX_NODES),
        *,
        cause: RefusalCause = RefusalCause.REJECTED,
        for_good: bool = False,
        counts: bool = True,
    ) -> tuple[Job, ClusterRefusal]:
        """Keep components of some ``sizes`` (least, most) from a cluster, for a pause that doubles or ``for_good``.

        ``counts``: it is one of the rejections after which the job fails.
        """
        refusal = ClusterRefusal(cluster, problem, None if for_good else now, 0, cause, *sizes)
        earlier = next((entry for entry in job.refusals if entry.kind == refusal.kind), refusal)
        refusal = replace(refusal, times=earlier.times + counts)
        if earlier.bars(now):
            minimum, maximum = min(earlier.least, refusal.least), max(earlier.most, refusal.most)
            refusal = replace(refusal, least=minimum, most=maximum)
        if not for_good:
            until = now + backoff_pause(REFUSAL_PAUSE, max(0, refusal.times - 1), MAX_REFUSAL_PAUSE)
            refusal = replace(refusal, until=until)
            for number in filter(None, (job.id, job.array_job)):
                self._timers.add(until, Deadline.REFUSAL, job=number)
        return self._ledger.change_job(job, refusals=add_refusal(job.refusals, refusal)), refusal

    def pause_job(self, job: Job, until: float) -> None:
        """Keep a queued job out of its queue until a time."""
        self._queues.pause(job)
        self._timers.add(until, Deadline.RETRY, job=job.id)


def _must_be_awaited(job: Job, component: Component) -> bool:
    """Return whether the job must wait for a component to end.

    A component that sends output is awaited if the job is about to be final. An unreachable one is awaited only if it
    may run the program and the job is to start again: two live attempts of one job must not exist.
    """
    if component.state is ComponentState.ENDED:
        return False
    out_of_reach = component.unknown_since is not None
    if component.state is ComponentState.DELIVERING:
        return not out_of_reach and job.ending is not JobState.QUEUED
    may_run = live(job).barrier_at is not None and not component.superseded
    return not out_of_reach or (job.ending is JobState.QUEUED and may_run)
