"""The simulated grid: clusters, links and failures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from koalapy.model.cluster import ClusterPair, Link
from koalapy.model.errors import UsageError
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ClusterName


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """A simulated cluster with ``nodes`` nodes; ``speed`` is relative to 1."""

    nodes: int
    speed: float = 1.0
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    failures: float | None = None
    """Probability that the start of a component fails on this cluster; None: that of the grid."""
    startup: float | None = None
    """Start-up time of components on this cluster in seconds; None: that of the grid."""

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for a value outside its bounds."""
        _check_value("nodes", self.nodes, self.nodes >= 1, "at least 1")
        _check_value("speed", self.speed, isfinite(self.speed) and self.speed > 0, "more than 0")
        if self.failures is not None:
            _check_value("failures", self.failures, 0 <= self.failures < 1, "at least 0 and below 1")
        if self.startup is not None:
            _check_value("startup", self.startup, isfinite(self.startup) and self.startup >= 0, "at least 0")


@dataclass(frozen=True)
class SimulatedGrid:
    """Clusters, links, and failure and delay parameters. Times are in seconds."""

    clusters: Mapping[ClusterName, SimulatedCluster]
    links: Mapping[ClusterPair, Link] = field(default_factory=dict)
    startup: float = 0.0
    """Seconds from the time at which a component has its nodes until all its runners have reported."""
    failures: float = 0.0
    """Probability that the start of a component fails by a fault of its cluster."""
    look_every: float = 0.0
    """Interval at which agents report their clusters, in addition to reports when a component changes.

    Until the next report, changes by local users are invisible to the scheduler. 0: they are reported at once.
    """

    def __post_init__(self) -> None:
        _check_value("clusters", len(self.clusters), bool(self.clusters), "at least one")
        _check_value("startup", self.startup, isfinite(self.startup) and self.startup >= 0, "at least 0")
        _check_value("failures", self.failures, 0 <= self.failures < 1, "at least 0 and below 1")
        _check_value("look_every", self.look_every, isfinite(self.look_every) and self.look_every >= 0, "at least 0")

    @property
    def nodes(self) -> int:
        """Return the number of nodes of all clusters."""
        return sum(cluster.nodes for cluster in self.clusters.values())

    @property
    def speeds(self) -> dict[ClusterName, float]:
        return {name: cluster.speed for name, cluster in self.clusters.items()}


def _check_value(name: str, value: float, holds: bool, requirement: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value}, but must be {requirement}", field=name, value=value)
