"""What is known of the links between clusters: configured, measured, learned from transfers, found unreachable."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from koalapy.model.cluster import ClusterPair, Link, pair_of
from koalapy.model.measurement import MAX_PINGPONGS, Measurement, MeasurementKind
from koalapy.model.request import ClusterName

MAX_TRANSFER_WEIGHT = 20.0
"""Seconds of transfers for which what is known of a bandwidth counts at most against further ones."""
PINGPONG_WEIGHT = 10.0
"""Seconds of transfers for which ping-pongs count."""
MAX_NEW_SHARE = 0.5
"""What one transfer counts at most, as a fraction of what is known, or of ping-pongs where that is more."""
MAX_RISE = 4.0
"""By which one transfer raises at most what counts as ping-pongs do, or for more."""
MIN_CHANGE = 0.05
"""Fraction by which transfers must have changed a bandwidth before that is told and kept."""
REPORT_INTERVAL = 600.0
"""Seconds after which a transfer is told and kept even if it has changed little."""
MIN_TRANSFER_SECONDS = 0.05
"""Seconds; of shorter ones hardly anything was measured."""
MIN_TRANSFER_SIZE = 4 * 1000 * 1000
"""Bytes; smaller ones say more of buffers than of the link."""


class LinkState(StrEnum):
    """How much is to be made of what is known of a link."""

    MEASURED = "measured"
    STALE = "stale"
    """Measured long ago; used all the same."""
    CONFIGURED = "configured"
    UNREACHABLE = "unreachable"
    """The last ping-pong found that the nodes do not reach each other."""
    UNMEASURED = "unmeasured"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The configured link and the newest measurements of each sort, since its nodes last could not reach each other."""

    configured: Link | None = None
    pingpongs: tuple[Measurement, ...] = ()
    """The newest that went well, the oldest first."""
    failed: Measurement | None = None
    """The newest whose nodes could not reach each other."""
    moved: Measurement | None = None
    """The newest transfer from the first cluster to the second."""
    moved_back: Measurement | None = None
    inconclusive: Measurement | None = None
    """The newest ping-pong that came to nothing."""

    order: tuple[Measurement, ...] = ()
    """The same from the oldest to the newest, as they were learned: clocks may have been set back in between."""

    def with_(self, new: Measurement) -> "Knowledge":
        if new.kind is MeasurementKind.TRANSFER:
            if self.unreachable:
                return self  # It went between the heads, and says nothing of the nodes.
            back = new.one > new.other
            known = replace(self, moved_back=new) if back else replace(self, moved=new)
        elif new.kind is MeasurementKind.INCONCLUSIVE:
            known = replace(self, inconclusive=new)
        elif new.error:
            known = replace(self, failed=new, pingpongs=(), moved=None, moved_back=None)
        else:
            known = replace(self, pingpongs=(*self.pingpongs, new)[-MAX_PINGPONGS:])._without_old_transfers()
        kept = (*known.pingpongs, known.failed, known.moved, known.moved_back, known.inconclusive)
        order = tuple(found for found in (*self.order, new) if any(found is one for one in kept))
        return replace(known, order=order)

    def _without_old_transfers(self) -> "Knowledge":
        """Without those that so many ping-pongs have followed that they count no more, and no store gives back."""
        if len(self.pingpongs) < MAX_PINGPONGS:
            return self
        first = self.pingpongs[0]
        moved, back = (one if self._last(first, one) is one else None for one in (self.moved, self.moved_back))
        return replace(self, moved=moved, moved_back=back)

    def _last(self, *found: Measurement | None) -> Measurement | None:
        """Which of these was learned last."""
        return next((each for each in reversed(self.order) if any(each is one for one in found)), None)

    @property
    def measured(self) -> Measurement | None:
        """The newest ping-pong that went well."""
        return self.pingpongs[-1] if self.pingpongs else None

    @property
    def unreachable(self) -> bool:
        return self.failed is not None and self._last(self.failed, self.measured) is self.failed

    @property
    def newest(self) -> Measurement | None:
        """The newest that has a bandwidth."""
        return self._last(self.measured, self.moved, self.moved_back)

    @property
    def link(self) -> Link:
        """What policies go by, from the first cluster to the second: what was measured before what is configured, and
        nothing of what is unreachable."""
        return self._way(back=False)

    @property
    def link_back(self) -> Link:
        """The same from the second to the first."""
        return self._way(back=True)

    def _way(self, *, back: bool) -> Link:
        if self.unreachable:
            return Link(unreachable=True)
        configured = self.configured or Link()
        latencies = [each.latency for each in self.pingpongs if each.latency is not None]
        latency = median(latencies) if latencies else configured.latency
        bandwidth = self.bandwidth(back=back)
        return Link(latency, configured.bandwidth if bandwidth is None else bandwidth)

    def bandwidth(self, *, back: bool) -> float | None:
        """What was measured of one way, or else of the other; None where nothing was.

        Transfers carry on what ping-pongs have found. Of ping-pongs after them the middle counts, of the last three
        and what transfers had come to before these: one that is far from all others does not, two that agree do.
        """
        moved, other = (self.moved_back, self.moved) if back else (self.moved, self.moved_back)
        if moved is None and self.measured is None:
            moved = other
        if moved is not None and self._last(self.measured, moved) is moved:
            return moved.bandwidth
        newest = [each for each in self.order if each is moved or any(each is one for one in self.pingpongs)]
        found = [each.back if back and each.back is not None else each.bandwidth for each in newest[-MAX_PINGPONGS:]]
        known = [each for each in found if each is not None]
        return median(known) if known else None

    @property
    def tried(self) -> Measurement | None:
        """The newest ping-pong, whatever came of it."""
        return self._last(self.measured, self.failed, self.inconclusive)

    @property
    def tried_at(self) -> float | None:
        return self.tried.at if self.tried else None

    @property
    def error(self) -> str:
        """Why it is unreachable, or why the last try came to nothing; empty when the last went well."""
        if self.inconclusive is not None and self.tried is self.inconclusive:
            return self.inconclusive.error
        return self.failed.error if self.unreachable and self.failed else ""

    def state(self, now: float, stale_after: float) -> LinkState:
        if self.unreachable:
            return LinkState.UNREACHABLE
        # A transfer says nothing of the latency: beside it, an old ping-pong is no newer.
        known = self.measured or self._last(self.moved, self.moved_back)
        if known is not None:
            return LinkState.STALE if now - known.at > stale_after else LinkState.MEASURED
        return LinkState.CONFIGURED if self.configured is not None else LinkState.UNMEASURED


def _mean(before: float | None, counts: float, found: float, weight: float) -> float:
    """Of a bandwidth that is known, if one is, and one that a transfer had, each for what it counts."""
    if before is None:
        return found
    mean = (found * weight + before * counts) / (weight + counts)
    return min(mean, MAX_RISE * before) if counts >= PINGPONG_WEIGHT else mean


class LinkTable:
    """What is known of each pair of the configured clusters; a pair is within one cluster or between two."""

    def __init__(
        self,
        clusters: Iterable[ClusterName],
        configured: Mapping[ClusterPair, Link],
        latest: Iterable[Measurement] = (),
    ) -> None:
        names = sorted(clusters)
        self._known = {
            (one, other): Knowledge(configured.get((one, other)))
            for place, one in enumerate(names)
            for other in names[place:]
        }
        self._told: dict[ClusterPair, Measurement] = {}
        """By which the bandwidth of one way is known to the scheduler and the store."""
        self._counts: dict[ClusterPair, float] = {}
        """Seconds of transfers for which what is known of one way counts."""
        for measurement in latest:
            self.learn(measurement)

    def pairs(self) -> list[ClusterPair]:
        return list(self._known)

    def __getitem__(self, pair: ClusterPair) -> Knowledge:
        return self._known[pair]

    def learn(self, measurement: Measurement) -> None:
        """Of clusters that are not configured any more nothing is learned."""
        one, other = measurement.one, measurement.other
        pair = pair_of(one, other)
        if pair not in self._known:
            return
        self._known[pair] = self._known[pair].with_(measurement)
        if measurement.kind is MeasurementKind.TRANSFER:
            self._told[one, other], self._counts[one, other] = measurement, MAX_TRANSFER_WEIGHT
        elif measurement.kind is MeasurementKind.PINGPONG:
            for way in ((one, other), (other, one)):
                self._told[way], self._counts[way] = measurement, PINGPONG_WEIGHT

    def moved(self, way: ClusterPair, size: int, seconds: float, now: float) -> Measurement | None:
        """Learn from a transfer of that many bytes, from the first cluster to the second; None where nothing is to be
        told and kept of it. The longer it took, the more it counts, up to a bound."""
        pair = pair_of(*way)
        if pair not in self._known or size < MIN_TRANSFER_SIZE or seconds < MIN_TRANSFER_SECONDS:
            return None
        known, back = self._known[pair], way != pair
        if known.unreachable:
            return None
        before, counts = known.bandwidth(back=back), self._counts.get(way, 0.0)
        weight = min(seconds, MAX_NEW_SHARE * max(counts, PINGPONG_WEIGHT))
        bandwidth = _mean(before, counts, size / seconds, weight)
        self._counts[way] = min(MAX_TRANSFER_WEIGHT, counts + weight)
        new = Measurement(*way, MeasurementKind.TRANSFER, now, bandwidth=bandwidth)
        told = self._told.get(way)
        told_bandwidth = None if told is None else told.back if back and told.back is not None else told.bandwidth
        recent = told_bandwidth if told is not None and 0 <= now - told.at < REPORT_INTERVAL else None
        self._known[pair] = known.with_(new)
        if recent and abs(bandwidth / recent - 1) < MIN_CHANGE:
            return None
        self._told[way] = new
        return new

    def links(self) -> dict[ClusterPair, Link]:
        """What policies are to know at the start."""
        found = {pair: known.link for pair, known in self._known.items() if known.link != Link()}
        back = {pair[::-1]: known.link_back for pair, known in self._known.items() if known.link_back != known.link}
        return found | back
