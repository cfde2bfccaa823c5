"""The replica catalogue in memory: what the scheduler's commands and the submissions are filled in from."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from koalapy.model.replica import Replica, ReplicaState
from koalapy.model.request import ClusterName


class Catalogue:
    """Replicas by logical name and cluster; ``store`` keeps the same."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self._replicas: dict[str, dict[ClusterName, Replica]] = {}
        self._names: list[str] | None = None
        """In order, until a name comes or goes."""
        for replica in replicas:
            self.put(replica)

    def put(self, replica: Replica) -> None:
        if replica.name not in self._replicas:
            self._names = None
        self._replicas.setdefault(replica.name, {})[replica.cluster] = replica

    def remove(self, name: str, cluster: ClusterName) -> None:
        """No error when there is none."""
        there = self._replicas.get(name, {})
        there.pop(cluster, None)
        if not there and self._replicas.pop(name, None) is not None:
            self._names = None

    def get(self, name: str, cluster: ClusterName) -> Replica | None:
        return self._replicas.get(name, {}).get(cluster)

    def of(self, name: str) -> list[Replica]:
        """All replicas of a logical file, good or not, in order of cluster."""
        return [replica for _, replica in sorted(self._replicas.get(name, {}).items())]

    def sites(self, name: str) -> tuple[ClusterName, ...]:
        """The clusters that have a good replica."""
        return tuple(replica.cluster for replica in self.of(name) if replica.state is ReplicaState.GOOD)

    def names(self) -> Sequence[str]:
        """In order."""
        if self._names is None:
            self._names = sorted(self._replicas)
        return self._names

    def behind(self, name: str, cluster: ClusterName) -> Iterator[Replica]:
        """All replicas that come after one of that name and cluster, which need not be there, in the same order."""
        names = self.names()
        for index in range(bisect_left(names, name), len(names)):
            found = self.of(names[index])
            yield from (replica for replica in found if (replica.name, replica.cluster) > (name, cluster))
