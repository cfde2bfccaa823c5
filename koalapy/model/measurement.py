"""What was measured of the network between two clusters, or within one."""

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Annotated

from annotated_types import Ge, Gt, MinLen, Predicate

from koalapy.model.job import JobId
from koalapy.model.request import ClusterName

MAX_PINGPONGS = 3
"""Ping-pongs of a link that count: one that is far from the others does not."""


def _is_finite(value: float) -> bool:
    if not isfinite(value):
        raise ValueError("Input should be a finite number")
    return True


Finite = Annotated[float, Predicate(_is_finite)]


class MeasurementKind(StrEnum):
    """How something is known of the network between two clusters, or within one."""

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


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """How links are measured: by MPI ping-pongs, which are jobs of low priority like any other. Times in seconds."""

    interval: Annotated[Finite, Ge(60)] | None = None
    """How often each link is measured; never by itself when there is none."""
    stale_after: Annotated[Finite, Gt(0)] = 7 * 86400.0
    """From when on a measurement is shown as stale; it is used all the same."""
    parallel: Annotated[int, Ge(1)] = 1
    """How many links are measured at once; more than one disturb each other where they share a network."""
    patience: Annotated[Finite, Gt(0)] = 300.0
    """How long a measurement waits for its nodes."""
    command: Annotated[tuple[str, ...], MinLen(1)] = ("python", "-m", "koalapy.apps.pingpong", "--json")
    """What measures, on one node each of two clusters or two of one."""
