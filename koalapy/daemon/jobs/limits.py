"""What users and groups may have, and what they have of it, for those who ask."""

from collections.abc import Sequence
from dataclasses import dataclass

from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.results import Results
from koalapy.model.limits import NAMES, Limits, Scope


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

    def __init__(self, engine: Engine, bundles: Bundles, results: Results) -> None:
        self._engine, self._bundles, self._results = engine, bundles, results

    @property
    def limits(self) -> Limits:
        return self._engine.queries.owner_use.limits

    async def of(self, user: str) -> Sequence[ScopeInUse]:
        return [await self._in_use(scope) for scope in self.limits.scopes(user)]

    async def _in_use(self, scope: Scope) -> ScopeInUse:
        used: dict[str, float] = {**self._engine.queries.owner_use.used(scope, self._engine.clock())}
        used["bundle_bytes"] = self._bundles.size_of(scope)
        if scope.limits.result_bytes is not None:
            used["result_bytes"] = await self._results.size_of(scope)
        found = [(name, getattr(scope.limits, name)) for name in NAMES]
        limits = [LimitInUse(name, limit, used.get(name)) for name, limit in found if limit is not None]
        return ScopeInUse(*scope.key, limits)
