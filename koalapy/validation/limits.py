"""What a submission is held against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from koalapy.model.job import JobSpec
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import MAX_COMPONENTS, MAX_GRACE, ClusterName
from koalapy.model.sharing import Sharing
from koalapy.model.users import Accounts
from koalapy.policies.registry import Registry


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """A cluster's size in nodes, None while it is not known, its speed, and what programs find there."""

    name: ClusterName
    total: int | None
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The clusters, the policies, how many components, seconds of grace and bytes a job may have, where its owner has
    an account, and what its home site means."""

    clusters: Sequence[ClusterLimits]
    policies: Registry
    max_components: int = MAX_COMPONENTS
    max_grace: float = MAX_GRACE
    accounts: Accounts = field(default_factory=Accounts)
    sharing: Sharing = field(default_factory=Sharing)
    max_bytes: int | None = None
    """Of a job's texts; None: not limited."""
    refusal_on_empty_grid: Callable[[JobSpec], str] = lambda _: ""
    """Why its policy would not place a job on the whole grid if all nodes were idle and all clusters usable.

    Empty where it would, or where that cannot be told yet; what is not known of links is assumed to be good.
    """
