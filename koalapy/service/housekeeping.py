"""Throws away what nobody needs any more: old bundles, old jobs, and old results where the configuration says so."""

from collections.abc import Callable

import structlog

from koalapy.model.errors import LeaseLost, StoreUnavailable
from koalapy.service.bundles import Bundles
from koalapy.service.results import Results
from koalapy.service.retention import Retention

log = structlog.get_logger()

INTERVAL = 600.0
"""Seconds."""


class Housekeeping:
    """One round at a time; what a round does not get done, the next one does."""

    def __init__(
        self,
        bundles: Bundles,
        results: Results,
        retention: Retention,
        results_keep: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._bundles = bundles
        self._results = results
        self._retention = retention
        self._results_keep = results_keep
        self._clock = clock

    async def tidy(self) -> None:
        keep = self._results_keep
        try:
            bundles = await self._bundles.tidy()
            results = await self._results.tidy(None if keep is None else self._clock() - keep)
            jobs = await self._retention.tidy()
        except (StoreUnavailable, LeaseLost, OSError) as error:
            log.error("not all that is old was removed", action="tidy", error=str(error))
            return
        if bundles or results or jobs:
            log.info("what was old is removed", action="tidy", bundles=len(bundles), results_of=results, jobs=jobs)
