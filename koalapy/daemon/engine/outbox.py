"""Commands that are written and not yet acknowledged, by cluster, in order."""

from collections import Counter
from collections.abc import Iterable, Sequence

from koalapy.model.job import Token
from koalapy.model.request import ClusterName
from koalapy.ports import OutboxEntry


class Outbox:
    """The memory of the outbox table: what must be sent again when a cluster's agent comes back."""

    def __init__(self, entries: Iterable[OutboxEntry], epoch: int) -> None:
        self._entries: dict[int, OutboxEntry] = {}
        self._open: Counter[ClusterName] = Counter()
        self.add(entries)
        self._next = max(self._entries, default=0) + 1
        self.outgrow(epoch)

    def outgrow(self, epoch: int) -> None:
        """Ids rise over all epochs, so that an acknowledgement can never be taken for that of another command."""
        self._next = max(self._next, epoch * 10**9)

    def new_id(self) -> int:
        self._next += 1
        return self._next

    def add(self, entries: Iterable[OutboxEntry]) -> None:
        for entry in entries:
            self._entries[entry.id] = entry
            self._open[entry.cluster] += 1

    def open(self, cluster: ClusterName) -> int:
        """How many commands a cluster has not acknowledged."""
        return self._open[cluster]

    def acknowledge(self, cluster: ClusterName, ident: int) -> bool:
        """Whether the command was still open, and that cluster's to carry out."""
        known = self._entries.get(ident)
        if known is None or known.cluster != cluster:
            return False
        del self._entries[ident]
        self._open[cluster] -= 1
        return True

    def of(self, cluster: ClusterName, epoch: int) -> Sequence[dict[str, object]]:
        """What a cluster has not acknowledged, as messages of today's epoch: first what ends other components."""
        submitted = self.undelivered_submits(cluster)
        own = [entry for entry in self._entries.values() if entry.cluster == cluster]
        own.sort(key=lambda entry: entry.kind != "stop" or entry.token in submitted)
        return [entry.payload | {"epoch": epoch} for entry in own]

    def undelivered_submits(self, cluster: ClusterName) -> frozenset[Token]:
        entries = self._entries.values()
        return frozenset(e.token for e in entries if e.cluster == cluster and e.kind == "submit")
