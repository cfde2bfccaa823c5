"""The weights of users in fair share: the configuration gives the default, operators may set others."""

from collections.abc import Iterable
from dataclasses import replace

from koalapy.daemon.engine.database import run_in_database
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.errors import ConflictError
from koalapy.model.identity import Identity
from koalapy.model.limits import FairShareSettings, ShareWeight
from koalapy.scheduler.events import WeightChanged
from koalapy.store.service_tables import ShareWeightStore


def merge_weights(configured: FairShareSettings, stored: Iterable[ShareWeight]) -> FairShareSettings:
    """Return the configured weights with those that operators have set."""
    set_weights = {entry.user: entry.weight for entry in stored if entry.weight is not None}
    return replace(configured, users=configured.users | set_weights)


class ShareWeights:
    """Sets the weights of users. It stores each before the scheduler uses it."""

    def __init__(self, engine: Engine, store: ShareWeightStore, configured: FairShareSettings) -> None:
        self._engine, self._store, self._configured = engine, store, configured
        self.by_user = {entry.user: entry for entry in store.load() if entry.weight is not None}
        """The weights that operators have set."""

    def configured_weight(self, user: str) -> float:
        return self._configured.users.get(user, 1.0)

    async def set_weight(self, user: str, weight: float | None, reason: str, caller: Identity) -> None:
        """Set the weight of a user; None: as configured. Raise ``ConflictError`` without fair shares."""
        if self._engine.queries.owner_use.shares is None:
            hint = "set rules.queue_order to fair-share in the daemon's configuration"
            raise ConflictError("waiting jobs are not ordered by fair share, so that weights have no effect", hint=hint)
        configured = self.configured_weight(user)
        new = f"{configured:g}, as configured" if weight is None else f"{weight:g}"
        describe_request(f"user {user}", f"weight {new}: {reason}")
        changed = ShareWeight(user, weight, caller.user, reason, self._engine.clock())
        await run_in_database(self._store.save, changed)
        self.by_user.pop(user, None)
        if weight is not None:
            self.by_user[user] = changed
        await self._engine.commit(WorkItem(events=(WeightChanged(user, configured if weight is None else weight),)))
