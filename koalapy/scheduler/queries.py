"""What the scheduler knows, for those who ask; nothing here changes anything."""

from collections.abc import Iterable, Iterator

from koalapy.model.cluster import GridView
from koalapy.model.errors import BusyError, NotFoundError, ProblemCode
from koalapy.model.job import Component, Job, JobId, JobSpec, Priority, Token
from koalapy.model.limits import Excess
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import ClusterName
from koalapy.model.users import NOWHERE
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.policy_evaluation import PolicyEvaluator
from koalapy.scheduler.queue.promise import is_promised
from koalapy.scheduler.queue.queue import Shape
from koalapy.scheduler.queue.scan import Scanner
from koalapy.scheduler.state import SchedulerState
from koalapy.validation.limits import ClusterLimits, Limits


class Queries:
    """The scheduler's read-only side."""

    def __init__(
        self, state: SchedulerState, queues: PlacementQueues, scanner: Scanner, evaluator: PolicyEvaluator
    ) -> None:
        self.rules, self.policies, self.grid, self.experience = (
            state.rules,
            state.policies,
            state.grid,
            state.experience,
        )
        self.accounts = state.accounts
        """Where jobs of an owner may run, and as which account."""
        self.sharing = state.sharing
        """What a job's home site means for it."""
        self.owner_use, self._state = state.owner_use, state
        self.lrm_waits = state.lrm_waits
        """What components wait for in their resource managers."""
        self._ledger, self._queues, self._scanner, self._evaluator = state.ledger, queues, scanner, evaluator

    # Jobs

    def job(self, job: JobId) -> Job | None:
        """A job that is not final, as it stands."""
        known = self._ledger.get(job)
        return known and self._ledger.share(known)

    def jobs(self) -> list[Job]:
        """All jobs that are not final."""
        return list(self._ledger.share_all())

    def is_sent_to(self, cluster: ClusterName, bundle: str) -> bool:
        """Whether a component there is to have these files of its submitter."""
        wanted = (job for job in self.jobs() if job.spec.bundle is not None and job.spec.bundle.id == bundle)
        return any(c.cluster == cluster for job in wanted if job.attempt for c in job.attempt.components)

    def find(self, token: Token) -> tuple[Job, Component] | None:
        """The component of a live attempt that a token names, and its job."""
        return self._shared(self._ledger.find(token))

    def find_staged(self, token: Token) -> tuple[Job, Component] | None:
        """The component of a live attempt whose stage a token names, and its job."""
        return self._shared(self._ledger.find_staged(token))

    def _shared(self, found: tuple[Job, Component] | None) -> tuple[Job, Component] | None:
        if found is not None:
            self._ledger.share(found[0])
        return found

    # The placement queues

    @property
    def queued(self) -> int:
        return len(self._queues)

    def admit(self, spec: JobSpec) -> None:
        """Refuse a submission while the placement queues are full, and what its owner may not have; nothing is kept.

        ``BusyError``, ``LimitReached``, ``NeverAllowed``.
        """
        self.owner_use.check(spec)
        if self.queued >= self.rules.placement_queue_limit:
            raise BusyError(
                f"{self.queued} jobs wait already, and placement_queue_limit is {self.rules.placement_queue_limit}",
                retry_after=self.rules.scan_interval,
                hint="submit again later",
            )

    def never_fits(self, job: Job) -> bool:
        """Return whether a job would not be placed on the empty grid, by the links as they are known."""
        return bool(self._evaluator.refusal_on_empty_grid(job.spec, assume_links=False))

    def waiting(self, priority: Priority) -> Iterator[Job]:
        """Return the jobs of a placement queue from head to tail, as long as none comes or leaves."""
        return (self._ledger.jobs[job] for job in self._queues[priority])

    def shape(self, job: Job) -> Shape:
        """Return what the answer of a job's policy depends on, beside the grid."""
        return self._queues.shape(job.spec, self.barred(job))

    def has_waited_long(self, job: Job) -> bool:
        """Return whether nodes may be kept for a waiting job: it has failed enough scans, or was promised its turn."""
        rules = self.rules
        has_aged = rules.aging and self._queues.tries(job) >= rules.aging_tries
        return has_aged or is_promised(job, rules, self._state.now)

    def over_limit(self, spec: JobSpec) -> Excess | None:
        """The limit of its owner that would keep a job from being placed now."""
        return self.owner_use.of(spec, self._state.now)

    def position(self, job: JobId) -> int | None:
        """A queued job's place in its queue, counted from 1."""
        known = self._ledger.get(job)
        return self._queues.position(known) if known else None

    def positions(self, jobs: Iterable[Job]) -> dict[JobId, int]:
        """The same of many, as far as they are in a queue."""
        return self._queues.positions(jobs)

    def tries(self, job: JobId) -> int:
        """How often an unfinished job was tried to be placed, scans that passed it over among them."""
        known = self._ledger.get(job)
        if known is None:
            raise NotFoundError(
                f"there is no unfinished job {job}", field="job", value=job, code=ProblemCode.JOB_NOT_FOUND
            )
        return self._queues.tries(known)

    def waiting_reason(self, job: Job) -> str:
        """Why a queued job is not placed."""
        return self._scanner.waiting_reason(job)

    def awaited_clusters(self) -> frozenset[ClusterName]:
        """Where a job that waits to be placed might be, if there was room."""
        return self._queues.awaited_clusters()

    @property
    def reservation(self) -> JobId | None:
        """The job that has failed so many scans that nodes are kept for it."""
        return self._queues.reservation.job

    def keeper(self, job: JobId | None) -> JobId | None:
        """For whom nodes are kept that a job, or a new one, is not given: that one, or one that was promised its turn
        before; it keeps them until they are claimed."""
        return self._queues.reservation.keeper(job)

    def kept(self, cluster: ClusterName, priority: Priority) -> int:
        """Nodes that are kept for that job there, and for those who were promised theirs, and not offered to jobs of a
        priority."""
        return self._queues.reservation.kept(cluster, priority)

    def aged(self, cluster: ClusterName) -> int:
        """Of these, nodes that are kept from jobs of low priority only."""
        return self._queues.reservation.aged(cluster)

    # What might be placed

    def limits(self) -> Limits:
        """What submissions are held against."""
        clusters = [ClusterLimits(c.name, c.total or None, c.profile, c.speed) for c in self.grid.clusters()]
        rules = self.rules
        most = rules.max_components_per_job, rules.warning_max
        return Limits(
            clusters,
            self.policies,
            *most,
            self.accounts,
            self.sharing,
            rules.max_bytes_per_job,
            self._evaluator.refusal_on_empty_grid,
        )

    def view(self, priority: Priority) -> GridView:
        """The grid as a job of that priority would be placed on it now."""
        return self._queues.reservation.view(priority)

    def own_view(self) -> GridView:
        """The grid as that job would be placed on it for which nodes are kept."""
        return self._queues.reservation.own_view()

    def head(self, spec: JobSpec) -> JobId | None:
        """The first of those who wait where such a job does, as far as limits go."""
        return self._queues.head(spec)

    def head_before(self, spec: JobSpec, without: JobId | None = None) -> JobId | None:
        """The first of those, one left out, if such a job would stand behind it when it comes."""
        return self._queues.head_before(spec, without)

    def before_new(self, spec: JobSpec) -> int:
        """How many jobs would stand before such a one when it comes, in the queue of its home site where it has one."""
        return self._queues.before_new(spec)

    def view_at_home(self, spec: JobSpec, *, everything: bool = False) -> GridView | None:
        """A job's home site alone, as it would be if it took back its nodes for it, where it may; ``everything``: also
        those that are kept for this one."""
        return self._scanner.view_at_home(spec, everything=everything)

    def view_with_preemption(self) -> GridView:
        """The grid as it would be if low-priority jobs made room for one of high priority."""
        return self._scanner.view_with_preemption()

    def evaluate(self, spec: JobSpec, view: GridView, barred: frozenset[ClusterName] = NOWHERE) -> Placement | Refusal:
        """What the job's policy answers on a view, without the clusters that have refused the job (``barred``)."""
        return self._evaluator.evaluate(spec, view, barred)

    @property
    def now(self) -> float:
        """The latest time that the scheduler was told."""
        return self._state.now

    def barred(self, job: Job) -> frozenset[ClusterName]:
        """The clusters where a job is not placed now, since they have refused it."""
        return job.barred_from(self._state.now)

    def may_be_placed(self, spec: JobSpec, without: frozenset[ClusterName]) -> bool:
        """Whether a job could be placed if all nodes were idle and all clusters usable, ``without`` some of these."""
        return self._evaluator.may_be_placed(spec, without)

    def reasons(self, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Cluster by cluster, why the job is not placed on a view; empty when it would be."""
        return self._evaluator.reasons(spec, view)
