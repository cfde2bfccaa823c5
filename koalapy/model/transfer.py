"""Estimates of the time to transfer input files to an execution site (semantics 3 and 5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.request import ClusterName, InputFile
from koalapy.model.wording import format_list


@dataclass(frozen=True, slots=True)
class Transfer:
    """The estimated seconds to transfer all inputs, and the file site of each input, in order."""

    seconds: float = 0.0
    sources: tuple[ClusterName, ...] = ()


NONE = Transfer()


def estimate_transfer(
    site: ClusterName, files: Sequence[InputFile], grid: GridView, assumed: float | None = None
) -> Transfer | None:
    """Choose the fastest file site of each input and return the sum of size / bandwidth; None if an input has no site.

    A file that the cluster has takes 0 seconds. A link of unknown bandwidth counts as ``assumed`` bytes per second, or
    is not used if that is None. Ties go to the first name.
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
    """Return why an input with replicas cannot be transferred to a cluster; empty if all can."""
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
    """Return the seconds and the file site of the fastest transfer of a file; None if it has no usable site."""
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
