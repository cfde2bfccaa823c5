"""Read-only queries of the scheduler's state."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from koalapy.model.array import TaskIndices
from koalapy.model.cluster import ClusterPair, GridView, LinkPath, RelayedSince
from koalapy.model.errors import BusyError, NotFoundError, ProblemCode, naming_item
from koalapy.model.job import Component, Job, JobId, Token
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.limits import Excess, ScopeKey
from koalapy.model.placement import PlacedComponent, Placement
from koalapy.model.request import ClusterName
from koalapy.scheduler.arrays import Arrays
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.candidates import Offer, Offers, WaitingReasons
from koalapy.scheduler.queue.eligibility import count_streams, may_fall_back
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.questions import PolicyQuestions
from koalapy.scheduler.queue.start_conditions import StartConditions
from koalapy.scheduler.state import SchedulerState
from koalapy.validation.limits import ClusterLimits, Limits


class Queries:
    """The read-only interface of the scheduler."""

    def __init__(
        self,
        state: SchedulerState,
        queues: PlacementQueues,
        offers: Offers,
        questions: PolicyQuestions,
        reasons: WaitingReasons,
        arrays: Arrays,
        conditions: StartConditions,
    ) -> None:
        self.rules, self.policies, self.grid = state.rules, state.policies, state.grid
        self.accounts, self.sharing, self.owner_use = state.accounts, state.sharing, state.owner_use
        self.experience, self.lrm_waits = state.experience, state.lrm_waits
        self.reservations = state.reservations
        self.queues, self.questions, self._offers, self._reasons = queues, questions, offers, reasons
        self._state, self._ledger, self._arrays, self._conditions = state, state.ledger, arrays, conditions
        self._limits: Limits | None = None
        self._empty_grid: GridView | None = None
        """The grid for which ``_limits`` were made."""

    @property
    def now(self) -> float:
        """Return the scheduler's time: the latest time passed to it."""
        return self._state.now

    # Jobs

    def job(self, job: JobId) -> Job | None:
        """Return a snapshot of an unfinished job; None if there is none."""
        unfinished = self._ledger.get(job)
        return unfinished and self._ledger.share(unfinished)

    def link_paths(self, job: Job) -> dict[ClusterPair, LinkPath]:
        """Return how the messages of a job pass between the clusters of its attempt, by pair sorted by name.

        A link that only measurements have found to be relayed is tried directly again by the daemon's own jobs. A
        direct link may turn out to be relayed if the job has reserved streams for that.
        """
        names, view = sorted({component.cluster for component in live(job).gang}), self.grid.view()
        paths = {pair: view.path_between(*pair, job.spec.links) for pair in combinations(names, 2)}
        placement = Placement(tuple(PlacedComponent(c.size, c.cluster) for c in live(job).gang))
        if live(job).streams >= count_streams(job.spec, placement, view, with_fallback=True):
            for pair, path in paths.items():
                if path is LinkPath.DIRECT and may_fall_back(view, pair, job.spec.links):
                    paths[pair] = LinkPath.UNKNOWN
        if job.spec.internal:
            for pair, path in paths.items():
                if path is LinkPath.RELAYED and not view.relays.must_relay(*pair):
                    paths[pair] = LinkPath.UNKNOWN
        return paths

    def relayed_since(self, pair: ClusterPair) -> RelayedSince | None:
        """Return why messages between two clusters go over relays; None if they do not."""
        relays, since = self.grid.relays, self._state.relayed.get(pair)
        if relays.must_relay(*pair):
            demanding = " and ".join(name for name in pair if name in relays.relayed_only)
            return RelayedSince(None, f"demanded by {demanding or 'the configuration of the link'}")
        return since if since is not None and relays.streams else None

    def unfinished(self, job: JobId) -> Job | None:
        """Return a snapshot of an unfinished job, or a task that waits in its array; None if there is none."""
        return self.job(job) or self._arrays.pending_task(job)

    def select_pending(self, array: JobId, tasks: Sequence[JobId]) -> TaskIndices:
        """Return the indices of an array's tasks that wait in it. Raise ``ConflictError`` if they cannot be cancelled
        together."""
        return self._arrays.select_pending(array, tasks)

    def tasks_of(self, array: JobId) -> list[Job]:
        """Return snapshots of the started and unfinished tasks of an array."""
        return [self._ledger.share(self._ledger.jobs[task]) for task in self._arrays.live_tasks(array)]

    def jobs(self) -> list[Job]:
        """Return snapshots of all unfinished jobs."""
        return list(self._ledger.share_all())

    def active_jobs(self) -> list[Job]:
        """Return snapshots of the jobs that have a live attempt."""
        return [self._ledger.share(job) for job in self._ledger.active_jobs()]

    def result_sources(self) -> set[JobId]:
        """Return the jobs with results that unfinished jobs need, and the arrays of those that are tasks."""
        inputs = (result_input for job in self.jobs() for result_input in job.spec.result_inputs)
        return {ident for result_input in inputs for ident in (result_input.job, result_input.source)}

    def is_sent_to(self, cluster: ClusterName, bundle: str) -> bool:
        """Return whether a component on a cluster needs a bundle of its submitter's files."""
        matching_jobs = (job for job in self.jobs() if job.spec.bundle is not None and job.spec.bundle.id == bundle)
        return any(c.cluster == cluster for job in matching_jobs if job.attempt for c in job.attempt.components)

    def find(self, token: Token) -> tuple[Job, Component] | None:
        """Return the job and the component of a live attempt that a token names; None if there is none."""
        return self._shared(self._ledger.find(token))

    def find_staged(self, token: Token) -> tuple[Job, Component] | None:
        """Return the job and the component of the live attempt with the stage of this token; None if there is none."""
        return self._shared(self._ledger.find_staged(token))

    def _shared(self, match: tuple[Job, Component] | None) -> tuple[Job, Component] | None:
        """Return the job and component, and hand out the job: it is never changed in place again."""
        if match is not None:
            self._ledger.share(match[0])
        return match

    # The placement queues

    @property
    def queued(self) -> int:
        return len(self.queues)

    def admit(self, spec: JobSpec) -> None:
        """Raise ``BusyError``, ``LimitReached`` or ``NeverAllowed`` for a submission that cannot be accepted now."""
        self.owner_use.check(spec)
        self._check_queue(0)

    def admit_change(self, spec: JobSpec) -> None:
        """Raise ``NeverAllowed`` if a waiting job could never be placed with a changed specification."""
        self.owner_use.check(spec, is_queued=True)

    def admit_batch(self, specs: Sequence[JobSpec]) -> None:
        """Raise the error of ``admit`` for the first of several submissions that cannot be accepted together now."""
        ahead, index = Counter[ScopeKey](), 0
        with naming_item(lambda: f"jobs[{index}]"):
            for index, spec in enumerate(specs):
                self.owner_use.check(spec, ahead)
                self._check_queue(index)

    def _check_queue(self, ahead: int) -> None:
        """Raise ``BusyError`` if no job can be queued behind the waiting jobs and ``ahead`` more."""
        if self.queued + ahead >= self.rules.placement_queue_limit:
            raise BusyError(
                f"{self.queued} jobs wait already, and placement_queue_limit is {self.rules.placement_queue_limit}",
                retry_after=self.rules.scan_interval,
                hint="submit again later",
            )

    def waiting(self, priority: Priority) -> Iterator[Job]:
        """Yield the jobs of a placement queue from head to tail. The queue must not change during the iteration."""
        return (self._ledger.jobs[job] for job in self.queues[priority])

    def over_limit(self, spec: JobSpec) -> Excess | None:
        """Return the owner's limit that would keep a job from being placed now; None if there is none."""
        return self.owner_use.find_excess(spec, self.now)

    def position(self, job: JobId) -> int | None:
        """Return the position of a queued job, counted from 1; None if it is not queued."""
        unfinished = self._ledger.get(job)
        return self.queues.position(unfinished) if unfinished else None

    def tries(self, job: JobId) -> int:
        """Return the number of placement tries of an unfinished job, including scans that passed it over."""
        unfinished = self._ledger.get(job)
        if unfinished is None:
            raise NotFoundError(
                f"there is no unfinished job {job}", field="job", value=job, code=ProblemCode.JOB_NOT_FOUND
            )
        return self.queues.tries(unfinished)

    def waiting_reason(self, job: Job) -> str:
        """Return why a queued job is not placed."""
        return self._reasons.reason_of(job)

    def dependents_of(self, job: JobId) -> list[JobId]:
        """Return the unfinished jobs that name an unfinished job in ``after``."""
        return self._conditions.dependents_of(job)

    def awaited_clusters(self) -> frozenset[ClusterName]:
        """Return the clusters where a waiting job might be placed if they had more capacity."""
        return self.queues.awaited_clusters()

    @property
    def planned_job(self) -> JobId | None:
        """Return the waiting job with a planned start; None if there is none."""
        return self.queues.plan.job

    def planned_start(self, job: JobId) -> float | None:
        """Return when a waiting job is planned to start; None if it has no planned start."""
        return self.queues.plan.start if job == self.planned_job else None

    # Offered nodes and answers of policies

    def limits(self) -> Limits:
        """Return the limits that submissions are checked against; the same object until the empty grid changes."""
        clusters = [
            ClusterLimits(
                c.name,
                c.last_report.total or None,
                c.profile,
                c.speed,
                c.nodes.classes.reported if c.nodes.reported else None,
                c.last_report.job_sizes,
            )
            for c in self.grid.clusters()
        ]
        empty_grid = self.questions.empty_grid()
        if self._limits is None or empty_grid is not self._empty_grid or clusters != self._limits.clusters:
            rules, self._empty_grid = self.rules, empty_grid
            self._limits = Limits(
                clusters,
                self.policies,
                rules.max_components_per_job,
                rules.warning_max,
                self.accounts,
                self.sharing,
                rules.max_array_size,
                rules.max_bytes_per_job,
                self.questions.refusal_on_empty_grid,
            )
        return self._limits

    def offer(self, spec: JobSpec, job: Job | None = None) -> Offer:
        """Return which nodes are offered to a new job now, or to a waiting ``job``."""
        if job is not None and job.id == self.planned_job:
            return self._offers.for_planned(job)
        duration = self.queues.duration_of(spec, job)
        if job is not None and spec.priority is Priority.LOW and self.queues.kept:
            return self._offers.for_restart(job, duration)
        return self._offers.ordinary(spec.priority, duration)
