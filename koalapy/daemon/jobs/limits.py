"""What users and groups may have, and what they have of it, for those who ask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.results import Results
from koalapy.model.limits import NAMES, Limits, Scope
from koalapy.scheduler.owner_use import OwnerUse


@dataclass(frozen=True, slots=True)
class LimitInUse:
    """One limit; ``used`` is None of what is not added up, as requests."""

    name: str
    limit: float
    used: float | None


@dataclass(frozen=True, slots=True)
class ScopeInUse:
    """The limits of a user, or of a group of which he is."""

    kind: str
    name: str
    limits: Sequence[LimitInUse]


class LimitsInUse:
    """Asks those who count."""

    def __init__(self, use: OwnerUse, bundles: Bundles, results: Results, clock: Callable[[], float]) -> None:
        self._use, self._bundles, self._results, self._clock = use, bundles, results, clock
        self.limits: Limits = use.limits

    async def of(self, user: str) -> Sequence[ScopeInUse]:
        return [await self._in_use(scope) for scope in self.limits.scopes(user)]

    async def _in_use(self, scope: Scope) -> ScopeInUse:
        used: dict[str, float] = {**self._use.used(scope, self._clock())}
        used["bundle_bytes"] = self._bundles.size_of(scope)
        if scope.limits.result_bytes is not None:
            used["result_bytes"] = await self._results.size_of(scope)
        found = [(name, getattr(scope.limits, name)) for name in NAMES]
        limits = [LimitInUse(name, limit, used.get(name)) for name, limit in found if limit is not None]
        return ScopeInUse(*scope.key, limits)
