"""Advance reservations of nodes on several clusters."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from koalapy.model.field import Length
from koalapy.model.request import ClusterName, Name

MAX_SPAN_S = 366 * 86400.0
"""The longest time from now to the end of a reservation, or to the begin of a drain, in seconds."""
MAX_LATE_S = 60.0
"""Seconds by which the begin of a reservation or a drain may have passed; it then begins at once."""


class ReservationState(StrEnum):
    MAKING = "making"
    """The clusters have not answered yet."""
    MADE = "made"
    """All clusters keep the nodes."""
    FAILED = "failed"
    """A cluster has refused, so that none keeps nodes."""
    CANCELLED = "cancelled"
    BROKEN = "broken"
    """A cluster has removed its part before the end."""
    OVER = "over"

    @property
    def is_live(self) -> bool:
        return self in (ReservationState.MAKING, ReservationState.MADE)


@dataclass(frozen=True, slots=True)
class ReservedPart:
    """The nodes of a reservation on one cluster."""

    cluster: ClusterName
    nodes: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that the clusters keep for the jobs of some users; times in seconds since the epoch."""

    id: int
    name: Name
    """Jobs name it; no other live reservation has it."""
    site_name: str
    """The name by which the resource managers of the clusters know it."""
    owner: Name
    begins_at: float
    ends_at: float
    parts: tuple[ReservedPart, ...]
    changed_at: float
    """When it got its state."""
    users: Annotated[tuple[Name, ...], Length(100)] = ()
    """Other users that may use it."""
    state: ReservationState = ReservationState.MAKING
    reason: str = ""
    """Why it is in its state."""

    @property
    def nodes(self) -> int:
        return sum(part.nodes for part in self.parts)

    def nodes_on(self, cluster: ClusterName) -> int:
        return sum(part.nodes for part in self.parts if part.cluster == cluster)

    def may_use(self, user: str) -> bool:
        return user == self.owner or user in self.users
