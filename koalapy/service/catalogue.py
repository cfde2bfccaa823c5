"""The replica catalogue in memory: what the scheduler's commands and the submissions are filled in from."""

from collections.abc import Iterable

from koalapy.model.replica import Replica, ReplicaState
from koalapy.model.request import ClusterName


class Catalogue:
    """Replicas by logical name and cluster; ``store`` keeps the same."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self._replicas: dict[str, dict[ClusterName, Replica]] = {}
        for replica in replicas:
            self.put(replica)

    def put(self, replica: Replica) -> None:
        self._replicas.setdefault(replica.name, {})[replica.cluster] = replica

    def remove(self, name: str, cluster: ClusterName) -> None:
        """No error when there is none."""
        there = self._replicas.get(name, {})
        there.pop(cluster, None)
        if not there:
            self._replicas.pop(name, None)

    def get(self, name: str, cluster: ClusterName) -> Replica | None:
        return self._replicas.get(name, {}).get(cluster)

    def of(self, name: str) -> list[Replica]:
        """All replicas of a logical file, good or not, in order of cluster."""
        return [replica for _, replica in sorted(self._replicas.get(name, {}).items())]

    def sites(self, name: str) -> tuple[ClusterName, ...]:
        """The clusters that have a good replica."""
        return tuple(replica.cluster for replica in self.of(name) if replica.state is ReplicaState.GOOD)

    def names(self) -> list[str]:
        return sorted(self._replicas)
