"""A network in memory with given measurements."""

from collections.abc import Sequence

from koalapy.daemon.network.links import LinkTable
from koalapy.daemon.network.network import LinkRecord, MeasureReply, PendingMeasurement
from koalapy.model.cluster import ClusterPair, Link, RelayedSince, pair_of
from koalapy.model.errors import NotFoundError, UsageError
from koalapy.model.measurement import Measurement

NOW = 1000.0


class MemoryNetwork:
    """Each request for the links completes one measurement."""

    def __init__(self) -> None:
        self.table = LinkTable(("north", "south"), {})
        self.measurements: list[Measurement] = []
        self.results: dict[ClusterPair, Measurement | None] = {}
        """Result of each link that can be measured; None for a lost result."""
        self.relayed: dict[ClusterPair, RelayedSince] = {}
        self.under_way: list[ClusterPair] = []
        self.is_stalled = False
        self.measuring_job = 7
        """Id of the job that measures the first pending link."""
        self.stale_after = 3600.0

    def set_measurements(self, *measurements: Measurement, configured: dict[ClusterPair, Link] | None = None) -> None:
        self.measurements = list(measurements)
        self.table = LinkTable(("north", "south"), configured or {}, measurements)

    def current_time(self) -> float:
        return NOW

    def list_links(self) -> list[LinkRecord]:
        if self.under_way and not self.is_stalled:
            measurement = self.results[self.under_way.pop(0)]
            if measurement is not None:
                self.measurements.insert(0, measurement)
                self.table.add_measurement(measurement)
        return [self._record(pair) for pair in self.table.list_pairs()]

    def _record(self, pair: ClusterPair) -> LinkRecord:
        under_way = (
            PendingMeasurement(self.measuring_job if self.under_way.index(pair) == 0 else None)
            if pair in self.under_way
            else None
        )
        estimate = self.table[pair]
        state, link = estimate.state_at(NOW, self.stale_after), estimate.link
        return LinkRecord(pair, state, link, estimate, under_way, estimate.relayed, self.relayed.get(pair))

    async def wait_for_agents(self) -> None:
        pass

    def measure_links(
        self, clusters: Sequence[str] | None = None, pairs: Sequence[ClusterPair] | None = None
    ) -> list[MeasureReply]:
        for index, name in enumerate(clusters or ()):
            if name not in ("north", "south"):
                raise UsageError(f"clusters[{index}] is {name}", field=f"clusters[{index}]", hint="known: north, south")
        requested = [p for p in self.table.list_pairs() if clusters is None or set(p) <= set(clusters)]
        self.under_way = [pair for pair in requested if pair in self.results]
        return [
            MeasureReply(pair, reason="" if pair in self.results else f"{pair[0]} has 1 node") for pair in requested
        ]

    async def read_history(self, cluster: str, peer: str, limit: int) -> list[Measurement]:
        if peer not in ("north", "south"):
            raise NotFoundError(f"there is no cluster {peer}", field="cluster", hint="known: north, south")
        return [m for m in self.measurements if (m.one, m.other) == pair_of(cluster, peer)][:limit]
