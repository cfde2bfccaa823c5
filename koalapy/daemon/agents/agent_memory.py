"""What agents remember and the database may not: it may have been put back from a copy that is older than they are."""

from collections.abc import Callable, Sequence

import structlog

from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.model.errors import UsageError
from koalapy.model.job import JobId
from koalapy.model.request import ClusterName
from koalapy.protocol.messages import KnownDaemon

log = structlog.get_logger()

MAX_EPOCHS_AHEAD = 1000
MAX_JOBS_AHEAD = 1_000_000
"""By how much all agents together may raise the numbers of a daemon's epoch and jobs while it lives. A copy of the
database that was put back is hardly older, and an agent that lies changes little."""
HINT = "if that is right, empty the agent's directory once nothing of it runs"


class AgentMemory:
    """Takes epoch and job numbers above what agents have seen, before anything is sent to them."""

    def __init__(self, engine: Engine, instance: str, life: str) -> None:
        self._engine = engine
        self._instance, self._life = instance, life
        self._max_epoch = engine.epoch + MAX_EPOCHS_AHEAD
        self._heard: set[ClusterName] = set()
        self._yielded: set[ClusterName] = set()
        """Clusters for which the epoch was raised: each needs that once."""
        self.number_above: Callable[[JobId], bool] = lambda job: True
        """Has new jobs get numbers above one; False when that is too far."""

    async def outgrow(self, cluster: ClusterName, known_daemons: Sequence[KnownDaemon]) -> None:
        """Be later than all that an agent knows of us; ``UsageError`` when it cannot know that."""
        known = next((known for known in known_daemons if known.instance == self._instance), None)
        first = cluster not in self._heard
        self._heard.add(cluster)
        if known is None:
            return
        if known.epoch > self._engine.epoch or (known.epoch == self._engine.epoch and known.life != self._life):
            await self._raise(cluster, known.epoch)
        # Later on it can know of none but those that we have numbered.
        if first and not self.number_above(known.job):
            raise UsageError(f"the agent of {cluster} tells of job {known.job}, far above any of ours: {HINT}")

    async def _raise(self, cluster: ClusterName, epoch: int) -> None:
        own = self._engine.epoch
        if cluster in self._yielded or epoch > self._max_epoch:
            raise UsageError(f"the agent of {cluster} tells of epoch {epoch} and ours is {own}: {HINT}")
        self._yielded.add(cluster)
        log.warning(
            "the database is older than what agents know of it: it was put back from a copy",
            action="database-restored",
            cluster=cluster,
            epoch=own,
            known=epoch,
        )
        await self._engine.commit(WorkItem(epoch=epoch + 1))
