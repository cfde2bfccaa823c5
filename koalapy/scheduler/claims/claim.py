"""Claiming: submit the components of a placed job, or return it to its queue (semantics 5).

The nodes of a placed job are claimed first at its claiming time (JCT), and repeatedly until its estimated start (JST).
If at least the fraction T of its components can start, these are started. The others are placed elsewhere, or preempt
jobs of low priority for a job of high priority. A runner that stays queued in its LRM for ``claim_grace`` has lost its
nodes to local users and is replaced.
"""

from collections.abc import Callable
from dataclasses import replace

from koalapy.model.cluster import GridView
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, Nonce, RefusalCause
from koalapy.model.job_sizes import BarredSizes, is_barred
from koalapy.model.job_spec import ClaimingMode, Priority
from koalapy.model.placement import PlacedComponent, Placement
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.model.wording import format_list, format_nodes
from koalapy.policies.close_to_files import closest_site
from koalapy.policies.network import Transfer
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.facts import expected_end_of_transfers, filter_of, unclaimed
from koalapy.scheduler.claims.claim_try import ClaimTry
from koalapy.scheduler.claims.preemption import Preemption, Reclaiming
from koalapy.scheduler.effects import ClaimFailure
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.component_sizes import exclude_reserved
from koalapy.scheduler.queue.eligibility import (
    Eligibility,
    count_streams,
    may_not_be_claimed,
    streams_to_reserve,
    tries_used_up,
)
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.questions import PolicyQuestions
from koalapy.scheduler.state import Deadline, SchedulerState

CLAIM_FAILED = "claim-failed"

Nonces = Callable[[], Nonce]
"""Returns a new nonce with each call."""


class Claiming:
    """The claiming of placed jobs: when they are claimed, and which of their components are started."""

    def __init__(
        self,
        state: SchedulerState,
        attempts: Attempts,
        queues: PlacementQueues,
        eligibility: Eligibility,
        questions: PolicyQuestions,
        nonces: Nonces,
    ) -> None:
        self._state, self._rules, self._ledger = state, state.rules, state.ledger
        self._attempts, self._plan = attempts, queues.plan
        self._eligibility, self._questions, self._nonces = eligibility, questions, nonces
        self._preemption = Preemption(state)
        sites = [cluster.name for cluster in state.grid.clusters()] if state.sharing.reclaims else []
        self._reclaiming = {site: Reclaiming(state, site, queues.move_to_front) for site in sites}

    # The claiming queue

    def start_attempt(self, job: Job, placement: Placement, now: float) -> Job:
        """Begin an attempt of a placed job, and set when to claim its nodes first (its JCT)."""
        components = tuple(
            self._new_component(job, index, placed, now) for index, placed in enumerate(placement.components)
        )
        streams = streams_to_reserve(job.spec, placement, self._state.grid.view())
        transfer_time = max(component.transfer_time for component in components)
        generation, start_estimate = job.generation + 1, now + transfer_time
        claim_at = now + self._factor(job) * transfer_time
        first = job.first_start_estimate if job.first_start_estimate is not None else start_estimate
        job = self._ledger.change_state(
            job,
            JobState.PLACED,
            now,
            "placed",
            placement.reason,
            generation=generation,
            placed_at=now,
            started_at=None,
            ending=None,
            attempt=Attempt(
                generation, components, now, start_estimate, claim_at, nonce=self._nonces(), streams=streams
            ),
            placement_tries=job.placement_tries + 1,
            first_start_estimate=first,
        )
        self._attempts.set_end_at_deadline(job)
        for component in components:
            self._attempts.begin_staging(job, component, now)
        if claim_at > now:
            self._attempts.set_deadline(job, Deadline.CLAIM, claim_at)
            return job
        return self.try_claim(job, now)

    def _new_component(self, job: Job, index: int, placed: PlacedComponent, now: float) -> Component:
        """Return the component that holds one part of a placement.

        The file transfers are estimated here if the policy has chosen no sources for them.
        """
        transfer = self._questions.transfer_of(job.spec, placed, self._state.grid.view())
        return Component(
            index,
            placed.cluster,
            placed.size,
            request_index=placed.request_index,
            node_class=placed.node_class,
            node_part=self._part_of(job, placed.cluster, placed.request_index),
            sources=transfer.sources,
            transfer_time=transfer.seconds,
            staging_since=now if job.spec.has_stage(placed.request_index) else None,
        )

    def _part_of(self, job: Job, cluster: ClusterName, request_index: int | None) -> float:
        """Return which part of the processors of each node a component holds: less than all if the job shares nodes."""
        requirement = job.spec.node_requirement(request_index)
        if not job.spec.share or requirement is None or requirement.cores is None:
            return 1.0
        classes = self._state.grid[cluster].nodes.classes.reported
        fitting = [entry.cores for entry in classes if entry.cores is not None and entry.cores >= requirement.cores]
        return requirement.cores / min(fitting, default=requirement.cores)

    def restore(self, job: Job, now: float, earliest: float) -> None:
        """Restore an attempt of an earlier daemon run that waits for nodes or files; see ``set_phase_deadline``."""
        attempt = live(job)
        for component in attempt.gang:
            if component.state is ComponentState.WAITING:
                self._attempts.set_claim_timeout(job, component, now)
        if unclaimed(job):
            self._claim_at(job, max(now + self._rules.unreachable_after, attempt.claim_at or now))
        else:
            self._attempts.set_phase_deadline(job, now, earliest)

    def handle_due_claim(self, job: Job, claim_at: float, now: float) -> Job:
        """Claim the nodes of a job at its claiming time (JCT), or postpone that if transfers are late.

        Ignore a time that has been replaced by another since.
        """
        attempt = live(job)
        if attempt.claim_at != claim_at or not unclaimed(job):
            return job
        # Clusters have no capacity before their first report after a restart.
        statuses = [self._state.grid[component.cluster] for component in unclaimed(job)]
        return_by = max((s.contact.silence_ignored_until for s in statuses if not s.nodes.reported), default=now)
        if return_by > now:
            return self._claim_at(job, return_by)
        estimated = attempt.start_estimate
        job = self.estimate_start(job, now)
        following = self._next_try(job, now) if live(job).start_estimate != estimated else None
        if following is None:
            return self.try_claim(job, now)
        # The transfers end later than estimated: claimed nodes would only wait for them.
        return self._claim_at(job, following)

    def estimate_start(self, job: Job, now: float) -> Job:
        """Move the estimated start (JST) to the end of slow transfers; never before the first estimate."""
        end = expected_end_of_transfers(live(job), now)
        return job if end is None else self._set_transfer_end(job, end, now)

    def claim_after_transfers(self, job: Job, now: float) -> Job:
        """Claim the nodes at once after the last transfer, unless a cluster has not reported in this daemon run."""
        job = self._set_transfer_end(job, now, now)
        claim_at, components = live(job).claim_at, unclaimed(job)
        is_early = bool(components) and claim_at is not None and claim_at > now
        if is_early and all(self._state.grid[component.cluster].nodes.reported for component in components):
            return self.try_claim(job, now)
        return job

    def _set_transfer_end(self, job: Job, end: float, now: float) -> Job:
        """Set the estimated start of a job (JST) to ``end``, but not before the estimate made at its placement.

        Do nothing once the program may start, or if the change is at most ``claim_epsilon`` seconds.
        """
        attempt = live(job)
        estimates = (c.staging_since + c.transfer_time for c in attempt.gang if c.staging_since is not None)
        first = max(estimates, default=attempt.placed_at)
        end, previous_end = max(end, first), attempt.start_estimate or now
        if attempt.barrier_at is not None or abs(end - previous_end) <= self._rules.claim_epsilon:
            return job
        return self._ledger.change_attempt(job, start_estimate=end)

    # A claiming try

    def try_claim(self, job: Job, now: float) -> Job:
        """Perform one claiming try: start the components that can start. The steps are those of docs/scheduling.md."""
        job = self._ledger.change_job(job, claiming_tries=job.claiming_tries + 1)
        job = self._ledger.change_attempt(job, claim_at=now)
        this = ClaimTry(self._state, self._preemption_for(job), job)
        # 1. Start nothing if too few components are started or startable.
        if this.fraction < self._threshold(job):
            self._ledger.record_event(job, now, "claim-try", f"{this}: fewer than wanted")
            return self._plan_next_try(job, this, now)
        # 2. Move components that cannot start to other clusters.
        job = self._relocate(job, this, now)
        if this.blocked and self._rules.preemption != "claiming" and self._is_last_try(job, this, now):
            # Components that start now, and jobs that are preempted, would be stopped in vain. The paper does so.
            self._ledger.record_event(job, now, "claim-try", f"no room on {_clusters(this.blocked)}")
            return self._plan_next_try(job, this, now)
        # 3. If that is not enough, preempt low-priority jobs for a high-priority job, or guests for a job at its home.
        if this.blocked and isinstance(this.preemption, Reclaiming):
            this.withdraw_preemption()
        self._preempt(job, this, now)
        # 4. Start the components that can start. They wait at the barrier for the others.
        job = self._submit_startable(job, this, now)
        if this.blocked:
            return self._plan_next_try(job, this, now)
        self._attempts.set_phase_deadline(job, now)
        return job

    def _threshold(self, job: Job) -> float:
        """Return the fraction of components that must be able to start before any is started (T in docs/scheduling.md).

        A threshold in the job's specification implies that its components may start one after another.
        """
        if job.spec.claim_threshold is not None:
            return 1.0 if job.spec.claiming is ClaimingMode.ATOMIC else job.spec.claim_threshold
        mode = job.spec.claiming or self._rules.claiming
        return 1.0 if mode is ClaimingMode.ATOMIC else self._rules.claim_threshold

    def _factor(self, job: Job) -> float:
        """Return the fraction of the time until the estimated start at which to claim (L). Failed claims lower it."""
        return self._rules.claim_factor if job.claim_factor is None else job.claim_factor

    def _next_try(self, job: Job, now: float) -> float | None:
        """Return the next claiming time after a try now; None if it would be within ``claim_epsilon`` of the start."""
        start_estimate = live(job).start_estimate or now
        following = now + self._factor(job) * (start_estimate - now)
        later = following > now and start_estimate - following >= self._rules.claim_epsilon
        return following if later else None

    def _relocate(self, job: Job, this: ClaimTry, now: float) -> Job:
        """Place components that cannot start on other clusters, if their transfers end by the estimated start (JST)."""
        remaining_s = max(0.0, (live(job).start_estimate or now) - now)
        for component in [*this.blocked, *this.preempting]:
            site = self._other_site(job, component, this.view, remaining_s)
            if site is None:
                continue
            cluster, transfer = site
            left_behind = component.cluster
            job = self._ledger.change_attempt(job, streams=self._streams_after(job, component, cluster))
            self._attempts.end_staging(job, component)
            job = self._ledger.update_component(
                job,
                component.index,
                cluster=cluster,
                node_class="",
                node_part=self._part_of(job, cluster, component.request_index),
                sources=transfer.sources,
                transfer_time=transfer.seconds,
                staging_since=now if component.staging else None,
                stage_size=0,
                staged=0,
                staged_at=None,
            )
            moved = live(job).components[component.index]
            self._ledger.record_event(job, now, "re-placed", f"{left_behind} had no room", moved)
            self._attempts.begin_staging(job, moved, now)
            this.move(moved, left_behind)
        return job

    def _other_site(
        self, job: Job, component: Component, view: GridView, within: float
    ) -> tuple[ClusterName, Transfer] | None:
        """Return a cluster with enough nodes for a component, and its transfer of at most ``within`` seconds; None if
        there is none."""
        spec, policies = job.spec, self._state.policies
        if (
            isinstance(spec.request, FixedRequest)
            or spec.reservation
            or policies.capabilities(spec.policy).keeps_together
        ):
            return None
        reserved = {c: nodes for c in view.by_idle if (nodes := self._plan.reserved_nodes(c.name, spec))}
        view = view.with_clusters(
            [replace(c.with_idle(max(0, c.idle - nodes)), parts=()) for c, nodes in reserved.items()]
        )
        view, _ = exclude_reserved(view, spec.walltime, self._state.now)
        requirement = spec.node_requirement(component.request_index)
        if requirement is not None and (part := requirement.matching_part) is not None:
            view = view.select_nodes(part)
        component_request = spec.component(component.request_index)
        barred = job.barred_sizes(self._state.now)
        other_clusters = {member.cluster for member in live(job).gang if member.index != component.index}
        if spec.share:  # two components of a job could get the same node of a cluster
            barred |= {BarredSizes(cluster) for cluster in other_clusters}
        open_to_it = frozenset(
            cluster.name
            for cluster in view.by_idle
            if cluster.idle >= component.size
            and cluster.name != component.cluster
            and cluster.accepts(component.size)
            and not is_barred(barred, cluster.name, component.size)
            and self._eligibility.may_run_on(spec, frozenset({cluster.name, *other_clusters}), view)
            and self._streams_after(job, component, cluster.name) <= view.free_streams + live(job).streams
        )
        if not open_to_it:
            return None
        files = component_request.inputs if component_request else spec.inputs
        return closest_site(
            component.size, files, view.select_clusters(open_to_it), within, self._rules.assumed_bandwidth
        )

    def _streams_after(self, job: Job, component: Component, cluster: ClusterName) -> int:
        """Return the streams over relays that a job needs once a component has moved to another cluster."""
        moved = tuple(
            PlacedComponent(member.size, cluster if member.index == component.index else member.cluster)
            for member in live(job).gang
        )
        return count_streams(job.spec, Placement(moved), self._state.grid.view())

    def _preemption_for(self, job: Job) -> Preemption | None:
        """Return the method that frees nodes for a job: preemption for high priority, else reclaiming at its home.

        Return None for a job that shares nodes or has reserved ones: it ends no other job.
        """
        if job.spec.share or job.spec.reservation:
            return None
        if job.spec.priority is Priority.HIGH and self._rules.preemption != "never":
            return self._preemption
        return self._reclaiming.get(self._state.sharing.reclaiming_site(job.spec.home_site))

    def _preempt(self, job: Job, this: ClaimTry, now: float) -> None:
        """Preempt jobs for the components that are about to start."""
        if (preemption := this.preemption) is None or not this.preempting:
            return
        room = preemption.plan_preemption(this.preempted_nodes(), now)
        if room.awaited:
            jobs = format_list([f"job {ending.id}" for ending, _ in room.awaited])
            self._ledger.record_event(job, now, "awaits", f"{jobs}, about to end: no job is preempted for those nodes")
        for ending, until in room.awaited:
            for component in live(ending).components:
                self._state.grid[component.cluster].nodes.await_end(ending.token(component.index), until)
        if room.victims and (text := preemption.beneficiary_text(room.victims)):
            self._ledger.record_event(job, now, "reclaims", text)
        for victim, clusters, note in room.victims:
            self._preempt_one(preemption, victim, clusters, job, note, now)

    def preempt_overdue_jobs(self, job: Job, component: Component, now: float) -> None:
        """Preempt the jobs that should have ended by themselves for a component, and have not."""
        cluster, preemption = self._state.grid[component.cluster], self._preemption_for(job)
        if preemption is None:
            return
        for token in cluster.nodes.overdue_components(job.token(component.index), now):
            if (match := self._ledger.find(token)) is not None:
                note = ", and it has not ended by itself as was expected"
                self._preempt_one(preemption, match[0], cluster.name, job, note, now)

    def _preempt_one(self, preemption: Preemption, victim: Job, clusters: str, job: Job, note: str, now: float) -> None:
        """End the attempt of ``victim`` to free its nodes for ``job``, and requeue it; ``note`` adds to the reason."""
        reason = preemption.victim_reason(clusters, job)
        self._ledger.record_event(victim, now, preemption.event, reason + note)
        self._attempts.end_attempt(preemption.prepare_victim(victim), JobState.QUEUED, reason, now, warn=True)

    def _submit_startable(self, job: Job, this: ClaimTry, now: float) -> Job:
        """Submit the components that can start now, and record in the timeline which ones these are."""
        starting = ", ".join(f"{c.size} on {c.cluster}" for c in sorted(this.startable, key=lambda c: c.rank))
        if not starting:
            self._ledger.record_event(job, now, "claim-try", f"no room on {_clusters(this.blocked)}")
        elif job.state is JobState.PLACED:
            job = self._ledger.change_state(job, JobState.CLAIMING, now, "claiming", starting)
        else:
            self._ledger.record_event(job, now, "claiming", starting)
        for component in this.startable:
            if (node_class := this.class_of(component)) != component.node_class:
                job = self._ledger.update_component(job, component.index, node_class=node_class)
            job = self._attempts.submit(job, live(job).components[component.index], now)
        return job

    # Failed claims

    def _is_last_try(self, job: Job, this: ClaimTry, now: float) -> bool:
        """Return whether no claiming try follows if one fails now."""
        return self._next_try(job, now) is None or (this.is_refused and may_not_be_claimed(job, self._rules))

    def _plan_next_try(self, job: Job, this: ClaimTry, now: float) -> Job:
        """Plan the next claiming try, or give up the claim."""
        for component in this.blocked:
            self._ledger.count_failed_claim(component.cluster, ClaimFailure.NO_ROOM)
        clusters, following = _clusters(this.blocked), self._next_try(job, now)
        if this.is_refused and live(job).placed_at == now and self._is_last_try(job, this, now):
            job = self._pause_claims(job, this, now)
        if not this.is_refused:
            job = self._uncount_try(job)
            if following is None:
                return self._requeue(job, f"{clusters} cannot be used", now)
        elif may_not_be_claimed(job, self._rules):
            return self._give_up(job, f"no room on {clusters}", now)
        elif following is None:
            return self._give_up(job, f"no room on {clusters} before its start time", now)
        return self._claim_at(job, following)

    def _pause_claims(self, job: Job, this: ClaimTry, now: float) -> Job:
        """Keep a job from the clusters that lack nodes for it in the cycle of its placement, since it would be placed
        there again at once. If it fits on no other clusters, it leaves its queue for that time."""
        for component in {c.cluster: c for c in this.refused}.values():
            nodes = f"{format_nodes(component.size)} {filter_of(job.spec, component)}".rstrip()
            problem = f"lacked {nodes} when they were claimed"
            job, _ = self._attempts.bar_cluster(job, component.cluster, problem, now, cause=RefusalCause.CLAIM)
        barred = job.barred_sizes(now)
        if self._questions.refusal_on_empty_grid(job.spec, barred):
            again = min(entry.until for entry in job.refusals if entry.until is not None and entry.bars(now))
            job = self._ledger.change_job(job, retry_at=again)
        return job

    def replace_failed_component(
        self, job: Job, component: Component, failure: ClaimFailure, reason: str, now: float
    ) -> Job:
        """Replace a component that got no nodes by another one for the next try, or give up the claim."""
        self._ledger.count_failed_claim(component.cluster, failure)
        following = self._next_try(job, now)
        if not self._state.grid[component.cluster].is_in_reach:
            if following is None:
                # The try may be uncounted already if other components still have to be claimed.
                return self._requeue(job if unclaimed(job) else self._uncount_try(job), reason, now)
        elif following is None or may_not_be_claimed(job, self._rules):
            return self._give_up(job, reason, now)
        self._ledger.record_event(job, now, CLAIM_FAILED, reason, component)
        job = self._replace(job, component, reason)
        claim_at = live(job).claim_at
        return self._claim_at(job, following) if claim_at is None or claim_at <= now else job

    def _replace(self, job: Job, component: Component, reason: str) -> Job:
        """Stop a component, and add a replacement without nodes for the next claiming try."""
        if component.state is not ComponentState.ENDED:
            job = self._attempts.stop_component(job, component, reason)
        job = self._ledger.update_component(job, component.index, superseded=True, error=reason)
        attempt = live(job)
        stand_in = Component(
            len(attempt.components),
            component.cluster,
            component.size,
            request_index=component.request_index,
            node_class=component.node_class,
            node_part=component.node_part,
            sources=component.sources,
            transfer_time=component.transfer_time,
            replaces=component.rank,
            staging_since=component.staging_since,
            stage_size=component.stage_size,
            staged=component.staged,
            staged_at=component.staged_at,
        )
        return self._ledger.change_attempt(job, components=(*attempt.components, stand_in))

    def _claim_at(self, job: Job, claim_at: float) -> Job:
        """Set when the next claiming try of a job is due, in seconds."""
        job = self._ledger.change_attempt(job, claim_at=claim_at)
        self._attempts.set_deadline(job, Deadline.CLAIM, claim_at)
        return job

    def _give_up(self, job: Job, reason: str, now: float) -> Job:
        """Fail the claim: stop all components, and requeue the job to claim earlier, unless its tries are used up."""
        rules, factor = self._rules, self._factor(job)
        lowered = max(min(factor, rules.claim_factor_min), factor - rules.claim_factor_step)
        job = self._ledger.change_job(job, claim_factor=lowered)
        if used_up := tries_used_up(job, rules):
            return self._attempts.end_attempt(job, JobState.FAILED, f"{used_up}: {reason}", now)
        return self._requeue(job, reason, now)

    def _requeue(self, job: Job, reason: str, now: float) -> Job:
        """End the attempt of a job that did not get its nodes, and return the job to its queue."""
        return self._attempts.end_attempt(job, JobState.QUEUED, f"{CLAIM_FAILED}: {reason}", now)

    def _uncount_try(self, job: Job) -> Job:
        """Do not count a claiming try that failed on an unusable cluster."""
        return self._ledger.change_job(job, claiming_tries=job.claiming_tries - 1)


def _clusters(components: list[Component]) -> str:
    return ", ".join(sorted({component.cluster for component in components}))
