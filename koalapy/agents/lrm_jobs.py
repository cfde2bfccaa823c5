"""A cluster's resource manager, as far as the agent uses it: hands in runners, ends them, and watches."""

import asyncio
import time
from collections.abc import Callable, Coroutine

import structlog

from koalapy.agents.component import Component
from koalapy.agents.lrm.port import Lrm, LrmSnapshot, LrmSubmission
from koalapy.agents.reporter import Reporter
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable

log = structlog.get_logger()

REPORT_EVERY = 10.0
POLL_INTERVAL = 5.0
"""Seconds between two questions that a resource manager asks by itself where it is not told of changes."""
SOON = 0.1
"""Seconds until we look for the end of a component whose runners are gone; each further look waits twice as long."""
SHARE = 4
"""How many times as long as a look took, we wait at least until the next such one."""
LONGEST_PAUSE = 10.0
"""Seconds between two tries to open the resource manager, at most."""
LOOK_PAUSE = 0.02
"""Seconds between two looks at least, so that a burst of changes costs one."""
SUBMIT_TRIES = 5
STOP_PATIENCE = 5.0
"""Seconds that runners have to end by themselves before the resource manager is asked to end them."""


class LrmJobs:
    """The jobs we have in the resource manager."""

    def __init__(
        self, lrm: Lrm, reporter: Reporter, submission: Callable[[Component], LrmSubmission],
        poll_interval: float = POLL_INTERVAL,
    ) -> None:  # fmt: skip
        self._lrm, self._reporter, self._submission = lrm, reporter, submission
        self.problem = ""
        """Why the resource manager cannot be asked, in one line; empty when it can."""
        self._poll_interval = poll_interval
        self._opened = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelling: set[str] = set()
        self._look = asyncio.Event()
        self._looked = asyncio.Event()
        self._last: LrmSnapshot | None = None
        self._took = 0.0
        """Seconds of the last look."""
        self._looks = 0
        """How many have begun."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        """Who waits for the end of a look of that number or a later one."""
        self._ending: set[str] = set()
        self._soon = self._soon_at = 0.0

    async def snapshot(self) -> LrmSnapshot:
        """The last look; waits for the first."""
        await self._looked.wait()
        assert self._last is not None
        return self._last

    def look(self) -> None:
        """Look again soon."""
        self._look.set()

    async def look_afresh(self) -> None:
        """Wait for a look that began after this was called, whatever came of it."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((self._looks + 1, done))
        self._look.set()
        await done

    def hand_in(self, component: Component, *, unsure: bool = False) -> None:
        """Submit a component's runner; ``unsure`` when that may have been done before."""
        self._spawn(self._hand_in(component, unsure))

    def end(self, component: Component) -> None:
        """Have a component end: its runners if there are any, else its job."""
        if component.ended:
            return
        for node in component.connected:
            if node.runner is not None:
                node.runner.send({"t": "stop"})
        if component.lrm_job is not None and component.name not in self._cancelling:
            self._cancelling.add(component.name)
            # What has begun to end by itself is let end: a cancellation that crosses it confuses Grid Engine.
            started = any(node.phase for node in component.nodes)
            self._spawn(self._cancel(component, STOP_PATIENCE if started else 0.0))

    async def watch(self) -> None:
        """Follow the resource manager until cancelled."""
        try:
            await self._open()
            self._spawn(self._listen())
            await self._wait(SOON)  # whatever the resource manager has to say first
            reported_at = 0.0
            while True:
                anyway = time.monotonic() - reported_at >= REPORT_EVERY
                await self._once(anyway=anyway)
                if anyway:
                    reported_at = time.monotonic()
                await asyncio.sleep(LOOK_PAUSE)
                await self._wait(self._patience())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _open(self) -> None:
        """Open the resource manager, however long it takes until that can be done."""
        pause = SOON
        while not self._opened.is_set():
            try:
                await self._lrm.open()
                self._opened.set()
            except SiteError as error:
                self._out_of_reach(error)
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE, pause * 2)

    async def _listen(self) -> None:
        async for _ in self._lrm.changes():
            self._look.set()

    async def _wait(self, patience: float) -> None:
        try:
            async with asyncio.timeout(patience):
                await self._look.wait()
        except TimeoutError:
            pass
        self._look.clear()

    def _patience(self) -> float:
        """Seconds until the next look at the latest.

        As a rule a resource manager says itself when to look, and to look without that is a safety net. But where only
        its word is missing for the end of a component, nodes of ours are idle until then: we look soon, and ever later.
        """
        now = time.monotonic()
        ending = {component.name for component in self._reporter.live.values() if component.only_the_lrm_is_missing}
        if ending - self._ending:
            self._soon = max(SOON, SHARE * self._took)
            self._soon_at = now + self._soon
        elif now >= self._soon_at:
            self._soon = min(self._poll_interval, self._soon * 2)
            self._soon_at = now + self._soon
        self._ending = ending
        safety_net = max(REPORT_EVERY, 2 * self._poll_interval)
        return min(safety_net, self._soon_at - now) if ending else safety_net

    async def _once(self, *, anyway: bool) -> None:
        self._looks += 1
        number = self._looks
        await self._see(anyway=anyway)
        waiting, self._waiting = self._waiting, []
        for wanted, done in waiting:
            if wanted > number:
                self._waiting.append((wanted, done))
            elif not done.done():
                done.set_result(None)

    async def _see(self, *, anyway: bool) -> None:
        began = time.monotonic()
        try:
            snapshot = await self._lrm.snapshot()
        except SiteError as error:
            self._out_of_reach(error)
            return
        finally:
            self._took = time.monotonic() - began
        if self.problem:
            log.info("resource manager in reach again", action="lrm-back")
            self.problem = ""
        self._last = snapshot
        self._compare(snapshot, began)
        self._reporter.report(snapshot, anyway=anyway)
        self._looked.set()

    def _out_of_reach(self, error: SiteError) -> None:
        if not self.problem:
            log.warning("resource manager out of reach", action="lrm-lost", reason=error.message)
        self.problem = " ".join(f"{error.message}; {error.hint}".split() if error.hint else error.message.split())
        self._reporter.report(None, self.problem)

    def _compare(self, snapshot: LrmSnapshot, began: float) -> None:
        jobs = {job.name: job for job in snapshot.jobs}
        for component in list(self._reporter.live.values()):
            job = jobs.get(component.name)
            if component.lrm_job is None or (job is None and component.handed_in_at >= began):
                continue
            if component.over(job):
                component.lrm_ended(job)
                log.info("component ended", action="end", token=component.token, error=component.error)
            elif job is not None and job.lost and not component.error:
                component.fail(job.reason)
                self.end(component)
            self._reporter.publish(component)

    async def _hand_in(self, component: Component, unsure: bool) -> None:
        await self._opened.wait()
        for attempt in range(1, SUBMIT_TRIES + 1):
            try:
                found = await self._lrm.find(component.name) if unsure else None
                if component.stop is not None and found is None:
                    break
                component.lrm_job = found or await self._lrm.submit(self._submission(component))
                break
            except SiteRejected as error:
                component.fail(error.message)
                break
            except SiteUnavailable as error:
                unsure = True
                if attempt == SUBMIT_TRIES:
                    component.fail(error.message)
                await asyncio.sleep(0.2 * 2**attempt)
        component.handed_in_at = time.monotonic()
        if component.lrm_job is None:
            component.end()
        else:
            component.folder.write(lrm=component.lrm_job)
            log.info("component submitted", action="submit", token=component.token, lrm_job=component.lrm_job)
        self._reporter.publish(component)
        if component.stop is not None:
            self.end(component)

    async def _cancel(self, component: Component, patience: float) -> None:
        """Ask the resource manager, and again until the component has ended."""
        try:
            await self._opened.wait()
            await asyncio.sleep(patience)
            while not component.ended and component.lrm_job is not None:
                try:
                    await self._lrm.cancel(component.lrm_job, component.name)
                    self.look()
                except (SiteUnavailable, SiteRejected) as error:
                    log.warning("cancel failed", action="cancel", token=component.token, reason=error.message)
                await asyncio.sleep(STOP_PATIENCE)
        finally:
            self._cancelling.discard(component.name)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
