"""The problem of matching one job with the nodes of several clusters (lerida-2008), and the cost of a matching.

The run time of a job is T = Tp·SP + Tc·SC, relative to its run time on dedicated nodes of power 1. SP is the slowdown
of its slowest node. SC is the slowdown of the most loaded uplink that it uses, and at least 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from koalapy.model.request import ClusterName


class Kind(NamedTuple):
    """Idle nodes of a cluster with the same properties."""

    name: str
    slowdown: float
    """Computation time relative to a node of power 1."""
    idle: int


@dataclass(frozen=True)
class Site:
    """A cluster with its usable kinds of nodes. ``capacity`` and ``consumed`` of its uplink are in bytes per second."""

    name: ClusterName
    kinds: tuple[Kind, ...]
    capacity: float | None = None
    """None: the uplink is never saturated."""
    consumed: float = 0.0

    @cached_property
    def idle(self) -> int:
        return sum(kind.idle for kind in self.kinds)


class Share(NamedTuple):
    """Nodes of one kind that are assigned to the job."""

    site: ClusterName
    kind: str
    nodes: int


@dataclass(frozen=True, slots=True)
class Matching:
    """The nodes assigned to a job, its slowdowns SP (``processing``) and SC (``communication``), and T (``time``)."""

    shares: tuple[Share, ...]
    processing: float
    communication: float
    time: float


@dataclass(frozen=True, slots=True)
class Problem:
    """A job and the clusters with which it may be matched."""

    nodes: int
    sites: tuple[Site, ...]
    computing: float = 1.0
    """Tp: share of computation in the run time on dedicated nodes of power 1."""
    communicating: float = 0.0
    """Tc: share of communication in that run time."""
    bandwidth: float = 0.0
    """PNBW: bytes per second that each node exchanges with all others."""
    min_nodes_per_site: int = 1
    """Minimum number of nodes on a cluster that is used."""
    max_sites: int | None = None
    """Maximum number of clusters; None: unlimited."""

    def uplink_demand(self, count: int) -> float:
        """Return the bytes per second that ``count`` nodes on one cluster exchange with the other nodes of the job.

        The function is concave, with its maximum at half of the job.
        """
        return self.bandwidth * (count * (self.nodes - count)) / (self.nodes - 1) if self.nodes > 1 else 0.0

    def link_slowdown(self, site: Site, count: int) -> float:
        """Return the slowdown by a site's uplink with ``count`` nodes of the job there; below 1 if not saturated."""
        if site.capacity is None or count in (0, self.nodes):
            return 0.0
        load = site.consumed + self.uplink_demand(count)
        return load / site.capacity if site.capacity > 0 else (inf if load > 0 else 0.0)

    def relative_time(self, processing: float, communication: float) -> float:
        """Return T for the slowdowns SP and SC."""
        # A share of zero contributes nothing, even with an infinite slowdown.
        computed = self.computing * processing if self.computing else 0.0
        return computed + (self.communicating * communication if self.communicating else 0.0)

    def evaluate_shares(self, shares: Iterable[Share]) -> Matching:
        """Return the matching with the slowdowns and T of an assignment of nodes."""
        shares = tuple(shares)
        sites = {site.name: site for site in self.sites}
        counts: dict[ClusterName, int] = {}
        for share in shares:
            counts[share.site] = counts.get(share.site, 0) + share.nodes
        slowdowns = {(site.name, kind.name): kind.slowdown for site in self.sites for kind in site.kinds}
        processing = max(slowdowns[share.site, share.kind] for share in shares)
        links = (self.link_slowdown(sites[name], count) for name, count in counts.items())
        communication = max(1.0, *links)
        return Matching(shares, processing, communication, self.relative_time(processing, communication))
