"""What is known of the links between clusters: configured, measured, learned from transfers, found unreachable."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from koalapy.model.cluster import Link
from koalapy.model.request import ClusterName
from koalapy.ports import Measurement, MeasurementKind

Pair = tuple[ClusterName, ClusterName]

SMOOTHING = 0.3
"""Weight of a transfer against all that was measured before."""
WORTH_TELLING = 0.05
"""Fraction by which transfers must have changed a bandwidth before that is told and kept."""
TELL_WITHIN = 600.0
"""Seconds after which a transfer is told and kept even if it has changed little."""
SHORTEST_TRANSFER = 1e-6
"""Seconds; shorter ones were not measured."""
SMALLEST_TRANSFER = 4 * 1000 * 1000
"""Bytes; smaller ones say more of the start of a transfer than of the link."""


class LinkState(StrEnum):
    """How much is to be made of what is known of a link."""

    MEASURED = "measured"
    STALE = "stale"
    """Measured long ago; used all the same."""
    CONFIGURED = "configured"
    UNREACHABLE = "unreachable"
    """The last ping-pong found that the nodes do not reach each other."""
    UNMEASURED = "unmeasured"


def pair_of(one: ClusterName, other: ClusterName) -> Pair:
    return (one, other) if one <= other else (other, one)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The configured link and the newest measurement of each sort; what went well is told from what failed."""

    configured: Link | None = None
    measured: Measurement | None = None
    failed: Measurement | None = None
    """The newest ping-pong whose nodes could not reach each other."""
    moved: Measurement | None = None
    """The newest transfer."""
    vain: Measurement | None = None
    """The newest that came to nothing."""

    order: tuple[Measurement, ...] = ()
    """The same from the oldest to the newest, as they were learned: clocks may have been set back in between."""

    def with_(self, new: Measurement) -> "Knowledge":
        sort: dict[str, Any] = {_sort_of(new): new}
        before = getattr(self, *sort)
        return replace(self, order=(*(found for found in self.order if found is not before), new), **sort)

    def _last(self, *found: Measurement | None) -> Measurement | None:
        """Which of these was learned last."""
        return next((each for each in reversed(self.order) if any(each is one for one in found)), None)

    @property
    def unreachable(self) -> bool:
        return self.failed is not None and self._last(self.failed, self.measured) is self.failed

    @property
    def newest(self) -> Measurement | None:
        """The newest that has a bandwidth."""
        return self._last(self.measured, self.moved)

    @property
    def link(self) -> Link:
        """What policies go by: what was measured before what is configured, and nothing of what is unreachable."""
        if self.unreachable:
            return Link(unreachable=True)
        link = self.configured or Link()
        if self.measured is not None:
            link = Link(self.measured.latency, self.measured.bandwidth)
        return link if self.newest is None else replace(link, bandwidth=self.newest.bandwidth)

    @property
    def tried(self) -> Measurement | None:
        """The newest ping-pong, whatever came of it."""
        return self._last(self.measured, self.failed, self.vain)

    @property
    def tried_at(self) -> float | None:
        return self.tried.at if self.tried else None

    @property
    def error(self) -> str:
        """Why it is unreachable, or why the last try came to nothing; empty when the last went well."""
        if self.vain is not None and self.tried is self.vain:
            return self.vain.error
        return self.failed.error if self.unreachable and self.failed else ""

    def state(self, now: float, stale_after: float) -> LinkState:
        if self.unreachable:
            return LinkState.UNREACHABLE
        # A transfer says nothing of the latency: beside it, an old ping-pong is no newer.
        known = self.measured or self.moved
        if known is not None:
            return LinkState.STALE if now - known.at > stale_after else LinkState.MEASURED
        return LinkState.CONFIGURED if self.configured is not None else LinkState.UNMEASURED


def _sort_of(measurement: Measurement) -> str:
    """The field of ``Knowledge`` that it is for."""
    if measurement.kind is MeasurementKind.PINGPONG:
        return "failed" if measurement.error else "measured"
    return "moved" if measurement.kind is MeasurementKind.TRANSFER else "vain"


class LinkBook:
    """What is known of each pair of the configured clusters; a pair is within one cluster or between two."""

    def __init__(
        self, clusters: Iterable[ClusterName], configured: Mapping[Pair, Link], latest: Iterable[Measurement] = ()
    ) -> None:  # fmt: skip
        names = sorted(clusters)
        self._known = {
            (one, other): Knowledge(configured.get((one, other)))
            for place, one in enumerate(names)
            for other in names[place:]
        }
        self._told: dict[Pair, Measurement | None] = {}
        """By which the bandwidth is known to the scheduler and the store."""
        for measurement in latest:
            self.learn(measurement)

    def pairs(self) -> list[Pair]:
        return list(self._known)

    def __getitem__(self, pair: Pair) -> Knowledge:
        return self._known[pair]

    def learn(self, measurement: Measurement) -> None:
        """Of clusters that are not configured any more nothing is learned."""
        pair = measurement.one, measurement.other
        if pair in self._known:
            self._known[pair] = known = self._known[pair].with_(measurement)
            self._told[pair] = known.newest

    def moved(self, pair: Pair, size: int, seconds: float, now: float) -> Measurement | None:
        """Learn from a transfer of that many bytes; None where nothing is to be told and kept of it."""
        if pair not in self._known or size < SMALLEST_TRANSFER or seconds < SHORTEST_TRANSFER:
            return None
        known, told = self._known[pair], self._told.get(pair)
        bandwidth = size / seconds
        if known.newest is not None and known.newest.bandwidth is not None:
            bandwidth = SMOOTHING * bandwidth + (1 - SMOOTHING) * known.newest.bandwidth
        new = Measurement(*pair, MeasurementKind.TRANSFER, now, bandwidth=bandwidth)
        self._known[pair] = known.with_(new)
        recent = told.bandwidth if told is not None and 0 <= now - told.at < TELL_WITHIN else None
        if recent and abs(bandwidth / recent - 1) < WORTH_TELLING:
            return None
        self._told[pair] = new
        return new

    def links(self) -> dict[Pair, Link]:
        """What policies are to know at the start."""
        return {pair: known.link for pair, known in self._known.items() if known.link != Link()}
