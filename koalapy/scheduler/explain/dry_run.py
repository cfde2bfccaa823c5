"""Compute the result of a submission, or of a change of a waiting job, without making it."""

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
from koalapy.scheduler.queue.candidates import Offer, refusal_text
from koalapy.scheduler.queue.component_sizes import exclude_barred
from koalapy.scheduler.queue.queue import Duration
from koalapy.validation.limits import Limits
from koalapy.validation.submission import check_submission


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
    """An evaluation of new jobs, or of changes of a waiting job in its place, as by the scheduler."""

    def __init__(self, queries: Queries, job: Job | None = None, *, high_priority_allowed: bool = True) -> None:
        """``job``: the waiting job. ``high_priority_allowed``: whether high priority may be suggested to the caller."""
        self.high_priority_allowed = high_priority_allowed
        self.queries = queries
        self.job = job
        self._all_limits = queries.limits()
        self._limits = replace(self._all_limits, refusal_on_empty_grid=lambda _: "")
        """The limits without policy calls: few of many candidates are placed."""
        self._barred = job.barred_sizes(queries.now) if job is not None else NOTHING_BARRED
        """The sizes that clusters rejected; they may also reject a changed job."""
        self._answers: dict[JobSpec, Placement | Refusal] = {}
        self._offers: dict[tuple[Priority, Duration], Offer] = {}
        self.asks = 0
        """The number of policy calls."""

    def _offer(self, spec: JobSpec) -> Offer:
        key = spec.priority, self.queries.queues.duration_of(spec, self.job)
        if key not in self._offers:
            self._offers[key] = self.queries.offer(spec, self.job)
        return self._offers[key]

    def view(self, spec: JobSpec) -> GridView:
        """Return the grid as offered to the job, including nodes kept for the job itself."""
        if spec.reservation:
            return self.queries.reservations.view(spec.reservation) or GridView(())
        return self._offer(spec).view

    @property
    def is_planned(self) -> bool:
        """Return whether the waiting job has a planned start."""
        return self.job is not None and self.queries.planned_job == self.job.id

    def reserved_nodes(self, cluster: ClusterName, spec: JobSpec) -> int:
        """Return the nodes on a cluster that are withheld from the job."""
        return self.queries.queues.plan.reserved_nodes(cluster, spec, self.job)

    def keeper(self, spec: JobSpec) -> JobId | None:
        """Return the other job that nodes are withheld for; None if there is none."""
        return self.queries.queues.plan.keeper(spec, self.job.id if self.job is not None else None)

    def ask(self, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the answer of the job's policy on a view."""
        self.asks += 1
        return self.queries.questions.ask(spec, view, self._barred)

    def reasons(self, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Return for each cluster why the job is not placed on a view."""
        if not self._barred:
            return self.queries.questions.explain(spec, view)
        offered, now = exclude_barred(view, self._barred), self.queries.now
        reasons = {reason.cluster: reason for reason in self.queries.questions.explain(spec, offered)}
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
        if spec.reservation:
            free_nodes = self.queries.reservations.free_nodes
            yield NodeSource(self.view(spec), lambda c, _: free_nodes(spec.reservation, c.name), lambda _: 0)
            return
        plan = self.queries.queues.plan
        yield NodeSource(
            self.view(spec),
            lambda cluster, extra_idle: (
                within_limit(cluster, cluster.nodes.surplus + plan.gained_nodes(cluster, spec, self.job, extra_idle))
                - self.reserved_nodes(cluster.name, spec)
            ),
            lambda _: 0,
        )
        if self.may_preempt(spec):
            description = "those that it would have of others by preemption"
            yield NodeSource(
                self.widest_view(spec),
                capacity_with_preemption,
                lambda c: c.nodes.leaving + c.nodes.preemptible,
                description,
            )
        if (home := self._offer(spec).at_home(spec)) is not None:
            yield NodeSource(
                home,
                lambda c, extra_idle: capacity_with_reclaiming(c, extra_idle) - self.reserved_nodes(c.name, spec),
                lambda c: c.nodes.leaving + c.nodes.reclaimable,
                "those that it would take back",
            )

    def may_preempt(self, spec: JobSpec) -> bool:
        return spec.priority is Priority.HIGH and not spec.share and self.queries.rules.preemption == "placement"

    def may_raise_priority(self, spec: JobSpec) -> bool:
        """Return whether high priority may be suggested. A job would lose its planned start by it."""
        return spec.priority is Priority.LOW and self.high_priority_allowed and not self.is_planned

    def widest_view(self, spec: JobSpec) -> GridView:
        """Return all nodes that the job could get, if necessary by preemption."""
        return self._offer(spec).with_preemption(spec) or self.view(spec)

    def preempts(self, spec: JobSpec, placement: Placement) -> bool:
        """Return whether a placement needs nodes of other jobs."""
        view = self.view(spec)
        if spec.share:
            view = select_nodes(spec, view)  # with the partly used nodes that it may share
        idle = {cluster.name: cluster.idle for cluster in view.by_idle}
        return any(placement.nodes_on(c.cluster) > idle.get(c.cluster, 0) for c in placement.components)

    def victims_text(self, spec: JobSpec) -> str:
        """Return, as text, which jobs would release nodes: ``it would preempt others``."""
        if self.may_preempt(spec) or not spec.home_site:
            return "it would preempt others"
        return f"{spec.home_site} would take back nodes from others"

    def placed_at_once(self, spec: JobSpec) -> Placement | None:
        """Return where a new or changed job would be placed if it were accepted and tried now; None if it would not."""
        if not self._is_acceptable(spec, self._limits) or not self.is_tried_at_once(spec):
            return None
        answer = self.answer(spec)
        return answer if isinstance(answer, Placement) and self._is_acceptable(spec, self._all_limits) else None

    def is_tried_at_once(self, spec: JobSpec) -> bool:
        """Return whether a new or changed job is tried at once instead of waiting behind others."""
        return self.queries.queues.is_tried_at_once(spec, self.job)

    def _is_acceptable(self, spec: JobSpec, limits: Limits) -> bool:
        """Return whether a submission keeps within the limits, and is otherwise valid."""
        try:
            check_submission(spec, limits)
        except UsageError:
            return False
        return True


def select_nodes(spec: JobSpec, view: GridView, request_index: int = 0) -> GridView:
    """Return the grid with only the nodes that serve a component, also partly used ones if the job shares nodes."""
    requirements = spec.node_requirements
    requirement = requirements[request_index if len(requirements) > 1 else 0] if requirements else None
    return view if requirement is None else view.select_nodes(requirement)
