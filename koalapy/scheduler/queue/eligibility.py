"""On which clusters a job may run, and what its policy answers there.

A job may run where its owner may, where jobs of its home site go, where there are the folders that it needs, and on
clusters together that share jobs: each allows the others, and under Open MPI they have one series of it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from koalapy.model.cluster import GridView
from koalapy.model.coallocation import partners, sets_that_share, why_not_together
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.placement import ClusterReason, Placement, Refusal, RefusalKind
from koalapy.model.profile import ClusterProfile, folders_needed, folders_of, lacks
from koalapy.model.request import ClusterName, Environment, FixedRequest, Request
from koalapy.model.sharing import Sharing
from koalapy.model.transfer import immovable
from koalapy.model.users import NOWHERE, Accounts, not_for_its_owner
from koalapy.model.wording import listed
from koalapy.policies.constraints import Constraints
from koalapy.policies.policy import Policy
from koalapy.policies.reasons import not_usable
from koalapy.scheduler.queue.policy_answers import BrokenPolicy, checked, constrained
from koalapy.scheduler.queue.policy_reasons import Reasons, explained, explained_where_named


class Demands(NamedTuple):
    """What of a job decides where it may run, beside its request and its policy."""

    one_series: bool = False
    folders: frozenset[str] = frozenset()
    at_most: int | None = None
    speed_ratio: float | None = None
    options: Environment = ()
    closed: frozenset[ClusterName] = NOWHERE
    """Clusters that its owner may not use: a job is refused like those of others who may use the same ones."""
    away: frozenset[ClusterName] = NOWHERE
    """Clusters where jobs of its home site do not go."""
    sets: tuple[frozenset[ClusterName], ...] = ()
    """The largest sets of clusters that may share it; empty: all may."""

    @property
    def barred(self) -> frozenset[ClusterName]:
        """Clusters where it may not run, whatever they have."""
        return self.closed | self.away if self.away else self.closed

    @property
    def constraints(self) -> Constraints:
        return Constraints(self.at_most, self.speed_ratio)


class Eligibility:
    """Knows the profiles of the grid's clusters and who may use them, which do not change while a daemon lives."""

    def __init__(
        self, profiles: Mapping[ClusterName, ClusterProfile], accounts: Accounts, sharing: Sharing | None = None
    ) -> None:
        self._profiles, self._accounts, self._sharing = profiles, accounts, sharing or Sharing()
        self._sets = {one_series: sets_that_share(profiles, one_series=one_series) for one_series in (False, True)}
        self._mixed = len({profile.mpi.series for profile in profiles.values()}) > 1
        self._grouped: tuple[GridView, object, list[GridView]] | None = None
        """The last view and sets that were asked for, the same for a whole scan of like jobs, and the groups."""
        self._demanded: tuple[JobSpec, Demands | tuple[()]] | None = None
        """The last job that was asked for, and its demands."""

    def demands(self, spec: JobSpec) -> Demands | tuple[()]:
        """What of a job decides where it may run, beside its request and policy; empty for almost every job."""
        if self._demanded is None or self._demanded[0] is not spec:
            self._demanded = spec, self._demands(spec)
        return self._demanded[1]

    def _demands(self, spec: JobSpec) -> Demands | tuple[()]:
        folders = folders_needed(spec)
        one_series = self._mixed and spec.launcher is Launcher.OPENMPI
        at_most, ratio, options = spec.coallocation, spec.speed_ratio_min, spec.policy_options
        closed, away = self._accounts.closed_to(spec.owner), self._sharing.closed_to(spec.home_site)
        sets = self._sets[one_series]
        if sets or folders or at_most is not None or ratio is not None or options or closed or away:
            return Demands(one_series, folders, at_most, ratio, options, closed, away, sets)
        return ()

    def evaluate(self, policy: Policy, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """The policy's answer; ``BrokenPolicy`` when it is none."""
        request = spec.request
        if isinstance(request, FixedRequest):
            if cut_off := _unmoved_where_named(spec, request, view):
                return Refusal(cut_off, RefusalKind.FILES)
        elif unmoved := _unmoved(spec, view):
            view = view.only(frozenset(c.name for c in view if c.name not in unmoved))
            answer = self._evaluate(policy, spec, view)
            said = "; ".join(dict.fromkeys(unmoved.values()))
            return Refusal(f"{answer.summary}; {said}", RefusalKind.FILES) if isinstance(answer, Refusal) else answer
        return self._evaluate(policy, spec, view)

    def _evaluate(self, policy: Policy, spec: JobSpec, view: GridView) -> Placement | Refusal:
        request, demands = spec.request, self.demands(spec)
        if not demands:
            return checked(policy, request, view)
        constraints = demands.constraints
        if isinstance(request, FixedRequest):
            refusal = self._why_not_there(spec, request, demands)
            return refusal or constrained(policy, request, view, constraints)
        view, barred = _open(demands.barred, view)
        view, lacking = self._able(demands.folders, view)
        if demands.sets:
            answer = self._evaluate_by_sets(policy, request, view, demands)
        else:
            answer = constrained(policy, request, view, constraints)
        if isinstance(answer, Refusal) and (lacking or barred):
            why = [lacks(lacking, demands.folders)] if lacking else []
            said = [answer.summary, *why, *self._said_of(demands, barred)]
            return Refusal("; ".join(said), RefusalKind.ELIGIBILITY)
        return answer

    def explain(self, policy: Policy, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Why each cluster cannot serve the job now, in order of name; empty when the job can be placed.

        All that ``evaluate`` heeds is told of, also folders, which clusters share jobs, and constraints. Of a fixed
        request only the clusters are told of that stand in its way. ``missing`` is what would suffice within the
        constraints.
        Of a broken policy each reason says that it is; nothing is raised.
        """
        try:
            if isinstance(self.evaluate(policy, spec, view), Placement):
                return ()
            if isinstance(spec.request, FixedRequest):
                reasons = self._reasons_where_named(policy, spec, spec.request, view)
            else:
                reasons = self._reasons(policy, spec, view)
        except BrokenPolicy as error:
            reasons = {cluster.name: ClusterReason(cluster.name, error.message) for cluster in view}
        return tuple(reasons[name] for name in sorted(reasons))

    def _reasons(self, policy: Policy, spec: JobSpec, view: GridView) -> Reasons:
        demands = self.demands(spec) or Demands()
        able, barred = _open(demands.barred, view)
        able, lacking = self._able(demands.folders, able)
        reasons = {c.name: ClusterReason(c.name, not_usable(c)) for c in view if not_usable(c)}
        reasons |= self._barred(spec, barred)
        if unmoved := _unmoved(spec, view):
            able = able.only(frozenset(c.name for c in able if c.name not in unmoved))
        for name, why in unmoved.items():
            reasons.setdefault(name, ClusterReason(name, why))
        for name in lacking:
            reasons.setdefault(name, ClusterReason(name, lacks([name], demands.folders)))
        groups = self._groups(able, demands.sets) if demands.sets else [able]
        for group in groups:
            found = explained(policy, spec.request, group, demands.constraints)
            for name in found.keys() - reasons.keys():
                reasons[name] = found[name]
                if len(groups) > 1:
                    reasons[name] = replace(found[name], reason=f"{found[name].reason}; {self._beside(name, demands)}")
        return reasons

    def _reasons_where_named(self, policy: Policy, spec: JobSpec, request: FixedRequest, view: GridView) -> Reasons:
        demands = self.demands(spec) or Demands()
        named = {component.cluster or "" for component in request.components}
        if barred := demands.barred & named:
            return self._barred(spec, barred)
        refusal: Placement | Refusal | None
        refusal = self._why_not_there(spec, request, demands)
        if refusal is None and (cut_off := _unmoved_where_named(spec, request, view)):
            refusal = Refusal(cut_off)
        if refusal is None:
            reasons = explained_where_named(policy, request, view)
            if reasons:
                return reasons
            refusal = constrained(policy, request, view, demands.constraints)
        return {name: ClusterReason(name, str(refusal)) for name in named}

    def _barred(self, spec: JobSpec, names: Iterable[ClusterName]) -> Reasons:
        reasons = {name: self._accounts.why_not(spec.owner, name) for name in names}
        return {
            name: ClusterReason(name, why or self._sharing.why_not(spec.home_site, name))
            for name, why in reasons.items()
        }

    def _said_of(self, demands: Demands, barred: Collection[ClusterName]) -> Iterator[str]:
        """Why a job may not run on these clusters."""
        if closed := demands.closed.intersection(barred):
            yield not_for_its_owner(closed)
        if away := demands.away.intersection(barred) - demands.closed:
            yield self._sharing.not_for_its_home(away)

    def allows(self, spec: JobSpec, names: frozenset[ClusterName], view: GridView) -> bool:
        """Whether the job may run on these clusters together, whatever is idle there."""
        demands = self.demands(spec)
        if not demands:
            return True
        if not demands.barred.isdisjoint(names):
            return False
        known = names & self._profiles.keys()
        if not all(demands.folders <= self._profiles[name].folders for name in known):
            return False
        if demands.sets and not any(known <= together for together in demands.sets):
            return False
        if demands.at_most is not None and len(names) > demands.at_most:
            return False
        return demands.constraints.similar([cluster for cluster in view if cluster.name in names])

    def _able(self, folders: frozenset[str], view: GridView) -> tuple[GridView, list[ClusterName]]:
        """The clusters that have all of these folders, and the names of the others."""
        if not folders:
            return view, []
        lacking = [cluster.name for cluster in view if not folders <= self._profiles[cluster.name].folders]
        if not lacking:
            return view, []
        return view.only(frozenset(cluster.name for cluster in view) - set(lacking)), lacking

    def _evaluate_by_sets(
        self, policy: Policy, request: Request, view: GridView, demands: Demands
    ) -> Placement | Refusal:
        """Ask the policy with one set of clusters that share jobs after the other, most idle nodes first."""
        constraints = demands.constraints
        groups = self._groups(view, demands.sets)
        if len(groups) < 2:
            return constrained(policy, request, view, constraints)
        best: Refusal | None = None
        for group in groups:
            answer = constrained(policy, request, group, constraints)
            if isinstance(answer, Placement):
                return answer
            best = best or answer
        assert best is not None
        if isinstance(constrained(policy, request, view, constraints), Placement):
            apart = self._apart((cluster.name for cluster in view.by_idle), demands)
            return Refusal(f"{best.summary}; {apart}", RefusalKind.ELIGIBILITY)
        return best

    def _groups(self, view: GridView, sets: tuple[frozenset[ClusterName], ...]) -> list[GridView]:
        """Return the usable clusters by the sets that share jobs."""
        if self._grouped is None or self._grouped[0] is not view or self._grouped[1] is not sets:
            usable = {cluster.name for cluster in view.by_idle}
            inside = {together & usable: together for together in sets}
            largest = [names for names in inside if names and not any(names < other for other in inside)]
            groups = [view.only(inside[names]) for names in largest]
            groups.sort(key=lambda group: (-group.usable_idle, sorted(cluster.name for cluster in group)))
            self._grouped = (view, sets, groups)
        return self._grouped[2]

    def _why_not_there(self, spec: JobSpec, request: FixedRequest, demands: Demands) -> Refusal | None:
        """Why a fixed request's own clusters cannot serve it, whatever is idle."""
        if barred := demands.barred & {component.cluster for component in request.components}:
            return Refusal("; ".join(self._said_of(demands, barred)), RefusalKind.ELIGIBILITY)
        for index, component in enumerate(request.components):
            name = component.cluster or ""
            if name in self._profiles and (missing := folders_of(spec, index) - self._profiles[name].folders):
                return Refusal(lacks([name], missing), RefusalKind.ELIGIBILITY)
        named = {component.cluster or "" for component in request.components} & self._profiles.keys()
        if demands.sets and not any(named <= together for together in demands.sets):
            return Refusal(self._apart(named, demands), RefusalKind.ELIGIBILITY)
        return None

    def _apart(self, names: Iterable[ClusterName], demands: Demands) -> str:
        """``north has Open MPI 5, south 4: a job runs under one series``."""
        return why_not_together(names, self._profiles, one_series=demands.one_series)

    def _beside(self, name: ClusterName, demands: Demands) -> str:
        """Say which clusters may share a job with one that cannot serve it alone."""
        if not self._sets[False]:
            return f"only clusters with Open MPI {self._profiles[name].mpi.series} count beside it"
        others = sorted(partners(name, self._profiles, one_series=demands.one_series))
        return f"only {listed(others)} may share a job with it" if others else "no cluster may share a job with it"


def _open(barred: frozenset[ClusterName], view: GridView) -> tuple[GridView, list[ClusterName]]:
    """The clusters where a job may run as far as its owner and its home site go, and the names of the others."""
    if not barred or not (there := [cluster.name for cluster in view if cluster.name in barred]):
        return view, []
    return view.only(frozenset(cluster.name for cluster in view) - barred), there


def _unmoved(spec: JobSpec, view: GridView) -> dict[ClusterName, str]:
    """The clusters to which some input of the job cannot be brought for want of a program, and why.

    Any component may be placed on any cluster, so that what one of them needs counts for all.
    """
    if not view.cut_off or not (files := spec.all_inputs):
        return {}
    found = {cluster.name: immovable(cluster.name, files, view) for cluster in view}
    return {name: why for name, why in found.items() if why}


def _unmoved_where_named(spec: JobSpec, request: FixedRequest, view: GridView) -> str:
    """Why some input cannot be brought to the cluster that was named for its component; empty when all can."""
    if not view.cut_off:
        return ""
    needs = ((c.cluster or "", spec.inputs_of(index)) for index, c in enumerate(request.components))
    return next(filter(None, (immovable(name, files, view) for name, files in needs)), "")
