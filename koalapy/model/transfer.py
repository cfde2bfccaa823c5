"""How long a component's inputs take to its execution site (semantics 3 and 5); pure arithmetic on the known links."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.request import ClusterName, InputFile
from koalapy.model.wording import format_list


@dataclass(frozen=True, slots=True)
class Transfer:
    """Estimated seconds until all inputs are there, and the file site of each, in the order of the inputs."""

    seconds: float = 0.0
    sources: tuple[ClusterName, ...] = ()


NONE = Transfer()


def estimate_transfer(
    site: ClusterName, files: Sequence[InputFile], grid: GridView, assumed: float | None = None
) -> Transfer | None:
    """The best transfers of files to a cluster, one after the other: the sum of size / bandwidth.

    A file takes 0 seconds where the cluster has it itself. Links of unknown bandwidth count as ``assumed`` bytes per
    second, or not at all. None when a file can be had from nowhere. Ties go to the first name.
    """
    if not files:
        return NONE
    seconds, sources = 0.0, []
    for file in files:
        best = _best(site, file, grid, assumed)
        if best is None:
            return None
        seconds += best[0]
        sources.append(best[1])
    return Transfer(seconds, tuple(sources))


def immovable_reason(site: ClusterName, files: Sequence[InputFile], grid: GridView) -> str:
    """Why some input can not be brought to a cluster though it is somewhere, in words; empty when nothing lacks."""
    for file in files:
        sites = grid.sites_of(file)
        if site in sites:
            continue
        if site in grid.cut_off:
            return f"{site} has no rsync, by which {file.name} would come"
        if sites and grid.cut_off.issuperset(sites):
            return f"{format_list(sorted(sites), separator=' and ')}, which has {file.name}, has no rsync to send it"
    return ""


def _best(
    site: ClusterName, file: InputFile, grid: GridView, assumed: float | None
) -> tuple[float, ClusterName] | None:
    """Seconds and file site of the shortest transfer of one file."""
    sites = grid.sites_of(file)
    if site in sites:
        return 0.0, site
    best: tuple[float, ClusterName] | None = None
    if site in grid.cut_off:
        return None
    for source in sorted(sites):
        cluster = grid.get(source)
        if source in grid.cut_off or (cluster is not None and cluster.state is ClusterState.UNREACHABLE):
            continue
        bandwidth = grid.link_between(source, site).bandwidth or assumed
        seconds = file.size / bandwidth if bandwidth else inf
        if seconds < (best[0] if best else inf):
            best = seconds, source
    return best
