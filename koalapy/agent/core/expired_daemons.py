"""What becomes of components and stages whose daemon is never heard of again, as after its database was wiped.

Their folders would stay for ever, and runners that wait at the barrier would hold their nodes: nobody else may let them
go. A program that runs is let run; what it had is removed after its end.
"""

import asyncio
import contextlib

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.core.lrm_jobs import LrmJobs
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.spool import Spool
from koalapy.agent.transfers.service import FileService

log = structlog.get_logger()


class ExpiredDaemons:
    """Removes what is left of a daemon that has been silent for ``after`` seconds while there is another."""

    def __init__(
        self, spool: Spool, reporter: Reporter, jobs: LrmJobs, files: FileService, after: float, check_interval_s: float
    ) -> None:
        self._spool, self._reporter, self._jobs, self._files = spool, reporter, jobs, files
        self._after, self._check_interval_s = after, check_interval_s

    async def watch(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._check_interval_s)
            try:
                self.remove()
            except OSError as error:
                log.warning(
                    "what is left of a daemon cannot be removed", action="daemon-not-forgotten", reason=str(error)
                )

    def heard(self) -> None:
        """The daemon has spoken. Where that cannot be noted we forget none too early: it is the present one."""
        with contextlib.suppress(OSError):
            self._spool.heard(self._reporter.instance)

    def remove(self) -> None:
        """What is left of who was silent for too long; never of the daemon that spoke last, however long ago."""
        present = self._reporter.instance
        if not present:
            return
        if self._reporter.uplink.online.is_set():
            self.heard()
        known = {component.instance for component in self._reporter.components.values()}
        for instance in (known | self._files.stages.instances()) - {present}:
            if self._spool.silence(instance) > self._after:
                self._remove(instance)

    def _remove(self, instance: str) -> None:
        log.warning("what is left of a daemon is removed", action="daemon-forgotten", instance=instance)
        own = [component for component in self._reporter.components.values() if component.instance == instance]
        for component in own:
            if component.ended:
                self._files.collector.give_up(component)
                del self._reporter.components[component.name]
                component.folder.remove()
                self._jobs.forget(component)
            elif component.plan is None and component.stop is None:
                self._end(component)
        self._files.stages.abandon(instance)

    def _end(self, component: Component) -> None:
        component.stop = "its daemon has not been heard of for too long"
        self._jobs.end(component)
        component.folder.note(stop=component.stop)
