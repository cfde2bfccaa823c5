"""Ask the policies of jobs for placements and for reasons: on the offered nodes, and on the empty grid."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import count, islice, product
from math import ceil, inf

from koalapy.model.cluster import ClusterPair, ClusterState, ClusterView, GridView, Link, Uplink
from koalapy.model.errors import UsageError
from koalapy.model.job_sizes import NOTHING_BARRED, Barred, is_barred
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.model.wording import format_duration, format_list
from koalapy.policies.network import Transfer
from koalapy.policies.policy import Policy
from koalapy.scheduler.advisor.knowledge import KnowledgeBuilder
from koalapy.scheduler.queue.component_sizes import exclude_barred, exclude_reserved, transfer_of, transfer_times
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.policy_answers import BrokenPolicy, inform_policy
from koalapy.scheduler.queue.policy_question import PolicyQuestion
from koalapy.scheduler.state import SchedulerState

LOOK_AHEAD = 50
"""Number of waiting requests that are passed to a policy that looks ahead."""
MAX_DELAY_ROUNDS = 16
"""Number of policy calls after which a job with inputs is placed only on clusters where nothing is reserved."""


class PolicyQuestions:
    """The questions of jobs to their policies, with what these know of other jobs, and the limits of probation."""

    def __init__(
        self, state: SchedulerState, eligibility: Eligibility, queues: PlacementQueues, knowledge: KnowledgeBuilder
    ) -> None:
        self._state, self._registry, self._grid, self._ledger = state, state.policies, state.grid, state.ledger
        self._eligibility, self._queues, self._knowledge = eligibility, queues, knowledge
        self._whole = self._grid.cached_view(lambda cluster: cluster.last_report.total - cluster.last_report.down)
        self._assumed_bandwidth = state.rules.assumed_bandwidth
        self._seen = self._empty = GridView(())
        """The grid of which ``_empty`` was last computed."""
        self._broken: set[str] = set()
        """Policies with invalid answers that have been logged."""

    def ask(self, spec: JobSpec, view: GridView, barred: Barred = NOTHING_BARRED) -> Placement | Refusal:
        """Return the answer of the job's policy on a view, without the sizes that clusters rejected (``barred``)."""
        if spec.reservation:
            reserved_view = self._state.reservations.view(spec.reservation)
            if reserved_view is None:
                return Refusal(f"reservation {spec.reservation} is not in force", RefusalKind.ELIGIBILITY)
            view = reserved_view
        nowhere = _missing_input_reason(spec, view)
        if nowhere:
            return Refusal(nowhere, RefusalKind.FILES)
        if refusing := _refusing_clusters(spec, barred):
            return Refusal(f"{format_list(refusing)} has refused it", RefusalKind.ELIGIBILITY)
        view = exclude_barred(view, barred)
        offered, reserved = exclude_reserved(view, spec.walltime, self._state.now)
        try:
            answer = self._place_on(spec, offered, reserved)
            delays: dict[ClusterName, float] = {}
            rounds = count(1)
            while isinstance(answer, Placement) and spec.all_inputs and view.has_reservations:
                # A job that awaits files starts, and so ends, later on all its clusters: after the last arrival.
                transfer_s: dict[ClusterName, float] = {}
                for placed in answer.components:
                    seconds = self.transfer_of(spec, placed, view).seconds
                    transfer_s[placed.cluster] = max(seconds, transfer_s.get(placed.cluster, 0.0))
                last = max(transfer_s.values())
                longer = {name: seconds for name, seconds in transfer_s.items() if seconds > delays.get(name, 0.0)}
                longer = longer or {name: last for name in transfer_s if last > delays.get(name, 0.0)}
                if not longer:
                    break
                delays = (delays or self._least_delays(spec, view)) | longer
                if next(rounds) >= MAX_DELAY_ROUNDS:  # only where nothing is reserved
                    delays = dict.fromkeys((cluster.name for cluster in view), inf)
                offered, reserved = exclude_reserved(view, spec.walltime, self._state.now, delays)
                arrival = f"; its files arrive in {format_duration(ceil(last))}" if reserved else ""
                answer = self._place_on(spec, offered, f"{reserved}{arrival}")
            return answer
        except UsageError as error:  # the policy was known when the job was submitted, to an earlier daemon
            return Refusal(error.message, RefusalKind.POLICY)
        except BrokenPolicy as error:
            if error.policy not in self._broken:
                self._broken.add(error.policy)
                self._ledger.warn(error.message)
            return Refusal(error.message, RefusalKind.POLICY)

    def _place_on(self, spec: JobSpec, view: GridView, reserved: str) -> Placement | Refusal:
        """Return the answer of the job's policy; ``reserved``: the nodes that a view lacks, as text to append."""
        answer = self._place(spec, view)
        if isinstance(answer, Placement):
            return self._limit_trials(spec, view, answer)
        if spec.reservation:
            reserved = f"; it gets nodes of reservation {spec.reservation} only"
        return Refusal(f"{answer.summary}{reserved}", answer.kind) if reserved else answer

    def _least_delays(self, spec: JobSpec, view: GridView) -> dict[ClusterName, float]:
        """Return after how many seconds files may be on each cluster, whatever component is there."""
        times = transfer_times(spec, view, self._assumed_bandwidth)
        return {name: min(seconds, default=0.0) for name, seconds in times.items()}

    def transfer_of(self, spec: JobSpec, placed: PlacedComponent, view: GridView) -> Transfer:
        """Return the transfer of a component's inputs, estimated if its policy has chosen no sources for them."""
        return transfer_of(spec, placed, view, self._assumed_bandwidth)

    def explain(self, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Return for each cluster why the job is not placed on a view; empty if it would be.

        A reason that applies to the whole grid names no cluster.
        """
        if spec.reservation:
            view = self._state.reservations.view(spec.reservation) or GridView(())
        if nowhere := _missing_input_reason(spec, view):
            return tuple(ClusterReason(cluster.name, nowhere) for cluster in view)
        view, _ = exclude_reserved(view, spec.walltime, self._state.now)
        try:
            policy = self._policy(spec, view)
            return PolicyQuestion(policy, spec, self._eligibility).explain(self._look_ahead(policy, spec, view))
        except (UsageError, BrokenPolicy) as error:
            return (ClusterReason("", error.message),)

    def refusal_on_empty_grid(
        self, spec: JobSpec, barred: Barred = NOTHING_BARRED, *, assume_links: bool = True
    ) -> str:
        """Return why a job would not be placed on the empty grid, without the sizes that clusters rejected.

        Return an empty text if it would be placed, or while that is unknown. ``assume_links``: assume good values for
        links that were not measured yet.
        """
        if refusing := _refusing_clusters(spec, barred):
            return f"{format_list(refusing)} has refused it"
        empty = self._state.reservations.view(spec.reservation, whole=True) if spec.reservation else self.empty_grid()
        if empty is None:
            return ""
        clusters, view = self._grid.clusters(), exclude_barred(empty, barred)
        if spec.internal or not all(cluster.last_report.total for cluster in clusters):
            return ""
        if spec.node_requirements and not all(cluster.nodes.reported for cluster in clusters):
            return ""
        if _missing_input_reason(spec, view) or (view.cut_off and spec.all_inputs):
            return ""
        try:
            answer = self._place(spec, view)
            if assume_links and isinstance(answer, Refusal):
                answer = self._place(spec, replace(view, links=_assumed_links(view, self._assumed_bandwidth)))
        except (UsageError, BrokenPolicy):
            return ""
        return answer.summary if isinstance(answer, Refusal) and answer.kind is not RefusalKind.ADVICE else ""

    def divide(self, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return on which clusters of a view a reservation for jobs of this kind may be. Raise ``UsageError``."""
        return self._place(spec, view)

    def _place(self, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the answer of the job's policy on a view, ignoring probation."""
        policy = self._policy(spec, view)
        return PolicyQuestion(policy, spec, self._eligibility).place(self._look_ahead(policy, spec, view))

    def empty_grid(self) -> GridView:
        """Return the grid with all clusters usable, nodes idle and links free; the same object until it changes."""
        view = self._grid.view()
        if view is not self._seen:
            emptied = tuple(map(ClusterView.emptied, view))
            uplinks = {name: Uplink(uplink.capacity) for name, uplink in view.uplinks.items()}
            empty = GridView(emptied, view.links, (), view.replicas, view.cut_off, uplinks)
            empty = self._grid.with_all_relays(empty)
            self._seen, self._empty = view, self._empty if empty == self._empty else empty
        return self._empty

    def _policy(self, spec: JobSpec, view: GridView) -> Policy:
        """Return the job's policy, with run-time statistics if it learns."""
        policy = self._registry.resolve(spec.policy, spec.request, spec.policy_options)
        if not self._registry.capabilities(policy.name).learns:
            return policy
        return inform_policy(policy, self._knowledge.build(spec, view))

    def _look_ahead(self, policy: Policy, spec: JobSpec, view: GridView) -> GridView:
        """Return the view with the requests of other waiting jobs, for policies that look ahead."""
        if not self._registry.capabilities(policy.name).looks_ahead:
            return view

        def ahead(view: GridView) -> GridView:
            waiting = list(islice(self._queues.waiting_requests(), LOOK_AHEAD + 1))
            if spec.request in waiting:  # its own request, or an equal one
                waiting.remove(spec.request)
            return view.with_waiting(tuple(waiting[:LOOK_AHEAD]))

        return view.compute_once(("waiting beside", spec.request), ahead)

    def _limit_trials(self, spec: JobSpec, view: GridView, answer: Placement) -> Placement | Refusal:
        """Call the policy again if its answer gives a cluster on probation several components.

        If only that prevents the placement, even on an idle grid, all components of the job may be one trial.
        """
        if len(answer.components) == 1:
            return answer
        single_trial = answer
        for narrow in (True, False):
            count = Counter(component.cluster for component in answer.components)
            crowded = {name for name, many in count.items() if many > 1 and self._grid[name].health.probation}
            if not crowded:
                return answer
            largest = {n: max(c.size for c in answer.components if c.cluster == n) * narrow for n in crowded}
            view = view.with_clusters([c.with_idle(largest[c.name]) for c in view if c.name in largest])
            another = self._place(spec, view)
            if isinstance(another, Refusal):
                return another if self._may_fit_later(spec, view, largest) else single_trial
            answer = another
        return answer

    def _may_fit_later(self, spec: JobSpec, offered: GridView, at_most: Mapping[ClusterName, int]) -> bool:
        """Return whether a job would fit with at most so many nodes on these clusters and all other offered
        nodes idle."""
        if self._grid.has_no_trusted_cluster:
            return False
        view = self._whole.view().select_clusters(frozenset(cluster.name for cluster in offered))
        view = view.with_clusters([c.with_idle(min(c.idle, at_most[c.name])) for c in view if c.name in at_most])
        return isinstance(self._place(spec, view), Placement)


def _assumed_links(view: GridView, bandwidth: float) -> Mapping[ClusterPair, Link]:
    """Return all links, with good values for unknown latency and bandwidth."""
    links = dict(view.links)
    for source, target in product([cluster.name for cluster in view], repeat=2):
        link = view.link_between(source, target)
        if not link.unreachable:
            latency = 0.0 if link.latency is None else link.latency
            links[source, target] = replace(
                link, latency=latency, bandwidth=bandwidth if link.bandwidth is None else link.bandwidth
            )
    return links


def _refusing_clusters(spec: JobSpec, barred: Barred) -> list[ClusterName]:
    """Return the clusters of a fixed request that have rejected the size of a component there; empty for others."""
    components = spec.request.components if barred and isinstance(spec.request, FixedRequest) else ()
    return sorted({c.cluster or "" for c in components if is_barred(barred, c.cluster or "", c.size)})


def _missing_input_reason(spec: JobSpec, view: GridView) -> str:
    """Return why an input is available from no cluster, under any policy; empty if all are available."""
    for file in spec.all_inputs:
        sites = view.sites_of(file)
        if not sites:
            return f"no cluster has a good replica of {file.name}"
        if all((c := view.get(name)) is not None and c.state is ClusterState.UNREACHABLE for name in sites):
            return f"{format_list(sites, separator=' and ')}, which has {file.name}, is out of reach"
    return ""
