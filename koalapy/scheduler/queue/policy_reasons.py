"""Cluster by cluster why a policy has no placement within a job's constraints."""

from dataclasses import replace

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.placement import ClusterReason
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, Request
from koalapy.model.wording import listed
from koalapy.policies.constraints import Constraints, capped, part_with
from koalapy.policies.policy import Policy
from koalapy.policies.reasons import reason_for
from koalapy.scheduler.queue.policy_answers import BrokenPolicy

Reasons = dict[ClusterName, ClusterReason]


def explained(policy: Policy, request: Request, view: GridView, constraints: Constraints) -> Reasons:
    """Of each cluster of the view; ``BrokenPolicy`` when the policy gives invalid reasons."""
    if not constraints:
        return _complete(_reasons(policy, request, view), policy, view)
    asked = request
    if constraints.at_most is not None and isinstance(request, FlexibleRequest) and not request.split_options:
        asked = capped(request, constraints.at_most)
    known: dict[frozenset[ClusterName], Reasons] = {}
    reasons: Reasons = {}
    for cluster in view:
        part = part_with(cluster, request, view, constraints)
        names = frozenset(c.name for c in part)
        if names not in known:
            known[names] = _reasons(policy, asked, part)
        found = known[names].get(cluster.name)
        if found is not None:
            beside = _beside(cluster, part, view, constraints)
            reasons[cluster.name] = replace(found, reason=f"{found.reason}{beside}")
    return _complete(reasons, policy, view)


def explained_where_named(policy: Policy, request: FixedRequest, view: GridView) -> Reasons:
    """Of the clusters that stand in the way of a fixed request; empty when none does."""
    return _reasons(policy, request, view)


def _reasons(policy: Policy, request: Request, view: GridView) -> Reasons:
    try:
        answer: object = policy.explain(request, view)
    except Exception as error:
        raise BrokenPolicy(policy.name, f"it raised {error!r:.200}") from error
    if not isinstance(answer, tuple) or not all(isinstance(reason, ClusterReason) for reason in answer):
        raise BrokenPolicy(policy.name, f"it explained with {repr(answer)[:80]}, which are no reasons")
    return {reason.cluster: reason for reason in answer}


def _complete(reasons: Reasons, policy: Policy, view: GridView) -> Reasons:
    """With a word on each cluster that the policy was silent about."""
    silent = f"policy {policy.name} does not say why not"
    return {c.name: reasons.get(c.name) or reason_for(c, silent, None) for c in view}


def _beside(cluster: ClusterView, part: GridView, view: GridView, constraints: Constraints) -> str:
    """What the constraints leave to be combined with a cluster."""
    if constraints.at_most == 1:
        return "; coallocation allows one cluster only"
    told = []
    if constraints.at_most is not None:
        told.append(f"coallocation allows {constraints.at_most} clusters")
    unlike = sorted(c.name for c in view.by_idle if not constraints.similar([c, cluster]))
    if unlike:
        told.append(f"speed_ratio_min of {constraints.speed_ratio:g} rules out {listed(unlike)} beside it")
    return "".join(f"; {text}" for text in told)
