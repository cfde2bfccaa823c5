"""Matching one job with the nodes of several clusters (lerida-2008): what is asked, and what an answer is worth.

The job runs for T = Tp·SP + Tc·SC, as a multiple of what it would run on dedicated nodes of power 1: SP is the slowdown
of the slowest of its nodes, SC that of the most loaded of the uplinks that it uses, which never makes it faster.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from koalapy.model.request import ClusterName


class Kind(NamedTuple):
    """Idle nodes of a cluster that are alike."""

    name: str
    slowdown: float
    """How many times longer than on a node of power 1 a computation takes."""
    idle: int


@dataclass(frozen=True)
class Site:
    """A cluster, as far as its nodes may serve; its uplink in bytes per second."""

    name: ClusterName
    kinds: tuple[Kind, ...]
    capacity: float | None = None
    """None: never saturated."""
    consumed: float = 0.0

    @cached_property
    def idle(self) -> int:
        return sum(kind.idle for kind in self.kinds)


class Share(NamedTuple):
    """Nodes of one kind."""

    site: ClusterName
    kind: str
    nodes: int


@dataclass(frozen=True, slots=True)
class Matching:
    """Which nodes a job gets, its slowdowns there (SP and SC), and the two in one: T."""

    shares: tuple[Share, ...]
    processing: float
    communication: float
    time: float


@dataclass(frozen=True, slots=True)
class Problem:
    """A job and the clusters that it may be matched with."""

    nodes: int
    sites: tuple[Site, ...]
    computing: float = 1.0
    """Tp, the share of computation in the run time on dedicated nodes of power 1."""
    communicating: float = 0.0
    """Tc, the share of communication."""
    bandwidth: float = 0.0
    """PNBW, bytes per second that each node exchanges with all others."""
    least: int = 1
    """Nodes of a cluster that is used at all."""
    most: int | None = None
    """Clusters that are used."""

    def demand(self, count: int) -> float:
        """What ``count`` of the job's nodes on one cluster exchange with the others: concave, the most for half."""
        return self.bandwidth * (count * (self.nodes - count)) / (self.nodes - 1) if self.nodes > 1 else 0.0

    def link_slowdown(self, site: Site, count: int) -> float:
        """What a site's uplink does to the job, with so many of its nodes there: below 1 while it is not saturated."""
        if site.capacity is None or count in (0, self.nodes):
            return 0.0
        load = site.consumed + self.demand(count)
        return load / site.capacity if site.capacity > 0 else (inf if load > 0 else 0.0)

    def time(self, processing: float, communication: float) -> float:
        """T."""
        # What takes no time is not made longer, not even by a link that carries nothing.
        computed = self.computing * processing if self.computing else 0.0
        return computed + (self.communicating * communication if self.communicating else 0.0)

    def weigh(self, shares: Iterable[Share]) -> Matching:
        """What an assignment of nodes is worth, whoever made it."""
        shares = tuple(shares)
        sites = {site.name: site for site in self.sites}
        counts: dict[ClusterName, int] = {}
        for share in shares:
            counts[share.site] = counts.get(share.site, 0) + share.nodes
        slowdowns = {(site.name, kind.name): kind.slowdown for site in self.sites for kind in site.kinds}
        processing = max(slowdowns[share.site, share.kind] for share in shares)
        links = (self.link_slowdown(sites[name], count) for name, count in counts.items())
        communication = max(1.0, *links)
        return Matching(shares, processing, communication, self.time(processing, communication))
