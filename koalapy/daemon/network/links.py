"""Decide latency and bandwidth of the links between clusters by configuration, ping-pongs and transfers of files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from statistics import median

from koalapy.model.cluster import ClusterPair, Link, pair_of
from koalapy.model.measurement import MAX_PINGPONGS, Measurement, MeasurementKind
from koalapy.model.request import ClusterName

MAX_TRANSFER_WEIGHT = 20.0
"""Seconds of transfers; the largest weight of a known bandwidth against a new transfer."""
PINGPONG_WEIGHT = 10.0
"""Seconds of transfers that weigh as much as ping-pongs."""
MAX_NEW_SHARE = 0.5
"""Largest weight of one transfer, as a fraction of the weight of the known bandwidth or of ping-pongs."""
MAX_RISE = 4.0
"""Largest factor by which one transfer raises a bandwidth that weighs as much as ping-pongs, or more."""
MIN_CHANGE = 0.05
"""Fraction by which transfers must change a bandwidth before it is reported and stored."""
REPORT_INTERVAL = 600.0
"""Seconds after which a transfer is reported and stored even if the bandwidth has changed little."""
MIN_TRANSFER_SECONDS = 0.05
"""Seconds; shorter transfers are ignored as too imprecise."""
MIN_TRANSFER_SIZE = 4 * 1000 * 1000
"""Bytes; smaller transfers measure buffers rather than the link."""


class LinkState(StrEnum):
    """The reliability of a link's values."""

    MEASURED = "measured"
    STALE = "stale"
    """Measured long ago, and used until it is measured again."""
    CONFIGURED = "configured"
    UNREACHABLE = "unreachable"
    """In the last ping-pong, the nodes could not reach each other."""
    UNMEASURED = "unmeasured"


@dataclass(frozen=True)
class LinkMeasurements:
    """The configured values and the newest measurements of a link, since its nodes last could not reach each other."""

    configured: Link | None = None
    pingpongs: tuple[Measurement, ...] = ()
    """The newest successful ping-pongs, oldest first."""
    failed: Measurement | None = None
    """The newest ping-pong in which the nodes could not reach each other."""
    moved: Measurement | None = None
    """The newest transfer from the first cluster to the second."""
    moved_back: Measurement | None = None
    inconclusive: Measurement | None = None
    """The newest ping-pong without a result."""

    order: tuple[Measurement, ...] = ()
    """The same measurements in the order of arrival, which differs from ``at`` if the clock was set back."""

    def with_measurement(self, new: Measurement) -> "LinkMeasurements":
        """Return the measurements with a new one in addition, without those that it makes obsolete."""
        if new.kind is MeasurementKind.TRANSFER:
            if self.unreachable or self.relayed:
                return self  # Transfers run between head nodes and say nothing about the compute nodes.
            updated = replace(self, moved_back=new) if new.one > new.other else replace(self, moved=new)
        elif new.kind is MeasurementKind.INCONCLUSIVE:
            updated = replace(self, inconclusive=new)
        elif new.error:
            updated = replace(self, failed=new, pingpongs=(), moved=None, moved_back=None)
        else:
            similar = [pingpong for pingpong in self.pingpongs if pingpong.kind is new.kind]
            updated = replace(self, pingpongs=(*similar, new)[-MAX_PINGPONGS:])
            if new.kind is MeasurementKind.RELAYED:
                updated = replace(updated, moved=None, moved_back=None)
            if len(updated.pingpongs) == MAX_PINGPONGS:  # Older transfers no longer count, and no store returns them.
                first = updated.pingpongs[0]
                moved = self.moved if self._last_of(first, self.moved) is self.moved else None
                back = self.moved_back if self._last_of(first, self.moved_back) is self.moved_back else None
                updated = replace(updated, moved=moved, moved_back=back)
        newest = (*updated.pingpongs, updated.failed, updated.moved, updated.moved_back, updated.inconclusive)
        order = tuple(measurement for measurement in (*self.order, new) if _contains_identical(newest, measurement))
        return replace(updated, order=order)

    def _last_of(self, *measurements: Measurement | None) -> Measurement | None:
        """Return the last of these in the order of arrival."""
        return next((entry for entry in reversed(self.order) if _contains_identical(measurements, entry)), None)

    @property
    def measured(self) -> Measurement | None:
        """The newest successful ping-pong."""
        return self.pingpongs[-1] if self.pingpongs else None

    @property
    def unreachable(self) -> bool:
        return self.failed is not None and self._last_of(self.failed, self.measured) is self.failed

    @property
    def relayed(self) -> bool:
        """Return whether the messages of the newest ping-pong went over relays."""
        return not self.unreachable and self.measured is not None and self.measured.kind is MeasurementKind.RELAYED

    @property
    def newest(self) -> Measurement | None:
        """The newest measurement with a bandwidth."""
        return self._last_of(self.measured, self.moved, self.moved_back)

    @cached_property
    def link(self) -> Link:
        """The link from the first cluster to the second as policies use it.

        Measured values take precedence over configured ones. An unreachable link has no values.
        """
        return self._link_in_direction(back=False)

    @cached_property
    def link_back(self) -> Link:
        """The link from the second cluster to the first as policies use it."""
        return self._link_in_direction(back=True)

    def _link_in_direction(self, *, back: bool) -> Link:
        """Return the link in one direction as policies use it: measured values, else the configured ones."""
        if self.unreachable:
            return Link(unreachable=True)
        configured = self.configured or Link()
        latencies = [pingpong.latency for pingpong in self.pingpongs if pingpong.latency is not None]
        latency = median(latencies) if latencies else configured.latency
        bandwidth = self.measured_bandwidth(back=back)
        bandwidth = configured.bandwidth if bandwidth is None else bandwidth
        is_direct = self.measured is not None and not self.relayed
        return Link(latency, bandwidth, relayed=self.relayed, direct=is_direct)

    def measured_bandwidth(self, *, back: bool) -> float | None:
        """Return the measured bandwidth in one direction, or else in the opposite one; None without measurements.

        A transfer after the last ping-pong includes the bandwidths before it, so only its bandwidth counts. After a
        ping-pong, the median of the last three values counts, transfers included, so that a single outlier does not.
        """
        transfer, opposite = (self.moved_back, self.moved) if back else (self.moved, self.moved_back)
        if transfer is None and self.measured is None:
            transfer = opposite
        if transfer is not None and self._last_of(self.measured, transfer) is transfer:
            return transfer.bandwidth
        counted = [entry for entry in self.order if entry is transfer or _contains_identical(self.pingpongs, entry)]
        values = [m.back if back and m.back is not None else m.bandwidth for m in counted[-MAX_PINGPONGS:]]
        bandwidths = [value for value in values if value is not None]
        return median(bandwidths) if bandwidths else None

    @property
    def tried(self) -> Measurement | None:
        """The newest ping-pong, successful or not."""
        return self._last_of(self.measured, self.failed, self.inconclusive)

    @property
    def tried_at(self) -> float | None:
        return self.tried.at if self.tried else None

    @property
    def error(self) -> str:
        """Why the link is unreachable or the last ping-pong has no result; empty if the last one succeeded."""
        if self.inconclusive is not None and self.tried is self.inconclusive:
            return self.inconclusive.error
        return self.failed.error if self.unreachable and self.failed else ""

    def state_at(self, now: float, stale_after: float) -> LinkState:
        """Return whether a link was measured, and whether that is more than ``stale_after`` seconds ago."""
        if self.unreachable:
            return LinkState.UNREACHABLE
        # A transfer measures no latency, so it does not renew an old ping-pong.
        latest = self.measured or self._last_of(self.moved, self.moved_back)
        if latest is not None:
            return LinkState.STALE if now - latest.at > stale_after else LinkState.MEASURED
        return LinkState.CONFIGURED if self.configured is not None else LinkState.UNMEASURED


def _contains_identical(measurements: Iterable[Measurement | None], sought: Measurement) -> bool:
    """Compare by identity, since two measurements may have equal values."""
    return any(measurement is sought for measurement in measurements)


class LinkTable:
    """The measurements of each pair of configured clusters; a pair is within one cluster or between two."""

    def __init__(
        self,
        clusters: Iterable[ClusterName],
        configured: Mapping[ClusterPair, Link],
        latest: Iterable[Measurement] = (),
    ) -> None:
        self.clusters = sorted(clusters)
        self._measurements = {
            (first, second): LinkMeasurements(configured.get((first, second)))
            for index, first in enumerate(self.clusters)
            for second in self.clusters[index:]
        }
        self.known_pairs = self._measurements.keys() & configured.keys()
        """The pairs with configured values or a measurement."""
        self._reported: dict[ClusterPair, Measurement] = {}
        """By direction: the last measurement that the scheduler and the store have received."""
        self._weights: dict[ClusterPair, float] = {}
        """By direction: the weight of the known bandwidth, in seconds of transfers."""
        for measurement in latest:
            self.add_measurement(measurement)

    def list_pairs(self) -> list[ClusterPair]:
        return list(self._measurements)

    def __getitem__(self, pair: ClusterPair) -> LinkMeasurements:
        return self._measurements[pair]

    def add_measurement(self, measurement: Measurement) -> None:
        """Add a measurement; ignore one of a cluster that is not configured."""
        source, target = measurement.one, measurement.other
        pair = pair_of(source, target)
        if pair not in self._measurements:
            return
        self._measurements[pair] = self._measurements[pair].with_measurement(measurement)
        self.known_pairs.add(pair)
        if measurement.kind is MeasurementKind.TRANSFER:
            self._reported[source, target], self._weights[source, target] = measurement, MAX_TRANSFER_WEIGHT
        elif measurement.kind in (MeasurementKind.PINGPONG, MeasurementKind.RELAYED):
            for direction in ((source, target), (target, source)):
                self._reported[direction], self._weights[direction] = measurement, PINGPONG_WEIGHT

    def learn_transfer(self, direction: ClusterPair, size: int, seconds: float, now: float) -> Measurement | None:
        """Average the bandwidth of a transfer of ``size`` bytes with the known one.

        A longer transfer weighs more, up to a bound. Return the new measurement if it is to be reported and stored.
        """
        pair = pair_of(*direction)
        if pair not in self._measurements or size < MIN_TRANSFER_SIZE or seconds < MIN_TRANSFER_SECONDS:
            return None
        measurements, back = self._measurements[pair], direction != pair
        if measurements.unreachable or measurements.relayed:
            return None
        previous, previous_weight = measurements.measured_bandwidth(back=back), self._weights.get(direction, 0.0)
        weight = min(seconds, MAX_NEW_SHARE * max(previous_weight, PINGPONG_WEIGHT))
        bandwidth = size / seconds
        if previous is not None:
            bandwidth = (bandwidth * weight + previous * previous_weight) / (weight + previous_weight)
            if previous_weight >= PINGPONG_WEIGHT:
                bandwidth = min(bandwidth, MAX_RISE * previous)
        self._weights[direction] = min(MAX_TRANSFER_WEIGHT, previous_weight + weight)
        new = Measurement(*direction, MeasurementKind.TRANSFER, now, bandwidth=bandwidth)
        self._measurements[pair] = measurements.with_measurement(new)
        self.known_pairs.add(pair)
        last = self._reported.get(direction)
        if last is not None and 0 <= now - last.at < REPORT_INTERVAL:
            last_bandwidth = last.back if back and last.back is not None else last.bandwidth
            if last_bandwidth and abs(bandwidth / last_bandwidth - 1) < MIN_CHANGE:
                return None
        self._reported[direction] = new
        return new

    def known_links(self) -> dict[ClusterPair, Link]:
        """Return the links with known values, by direction; the opposite direction only if it differs."""
        forward = {pair: m.link for pair, m in self._measurements.items() if m.link != Link()}
        back = {pair[::-1]: m.link_back for pair, m in self._measurements.items() if m.link_back != m.link}
        return forward | back
