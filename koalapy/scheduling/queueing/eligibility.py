"""On which clusters a job may run, and what its policy answers there.

A job may run where its owner may, where jobs of its home site go, where there are the folders that it needs, and, under
Open MPI, on clusters of one series together.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from koalapy.model.cluster import GridView
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.placement import ClusterReason, Placement, Refusal, RefusalKind
from koalapy.model.profile import ClusterProfile, folders_needed, folders_of, lacks, series_differ
from koalapy.model.request import ClusterName, Environment, FixedRequest, Request
from koalapy.model.sharing import Sharing
from koalapy.model.transfer import immovable
from koalapy.model.users import NOWHERE, Accounts, not_for_its_owner
from koalapy.placement.constraints import Constraints
from koalapy.placement.policy import Policy
from koalapy.placement.reasons import not_usable
from koalapy.scheduling.queueing.policy_answers import BrokenPolicy, checked, constrained
from koalapy.scheduling.queueing.policy_reasons import Reasons, explained, explained_where_named


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
        self._series: dict[int, frozenset[ClusterName]] = {}
        for series in sorted({profile.mpi.series for profile in profiles.values()}, reverse=True):
            self._series[series] = frozenset(n for n, p in profiles.items() if p.mpi.series == series)
        self._mixed = len(self._series) > 1
        self._grouped: tuple[GridView, list[GridView]] | None = None
        """The last view that was asked for, which is the same for a whole scan, and its groups."""
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
        if one_series or folders or at_most is not None or ratio is not None or options or closed or away:
            return Demands(one_series, folders, at_most, ratio, options, closed, away)
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
        if demands.one_series:
            answer = self._evaluate_by_series(policy, request, view, constraints)
        else:
            answer = constrained(policy, request, view, constraints)
        if isinstance(answer, Refusal) and (lacking or barred):
            why = [lacks(lacking, demands.folders)] if lacking else []
            said = [answer.summary, *why, *self._said_of(demands, barred)]
            return Refusal("; ".join(said), RefusalKind.ELIGIBILITY)
        return answer

    def explain(self, policy: Policy, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Why each cluster cannot serve the job now, in order of name; empty when the job can be placed.

        All that ``evaluate`` heeds is told of, also folders, the series of Open MPI, and constraints. Of a fixed
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
        groups = self._groups(able) if demands.one_series else [able]
        for group in groups:
            found = explained(policy, spec.request, group, demands.constraints)
            for name in found.keys() - reasons.keys():
                reasons[name] = found[name]
                if len(groups) > 1:
                    beside = f"only clusters with Open MPI {self._profiles[name].mpi.series} count beside it"
                    reasons[name] = replace(found[name], reason=f"{found[name].reason}; {beside}")
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
        profiles = [self._profiles[name] for name in names if name in self._profiles]
        if not all(demands.folders <= profile.folders for profile in profiles):
            return False
        if demands.one_series and len({profile.mpi.series for profile in profiles}) > 1:
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

    def _evaluate_by_series(
        self, policy: Policy, request: Request, view: GridView, constraints: Constraints
    ) -> Placement | Refusal:
        """The clusters of one series after the other, those with the most idle nodes first."""
        groups = self._groups(view)
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
            differ = self._differ(cluster.name for cluster in view.by_idle)
            return Refusal(f"{best.summary}; {differ}", RefusalKind.ELIGIBILITY)
        return best

    def _groups(self, view: GridView) -> list[GridView]:
        """The usable clusters by series."""
        if self._grouped is None or self._grouped[0] is not view:
            usable = {cluster.name for cluster in view.by_idle}
            groups = [view.only(series) for series in self._series.values() if series & usable]
            groups.sort(key=lambda group: (-group.usable_idle, min(cluster.name for cluster in group)))
            self._grouped = (view, groups)
        return self._grouped[1]

    def _why_not_there(self, spec: JobSpec, request: FixedRequest, demands: Demands) -> Refusal | None:
        """Why a fixed request's own clusters cannot serve it, whatever is idle."""
        if barred := demands.barred & {component.cluster for component in request.components}:
            return Refusal("; ".join(self._said_of(demands, barred)), RefusalKind.ELIGIBILITY)
        for index, component in enumerate(request.components):
            name = component.cluster or ""
            if name in self._profiles and (missing := folders_of(spec, index) - self._profiles[name].folders):
                return Refusal(lacks([name], missing), RefusalKind.ELIGIBILITY)
        named = {component.cluster or "" for component in request.components} & self._profiles.keys()
        if demands.one_series and len({self._profiles[name].mpi.series for name in named}) > 1:
            return Refusal(self._differ(named), RefusalKind.ELIGIBILITY)
        return None

    def _differ(self, names: Iterable[ClusterName]) -> str:
        """``north has Open MPI 5, south 4: a job runs under one series``."""
        return series_differ({name: self._profiles[name].mpi.series for name in names})


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
