"""The grid of a simulation: its clusters, what joins them, and how well they work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from koalapy.model.cluster import ClusterPair, Link
from koalapy.model.errors import UsageError
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ClusterName


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """A cluster of so many nodes; ``speed`` is relative to 1."""

    nodes: int
    speed: float = 1.0
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    failures: float | None = None
    """The chance that the start of a component fails there; None: the grid's."""
    startup: float | None = None
    """Of components there, in seconds; None: the grid's."""

    def __post_init__(self) -> None:
        _hold("nodes", self.nodes, self.nodes >= 1, "at least 1")
        _hold("speed", self.speed, isfinite(self.speed) and self.speed > 0, "more than 0")
        if self.failures is not None:
            _hold("failures", self.failures, 0 <= self.failures < 1, "at least 0 and below 1")
        if self.startup is not None:
            _hold("startup", self.startup, isfinite(self.startup) and self.startup >= 0, "at least 0")


@dataclass(frozen=True)
class SimulatedGrid:
    """Clusters and links, and what goes wrong there. Times in seconds."""

    clusters: Mapping[ClusterName, SimulatedCluster]
    links: Mapping[ClusterPair, Link] = field(default_factory=dict)
    startup: float = 0.0
    """From the moment when a component has its nodes until all its runners have reported."""
    failures: float = 0.0
    """The chance that the start of a component fails by a fault of its cluster."""
    look_every: float = 0.0
    """How often agents look at their clusters, beside when a component of theirs changes: for so long nobody sees what
    local users do. 0: it is seen at once."""

    def __post_init__(self) -> None:
        _hold("clusters", len(self.clusters), bool(self.clusters), "at least one")
        _hold("startup", self.startup, isfinite(self.startup) and self.startup >= 0, "at least 0")
        _hold("failures", self.failures, 0 <= self.failures < 1, "at least 0 and below 1")
        _hold("look_every", self.look_every, isfinite(self.look_every) and self.look_every >= 0, "at least 0")

    @property
    def nodes(self) -> int:
        """Of all clusters."""
        return sum(cluster.nodes for cluster in self.clusters.values())

    @property
    def speeds(self) -> dict[ClusterName, float]:
        return {name: cluster.speed for name, cluster in self.clusters.items()}


def _hold(name: str, value: float, holds: bool, words: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value}, but must be {words}", field=name, value=value)
