"""A cluster's resource manager, as far as the agent uses it: submits runners, ends them, and watches."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast, get_args

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.components.job_places import ComponentFolders
from koalapy.agent.core.lrm_health import LrmHealth, format_error, unexpected_error
from koalapy.agent.core.lrm_polling import FIRST_POLL_DELAY, PollSchedule
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentTimeouts
from koalapy.agent.core.spool import format_write_error
from koalapy.agent.lrm.port import Fault, Lrm, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable
from koalapy.model.reports import LrmOperation
from koalapy.model.wording import format_nodes
from koalapy.model.wording import format_time as clock_text
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.event_loop import BackgroundTasks

log = structlog.get_logger()

REPORT_AFTER = 10.0
"""Seconds after it was told to end from which it is told of that a job is still there."""
FORCE_AFTER = 30.0
"""Seconds until a job that is still there is told to end again, by force."""
MAX_RETAINED_NAMES = 10_000


@dataclass(slots=True)
class Leftover:
    """A job that was told to end: when first, in seconds since the epoch for people, and by the monotonic clock when
    first and last."""

    job: LrmJob
    since: float
    began: float
    ordered: float
    refusal: str = ""
    """Why the resource manager refused to end it by force, and the remedy."""


class Leftovers:
    """What was told to end and has not."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._over: dict[str, str] = {}
        """Accounts of components that have ended, by their names: what is found of both, even if late, is to go."""
        self._left: dict[str, Leftover] = {}

    def component_ended(self, name: str, user: str = "") -> None:
        self._over.pop(name, None)
        self._over[name] = user
        if len(self._over) > MAX_RETAINED_NAMES:
            del self._over[next(iter(self._over))]

    def component_started(self, name: str) -> None:
        self._over.pop(name, None)

    def find_overdue(self, jobs: Iterable[LrmJob], ending: Iterable[LrmJob]) -> list[tuple[LrmJob, bool]]:
        """Take in a look and, of the live components, the jobs that were ordered to end already.

        What is to be ordered to end now, and whether by force because it was ordered before.
        """
        now = self._clock.monotonic()
        ordered = {job.id: job for job in ending}
        alive = [job for job in jobs if job.state is not LrmJobState.ENDED]
        over = {job.id: job for job in alive if self._over.get(job.name) == job.user}
        self._left = {id: left for id, left in self._left.items() if id in ordered or id in over}
        orders = []
        for job in (*ordered.values(), *over.values()):
            left = self._left.get(job.id)
            if left is None:
                self._left[job.id] = Leftover(job, self._clock.now(), now, now)
                if job.id not in ordered:
                    orders.append((job, False))
                continue
            left.job = job
            if now >= left.ordered + FORCE_AFTER:
                left.ordered = now
                orders.append((job, True))
        return orders

    def record_refusal(self, job: LrmJob, refusal: str) -> None:
        """Note why the resource manager refused to end a job by force."""
        if job.id in self._left:
            self._left[job.id].refusal = refusal

    def notices(self) -> list[str]:
        """Of each, for people, what is still there and since when it should not be."""
        now = self._clock.now()
        return [
            f"the resource manager still holds job {left.job.id} ({left.job.name}"
            f"{f', {format_nodes(len(left.job.nodes))}' if left.job.nodes else ''}), "
            f"told to end at {clock_text(left.since, now, exact=True)}"
            + (f": {left.job.reason}" if left.job.reason else "")
            + (f"; {left.refusal}" if left.refusal else "")
            for left in self._left.values()
            if self._clock.monotonic() >= left.began + REPORT_AFTER
        ]


def select_job(component: Component, named: Sequence[LrmJob]) -> tuple[LrmJob | None, list[LrmJob]]:
    """Of all jobs of a component's name, its own, and those that must be ended because there may be but one.

    A submission that was not answered may have been taken all the same, perhaps late. What a runner is connected from
    stays; else the job that is known to have ended is the component's, else the oldest.
    """
    active = [job for job in named if job.state is not LrmJobState.ENDED]
    known = next((job for job in named if job.id == component.lrm_job), None)
    if not active or (len(active) == 1 and known in (None, active[0])):
        return known or next(iter(active), None) or (named[-1] if named else None), []
    runners = {node.lrm_job for node in component.nodes if node.runner is not None}
    connected = [job for job in active if job.id in runners]
    if connected:
        own = min(connected, key=_age)
    elif known is not None and known.state is LrmJobState.ENDED:
        own = known
    else:
        own = min(active, key=_age)
    return own, [job for job in active if job is not own]


def _age(job: LrmJob) -> tuple[int, str]:
    """Resource managers number their jobs upwards."""
    return len(job.id), job.id


def group_by_name(jobs: Iterable[LrmJob]) -> Mapping[tuple[str, str], list[LrmJob]]:
    """By name and account: another account's job of the same name is none of ours."""
    named: dict[tuple[str, str], list[LrmJob]] = {}
    for job in jobs:
        named.setdefault((job.name, job.user), []).append(job)
    return named


FAULTS = get_args(Fault)
SLEEP_SLICE = 0.5
"""Seconds."""
HANG_UP_TIMEOUT = 10.0
"""Seconds without a word: a node that died says nothing more, and does not hang up either."""
POLL_INTERVAL = 5.0
"""Seconds between two questions that a resource manager asks by itself where it is not told of changes."""
MAX_OPEN_PAUSE = 10.0
"""Seconds between two tries to open the resource manager, at most."""
MIN_POLL_INTERVAL = 0.02
"""Seconds between two polls at least, so that a burst of changes costs one."""
MAX_SUBMIT_TRIES = 5
"""The last of them only looks whether one before was taken all the same."""
SETTLE_CHECK_INTERVAL = 0.5
GRACE_CHECK_INTERVAL = 0.5
STOP_TIMEOUT = 5.0
"""Seconds that runners have to end by themselves before the resource manager is asked to end them."""
LAST_OUTPUT_TIMEOUT = 60.0
"""Seconds more, while output of theirs still comes."""


async def sleep_awake(seconds: float) -> None:
    """Wait until so many seconds have passed while this process ran: what came while it was stopped is read first."""
    loop = asyncio.get_running_loop()
    left = seconds
    while left > 0:
        pause, began = min(SLEEP_SLICE, left), loop.time()
        await asyncio.sleep(pause)
        if loop.time() - began < pause + SLEEP_SLICE:
            left -= pause


class LrmJobs:
    """The jobs we have in the resource manager."""

    def __init__(
        self,
        lrm: Lrm,
        reporter: Reporter,
        submission: Callable[[Component], LrmSubmission],
        places: ComponentFolders,
        poll_interval: float = POLL_INTERVAL,
        address: Callable[[], str] = str,
        stop_timeout: float = STOP_TIMEOUT,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._lrm, self._reporter, self._submission = lrm, reporter, submission
        self._places, self._stop_timeout = places, stop_timeout
        self._timeouts, self._clock = timeouts, clock
        self._health = LrmHealth(self._tell, timeouts, clock)
        self.calls = self._health.calls.summarize_calls
        self._leftovers = Leftovers(clock)
        self.polls = PollSchedule(poll_interval, reporter.live.values, timeouts, clock)
        self._address = address
        self._awaited: set[str] = set()
        self._hanging_up: set[str] = set()
        """Names of components whose nodes the resource manager has back, and whose runners are still connected."""
        self._opened = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._cancelling: set[str] = set()
        self._cancelled: set[str] = set()
        """Names of live components whose jobs the resource manager was asked to end."""
        self._ordered: dict[str, float] = {}
        """Jobs beside those of live components that it was asked to end, and when last."""

    @property
    def problem(self) -> str:
        """Why nothing can be started in the resource manager, in one line; empty when it can."""
        return self._health.problem

    def report_write_error(self, why: str) -> None:
        """Tell that no job can be started, since what must be remembered of one cannot be written down."""
        self._health.suspend_submission(why)

    async def fetch_version(self) -> str:
        """What the resource manager is, for people; empty where it does not say."""
        await self._opened.wait()
        try:
            return await self._health.call_lrm(LrmOperation.VERSION, self._lrm.read_version())
        except SiteError as error:
            log.info("the resource manager does not say its version", action="version-unknown", reason=error.message)
            return ""

    def submit_component(self, component: Component, *, unsure: bool = False) -> None:
        """Submit a component's runner; ``unsure`` when that may have been done before."""
        self._leftovers.component_started(component.name)
        self._tasks.spawn(self._submit(component, unsure))

    def end_component(self, component: Component) -> None:
        """Have a component end: its runners if there are any, else its job."""
        if component.ended:
            return
        component.send_to_runners(component.stop_message)
        if component.lrm_job is not None and component.name not in self._cancelling:
            self._cancelling.add(component.name)
            # What has begun to end by itself is let end: a cancellation that crosses it confuses Grid Engine.
            # Runners that were let go may not have found a restarted agent yet, and hold output of their program.
            started = component.plan is not None or any(node.phase for node in component.nodes)
            self._tasks.spawn(self._cancel(component, self._stop_timeout if started else 0.0))

    async def watch_lrm(self) -> None:
        try:
            await self._open()
            self._tasks.spawn(self._listen())
            await self.polls.wait_until_due(FIRST_POLL_DELAY)  # whatever the resource manager has to say first
            reported_at = 0.0
            while True:
                anyway = self._clock.monotonic() - reported_at >= self._timeouts.report_interval_s
                await self._poll(anyway=anyway)
                if anyway:
                    reported_at = self._clock.monotonic()
                await asyncio.sleep(MIN_POLL_INTERVAL)
                await self.polls.wait_until_due()
        finally:
            self._tasks.cancel()
            await self._tasks.wait()

    async def _open(self) -> None:
        """Open the resource manager, however long it takes until that can be done."""
        pause = FIRST_POLL_DELAY
        while not self._opened.is_set():
            try:
                await self._health.poll_lrm(LrmOperation.OPEN, self._lrm.open())
                self._opened.set()
            except SiteError:
                await asyncio.sleep(pause)
                pause = min(MAX_OPEN_PAUSE, pause * 2)

    async def _listen(self) -> None:
        async for _ in self._lrm.watch_changes():
            self.polls.request_poll()

    async def _poll(self, *, anyway: bool) -> None:
        number, began, snapshot = self.polls.begin_poll(), self._clock.monotonic(), None
        try:
            snapshot = await self._health.poll_lrm(LrmOperation.SNAPSHOT, self._lrm.take_snapshot())
        except SiteError:
            pass
        finally:
            self.polls.end_poll(began, snapshot)
        if snapshot is not None:
            self._health.set_submit_problem(snapshot.submit_error)
            self._compare(snapshot, began)
            self._reporter.notices = [*self._leftovers.notices(), *snapshot.notices]
            self._reporter.report_cluster(snapshot, self.problem, anyway=anyway)
        elif anyway:
            self._reporter.report_cluster(None, self.problem, anyway=True)
        self.polls.notify_processed(number)

    def _tell(self) -> None:
        if self.problem:
            self._reporter.report_cluster(None, self.problem)

    def _compare(self, snapshot: LrmSnapshot, began: float) -> None:
        named = group_by_name(snapshot.jobs)
        ending: list[LrmJob] = []
        for component in list(self._reporter.live.values()):
            job, superfluous = select_job(component, named.get((component.name, component.user), ()))
            if component.lrm_job is None or (job is None and component.submitted_at >= began):
                continue
            for each in superfluous:
                log.warning("several jobs of one name", action="duplicate-jobs", token=component.token, lrm_job=each.id)
                self._order(each)
            try:
                self._take_in(component, job, ending)
            except Exception as error:  # noqa: BLE001 whatever it is, the others have their turns
                self._give_up(component, job, error)
        for job, by_force in self._leftovers.find_overdue(snapshot.jobs, ending):
            self._order(job, by_force=by_force)

    def _take_in(self, component: Component, job: LrmJob | None, ending: list[LrmJob]) -> None:
        """What a look says of a component; a job that was to end and still lives is added to ``ending``."""
        if job is not None and job.id != component.lrm_job:
            component.lrm_job = job.id
            component.folder.note_entry(lrm=job.id)
        if job is not None and job.state is LrmJobState.ENDED:
            self._expect_hang_up(component)
        if component.is_over(job):
            if not self._places.start_fetch(component, self.polls.request_poll):
                return
            component.on_job_ended(job)
            self._over(component)
        elif job is not None and (job.lost or job.fault) and component.may_fail:
            component.fail(job.reason, job.fault or "site")
            self.end_component(component)
        elif job is not None and component.name in self._cancelled and job.state is not LrmJobState.ENDED:
            ending.append(job)
        elif job is not None:
            component.on_job_alive(job)
            if job.state is LrmJobState.RUNNING and not job.starting:
                self._expect_runners(component, job.nodes)
        self._reporter.publish_status(component)

    def _give_up(self, component: Component, job: LrmJob | None, error: Exception) -> None:
        """Its folder may be such that nothing can be done with it: that is to cost no other component anything."""
        component.fail(format_error(unexpected_error(error)))
        if component.is_over(job):
            component.mark_ended()
            self._over(component)
            self._reporter.publish_status(component)
        else:
            self._failed(component)

    def _over(self, component: Component) -> None:
        log.info("component ended", action="component-ended", token=component.token, error=component.error)
        self._leftovers.component_ended(component.name, component.user)
        self._cancelled.discard(component.name)

    def _failed(self, component: Component) -> None:
        self._reporter.publish_status(component)
        self.end_component(component)

    def _expect_runners(self, component: Component, nodes: Sequence[str]) -> None:
        """Give runners on these nodes a while to connect; one that stays silent is its site's fault."""
        if not component.has_seen_all_runners and component.name not in self._awaited:
            self._awaited.add(component.name)
            self._tasks.spawn(self._await_runners(component, nodes))

    async def _await_runners(self, component: Component, nodes: Sequence[str]) -> None:
        await sleep_awake(self._timeouts.runner_connect_s)
        self._awaited.discard(component.name)
        if component.ended or component.stop is not None or component.has_seen_all_runners:
            return
        heard = {node.name for node in component.nodes if node.phase}
        where = next((name for name in nodes if name not in heard), "a node")
        component.fail(f"the runner on {where} runs but never connected to the agent at {self._address()}")
        self._failed(component)

    def _expect_hang_up(self, component: Component) -> None:
        """Give runners whose nodes the resource manager has back a while to finish; then disconnect them."""
        if component.runners and component.name not in self._hanging_up:
            self._hanging_up.add(component.name)
            component.send_to_runners({"t": "stop"})  # its nodes are others' now
            self._tasks.spawn(self._await_hang_up(component))

    async def _await_hang_up(self, component: Component) -> None:
        before = -1
        while component.runners and before != (before := sum(runner.received_bytes for runner in component.runners)):
            await sleep_awake(HANG_UP_TIMEOUT)
        for runner in component.runners:
            runner.close()
        self._hanging_up.discard(component.name)

    async def _submit(self, component: Component, unsure: bool) -> None:
        await self._opened.wait()
        try:
            component.lrm_job = await self._lrm_job_of(component, unsure)
        except SiteRejected as error:
            fault = cast(Fault, error.fault.value) if error.fault in FAULTS else "unknown"
            if fault == "site":  # said first, so that no other is sent the same way
                self._health.suspend_submission(format_error(error))
            component.fail(format_error(error), fault)
        except SiteUnavailable as error:
            component.fail(format_error(error))
        except OSError as error:
            why = format_write_error(component.folder.path, error)
            self.report_write_error(why)
            component.fail(why)
        except Exception as error:  # noqa: BLE001 whatever it is, the component has an end
            component.fail(format_error(unexpected_error(error)))
        component.submitted_at = self._clock.monotonic()
        if component.lrm_job is None:
            component.mark_ended()
            self._over(component)
            self.polls.request_poll()  # what was told of this cluster may no longer hold
        else:
            component.folder.note_entry(lrm=component.lrm_job)
            log.info(
                "component submitted", action="component-submitted", token=component.token, lrm_job=component.lrm_job
            )
        self._reporter.publish_status(component)
        if component.stop is not None or component.error:
            self.end_component(component)

    async def _lrm_job_of(self, component: Component, unsure: bool) -> str | None:
        """Its job in the resource manager, which has but one of its name; None when it was told to end before there was
        one. ``SiteError``.

        A submission that was not answered may have been taken, and may still be: nothing is submitted again before that
        must have been settled, and none of that name is there. What comes later all the same is ended when it is seen.
        """
        health, lrm = self._health, self._lrm
        for attempt in range(1, MAX_SUBMIT_TRIES + 1):
            try:
                lrm_job = (
                    await health.call_lrm(LrmOperation.FIND, lrm.find_job(component.name, component.user))
                    if unsure
                    else None
                )
                if lrm_job is None and component.stop is None and attempt < MAX_SUBMIT_TRIES:
                    await component.folder.wait_synced()  # else it might run and nobody know of it
                    lrm_job = await health.call_lrm(LrmOperation.SUBMIT, lrm.submit_job(self._submission(component)))
                    health.on_job_accepted()
                if lrm_job is not None or component.stop is not None:
                    return lrm_job
            except SiteUnavailable as error:
                unsure, failed = True, error
                if attempt == MAX_SUBMIT_TRIES:
                    raise
                await self._settle(
                    component,
                    max(
                        self._timeouts.submit_pause_s * 2**attempt,
                        await health.call_lrm(LrmOperation.SETTLE, lrm.settling_time()),
                    ),
                )
        raise failed

    async def _settle(self, component: Component, seconds: float) -> None:
        """Wait so long, or until a runner says that there is a job."""
        end = self._clock.monotonic() + seconds
        while (left := end - self._clock.monotonic()) > 0 and not component.runners:  # noqa: ASYNC110
            await asyncio.sleep(min(left, SETTLE_CHECK_INTERVAL))

    def _order(self, job: LrmJob, *, by_force: bool = False) -> None:
        """Have a job ended that is no live component's, unless that was asked for just now."""
        now = self._clock.monotonic()
        if now < self._ordered.get(job.id, 0.0) + STOP_TIMEOUT:
            return
        self._ordered = {id: at for id, at in self._ordered.items() if now < at + STOP_TIMEOUT} | {job.id: now}
        self._tasks.spawn(self._end_now(job, by_force))

    async def _end_now(self, job: LrmJob, by_force: bool) -> None:
        try:
            await self._health.call_lrm(
                LrmOperation.CANCEL, self._lrm.cancel_job(job.id, job.name, job.user, by_force=by_force)
            )
            self.polls.request_poll()
        except SiteError as error:
            log.warning("cancel failed", action="cancel-failed", lrm_job=job.id, name=job.name, reason=error.message)
            if by_force and isinstance(error, SiteRejected):
                self._leftovers.record_refusal(job, f"{error.message}: {error.hint}" if error.hint else error.message)

    async def _cancel(self, component: Component, timeout: float) -> None:
        """Ask the resource manager, and again until the component has ended."""
        try:
            await self._opened.wait()
            # It may be told to stop at once meanwhile.
            while left := component.remaining_grace_s:  # noqa: ASYNC110
                await asyncio.sleep(min(left, GRACE_CHECK_INTERVAL))
            await asyncio.sleep(timeout)
            # What its runners had not handed over when they were told to end is not to be lost.
            longest = self._clock.monotonic() + LAST_OUTPUT_TIMEOUT
            while timeout and (left := component.output.received_at + timeout - self._clock.monotonic()) > 0:
                if self._clock.monotonic() > longest:
                    break
                await asyncio.sleep(left)
            while not component.ended and component.lrm_job is not None:
                self._cancelled.add(component.name)
                try:
                    await self._health.call_lrm(
                        LrmOperation.CANCEL, self._lrm.cancel_job(component.lrm_job, component.name, component.user)
                    )
                    self.polls.request_poll()
                except SiteError as error:
                    log.warning("cancel failed", action="cancel-failed", token=component.token, reason=error.message)
                await asyncio.sleep(STOP_TIMEOUT)
        finally:
            self._cancelling.discard(component.name)
