"""Compute the result of a submission without submitting it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from koalapy.model.cluster import GridView
from koalapy.model.errors import UsageError
from koalapy.model.job import Job, JobId
from koalapy.model.job_sizes import NOTHING_BARRED
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import ClusterName
from koalapy.scheduler.claims.preemption import capacity_with_preemption, capacity_with_reclaiming, within_limit
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.queue.candidates import refusal_text
from koalapy.scheduler.queue.component_sizes import exclude_barred
from koalapy.validation.limits import Limits
from koalapy.validation.submission import check_submission

MAX_OTHERS = 100
"""Maximum number of waiting jobs of different shapes that are tried in place of a cancelled one."""


@dataclass(frozen=True, slots=True)
class NodeSource:
    """A source of nodes for a job: idle nodes, nodes of preempted jobs, or nodes that the home site reclaims."""

    view: GridView
    """The grid as this source offers it."""
    offered: Callable[[ClusterStatus, int], int]
    """Returns the nodes offered on a cluster if that many additional nodes were idle there."""
    others: Callable[[ClusterStatus], int]
    """Returns how many of these are not idle now."""
    beside: str = ""
    """A description of the nodes that are not idle."""


class DryRun:
    """An evaluation of submissions as by the scheduler, in addition to all waiting jobs or in place of one of them."""

    def __init__(self, queries: Queries, instead_of: Job | None = None, *, high_priority_allowed: bool = True) -> None:
        """``high_priority_allowed``: whether high priority may be suggested to the caller."""
        self.high_priority_allowed = high_priority_allowed
        self.queries = queries
        self.job = instead_of
        self._all_limits = queries.limits()
        self._limits = replace(self._all_limits, refusal_on_empty_grid=lambda _: "")
        """The limits without policy calls: few of many candidates are placed."""
        self._barred = queries.barred(instead_of) if instead_of is not None else NOTHING_BARRED
        """The sizes that clusters rejected; they may also reject a changed job."""
        self._left: GridView | None = None
        """The nodes for a new job after the job is cancelled and the jobs ahead were tried."""
        self._answers: dict[JobSpec, Placement | Refusal] = {}
        self._views: dict[Priority, GridView] = {}
        self._preempting: GridView | None = None
        self.asks = 0
        """The number of policy calls."""

    def instead(self) -> "DryRun | None":
        """Return a dry run of submissions after the job was cancelled and others were tried; None if too costly."""
        job, queries = self.job, self.queries
        if job is None or not (self._has_reservation or queries.queues.head(job.spec) == job.id):
            return self
        if not self._has_reservation and queries.rules.queue == "scan":
            return self
        view = _view_after_cancel(queries, job)
        if view is None or view is queries.own_view():
            return None if view is None else self
        dry_run = DryRun(queries, job, high_priority_allowed=self.high_priority_allowed)
        dry_run._left = view
        return dry_run

    def view(self, priority: Priority) -> GridView:
        """Return the grid as offered to a priority, including nodes reserved for the job itself."""
        if self._left is not None:
            return self._left
        if priority not in self._views:
            queries = self.queries
            self._views[priority] = queries.own_view() if self._has_reservation else queries.view(priority, self.job)
        return self._views[priority]

    @property
    def _has_reservation(self) -> bool:
        return self.job is not None and self.queries.reservation == self.job.id

    def reserved_nodes(self, cluster: ClusterName, priority: Priority) -> int:
        """Return the nodes on a cluster that are reserved for another job."""
        if self.job is not None and self._has_reservation:
            return self.queries.grid[cluster].reserved_for_others(self.job.id)
        return self.queries.reserved_nodes(cluster, priority, self.job.id if self.job is not None else None)

    @property
    def keeper(self) -> JobId | None:
        """Return the other job that nodes are reserved for; None if there is none."""
        return self.queries.queues.reservation.keeper(self.job.id if self.job is not None else None)

    def ask(self, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the answer of the job's policy on a view."""
        self.asks += 1
        return self.queries.evaluate(spec, view, self._barred)

    def reasons(self, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Return for each cluster why the job is not placed on a view."""
        if not self._barred:
            return self.queries.policy_calls.reasons(spec, view)
        offered, now = exclude_barred(view, self._barred), self.queries.now
        reasons = {reason.cluster: reason for reason in self.queries.policy_calls.reasons(spec, offered)}
        for refusal in self.job.refusals if self.job is not None else ():
            if refusal.bars(now) and offered.get(refusal.cluster) is None:
                reasons[refusal.cluster] = ClusterReason(refusal.cluster, refusal_text(refusal, now))
        return tuple(reasons[name] for name in sorted(reasons))

    def answer(self, spec: JobSpec) -> Placement | Refusal:
        """Return where the job fits now, if necessary with preemption or reclaimed nodes; else the refusal."""
        cached = self._answers.get(spec)
        if cached is not None:
            return cached
        refusal: Refusal | None = None
        for source in self.node_sources(spec):
            answer = self.ask(spec, source.view)
            if isinstance(answer, Placement):
                break
            answer = refusal = refusal or answer
        self._answers[spec] = answer
        return answer

    def node_sources(self, spec: JobSpec) -> Iterator[NodeSource]:
        """Yield the sources of nodes in the order in which the scheduler tries them."""
        priority, queries = spec.priority, self.queries
        yield NodeSource(
            self.view(priority),
            lambda cluster, extra_idle: (
                within_limit(cluster, cluster.surplus + extra_idle) - self.reserved_nodes(cluster.name, priority)
            ),
            lambda _: 0,
        )
        if self._left is not None:
            return  # other jobs may take the nodes that preemption would free
        if self.may_preempt(spec):
            description = "those that it would have of others by preemption"
            yield NodeSource(
                self.widest_view(spec), capacity_with_preemption, lambda c: c.leaving + c.preemptible, description
            )
        if (home := queries.view_at_home(spec, everything=self._has_reservation)) is not None:
            takes_all = self._has_reservation or priority is Priority.HIGH
            yield NodeSource(
                home,
                lambda c, extra_idle: (
                    capacity_with_reclaiming(c, extra_idle)
                    - (0 if takes_all else queries.queues.reservation.kept_from_low(c.name))
                ),
                lambda c: c.leaving + c.reclaimable,
                "those that it would take back",
            )

    def may_preempt(self, spec: JobSpec) -> bool:
        return spec.priority is Priority.HIGH and not spec.share and self.queries.rules.preemption == "placement"

    def widest_view(self, spec: JobSpec) -> GridView:
        """Return all nodes that the job could get, if necessary by preemption."""
        if self._left is not None or not self.may_preempt(spec):
            return self.view(spec.priority)
        if self._preempting is None:
            self._preempting = self.queries.view_with_preemption()
        return self._preempting

    def preempts(self, spec: JobSpec, placement: Placement) -> bool:
        """Return whether a placement needs nodes of other jobs."""
        view = self.view(spec.priority)
        if spec.share and (requirement := spec.node_requirements[0]) is not None:
            view = view.select_nodes(requirement)  # with the partly used nodes that it may share
        idle = {cluster.name: cluster.idle for cluster in view.by_idle}
        return any(placement.nodes_on(c.cluster) > idle.get(c.cluster, 0) for c in placement.components)

    def victims_text(self, spec: JobSpec) -> str:
        """Return, as text, which jobs would release nodes: ``it would preempt others``."""
        if self.may_preempt(spec) or not spec.home_site:
            return "it would preempt others"
        return f"{spec.home_site} would take back nodes from others"

    def placed_at_once(self, spec: JobSpec) -> Placement | None:
        """Return where a job would be placed if its submission were accepted and tried now; None if it would not."""
        if not self._is_acceptable(spec, self._limits) or not self.is_tried_at_once(spec):
            return None
        answer = self.answer(spec)
        return answer if isinstance(answer, Placement) and self._is_acceptable(spec, self._all_limits) else None

    def is_tried_at_once(self, spec: JobSpec) -> bool:
        """Return whether a new job is tried on arrival instead of queuing behind others."""
        if self.queries.rules.queue != "fcfs":
            return True
        return self.queries.queues.head_before(spec, self.job.id if self.job is not None else None) is None

    def _is_acceptable(self, spec: JobSpec, limits: Limits) -> bool:
        """Return whether a submission keeps within the limits, and is otherwise valid."""
        try:
            check_submission(spec, limits)
        except UsageError:
            return False
        return True


def _view_after_cancel(queries: Queries, cancelled: Job) -> GridView | None:
    """Return the grid offered to a new job after a job was cancelled and the others were tried.

    Return None where that is too costly to compute, and the same object as ``own_view`` if the others get nothing.
    """
    view, mode, tried = queries.own_view(), queries.rules.queue, 0
    for priority in Priority:
        refused, ended = set[object](), set[int]()
        for job in queries.waiting(priority):
            section, shape = (
                queries.sharing.section_of(job.spec.home_site),
                queries.queues.shape(job.spec, queries.barred(job)),
            )
            if job.id == cancelled.id or section in ended or queries.over_limit(job.spec) is not None:
                continue
            answer: Placement | Refusal | None = None
            if shape not in refused:
                tried += 1
                if tried > MAX_OTHERS:
                    return None
                answer = queries.evaluate(job.spec, view, queries.barred(job))
            if isinstance(answer, Placement):
                changed = [c for c in view if answer.nodes_on(c.name)]
                view = view.with_clusters([c.with_idle(max(0, c.idle - answer.nodes_on(c.name))) for c in changed])
                continue
            if queries.has_waited_long(job) or _would_preempt(queries, job):
                return None
            refused.add(shape)
            if mode != "scan":
                ended.add(section)
    return view


def _would_preempt(queries: Queries, job: Job) -> bool:
    """Return whether a waiting job would be placed if others were preempted."""
    node_sources = DryRun(queries, job).node_sources(job.spec)
    next(node_sources)  # idle nodes
    return any(
        isinstance(queries.evaluate(job.spec, source.view, queries.barred(job)), Placement) for source in node_sources
    )
