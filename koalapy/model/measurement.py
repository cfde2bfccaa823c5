"""What was measured of the network between two clusters, or within one."""

from dataclasses import dataclass
from enum import StrEnum

from koalapy.model.job import JobId
from koalapy.model.request import ClusterName

MAX_PINGPONGS = 3
"""Ping-pongs of a link that count: one that is far from the others does not."""


class MeasurementKind(StrEnum):
    """Whence something is known of the network between two clusters, or within one."""

    PINGPONG = "pingpong"
    """An MPI ping-pong between two nodes; one with an error: they could not reach each other."""
    TRANSFER = "transfer"
    """Files that were moved; the bandwidth is the smoothed one, after it."""
    INCONCLUSIVE = "inconclusive"
    """A ping-pong that never came to measure anything, for reasons that say nothing of the network."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of a link's history; latency in seconds, bandwidth in bytes per second.

    Of ping-pongs ``one`` <= ``other``; a transfer went from ``one`` to ``other``.
    """

    one: ClusterName
    other: ClusterName
    kind: MeasurementKind
    at: float
    latency: float | None = None
    bandwidth: float | None = None
    job: JobId | None = None
    error: str = ""
    back: float | None = None
    """The bandwidth from ``other`` to ``one``; None where it was not told apart."""
