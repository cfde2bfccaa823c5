"""How long a component's input takes to its execution site (semantics 3 and 5); pure arithmetic on the known links."""

from dataclasses import dataclass
from math import inf

from koalapy.model.cluster import GridView
from koalapy.model.request import ClusterName, InputFile


@dataclass(frozen=True, slots=True)
class Transfer:
    """The file site with the shortest estimated transfer, and that in seconds; no site when nothing is transferred."""

    seconds: float = 0.0
    file_site: ClusterName | None = None


NONE = Transfer()


def transfer_to(site: ClusterName, file: InputFile | None, grid: GridView) -> Transfer | None:
    """The best transfer of a file to a cluster: size / bandwidth; none over links whose bandwidth is not known.

    0 seconds where the cluster has the file itself. None when no file site can reach it. Ties go to the first name.
    """
    if file is None:
        return NONE
    if site in file.sites:
        return Transfer(0.0, site)
    best: Transfer | None = None
    for source in sorted(file.sites):
        bandwidth = grid.link(source, site).bandwidth
        seconds = file.size / bandwidth if bandwidth else inf
        if seconds < (best.seconds if best else inf):
            best = Transfer(seconds, source)
    return best
