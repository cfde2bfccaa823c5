"""Throws away what nobody needs any more: old bundles, and old results where the configuration says so."""

import structlog

from koalapy.model.errors import StoreUnavailable
from koalapy.service.bundles import Bundles
from koalapy.service.engine import Engine
from koalapy.service.results import Results

log = structlog.get_logger()

INTERVAL = 600.0
"""Seconds."""


class Housekeeping:
    """One round at a time; what a round does not get done, the next one does."""

    def __init__(self, engine: Engine, bundles: Bundles, results: Results, results_keep: float | None) -> None:
        self._engine = engine
        self._bundles = bundles
        self._results = results
        self._results_keep = results_keep

    async def tidy(self) -> None:
        needed = {job.spec.bundle.id for job in self._engine.scheduler.jobs() if job.spec.bundle}
        try:
            bundles = await self._bundles.tidy(needed)
            keep = self._results_keep
            jobs = [] if keep is None else await self._results.tidy(self._engine.clock() - keep)
        except (StoreUnavailable, OSError) as error:
            log.error("old files were not removed", action="tidy", error=str(error))
            return
        if bundles or jobs:
            log.info("old files were removed", action="tidy", bundles=len(bundles), results_of=jobs)
