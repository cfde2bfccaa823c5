"""Asks a policy for a placement on those clusters where a job may run, and holds its answer against the request.

A job may run where there are the folders that it needs, and, under Open MPI, on clusters of one series together.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.placement import PlacedComponent, Placement, Refusal
from koalapy.model.profile import ClusterProfile, folders_needed, folders_used, lacks, series_differ, texts_of
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest
from koalapy.model.wording import nodes
from koalapy.placement.policy import Policy

Demands = tuple[object, ...]


class BrokenPolicy(Exception):
    """A policy answered what cannot be; ``message`` says which and what."""

    def __init__(self, policy: str, problem: str) -> None:
        self.policy = policy
        self.message = f"policy {policy} is broken: {problem}"
        super().__init__(self.message)


class Placer:
    """Knows the profiles of the grid's clusters, which do not change while a daemon lives."""

    def __init__(self, profiles: Mapping[ClusterName, ClusterProfile]) -> None:
        self._profiles = profiles
        self._series: dict[int, frozenset[ClusterName]] = {}
        for series in sorted({profile.mpi_series for profile in profiles.values()}, reverse=True):
            self._series[series] = frozenset(n for n, p in profiles.items() if p.mpi_series == series)
        self._mixed = len(self._series) > 1
        self._grouped: tuple[GridView, list[GridView]] | None = None
        """The last view that was asked for, which is the same for a whole scan, and its groups."""

    def demands(self, spec: JobSpec) -> Demands:
        """What of a job decides where it may run, beside its request; empty for almost every job."""
        folders = folders_needed(spec)
        one_series = self._mixed and spec.launcher is Launcher.OPENMPI
        return (one_series, folders) if one_series or folders else ()

    def ask(self, policy: Policy, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """The policy's answer; ``BrokenPolicy`` when it is none."""
        demands = self.demands(spec)
        if not demands:
            return _checked(policy, spec, view)
        one_series, folders = demands
        if isinstance(spec.request, FixedRequest):
            refusal = self._why_not_there(spec, spec.request, one_series=bool(one_series))
            return refusal or _checked(policy, spec, view)
        assert isinstance(folders, frozenset)
        lacking = [cluster.name for cluster in view if not folders <= self._profiles[cluster.name].folders]
        if lacking:
            view = view.only(frozenset(cluster.name for cluster in view) - set(lacking))
        answer = self._ask_by_series(policy, spec, view) if one_series else _checked(policy, spec, view)
        if lacking and isinstance(answer, Refusal):
            return Refusal(f"{answer.summary}; {lacks(lacking, folders)}")
        return answer

    def _ask_by_series(self, policy: Policy, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """The clusters of one series after the other, those with the most idle nodes first."""
        groups = self._groups(view)
        if len(groups) < 2:
            return _checked(policy, spec, view)
        best: Refusal | None = None
        for group in groups:
            answer = _checked(policy, spec, group)
            if isinstance(answer, Placement):
                return answer
            best = best or answer
        assert best is not None
        if isinstance(_checked(policy, spec, view), Placement):
            return Refusal(f"{best.summary}; {self._differ(cluster.name for cluster in view.by_idle)}")
        return best

    def _groups(self, view: GridView) -> list[GridView]:
        """The usable clusters by series."""
        if self._grouped is None or self._grouped[0] is not view:
            usable = {cluster.name for cluster in view.by_idle}
            groups = [view.only(series) for series in self._series.values() if series & usable]
            groups.sort(key=lambda group: (-group.usable_idle, min(cluster.name for cluster in group)))
            self._grouped = (view, groups)
        return self._grouped[1]

    def _why_not_there(self, spec: JobSpec, request: FixedRequest, *, one_series: bool) -> Refusal | None:
        """Why a fixed request's own clusters cannot serve it, whatever is idle."""
        for component in request.components:
            name = component.cluster or ""
            if name in self._profiles:
                used = folders_used(text for _, text in texts_of(spec, component))
                if missing := used - self._profiles[name].folders:
                    return Refusal(lacks([name], missing))
        named = {component.cluster or "" for component in request.components} & self._profiles.keys()
        if one_series and len({self._profiles[name].mpi_series for name in named}) > 1:
            return Refusal(self._differ(named))
        return None

    def _differ(self, names: Iterable[ClusterName]) -> str:
        """``north has Open MPI 5, south 4: a job runs under one series``."""
        return series_differ({name: self._profiles[name].mpi_series for name in names})


def _checked(policy: Policy, spec: JobSpec, view: GridView) -> Placement | Refusal:
    answer: object = policy.place(spec.request, view)
    if isinstance(answer, Refusal):
        return answer
    if not isinstance(answer, Placement):
        raise BrokenPolicy(policy.name, f"it answered {repr(answer)[:80]}, neither a placement nor a refusal")
    problem = _shape_problem(answer) or _grid_problem(answer, view) or _request_problem(answer, spec)
    if problem:
        raise BrokenPolicy(policy.name, problem)
    return answer


def _shape_problem(placement: Placement) -> str:
    """What keeps an answer of another's code from being a placement at all."""
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
    given: Counter[ClusterName] = Counter()
    for component in placement.components:
        given[component.cluster] += component.size
    for name, size in given.items():
        cluster = view.get(name)
        if cluster is None:
            return f"it placed {nodes(size)} on {name}, which it was not offered"
        if cluster.state is not ClusterState.USABLE:
            return f"it placed {nodes(size)} on {name}, which is {cluster.state}"
        if size > cluster.idle:
            return f"it placed {nodes(size)} on {name}, where {cluster.idle} are idle"
    return ""


def _request_problem(placement: Placement, spec: JobSpec) -> str:
    request, placed = spec.request, placement.components
    if isinstance(request, FlexibleRequest):
        return _flexible_problem(request, [component.size for component in placed])
    count = len(request.components)
    if len(placed) != count or {component.request_index for component in placed} != set(range(count)):
        return f"it placed {len(placed)} components that are not the request's {count}, each once"
    for component in placed:
        index = component.request_index or 0
        asked = request.components[index]
        if component.size != asked.size:
            return f"it placed component {index} with {nodes(component.size)} in place of {asked.size}"
        if asked.cluster is not None and asked.cluster != component.cluster:
            return f"it placed component {index} on {component.cluster} in place of {asked.cluster}"
    return ""


def _flexible_problem(request: FlexibleRequest, sizes: Sequence[int]) -> str:
    if sum(sizes) != request.total_size:
        return f"it placed {nodes(sum(sizes))} in place of {request.total_size}"
    if min(sizes) < request.min_component_size:
        return f"it placed a component of {min(sizes)}, below the min_component_size of {request.min_component_size}"
    if request.max_components is not None and len(sizes) > request.max_components:
        return f"it placed {len(sizes)} components, above the max_components of {request.max_components}"
    if request.split_options and sorted(sizes) not in [sorted(option) for option in request.split_options]:
        return f"it split into {sorted(sizes, reverse=True)}, which is none of the split_options"
    return ""
