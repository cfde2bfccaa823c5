"""Evaluates the policies of jobs: what they answer depends on a job's shape, and on the view."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice, product

from koalapy.model.bounds import MAX_NODES
from koalapy.model.cluster import ClusterPair, ClusterState, ClusterView, GridView, Link, Uplink, of_so_many
from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec
from koalapy.model.placement import ClusterReason, Placement, Refusal, RefusalKind
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.model.users import NOWHERE
from koalapy.model.wording import listed
from koalapy.policies.policy import Policy
from koalapy.scheduler.advisor.knowledge import KnowledgeBuilder
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.policy_answers import BrokenPolicy, informed
from koalapy.scheduler.state import SchedulerState

LOOK_AHEAD = 50
"""How many waiting requests a policy that looks ahead is shown."""


class PolicyEvaluator:
    """Policies by name, what jobs demand of clusters beside, and what clusters on probation are given."""

    def __init__(
        self, state: SchedulerState, eligibility: Eligibility, queues: PlacementQueues, knowledge: KnowledgeBuilder
    ) -> None:
        self._policies, self._grid, self._ledger = state.policies, state.grid, state.ledger
        self._eligibility, self._queues, self._knowledge = eligibility, queues, knowledge
        self._whole = self._grid.lens(lambda cluster: cluster.total - cluster.down)
        self._assumed_bandwidth = state.rules.assumed_bandwidth
        self._seen = self._empty = GridView(())
        """The grid when it was last emptied, and so emptied."""
        self._broken: set[str] = set()
        """Policies whose invalid answers have been logged."""

    def evaluate(self, spec: JobSpec, view: GridView, barred: frozenset[ClusterName] = NOWHERE) -> Placement | Refusal:
        """What the job's policy answers on a view, without the clusters that have refused the job (``barred``)."""
        nowhere = _had_from_nowhere(spec, view)
        if nowhere:
            return Refusal(nowhere, RefusalKind.FILES)
        if barred:
            if named := sorted(barred.intersection(_named_clusters(spec))):
                return Refusal(f"{listed(named)} has refused it", RefusalKind.ELIGIBILITY)
            view = view.only(frozenset(cluster.name for cluster in view if cluster.name not in barred))
        try:
            policy = self._policy(spec, view)
            answer = self._eligibility.evaluate(policy, spec, self._looking_ahead(policy, spec, view))
            return answer if isinstance(answer, Refusal) else self._one_trial_each(policy, spec, view, answer)
        except UsageError as error:  # the policy was known when the job was submitted, to an earlier daemon
            return Refusal(error.message, RefusalKind.POLICY)
        except BrokenPolicy as error:
            if error.policy not in self._broken:
                self._broken.add(error.policy)
                self._ledger.warn(error.message)
            return Refusal(error.message, RefusalKind.POLICY)

    def may_be_placed(self, spec: JobSpec, without: frozenset[ClusterName]) -> bool:
        """Whether a job could be placed if all nodes were idle and all clusters usable, ``without`` some of these.

        A cluster whose nodes are not known yet counts as large enough.
        """
        if not without.isdisjoint(_named_clusters(spec)):
            return False
        view = self.empty_grid()
        view = view.only(frozenset(cluster.name for cluster in view if cluster.name not in without))
        try:
            return isinstance(self._answer_with_links(spec, view), Placement)
        except (UsageError, BrokenPolicy):
            return False

    def refusal_on_empty_grid(self, spec: JobSpec, *, assume_links: bool = True) -> str:
        """Why a job would not be placed if all nodes were idle and all clusters usable; empty where it would be.

        Also empty while that cannot be told: clusters have not told their nodes, inputs are nowhere, or cannot be moved
        from or to some cluster. ``assume_links``: what is not known of a link is assumed, since it may be measured yet.
        """
        view = self.empty_grid()
        if spec.internal or not all(cluster.total for cluster in self._grid.clusters()):
            return ""
        if _had_from_nowhere(spec, view) or (view.cut_off and spec.all_inputs):
            return ""
        try:
            answer = self._answer_with_links(spec, view) if assume_links else self._answer(spec, view)
        except (UsageError, BrokenPolicy):
            return ""
        return answer.summary if isinstance(answer, Refusal) and answer.kind is not RefusalKind.ADVICE else ""

    def _answer_with_links(self, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the same as ``_answer``; where that is a refusal, as if all links were known and good."""
        answer = self._answer(spec, view)
        if isinstance(answer, Placement):
            return answer
        return self._answer(spec, replace(view, links=_assumed_links(view, self._assumed_bandwidth)))

    def _answer(self, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the answer of the job's policy on a view, whatever clusters are on probation."""
        policy = self._policy(spec, view)
        return self._eligibility.evaluate(policy, spec, self._looking_ahead(policy, spec, view))

    def empty_grid(self) -> GridView:
        """Return the grid with all clusters usable, all nodes idle and nothing on the links; the same object as before
        while it is the same."""
        view = self._grid.view()
        if view is not self._seen:
            emptied = tuple(map(_all_idle, view))
            uplinks = {name: Uplink(uplink.capacity) for name, uplink in view.uplinks.items()}
            empty = GridView(emptied, view.links, (), view.replicas, view.cut_off, uplinks)
            self._seen, self._empty = view, self._empty if empty == self._empty else empty
        return self._empty

    def reasons(self, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Cluster by cluster, why the job is not placed on a view; empty when it would be."""
        nowhere = _had_from_nowhere(spec, view)
        if nowhere:
            return tuple(ClusterReason(cluster.name, nowhere) for cluster in view)
        try:
            policy = self._policy(spec, view)
            return self._eligibility.explain(policy, spec, self._looking_ahead(policy, spec, view))
        except (UsageError, BrokenPolicy) as error:
            return (ClusterReason("", error.message),)

    def _policy(self, spec: JobSpec, view: GridView) -> Policy:
        """The job's policy; one that learns with what is known of the job."""
        policy = self._policies.resolve(spec.policy, spec.request, spec.policy_options)
        if not self._policies.capabilities(policy.name).learns:
            return policy
        return informed(policy, self._knowledge.build(spec, view))

    def _looking_ahead(self, policy: Policy, spec: JobSpec, view: GridView) -> GridView:
        """The view with the requests of others who wait, for the few policies that want to know."""
        if not self._policies.capabilities(policy.name).looks_ahead:
            return view

        def ahead(view: GridView) -> GridView:
            waiting = list(islice(self._queues.requests(), LOOK_AHEAD + 1))
            if spec.request in waiting:  # its own, or one that is as good
                waiting.remove(spec.request)
            return view.beside(tuple(waiting[:LOOK_AHEAD]))

        return view.once(("waiting beside", spec.request), ahead)

    def _one_trial_each(self, policy: Policy, spec: JobSpec, view: GridView, answer: Placement) -> Placement | Refusal:
        """A cluster on probation gets one component at a time: an answer that gives it more is asked for anew.

        If that leaves no way, and would not if all nodes were idle, a job may bring all its components as one trial.
        """
        if len(answer.components) == 1:
            return answer
        whole = answer
        for narrow in (True, False):
            count = Counter(component.cluster for component in answer.components)
            crowded = {name for name, many in count.items() if many > 1 and self._grid[name].health.probation}
            if not crowded:
                return answer
            largest = {n: max(c.size for c in answer.components if c.cluster == n) * narrow for n in crowded}
            view = view.changed([c.with_idle(largest[c.name]) for c in view if c.name in largest])
            another = self._eligibility.evaluate(policy, spec, self._looking_ahead(policy, spec, view))
            if isinstance(another, Refusal):
                return another if self._may_come_so(policy, spec, view, largest) else whole
            answer = another
        return answer

    def _may_come_so(
        self, policy: Policy, spec: JobSpec, offered: GridView, at_most: Mapping[ClusterName, int]
    ) -> bool:
        """Whether a job could be placed with so few nodes on these clusters if all others offered had theirs idle."""
        if self._grid.is_all_on_trial:
            return False
        view = self._whole.view().only(frozenset(cluster.name for cluster in offered))
        view = view.changed([c.with_idle(min(c.idle, at_most[c.name])) for c in view if c.name in at_most])
        return isinstance(self._eligibility.evaluate(policy, spec, self._looking_ahead(policy, spec, view)), Placement)


def _all_idle(cluster: ClusterView) -> ClusterView:
    """A cluster as it would be if it was usable and nobody had nodes there."""
    total = cluster.total or MAX_NODES
    classes = tuple(replace(each, idle=max(each.total, each.idle)) for each in cluster.node_classes)
    return ClusterView(cluster.name, total, total, speed=cluster.speed, node_classes=of_so_many(classes, total))


def _assumed_links(view: GridView, bandwidth: float) -> Mapping[ClusterPair, Link]:
    """Return all links, those of unknown latency or bandwidth as if they were measured and good."""
    links = dict(view.links)
    for one, other in product([cluster.name for cluster in view], repeat=2):
        known = view.link(one, other)
        if not known.unreachable:
            latency = 0.0 if known.latency is None else known.latency
            links[one, other] = Link(latency, bandwidth if known.bandwidth is None else known.bandwidth)
    return links


def _named_clusters(spec: JobSpec) -> frozenset[ClusterName]:
    """The clusters that a fixed request names; empty for others."""
    if not isinstance(spec.request, FixedRequest):
        return NOWHERE
    return frozenset(component.cluster or "" for component in spec.request.components)


def _had_from_nowhere(spec: JobSpec, view: GridView) -> str:
    """Why an input of the job can be had from no cluster at all, whatever its policy; empty when all can."""
    for file in spec.all_inputs:
        sites = view.sites_of(file)
        if not sites:
            return f"no cluster has a good replica of {file.name}"
        if all((c := view.get(name)) is not None and c.state is ClusterState.UNREACHABLE for name in sites):
            return f"{listed(sites, separator=' and ')}, which has {file.name}, is out of reach"
    return ""
