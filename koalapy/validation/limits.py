"""The clusters and bounds that submissions are checked against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from koalapy.model.array import MAX_ARRAY_SIZE
from koalapy.model.cluster import NodeClass
from koalapy.model.job_spec import JobSpec
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import MAX_COMPONENTS, MAX_GRACE, ClusterName
from koalapy.model.users import Accounts, Sharing
from koalapy.policies.registry import Registry


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """A cluster with its size in nodes (None while unknown), relative speed and profile."""

    name: ClusterName
    total: int | None
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    speed: float = 1.0
    node_classes: Sequence[NodeClass] | None = None
    """What its nodes have; None while unknown."""

    @property
    def known_classes(self) -> Sequence[NodeClass]:
        """Return its classes, or one of unknown properties for all nodes."""
        return self.node_classes or (NodeClass("", 0, total=self.total or 0),)


@dataclass(frozen=True, slots=True)
class Limits:
    """The clusters, policies, bounds, accounts and sharing rules for submissions. ``max_grace`` is in seconds."""

    clusters: Sequence[ClusterLimits]
    policies: Registry
    max_components: int = MAX_COMPONENTS
    max_grace: float = MAX_GRACE
    accounts: Accounts = field(default_factory=Accounts)
    sharing: Sharing = field(default_factory=Sharing)
    max_array_size: int = MAX_ARRAY_SIZE
    """Maximum tasks of an array."""
    max_bytes: int | None = None
    """Maximum bytes of the texts of a job; None: no limit."""
    refusal_on_empty_grid: Callable[[JobSpec], str] = lambda _: ""
    """Returns the reason why a job's policy would not place it on the empty grid with all clusters usable.

    Empty if it would, or while that is unknown. Links without measurements are assumed to be good.
    """
