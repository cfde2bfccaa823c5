"""Close-to-Files (mohamed-2005 2.6): place each component where its input files are available first."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import (
    ClusterName,
    ComponentRequest,
    FixedRequest,
    InputFile,
    NonFixedRequest,
    Request,
    RequestType,
)
from koalapy.model.wording import MAX_LISTED, format_idle, format_list, format_nodes
from koalapy.policies.fixed import Fixed
from koalapy.policies.network import Transfer, estimate_transfer
from koalapy.policies.policy import (
    does_not_serve,
    idle_nodes,
    idle_that_suffices,
    nothing_usable,
    reason_for,
    with_idle,
)
from koalapy.policies.worst_fit import Unplaced, fit_in_turn

Reach = Sequence[Sequence[tuple[ClusterName, Transfer]]]
"""Usable clusters that can get a list of files, grouped by transfer time, the shortest time first."""


class CloseToFiles:
    """Components by decreasing size, each where its input is soonest; of a fixed request only the file sites."""

    name = "close-to-files"
    serves: frozenset[RequestType] = frozenset({"fixed", "nonfixed"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if isinstance(request, FixedRequest):
            return _place_fixed(request, grid)
        if not isinstance(request, NonFixedRequest):
            raise does_not_serve(self, request)
        if not grid.by_idle:
            return Refusal(nothing_usable(grid), RefusalKind.CLUSTERS)
        if request.total_size > grid.usable_idle:
            needs = f"needs {format_nodes(request.total_size)}"
            return Refusal(f"{needs}; {format_idle(grid.usable_idle)} ({idle_nodes(grid)})")
        placed = _place_components(request.components, grid)
        if isinstance(placed, int):
            return Refusal(_refusal_text(request.components, placed, grid))
        return Placement(placed, _explain_choice(placed))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if isinstance(request, FixedRequest):
            return _explain_fixed(request, grid)
        if not isinstance(request, NonFixedRequest):
            raise does_not_serve(self, request)
        stuck = _place_components(request.components, grid)
        if not isinstance(stuck, int):
            return ()
        return tuple(_explain_cluster(request, stuck, cluster, grid) for cluster in sorted(grid, key=lambda c: c.name))


def closest_site(
    size: int, files: Sequence[InputFile], grid: GridView, within: float | None = None, assumed: float | None = None
) -> tuple[ClusterName, Transfer] | None:
    """Return the cluster with enough idle nodes that has the shortest transfer, and the transfer.

    Return None if there is none, or if the transfer takes more than ``within`` seconds. Ties go to the most idle nodes,
    then to the first name. Links of unknown bandwidth count as ``assumed`` bytes per second; if that is None, they are
    not used. Called for a component that did not get its nodes and needs another cluster.
    """
    closest = _closest_with_nodes(size, _group_by_transfer_time(tuple(files), grid, assumed), grid, {})
    if closest is None or (within is not None and closest[1].seconds > within):
        return None
    return closest[0].name, closest[1]


def _reachable_clusters(files: tuple[InputFile, ...], grid: GridView) -> Reach:
    """Return the clusters that can get the files, grouped by transfer time."""
    return grid.compute_lasting(("reach", files), lambda grid: _group_by_transfer_time(files, grid))


def _group_by_transfer_time(files: tuple[InputFile, ...], grid: GridView, assumed: float | None = None) -> Reach:
    """Return the usable clusters that can get the files, grouped by transfer time.

    Links of unknown bandwidth count as ``assumed`` bytes per second; if that is None, they are not used.
    """
    times: dict[float, list[tuple[ClusterName, Transfer]]] = {}
    for cluster in grid.by_idle:
        transfer = estimate_transfer(cluster.name, files, grid, assumed)
        if transfer is not None:
            times.setdefault(transfer.seconds, []).append((cluster.name, transfer))
    return [times[seconds] for seconds in sorted(times)]


def _closest_with_nodes(
    size: int, reach: Reach, grid: GridView, used_nodes: Mapping[ClusterName, int]
) -> tuple[ClusterView, Transfer] | None:
    """Return the first cluster by transfer time with enough idle nodes left; None if there is none.

    Ties go to the most nodes left, then to the first name.
    """
    for equals in reach:
        clusters = ((cluster, transfer) for name, transfer in equals if (cluster := grid.get(name)) is not None)
        candidates = (
            (cluster.idle - used_nodes.get(cluster.name, 0), cluster, transfer) for cluster, transfer in clusters
        )
        enough = (candidate for candidate in candidates if candidate[0] >= size)
        best = min(enough, key=lambda candidate: (-candidate[0], candidate[1].name), default=None)
        if best is not None:
            return best[1:]
    return None


def _place_components(components: Sequence[ComponentRequest], grid: GridView) -> tuple[PlacedComponent, ...] | int:
    """Return the placed components, or the index of the first that fits nowhere.

    If placing by transfer time fails, place each component on the cluster with the most nodes left that can get its
    inputs. So a request that worst-fit can place is placed whatever its links are.
    """
    if not any(component.inputs for component in components):
        fit = fit_in_turn([component.size for component in components], grid.by_idle)
        if isinstance(fit, Unplaced):
            return fit.index
        sites = zip(components, fit, strict=True)
        return tuple(PlacedComponent(component.size, site, index) for index, (component, (site, _)) in enumerate(sites))
    placed = _place_in_turn(components, grid, nearest=True)
    by_room = _place_in_turn(components, grid, nearest=False) if isinstance(placed, int) else placed
    return placed if isinstance(by_room, int) else by_room


def _place_in_turn(
    components: Sequence[ComponentRequest], grid: GridView, *, nearest: bool
) -> tuple[PlacedComponent, ...] | int:
    """Return the placed components, larger ones first; or the index of the first that fits nowhere.

    ``nearest``: prefer the shortest transfer to the most idle nodes.
    """
    used_nodes: dict[ClusterName, int] = {}
    placed: list[PlacedComponent | None] = [None] * len(components)
    for index in sorted(range(len(components)), key=lambda index: -components[index].size):
        size = components[index].size
        reach = _reachable_clusters(components[index].inputs, grid)
        closest = _closest_with_nodes(size, reach if nearest else [list(chain.from_iterable(reach))], grid, used_nodes)
        if closest is None:
            return index
        cluster, transfer = closest
        used_nodes[cluster.name] = used_nodes.get(cluster.name, 0) + size
        placed[index] = PlacedComponent(size, cluster.name, index, transfer.sources, transfer.seconds)
    return tuple(component for component in placed if component is not None)


def _place_fixed(request: FixedRequest, grid: GridView) -> Placement | Refusal:
    """Place the components on the clusters that the user chose, with the transfers of their inputs.

    Refuse if a cluster has too few idle nodes or cannot get an input.
    """
    answer = Fixed().place(request, grid)
    if isinstance(answer, Refusal):
        return answer
    placed: list[PlacedComponent] = []
    for index, component in enumerate(request.components):
        site = component.cluster or ""
        transfer = estimate_transfer(site, component.inputs, grid)
        if transfer is None:
            return Refusal(
                f"component {index}: {_explain_missing_transfer(component.inputs, grid, site)} to {site}",
                RefusalKind.FILES,
            )
        placed.append(PlacedComponent(component.size, site, index, transfer.sources, transfer.seconds))
    return Placement(tuple(placed), "; ".join(filter(None, (answer.reason, _describe_inputs(placed)))))


def _explain_fixed(request: FixedRequest, grid: GridView) -> tuple[ClusterReason, ...]:
    """Return the reason for each chosen cluster that has too few idle nodes or cannot get an input."""
    reasons = {reason.cluster: reason for reason in Fixed().explain(request, grid)}
    for index, component in enumerate(request.components):
        site, files = component.cluster or "", component.inputs
        if estimate_transfer(site, files, grid) is None:
            reasons[site] = ClusterReason(
                site, f"component {index}: {_explain_missing_transfer(files, grid, site)} to {site}"
            )
    return tuple(reasons[name] for name in sorted(reasons))


def _explain_cluster(request: NonFixedRequest, stuck: int, cluster: ClusterView, grid: GridView) -> ClusterReason:
    """Return why a cluster cannot take the component with index ``stuck``, which fits nowhere."""
    component = request.components[stuck]
    idle_elsewhere = grid.usable_idle - cluster.usable_idle

    def fits(idle: int) -> bool:
        return not isinstance(_place_components(request.components, with_idle(grid, cluster, idle)), int)

    sufficient = idle_that_suffices(cluster, fits, request.total_size - idle_elsewhere)
    larger = sum(1 for sibling in request.components if sibling.size > component.size)
    needs = f"component {stuck} needs {component.size}{' beside larger ones' if larger else ''}"
    reason = reason_for(cluster, needs, sufficient)
    if cluster.usable_idle and estimate_transfer(cluster.name, component.inputs, grid) is None:
        unreached = _explain_missing_transfer(component.inputs, grid, cluster.name)
        return replace(reason, reason=f"component {stuck}: {unreached} to {cluster.name}")
    return reason


def _refusal_text(components: Sequence[ComponentRequest], stuck: int, grid: GridView) -> str:
    """Return why the component with index ``stuck`` fits nowhere: too few idle nodes, or no transfer of its inputs."""
    size, files = components[stuck].size, components[stuck].inputs
    reach = _reachable_clusters(files, grid)
    if files and not reach:
        return f"component {stuck}: {_explain_missing_transfer(files, grid)} to any usable cluster ({idle_nodes(grid)})"
    remaining = " left" if max(component.size for component in components) > size else ""
    needed = f"{format_nodes(size, 'idle')}{remaining}"
    names = format_list([file.name for file in files])
    restriction = f" that {names} can be brought to" if files and sum(map(len, reach)) < len(grid.by_idle) else ""
    return f"no cluster{restriction} has {needed} for component {stuck} ({idle_nodes(grid)})"


def _explain_missing_transfer(files: Sequence[InputFile], grid: GridView, site: ClusterName | None = None) -> str:
    """Return the beginning of a sentence that says why a file cannot be transferred.

    It names the first file that cannot reach ``site``, or any usable cluster if ``site`` is None. The caller appends
    the destination.
    """
    to = [site] if site else [cluster.name for cluster in grid.by_idle]
    file = next((f for f in files if all(estimate_transfer(name, (f,), grid) is None for name in to)), files[0])
    sites = sorted(grid.sites_of(file))
    if not sites:
        return f"no cluster has {file.name}, so it cannot be brought"
    away = [name for name in sites if (c := grid.get(name)) is not None and c.state is ClusterState.UNREACHABLE]
    if away == sites:
        return (
            f"{format_list(away, separator=' and ')}, which has {file.name}, is out of reach, so it cannot be brought"
        )
    return f"no known bandwidth from {format_list(sites, separator=' or ')}, which has {file.name},"


def _explain_choice(placed: Sequence[PlacedComponent]) -> str:
    """Return the reason for users: the sources of the inputs, or without inputs the chosen clusters."""
    inputs = _describe_inputs(placed)
    if inputs:
        return inputs
    sites = format_list([f"{c.cluster} ({c.size})" for c in placed[:MAX_LISTED]], len(placed))
    return f"nothing is transferred: the largest first, each where most nodes were idle: {sites}"


def _describe_inputs(placed: Sequence[PlacedComponent]) -> str:
    """Return the sources of the inputs, such as ``north has its input, south gets it from north in 12 s``."""
    texts = []
    for component in placed:
        sources = sorted({source for source in component.sources if source != component.cluster})
        if component.sources and not sources:
            texts.append(f"{component.cluster} has the input of component {component.request_index}")
        elif sources:
            took = f"from {' and '.join(sources)} in {component.transfer_time:.3g} s"
            texts.append(f"{component.cluster} gets that of component {component.request_index} {took}")
    return format_list(texts) if texts else ""
