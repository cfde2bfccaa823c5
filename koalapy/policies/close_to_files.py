"""Close-to-Files (mohamed-2005 2.6): place each component where its input files are available first."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

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
from koalapy.model.transfer import NONE, Transfer, estimate_transfer
from koalapy.model.wording import MAX_LISTED, format_idle, format_list, format_nodes
from koalapy.policies.fixed import Fixed
from koalapy.policies.policy import does_not_serve
from koalapy.policies.reasons import idle_nodes, idle_that_suffices, nothing_usable, reason_for, with_idle

Reach = Sequence[Sequence[tuple[ClusterName, Transfer]]]
"""Usable clusters that can get a list of files, grouped by transfer time, the shortest time first."""


NOTHING_TAKEN: Mapping[ClusterName, int] = MappingProxyType({})


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
        placed = _place(request.components, grid)
        if isinstance(placed, int):
            return Refusal(_summary(request.components, placed, grid))
        return Placement(placed, _why(placed))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if isinstance(request, FixedRequest):
            return _explain_fixed(request, grid)
        if not isinstance(request, NonFixedRequest):
            raise does_not_serve(self, request)
        stuck = _place(request.components, grid)
        if not isinstance(stuck, int):
            return ()
        return tuple(_reason(request, stuck, cluster, grid) for cluster in sorted(grid, key=lambda c: c.name))


def closest_site(
    size: int, files: Sequence[InputFile], grid: GridView, within: float | None = None, assumed: float | None = None
) -> tuple[ClusterName, Transfer] | None:
    """Return the cluster with enough idle nodes that has the shortest transfer, and the transfer.

    Return None if there is none, or if the transfer takes more than ``within`` seconds. Ties go to the most idle nodes,
    then to the first name. Links of unknown bandwidth count as ``assumed`` bytes per second; if that is None, they are
    not used. Called to place one component again during claiming.
    """
    closest = _closest(size, _reached(tuple(files), grid, assumed), grid, {})
    if closest is None or (within is not None and closest[1].seconds > within):
        return None
    return closest[0].name, closest[1]


def _reach(files: tuple[InputFile, ...], grid: GridView, taken: Collection[ClusterName] = ()) -> Reach:
    """Return the clusters that can get the files. ``taken``: clusters of which some idle nodes are already taken."""
    if not files:
        # One of these clusters has no taken nodes, since there is one more of them than in ``taken``. Clusters after it
        # have no more idle nodes.
        return [[(cluster.name, NONE) for cluster in grid.by_idle[: len(taken) + 1]]]
    return grid.compute_lasting(("reach", files), lambda grid: _reached(files, grid))


def _reached(files: tuple[InputFile, ...], grid: GridView, assumed: float | None = None) -> Reach:
    times: dict[float, list[tuple[ClusterName, Transfer]]] = {}
    for cluster in grid.by_idle:
        transfer = estimate_transfer(cluster.name, files, grid, assumed)
        if transfer is not None:
            times.setdefault(transfer.seconds, []).append((cluster.name, transfer))
    return [times[seconds] for seconds in sorted(times)]


def _closest(
    size: int, reach: Reach, grid: GridView, taken: Mapping[ClusterName, int]
) -> tuple[ClusterView, Transfer] | None:
    """Return the first cluster by transfer time with enough idle nodes left; None if there is none.

    Ties go to the most nodes left, then to the first name.
    """
    for equals in reach:
        clusters = ((cluster, transfer) for name, transfer in equals if (cluster := grid.get(name)) is not None)
        left = ((cluster.idle - taken.get(cluster.name, 0), cluster, transfer) for cluster, transfer in clusters)
        enough = (each for each in left if each[0] >= size)
        best = min(enough, key=lambda each: (-each[0], each[1].name), default=None)
        if best is not None:
            return best[1:]
    return None


def _place(
    components: Sequence[ComponentRequest], grid: GridView, taken: Mapping[ClusterName, int] = NOTHING_TAKEN
) -> tuple[PlacedComponent, ...] | int:
    """Return the placed components, or the index of the first that fits nowhere; ``taken`` nodes are not available.

    If placing by transfer time fails, place each component on the cluster with the most nodes left that can get its
    inputs. So a request that worst-fit can place is placed whatever its links are.
    """
    placed = _place_in_turn(components, grid, dict(taken), nearest=True)
    if not isinstance(placed, int) or not any(component.inputs for component in components):
        return placed
    by_room = _place_in_turn(components, grid, dict(taken), nearest=False)
    return placed if isinstance(by_room, int) else by_room


def _place_in_turn(
    components: Sequence[ComponentRequest], grid: GridView, taken: dict[ClusterName, int], *, nearest: bool
) -> tuple[PlacedComponent, ...] | int:
    """Return the placed components, larger ones first; or the index of the first that fits nowhere.

    ``taken``: nodes that are not available; those of the placement are added to it. ``nearest``: prefer the shortest
    transfer to the most idle nodes.
    """
    placed: list[PlacedComponent | None] = [None] * len(components)
    for index in sorted(range(len(components)), key=lambda index: -components[index].size):
        size = components[index].size
        reach = _reach(components[index].inputs, grid, taken)
        closest = _closest(size, reach if nearest else [list(chain.from_iterable(reach))], grid, taken)
        if closest is None:
            return index
        cluster, transfer = closest
        taken[cluster.name] = taken.get(cluster.name, 0) + size
        placed[index] = PlacedComponent(size, cluster.name, index, transfer.sources, transfer.seconds)
    return tuple(component for component in placed if component is not None)


def _place_fixed(request: FixedRequest, grid: GridView) -> Placement | Refusal:
    answer = Fixed().place(request, grid)
    if isinstance(answer, Refusal):
        return answer
    placed: list[PlacedComponent] = []
    for index, component in enumerate(request.components):
        site = component.cluster or ""
        transfer = estimate_transfer(site, component.inputs, grid)
        if transfer is None:
            return Refusal(
                f"component {index}: {_unreached(component.inputs, grid, site)} to {site}", RefusalKind.FILES
            )
        placed.append(PlacedComponent(component.size, site, index, transfer.sources, transfer.seconds))
    return Placement(tuple(placed), "; ".join(filter(None, (answer.reason, _inputs(placed)))))


def _explain_fixed(request: FixedRequest, grid: GridView) -> tuple[ClusterReason, ...]:
    reasons = {reason.cluster: reason for reason in Fixed().explain(request, grid)}
    for index, component in enumerate(request.components):
        site, files = component.cluster or "", component.inputs
        if estimate_transfer(site, files, grid) is None:
            reasons[site] = ClusterReason(site, f"component {index}: {_unreached(files, grid, site)} to {site}")
    return tuple(reasons[name] for name in sorted(reasons))


def _reason(request: NonFixedRequest, stuck: int, cluster: ClusterView, grid: GridView) -> ClusterReason:
    component = request.components[stuck]
    others = grid.usable_idle - cluster.usable_idle
    full = with_idle(grid, cluster, cluster.total)

    def fits(idle: int) -> bool:
        return not isinstance(_place(request.components, full, {cluster.name: cluster.total - idle}), int)

    wanted = idle_that_suffices(cluster, fits, request.total_size - others)
    larger = sum(1 for other in request.components if other.size > component.size)
    needs = f"component {stuck} needs {component.size}{' beside larger ones' if larger else ''}"
    reason = reason_for(cluster, needs, wanted)
    if cluster.usable_idle and estimate_transfer(cluster.name, component.inputs, grid) is None:
        unreached = _unreached(component.inputs, grid, cluster.name)
        return replace(reason, reason=f"component {stuck}: {unreached} to {cluster.name}")
    return reason


def _summary(components: Sequence[ComponentRequest], stuck: int, grid: GridView) -> str:
    size, files = components[stuck].size, components[stuck].inputs
    reach = _reach(files, grid)
    if files and not reach:
        return f"component {stuck}: {_unreached(files, grid)} to any usable cluster ({idle_nodes(grid)})"
    left = " left" if max(component.size for component in components) > size else ""
    names = format_list([file.name for file in files])
    which = f" that {names} can be brought to" if files and sum(map(len, reach)) < len(grid.by_idle) else ""
    return f"no cluster{which} has {format_nodes(size, 'idle')}{left} for component {stuck} ({idle_nodes(grid)})"


def _unreached(files: Sequence[InputFile], grid: GridView, site: ClusterName | None = None) -> str:
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


def _why(placed: Sequence[PlacedComponent]) -> str:
    inputs = _inputs(placed)
    if inputs:
        return inputs
    sites = format_list([f"{c.cluster} ({c.size})" for c in placed[:MAX_LISTED]], len(placed))
    return f"nothing is transferred: the largest first, each where most nodes were idle: {sites}"


def _inputs(placed: Sequence[PlacedComponent]) -> str:
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
