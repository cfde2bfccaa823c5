"""Measurements of the network between two clusters, or within one."""

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Annotated

from annotated_types import Ge, Gt, MinLen, Predicate

from koalapy.model.job import JobId
from koalapy.model.request import ClusterName

MAX_PINGPONGS = 3
"""Number of recent ping-pongs of a link that are compared, so that an outlier does not count."""


def _is_finite(value: float) -> bool:
    if not isfinite(value):
        raise ValueError("Input should be a finite number")
    return True


Finite = Annotated[float, Predicate(_is_finite)]


class MeasurementKind(StrEnum):
    """The kind of a network measurement."""

    PINGPONG = "pingpong"
    """An MPI ping-pong between two nodes; with an error if the nodes could not reach each other."""
    RELAYED = "relayed"
    """A successful MPI ping-pong over relays, as the nodes could not reach each other."""
    TRANSFER = "transfer"
    """A file transfer; the bandwidth is the smoothed value that includes it."""
    INCONCLUSIVE = "inconclusive"
    """A ping-pong that failed for reasons unrelated to the network."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement of a link; latency in seconds, bandwidth in bytes per second.

    For ping-pongs ``one`` <= ``other``; a transfer went from ``one`` to ``other``.
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
    """The bandwidth from ``other`` to ``one``; None if it was not measured separately."""


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """Settings for measuring links by MPI ping-pongs, which run as low-priority jobs. Times are in seconds."""

    interval: Annotated[Finite, Ge(60)] | None = None
    """Interval between measurements of a link; omitted: links are measured on request only."""
    stale_after: Annotated[Finite, Gt(0)] = 7 * 86400.0
    """Age from which a measurement is shown as stale; it is still used."""
    parallel: Annotated[int, Ge(1)] = 1
    """Number of links measured at once; measurements over a shared network disturb each other."""
    patience: Annotated[Finite, Gt(0)] = 300.0
    """Maximum time that a measurement waits for its nodes."""
    command: Annotated[tuple[str, ...], MinLen(1)] = ("python", "-m", "koalapy.apps.pingpong", "--json")
    """The measuring program; it runs on one node of each of two clusters, or on two nodes of one."""
