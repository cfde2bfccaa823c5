"""The scheduling cycle: apply events, choose candidates, evaluate their policies, claim nodes, return the effects."""

from collections.abc import Sequence

from koalapy.model.advice import record_advice
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.placement import Placement, Refusal, RefusalKind
from koalapy.model.request import ClusterName
from koalapy.scheduler.attempts.deadlines import Deadlines
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.event_handler import EventHandler
from koalapy.scheduler.events import Event
from koalapy.scheduler.parts import Parts
from koalapy.scheduler.queue.candidates import Candidate
from koalapy.scheduler.queue.queue import Group


class Cycle:
    """The scheduling cycle. ``run`` lists the steps; each step calls one other component."""

    def __init__(self, parts: Parts, *, keeps_effects: bool) -> None:
        self._state, self._ledger = parts.state, parts.state.ledger
        self._contact, self._events, self._deadlines = parts.contact, EventHandler(parts), Deadlines(parts)
        self._queues, self._candidates, self._offers = parts.queues, parts.candidates, parts.offers
        self._questions, self._knowledge, self._reasons = parts.questions, parts.knowledge, parts.reasons
        self._claiming, self._attempts, self._budget = parts.claiming, parts.attempts, parts.budget
        self._arrays, self._conditions = parts.arrays, parts.conditions
        self._ends = self._ledger.ended_tasks, parts.conditions.ended, parts.queues.unreserved
        """The ended tasks and jobs to follow, and the jobs without their reservations, looked at in each cycle."""
        self._keeps_effects = keeps_effects
        self._being_placed: set[JobId] = set()
        """Guest jobs that are placed only after a job of the home site has been placed."""
        self._guest_sites: set[ClusterName] = set()
        """The clusters where jobs of other home sites were placed in this cycle."""
        self._refused_owners: set[Group] = set()
        """The job groups that were rejected in this cycle when tried before a guest on their home site."""

    def run(self, events: Sequence[Event], now: float) -> Effects:
        """Run one scheduling cycle, and return all changes since the last one.

        When the time budget is spent, the remaining candidates are tried by the next cycle, which is due at once.
        """
        # 1. Apply the events of jobs and clusters.
        now = self._contact.advance_clock(now)
        for event in events:
            self._events.apply(event, now)
        # 2. Handle the deadlines that are due.
        for timer in self._state.timers.pop_due(now):
            self._deadlines.handle(timer, now)
        if any(self._ends):
            self._follow_ends(now)
        # 3. Wake the jobs that may be placed after these changes.
        self._begin_placing()
        # 4. Choose candidates: by priority, and by their places in the queues.
        while (candidate := self._next_candidate(now)) is not None:
            # 5. Ask the candidate's policy for a placement, on the nodes that the job may have.
            answer = self._ask_policy(candidate, now)
            # 6. Claim the nodes of the placement, or count the refusal.
            if isinstance(answer, Placement):
                self._claim_nodes(candidate, answer, now)
            else:
                self._count_refusal(candidate, answer, now)
            if self._budget.is_spent:
                self._follow_ends(now)
                break
        # 7. Return the changes, and the commands to clusters.
        self._knowledge.notes_waits = False
        self.invalidate()
        return self._ledger.take_effects(share=self._keeps_effects)

    def apply(self, event: Event, now: float) -> None:
        """Apply one event before a cycle. Raise the event's ``KoalaError`` to the caller."""
        self.invalidate()
        self._events.apply(event, self._contact.advance_clock(now))

    def invalidate(self) -> None:
        """Clear the results cached for queries."""
        self._reasons.invalidate()
        self._knowledge.invalidate()

    def _begin_placing(self) -> None:
        """Clear the facts of the last cycle, and wake the jobs that may be placed now."""
        self.invalidate()
        if first_seen := self._state.experience.take_first_seen():
            self._queues.regroup_jobs(first_seen)
        self._guest_sites.clear()
        self._refused_owners.clear()
        self._knowledge.notes_waits = True
        self._candidates.begin_cycle()

    # Ask policies

    def _ask_policy(self, candidate: Candidate, now: float) -> Placement | Refusal | None:
        """Return the answer of the job's policy; None for a rejection that has already been counted."""
        if candidate.is_newcomer and self._candidates.is_rejected_early(candidate):
            return None
        if candidate.job in self._queues.failed_at_once:
            return None
        job = self._ledger.jobs[candidate.job]
        if (excess := self._state.owner_use.find_excess(job.spec, self._state.now)) is not None:
            return Refusal(excess.waiting_reason, RefusalKind.LIMIT)
        answer = self._ask_on_offer(job, candidate, now)
        while isinstance(answer, Placement) and self._place_home_job(job, answer, now):
            answer = self._ask_on_offer(job, candidate, now)
        return answer

    def _ask_on_offer(self, job: Job, candidate: Candidate, now: float) -> Placement | Refusal:
        """Evaluate the policy on the offered nodes, then with preemption, then with nodes the home site may reclaim."""
        barred, offer = job.barred_sizes(now), candidate.offer
        answer = self._questions.ask(job.spec, offer.view, barred)
        if isinstance(answer, Refusal) and (widest := offer.with_preemption(job.spec)) is not None:
            answer = self._questions.ask(job.spec, widest, barred)
        if isinstance(answer, Refusal) and (home := offer.at_home(job.spec)) is not None:
            taken_back = self._questions.ask(job.spec, home, barred)
            answer = taken_back if isinstance(taken_back, Placement) else answer
        return answer

    def _place_home_job(self, guest: Job, placement: Placement, now: float) -> bool:
        """Place a job of a home site before a guest there, which is a job of another site.

        Return whether jobs may have been placed, so that the guest must be evaluated anew. The home job must fit
        entirely on its home site, or would reclaim the guest's nodes in this cycle. Guests that could all stay only by
        exchanging their sites may still be reclaimed, before they have started.
        """
        sharing, priority = self._state.sharing, guest.spec.priority
        if not sharing.reclaims or guest.spec.reservation:
            return False
        queue = self._queues[priority]
        newcomers = {place[-1]: place for place in sorted(self._queues.newcomers[priority])}
        sites = {component.cluster for component in placement.components} - {guest.spec.home_site}
        self._being_placed.add(guest.id)
        try:
            for site in sorted(sites | self._guest_sites):
                section = sharing.section_of(site)
                owners = queue.first_jobs(section, self._state.rules.queue)
                if self._state.rules.queue == "head":  # newcomers are tried out of turn
                    owners += [job for job, place in newcomers.items() if place[0] == section and job in queue]
                for job_id in owners:
                    group = queue.group_of(job_id)
                    may_be_tried = self._candidates.may_scan(priority) or job_id in newcomers
                    if not may_be_tried or job_id in self._being_placed or group in self._refused_owners:
                        continue
                    offer = self._offers.ordinary(priority, group.needs.duration)
                    owner, candidate = self._ledger.jobs[job_id], Candidate(job_id, offer)
                    owner_answer = self._ask_on_offer(owner, candidate, now) if offer.idle_test()(group.needs) else None
                    if not isinstance(owner_answer, Placement):
                        self._refused_owners.add(group)
                    elif all(
                        component.cluster == owner.spec.home_site for component in owner_answer.components
                    ) or self._needs_reclaimed_nodes(owner, candidate, placement, now):
                        answer = self._ask_policy(candidate, now)
                        if not isinstance(answer, Placement):
                            self._count_refusal(candidate, answer, now)
                            self._refused_owners.add(group)
                            return True  # the question may have placed other jobs
                        self._claim_nodes(candidate, answer, now, in_scan=False)
                        return True
        finally:
            self._being_placed.discard(guest.id)
        self._guest_sites |= sites
        return False

    def _needs_reclaimed_nodes(self, owner: Job, candidate: Candidate, guest: Placement, now: float) -> bool:
        """Return whether a job could be placed only on reclaimed nodes once a guest has been placed."""
        barred, offer = owner.barred_sizes(now), candidate.offer
        home = offer.at_home(owner.spec)
        if home is None or isinstance(self._questions.ask(owner.spec, home, barred), Refusal):
            return False
        changed = [cluster for cluster in offer.view if guest.nodes_on(cluster.name)]
        remaining = offer.view.with_clusters([c.with_idle(max(0, c.idle - guest.nodes_on(c.name))) for c in changed])
        return isinstance(self._questions.ask(owner.spec, remaining, barred), Refusal)

    # Act on their answers

    def _next_candidate(self, now: float) -> Candidate | None:
        """Return the next candidate, also among jobs and tasks that may start since others have ended."""
        if self._ledger.ended_tasks:
            self._arrays.count_ended_tasks(now)
        candidate = self._candidates.next_candidate()
        while candidate is None and any(self._ends) and self._follow_ends(now):
            self._candidates.is_unfinished = True
            candidate = self._candidates.next_candidate()
        return candidate

    def _follow_ends(self, now: float) -> bool:
        """Apply the ends of tasks to their arrays, and of jobs and reservations to those that wait for them.

        Return whether there were any.
        """
        had_any = False
        while self._arrays.count_ended_tasks(now) or self._conditions.settle(now):
            had_any = True
        return had_any

    def _claim_nodes(self, candidate: Candidate, placement: Placement, now: float, *, in_scan: bool = True) -> None:
        """Start an attempt of a job, or of an array's next task, on the nodes of its placement.

        The job leaves its queue. An array stays there while it may start another task, and is tried again; ``in_scan``:
        the scan that chose the candidate goes on with it.
        """
        waiting = self._ledger.jobs[candidate.job]
        refusals, is_planned = waiting.refusals, waiting.id == self._queues.plan.job
        duration = self._queues[waiting.spec.priority].group_of(waiting.id).needs.duration
        self._queues.placing = waiting.id
        placed = self._queues.remove(waiting) if waiting.tasks is None else self._arrays.create_task(waiting, now)
        self._queues.placing = placed.id
        job = self._claiming.start_attempt(placed, placement, now)
        self._queues.plan.note_placement(job, placement, duration, is_planned=is_planned)
        if placement.advice is not None:
            self._ledger.record_advised_placement(record_advice(job, now, placement.advice, placement.reason))
        self._attempts.settle_job(job, now)
        self._queues.placing = None
        if waiting.tasks is None:
            returned = self._ledger.get(placed.id)
            if returned is not None and returned.is_in_queue and returned.refusals != refusals:
                self._queues.try_again(returned)
        else:
            self._continue_array(candidate, placed.id, in_scan and not is_planned)
        self._candidates.update_plan()

    def _continue_array(self, candidate: Candidate, task: JobId, in_scan: bool) -> None:
        """Try an array again after the placement of a task; in the next cycle if the task has failed at once, unless
        other clusters remain."""
        job = self._ledger.get(task)
        if job is None or job.state is JobState.QUEUED:
            if job is None or not self._arrays.share_refusals(job):
                self._queues.failed_at_once.add(candidate.job)
            return
        array = self._ledger.get(candidate.job)
        if array is not None and self._queues.has(array) and (candidate.is_newcomer or not in_scan):
            self._queues.try_again(array, is_newcomer=candidate.is_newcomer)

    def _count_refusal(self, candidate: Candidate, refusal: Refusal | None, now: float) -> None:
        """Count a refusal by its kind, and the try of a job that has just arrived.

        ``refusal``: None if its kind has already been counted.
        """
        if refusal is not None:
            self._ledger.count_refusals(refusal.kind)
        if candidate.is_newcomer:
            self._candidates.count_newcomer_try(self._ledger.jobs[candidate.job], now)
