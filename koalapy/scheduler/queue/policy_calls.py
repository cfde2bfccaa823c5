"""Call policies on a view and validate their answers, since a policy may be foreign code."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING

from koalapy.model.cluster import ClusterPair, ClusterState, ClusterView, GridView, Link, Uplink
from koalapy.model.errors import UsageError
from koalapy.model.job_sizes import NOTHING_BARRED, Barred, is_barred
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.profile import describe_missing_folders
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, Request
from koalapy.model.wording import format_list, format_nodes
from koalapy.policies.constraints import Constraints, cap_components, grid_parts, part_with
from koalapy.policies.knowledge import Knowledge
from koalapy.policies.network import immovable_reason
from koalapy.policies.policy import Policy, not_usable, reason_for
from koalapy.scheduler.advisor.knowledge import KnowledgeBuilder
from koalapy.scheduler.queue.component_sizes import exclude_barred, exclude_reserved, place_within_sizes
from koalapy.scheduler.queue.eligibility import (
    Demands,
    Eligibility,
    Reasons,
    linked_sets,
    streams_refusal,
    without_barred,
)
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.state import SchedulerState

if TYPE_CHECKING:
    from koalapy.scheduler.queue.node_matching import NodeMatching


class BrokenPolicy(Exception):
    """A policy returned an invalid answer; ``message`` names the policy and the problem."""

    def __init__(self, policy: str, problem: str) -> None:
        self.policy = policy
        self.message = f"policy {policy} is broken: {problem}"
        super().__init__(self.message)


def inform_policy(policy: Policy, knowledge: Knowledge) -> Policy:
    """Return a learning policy with the run-time statistics of a job."""
    try:
        answer: object = policy.informed(knowledge)  # type: ignore[attr-defined]
    except Exception as error:
        raise BrokenPolicy(policy.name, f"it raised {error!r:.200}") from error
    if type(answer) is not type(policy) and not isinstance(answer, Policy):  # isinstance with a protocol is slow
        raise BrokenPolicy(policy.name, f"informed, it was {repr(answer)[:80]}, which is not a policy")
    return answer


def place_within_constraints(
    policy: Policy, request: Request, view: GridView, constraints: Constraints
) -> Placement | Refusal:
    """Return the policy's answer within the constraints; a refusal names the constraint that prevents a placement."""
    answer = call_policy(policy, request, view)
    if not constraints or isinstance(answer, Refusal):
        return answer
    violations = constraints.describe_violations(answer, view)
    if not violations:
        return answer
    refused = ""
    for part_request, part in grid_parts(request, answer, view, constraints):
        part_answer = call_policy(policy, part_request, part)
        if isinstance(part_answer, Refusal):
            refused = refused or f"{part_answer.summary}; "
        elif not constraints.describe_violations(part_answer, view):
            return part_answer
    return Refusal(f"{refused}{violations}", RefusalKind.ELIGIBILITY)


def call_policy(policy: Policy, request: Request, view: GridView) -> Placement | Refusal:
    """Return the policy's answer after checking it against the request and the view. Raise ``BrokenPolicy``."""
    if view.limits_sizes:
        return place_within_sizes(partial(_call_policy, policy), request, view)
    return _call_policy(policy, request, view)


def _call_policy(policy: Policy, request: Request, view: GridView) -> Placement | Refusal:
    try:
        answer: object = policy.place(request, view)
    except Exception as error:
        raise BrokenPolicy(policy.name, f"it raised {error!r:.200}") from error
    if isinstance(answer, Refusal):
        return answer
    if not isinstance(answer, Placement):
        raise BrokenPolicy(policy.name, f"it answered {repr(answer)[:80]}, neither a placement nor a refusal")
    problem = _shape_problem(answer) or _grid_problem(answer, view) or _request_problem(answer, request)
    if problem:
        raise BrokenPolicy(policy.name, problem)
    return answer


def _shape_problem(placement: Placement) -> str:
    """Return why an answer is not a placement at all; empty if it is one."""
    components: object = placement.components
    if not isinstance(components, tuple) or not components:
        return "it placed no components"
    for component in components:
        if not isinstance(component, PlacedComponent) or not isinstance(component.cluster, str):
            return f"it placed {repr(component)[:80]}"
        if type(component.size) is not int or component.size < 1:
            return f"it placed a component of the size {component.size!r}"
    return ""


def _grid_problem(placement: Placement, view: GridView) -> str:
    """Return why a placement does not fit on the offered clusters; empty if it does."""
    placed: dict[ClusterName, int] = {}
    for component in placement.components:
        placed[component.cluster] = placed.get(component.cluster, 0) + component.size
    for name, size in placed.items():
        cluster = view.get(name)
        if cluster is None:
            return f"it placed {format_nodes(size)} on {name}, which it was not offered"
        if cluster.state is not ClusterState.USABLE:
            return f"it placed {format_nodes(size)} on {name}, which is {cluster.state}"
        if size > cluster.idle:
            return f"it placed {format_nodes(size)} on {name}, where {cluster.idle} are idle"
    return _class_problem(placement, view)


def _class_problem(placement: Placement, view: GridView) -> str:
    """Return why an answer exceeds the idle nodes of a class; empty if it does not."""
    placed: dict[tuple[ClusterName, str], int] = {}
    for component in placement.components:
        if component.node_class:
            key = component.cluster, component.node_class
            placed[key] = placed.get(key, 0) + component.size
    for (name, node_class), size in placed.items():
        cluster = view.get(name)
        idle = {idle_class.name: idle_class.idle for idle_class in cluster.node_classes} if cluster else {}
        if size > idle.get(node_class, 0):
            problem = f"where {idle[node_class]} are idle" if node_class in idle else "which it has none of"
            return f"it placed {format_nodes(size)} on {name}'s class {node_class}, {problem}"
    return ""


def _request_problem(placement: Placement, request: Request) -> str:
    """Return why a placement does not match the request; empty if it does."""
    placed = placement.components
    if isinstance(request, FlexibleRequest):
        return _flexible_problem(request, _flexible_sizes(placed))
    count = len(request.components)
    if len(placed) != count or {component.request_index for component in placed} != set(range(count)):
        return f"it placed {len(placed)} components that are not the request's {count}, each once"
    for component in placed:
        index = component.request_index or 0
        requested = request.components[index]
        if component.size != requested.size:
            return f"it placed component {index} with {format_nodes(component.size)} in place of {requested.size}"
        if requested.cluster is not None and requested.cluster != component.cluster:
            return f"it placed component {index} on {component.cluster} in place of {requested.cluster}"
    return ""


def _flexible_sizes(placed: Sequence[PlacedComponent]) -> list[int]:
    """Return the sizes that the request's bounds apply to: the classes of one cluster count as one component."""
    by_class: dict[ClusterName, int] = {component.cluster: 0 for component in placed if component.node_class}
    sizes = []
    for component in placed:
        if component.cluster in by_class:
            by_class[component.cluster] += component.size
        else:
            sizes.append(component.size)
    return sizes + list(by_class.values())


def _flexible_problem(request: FlexibleRequest, sizes: Sequence[int]) -> str:
    """Return why component sizes violate a flexible request; empty if they do not."""
    if sum(sizes) != request.total_size:
        return f"it placed {format_nodes(sum(sizes))} in place of {request.total_size}"
    if min(sizes) < request.min_component_size:
        return f"it placed a component of {min(sizes)}, below the min_component_size of {request.min_component_size}"
    if request.max_components is not None and len(sizes) > request.max_components:
        return f"it placed {len(sizes)} components, above the max_components of {request.max_components}"
    if request.split_options and sorted(sizes) not in [sorted(option) for option in request.split_options]:
        return f"it split into {sorted(sizes, reverse=True)}, which is none of the split_options"
    return ""


def explain_clusters(policy: Policy, request: Request, view: GridView, constraints: Constraints) -> Reasons:
    """Return why each cluster of the view cannot serve the request. Raise ``BrokenPolicy`` for invalid reasons."""
    if not constraints:
        return _complete_reasons(_call_explain(policy, request, view), policy, view)
    capped_request = request
    if constraints.at_most is not None and isinstance(request, FlexibleRequest) and not request.split_options:
        capped_request = cap_components(request, constraints.at_most)
    cached: dict[frozenset[ClusterName], Reasons] = {}
    reasons: Reasons = {}
    for cluster in view:
        part = part_with(cluster, request, view, constraints)
        names = frozenset(c.name for c in part)
        if names not in cached:
            cached[names] = _call_explain(policy, capped_request, part)
        reason = cached[names].get(cluster.name)
        if reason is not None:
            beside = _combination_limits(cluster, part, view, constraints)
            reasons[cluster.name] = replace(reason, reason=f"{reason.reason}{beside}")
    return _complete_reasons(reasons, policy, view)


def explained_where_named(policy: Policy, request: FixedRequest, view: GridView) -> Reasons:
    """Return the reasons of the clusters that prevent the placement of a fixed request; empty if none does."""
    return _call_explain(policy, request, view)


def _call_explain(policy: Policy, request: Request, view: GridView) -> Reasons:
    """Return the policy's reasons by cluster. Raise ``BrokenPolicy`` if it fails or returns anything else."""
    try:
        answer: object = policy.explain(request, view)
    except Exception as error:
        raise BrokenPolicy(policy.name, f"it raised {error!r:.200}") from error
    if not isinstance(answer, tuple) or not all(isinstance(reason, ClusterReason) for reason in answer):
        raise BrokenPolicy(policy.name, f"it explained with {repr(answer)[:80]}, which are no reasons")
    return {reason.cluster: reason for reason in answer}


def _complete_reasons(reasons: Reasons, policy: Policy, view: GridView) -> Reasons:
    """Add a reason for each cluster that the policy gave none for."""
    silent = f"policy {policy.name} does not say why not"
    return {c.name: reasons.get(c.name) or reason_for(c, silent, None) for c in view}


def _combination_limits(cluster: ClusterView, part: GridView, view: GridView, constraints: Constraints) -> str:
    """Return how the constraints limit combinations with a cluster, as text."""
    if constraints.at_most == 1:
        return "; coallocation allows one cluster only"
    texts = []
    if constraints.at_most is not None:
        texts.append(f"coallocation allows {constraints.at_most} clusters")
    unlike = sorted(c.name for c in view.by_idle if not constraints.are_speeds_similar([c, cluster]))
    if unlike:
        texts.append(f"speed_ratio_min of {constraints.speed_ratio:g} rules out {format_list(unlike)} beside it")
    return "".join(f"; {text}" for text in texts)


class PolicyCalls:
    """The calls of policies on the clusters where a job may run, within its constraints."""

    def __init__(self, eligibility: Eligibility) -> None:
        self._eligibility = eligibility

    def evaluate(self, policy: Policy, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the policy's answer. Raise ``BrokenPolicy`` if it is invalid."""
        request = spec.request
        if isinstance(request, FixedRequest):
            if cut_off := _fixed_transfer_problem(spec, request, view):
                return Refusal(cut_off, RefusalKind.FILES)
        elif unmoved := _transfer_problems(spec, view):
            view = view.select_clusters(frozenset(c.name for c in view if c.name not in unmoved))
            answer = self._evaluate_within_demands(policy, spec, view)
            reasons = "; ".join(dict.fromkeys(unmoved.values()))
            return Refusal(f"{answer.summary}; {reasons}", RefusalKind.FILES) if isinstance(answer, Refusal) else answer
        return self._evaluate_within_demands(policy, spec, view)

    def _evaluate_within_demands(self, policy: Policy, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the policy's answer for the clusters where the job may run. Raise ``BrokenPolicy`` if it is invalid.

        A refusal also says which clusters were left out. A fixed request that names one of those is refused.
        """
        demands = self._eligibility.demands_on(spec, view)
        if not demands:
            if not view.relays.streams:
                return call_policy(policy, spec.request, view)
            demands = Demands()
        answer = self._answer_demands(policy, spec, view, demands)
        if not view.relays.streams or isinstance(answer, Refusal):
            return answer
        refusal = streams_refusal(spec, answer, view)
        if refusal is None:
            return answer
        sets = linked_sets(demands.sets, spec.links, view, without_relays=True)
        answer = self._answer_demands(policy, spec, view, demands._replace(sets=sets))
        return refusal if isinstance(answer, Refusal) or streams_refusal(spec, answer, view) else answer

    def _answer_demands(self, policy: Policy, spec: JobSpec, view: GridView, demands: Demands) -> Placement | Refusal:
        """Return the policy's answer for clusters that meet a job's demands. Raise ``BrokenPolicy`` if it is
        invalid."""
        request, constraints = spec.request, demands.constraints
        if isinstance(request, FixedRequest):
            refusal = self._eligibility.fixed_request_refusal(spec, request, demands, view)
            return refusal or place_within_constraints(policy, request, view, constraints)
        view, barred = without_barred(demands.barred, view)
        view, lacking = self._eligibility.with_folders(demands.folders, view)
        if demands.sets:
            answer = self._evaluate_by_sets(policy, request, view, demands)
        else:
            answer = place_within_constraints(policy, request, view, constraints)
        if isinstance(answer, Refusal) and (lacking or barred):
            folder_texts = [describe_missing_folders(lacking, demands.folders)] if lacking else []
            texts = [answer.summary, *folder_texts, *self._eligibility.barred_texts(demands, barred)]
            return Refusal("; ".join(texts), RefusalKind.ELIGIBILITY)
        return answer

    def explain(self, policy: Policy, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Return why each cluster cannot serve the job now, by name; empty if the job can be placed.

        For a fixed request only the clusters that prevent its placement are returned. ``missing`` is the number of
        nodes that would suffice within the constraints. A broken policy is the reason for every cluster.
        """
        try:
            if isinstance(self.evaluate(policy, spec, view), Placement):
                return ()
            if isinstance(spec.request, FixedRequest):
                reasons = self._fixed_request_reasons(policy, spec, spec.request, view)
            else:
                reasons = self._find_reasons(policy, spec, view)
        except BrokenPolicy as error:
            reasons = {cluster.name: ClusterReason(cluster.name, error.message) for cluster in view}
        return tuple(reasons[name] for name in sorted(reasons))

    def _find_reasons(self, policy: Policy, spec: JobSpec, view: GridView) -> Reasons:
        """Return the reason of each cluster against a job without a fixed request, by cluster name.

        The policy gives the reasons only of clusters that are usable and where the job may run.
        """
        demands = self._eligibility.demands_on(spec, view) or Demands()
        able, barred = without_barred(demands.barred, view)
        able, lacking = self._eligibility.with_folders(demands.folders, able)
        reasons = {c.name: ClusterReason(c.name, not_usable(c)) for c in view if not_usable(c)}
        reasons |= self._eligibility.barred_reasons(spec, barred)
        if unmoved := _transfer_problems(spec, view):
            able = able.select_clusters(frozenset(c.name for c in able if c.name not in unmoved))
        for name, reason in unmoved.items():
            reasons.setdefault(name, ClusterReason(name, reason))
        for name in lacking:
            reasons.setdefault(name, ClusterReason(name, describe_missing_folders([name], demands.folders)))
        groups = self._eligibility.sharing_groups(able, demands.sets) if demands.sets else [able]
        for group in groups:
            group_reasons = explain_clusters(policy, spec.request, group, demands.constraints)
            for name in group_reasons.keys() - reasons.keys():
                reasons[name] = group_reasons[name]
                if len(groups) > 1:
                    reasons[name] = replace(
                        group_reasons[name],
                        reason=f"{group_reasons[name].reason}; {self._eligibility.partners_text(name, demands, view)}",
                    )
        return reasons

    def _fixed_request_reasons(self, policy: Policy, spec: JobSpec, request: FixedRequest, view: GridView) -> Reasons:
        """Return the reasons against a fixed request, by the names of the clusters that prevent its placement."""
        demands = self._eligibility.demands_on(spec, view) or Demands()
        clusters = {component.cluster or "" for component in request.components}
        if barred := demands.barred & clusters:
            return self._eligibility.barred_reasons(spec, barred)
        refusal: Placement | Refusal | None
        refusal = self._eligibility.fixed_request_refusal(spec, request, demands, view)
        if refusal is None and (cut_off := _fixed_transfer_problem(spec, request, view)):
            refusal = Refusal(cut_off)
        if refusal is None:
            reasons = explained_where_named(policy, request, view)
            if reasons:
                return reasons
            refusal = self._evaluate_within_demands(policy, spec, view)
        return {name: ClusterReason(name, str(refusal)) for name in clusters}

    def _evaluate_by_sets(
        self, policy: Policy, request: Request, view: GridView, demands: Demands
    ) -> Placement | Refusal:
        """Call the policy with each set of clusters that may run one job together, most idle nodes first."""
        constraints = demands.constraints
        groups = self._eligibility.sharing_groups(view, demands.sets)
        if len(groups) < 2:
            return place_within_constraints(policy, request, view, constraints)
        best: Refusal | None = None
        for group in groups:
            answer = place_within_constraints(policy, request, group, constraints)
            if isinstance(answer, Placement):
                return answer
            best = best or answer
        assert best is not None
        if isinstance(place_within_constraints(policy, request, view, constraints), Placement):
            apart = self._eligibility.conflict_text((cluster.name for cluster in view.by_idle), demands, view)
            return Refusal(f"{best.summary}; {apart}", RefusalKind.ELIGIBILITY)
        return best


def _transfer_problems(spec: JobSpec, view: GridView) -> dict[ClusterName, str]:
    """Return the clusters to which an input cannot be transferred for lack of a program, and why."""
    if not view.cut_off or not (files := spec.all_inputs):
        return {}
    problems = {cluster.name: immovable_reason(cluster.name, files, view) for cluster in view}
    return {name: reason for name, reason in problems.items() if reason}


def _fixed_transfer_problem(spec: JobSpec, request: FixedRequest, view: GridView) -> str:
    """Return why an input cannot be transferred to its component's named cluster; empty if all can."""
    if not view.cut_off:
        return ""
    needs = ((c.cluster or "", spec.inputs_of(index)) for index, c in enumerate(request.components))
    return next(filter(None, (immovable_reason(name, files, view) for name, files in needs)), "")


LOOK_AHEAD = 50
"""Number of waiting requests that are passed to a policy that looks ahead."""


class PolicyEvaluator:
    """The evaluation of jobs with their policies, including the limits of clusters on probation."""

    def __init__(
        self, state: SchedulerState, calls: "NodeMatching", queues: PlacementQueues, knowledge: KnowledgeBuilder
    ) -> None:
        self._state, self._policies, self._grid, self._ledger = state, state.policies, state.grid, state.ledger
        self._calls, self._queues, self._knowledge = calls, queues, knowledge
        self._whole = self._grid.cached_view(lambda cluster: cluster.last_report.total - cluster.last_report.down)
        self._assumed_bandwidth = state.rules.assumed_bandwidth
        self._seen = self._empty = GridView(())
        """The grid of which ``_empty`` was last computed."""
        self._broken: set[str] = set()
        """Policies with invalid answers that have been logged."""

    def evaluate(self, spec: JobSpec, view: GridView, barred: Barred = NOTHING_BARRED) -> Placement | Refusal:
        """Return the answer of the job's policy on a view, without the sizes that clusters rejected (``barred``)."""
        nowhere = _missing_input_reason(spec, view)
        if nowhere:
            return Refusal(nowhere, RefusalKind.FILES)
        if refusing := _refusing_clusters(spec, barred):
            return Refusal(f"{format_list(refusing)} has refused it", RefusalKind.ELIGIBILITY)
        view, reserved = exclude_reserved(exclude_barred(view, barred), spec.walltime, self._state.now)
        try:
            policy = self._policy(spec, view)
            answer = self._calls.evaluate(policy, spec, self._with_waiting_requests(policy, spec, view))
            if isinstance(answer, Refusal):
                return Refusal(f"{answer.summary}{reserved}", answer.kind) if reserved else answer
            return self._limit_trials(policy, spec, view, answer)
        except UsageError as error:  # the policy was known when the job was submitted, to an earlier daemon
            return Refusal(error.message, RefusalKind.POLICY)
        except BrokenPolicy as error:
            if error.policy not in self._broken:
                self._broken.add(error.policy)
                self._ledger.warn(error.message)
            return Refusal(error.message, RefusalKind.POLICY)

    def may_be_placed(self, spec: JobSpec, barred: Barred) -> bool:
        """Return whether a job fits on the empty grid without the ``barred`` sizes. Clusters of unknown size count as
        large enough."""
        if _refusing_clusters(spec, barred):
            return False
        if spec.node_requirements and not self._are_nodes_reported:
            return True
        view = exclude_barred(self.empty_grid(), barred)
        try:
            return isinstance(self._answer_with_links(spec, view), Placement)
        except (UsageError, BrokenPolicy):
            return False

    def refusal_on_empty_grid(self, spec: JobSpec, *, assume_links: bool = True) -> str:
        """Return why a job would not be placed on the empty grid; empty if it would be, or while that is unknown.

        ``assume_links``: assume good values for links that were not measured yet.
        """
        view = self.empty_grid()
        if spec.internal or not all(cluster.last_report.total for cluster in self._grid.clusters()):
            return ""
        if spec.node_requirements and not self._are_nodes_reported:
            return ""
        if _missing_input_reason(spec, view) or (view.cut_off and spec.all_inputs):
            return ""
        try:
            answer = self._answer_with_links(spec, view) if assume_links else self._answer(spec, view)
        except (UsageError, BrokenPolicy):
            return ""
        return answer.summary if isinstance(answer, Refusal) and answer.kind is not RefusalKind.ADVICE else ""

    @property
    def _are_nodes_reported(self) -> bool:
        """Return whether all clusters have reported the properties of their nodes in this daemon run."""
        return all(cluster.nodes.reported for cluster in self._grid.clusters())

    def _answer_with_links(self, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the policy's answer; if it is a refusal, the answer with all unmeasured links assumed good."""
        answer = self._answer(spec, view)
        if isinstance(answer, Placement):
            return answer
        return self._answer(spec, replace(view, links=_assumed_links(view, self._assumed_bandwidth)))

    def _answer(self, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the answer of the job's policy on a view, ignoring probation."""
        policy = self._policy(spec, view)
        return self._calls.evaluate(policy, spec, self._with_waiting_requests(policy, spec, view))

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

    def reasons(self, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Return for each cluster why the job is not placed on a view; empty if it would be."""
        nowhere = _missing_input_reason(spec, view)
        if nowhere:
            return tuple(ClusterReason(cluster.name, nowhere) for cluster in view)
        view, _ = exclude_reserved(view, spec.walltime, self._state.now)
        try:
            policy = self._policy(spec, view)
            return self._calls.explain(policy, spec, self._with_waiting_requests(policy, spec, view))
        except (UsageError, BrokenPolicy) as error:
            return (ClusterReason("", error.message),)

    def _policy(self, spec: JobSpec, view: GridView) -> Policy:
        """Return the job's policy, with run-time statistics if it learns."""
        policy = self._policies.resolve(spec.policy, spec.request, spec.policy_options)
        if not self._policies.capabilities(policy.name).learns:
            return policy
        return inform_policy(policy, self._knowledge.build(spec, view))

    def _with_waiting_requests(self, policy: Policy, spec: JobSpec, view: GridView) -> GridView:
        """Return the view with the requests of other waiting jobs, for policies that look ahead."""
        if not self._policies.capabilities(policy.name).looks_ahead:
            return view

        def ahead(view: GridView) -> GridView:
            waiting = list(islice(self._queues.waiting_requests(), LOOK_AHEAD + 1))
            if spec.request in waiting:  # its own request, or an equal one
                waiting.remove(spec.request)
            return view.with_waiting(tuple(waiting[:LOOK_AHEAD]))

        return view.compute_once(("waiting beside", spec.request), ahead)

    def _limit_trials(self, policy: Policy, spec: JobSpec, view: GridView, answer: Placement) -> Placement | Refusal:
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
            another = self._calls.evaluate(policy, spec, self._with_waiting_requests(policy, spec, view))
            if isinstance(another, Refusal):
                return another if self._may_fit_later(policy, spec, view, largest) else single_trial
            answer = another
        return answer

    def _may_fit_later(
        self, policy: Policy, spec: JobSpec, offered: GridView, at_most: Mapping[ClusterName, int]
    ) -> bool:
        """Return whether a job would fit with at most so many nodes on these clusters and all other offered
        nodes idle."""
        if self._grid.has_no_trusted_cluster:
            return False
        view = self._whole.view().select_clusters(frozenset(cluster.name for cluster in offered))
        view = view.with_clusters([c.with_idle(min(c.idle, at_most[c.name])) for c in view if c.name in at_most])
        return isinstance(
            self._calls.evaluate(policy, spec, self._with_waiting_requests(policy, spec, view)), Placement
        )


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
