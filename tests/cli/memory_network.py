"""A network in memory: the test says what is known of it, and what measuring finds."""

from collections.abc import Sequence

from koalapy.daemon.network.links import LinkTable
from koalapy.daemon.network.network import LinkRecord, MeasureReply, PendingMeasurement
from koalapy.model.cluster import ClusterPair, Link, pair_of
from koalapy.model.errors import NotFoundError, UsageError
from koalapy.model.measurement import Measurement

NOW = 1000.0


class MemoryNetwork:
    """Each look at the links finds one more measurement over."""

    def __init__(self) -> None:
        self.table = LinkTable(("north", "south"), {})
        self.lines: list[Measurement] = []
        self.finds: dict[ClusterPair, Measurement | None] = {}
        """What measuring finds; of other links that they cannot be measured, and None that it is lost."""
        self.under_way: list[ClusterPair] = []
        self.stands_still = False
        self.job = 7
        """That measures the first link that is under way."""
        self.stale_after = 3600.0

    def knows(self, *lines: Measurement, configured: dict[ClusterPair, Link] | None = None) -> None:
        self.lines = list(lines)
        self.table = LinkTable(("north", "south"), configured or {}, lines)

    def current_time(self) -> float:
        return NOW

    def list_links(self) -> list[LinkRecord]:
        if self.under_way and not self.stands_still:
            found = self.finds[self.under_way.pop(0)]
            if found is not None:
                self.lines.insert(0, found)
                self.table.add_measurement(found)
        return [self._record(pair) for pair in self.table.list_pairs()]

    def _record(self, pair: ClusterPair) -> LinkRecord:
        under_way = (
            PendingMeasurement(self.job if self.under_way.index(pair) == 0 else None)
            if pair in self.under_way
            else None
        )
        known = self.table[pair]
        return LinkRecord(pair, known.state_at(NOW, self.stale_after), known.link, known, under_way)

    async def wait_for_agents(self) -> None:
        pass

    def measure_links(
        self, clusters: Sequence[str] | None = None, pairs: Sequence[ClusterPair] | None = None
    ) -> list[MeasureReply]:
        for index, name in enumerate(clusters or ()):
            if name not in ("north", "south"):
                raise UsageError(f"clusters[{index}] is {name}", field=f"clusters[{index}]", hint="known: north, south")
        wanted = [p for p in self.table.list_pairs() if clusters is None or set(p) <= set(clusters)]
        self.under_way = [pair for pair in wanted if pair in self.finds]
        return [MeasureReply(pair, reason="" if pair in self.finds else f"{pair[0]} has 1 node") for pair in wanted]

    async def read_history(self, one: str, other: str, limit: int) -> list[Measurement]:
        if other not in ("north", "south"):
            raise NotFoundError(f"there is no cluster {other}", field="cluster", hint="known: north, south")
        return [line for line in self.lines if (line.one, line.other) == pair_of(one, other)][:limit]
