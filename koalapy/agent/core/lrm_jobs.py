"""The agent's jobs in the resource manager: submission, end, polls, and jobs that should be gone."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast, get_args

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.core.lrm_monitor import FIRST_POLL_DELAY, LrmMonitor, format_error, unexpected_error
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentTimeouts
from koalapy.agent.core.spool import format_write_error
from koalapy.agent.lrm.port import Fault, Lrm, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.agent.runners.runners import RunnerServer
from koalapy.agent.transfers.stages import ComponentFiles
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable
from koalapy.model.reports import LrmOperation
from koalapy.model.wording import format_nodes
from koalapy.model.wording import format_time as clock_text
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.event_loop import BackgroundTasks

log = structlog.get_logger()

REPORT_AFTER = 10.0
"""Seconds after the order to end from which a job that still exists is reported."""
FORCE_AFTER = 30.0
"""Seconds until a job that still exists is ended by force."""
MAX_RETAINED_NAMES = 10_000
FAULTS = get_args(Fault)
SLEEP_SLICE = 0.5
"""Seconds of one sleep."""
HANG_UP_TIMEOUT = 10.0
"""Seconds of silence after which a runner is disconnected: a dead node does not close its connections."""
MAX_OPEN_PAUSE = 10.0
"""Maximum seconds between two attempts to open the resource manager."""
MIN_POLL_INTERVAL = 0.02
"""Minimum seconds between two polls, so that a burst of changes causes one."""
MAX_SUBMIT_TRIES = 5
"""Maximum attempts. The last one only checks whether an earlier one succeeded after all."""
FIND_INTERVAL = 1.0
"""Seconds between two searches for the job of a runner that has connected."""
SETTLE_CHECK_INTERVAL = 0.5
GRACE_CHECK_INTERVAL = 0.5
STOP_TIMEOUT = 5.0
"""Seconds that runners have to end by themselves before the resource manager ends them."""
LAST_OUTPUT_TIMEOUT = 60.0
"""Further seconds while their output still arrives."""


@dataclass(slots=True)
class Leftover:
    """A job ordered to end: since when (seconds since 1970), and the monotonic times of the first and last order."""

    job: LrmJob
    since: float
    began: float
    ordered: float
    refusal: str = ""
    """Why the resource manager rejected ending it by force, and the remedy."""


class Leftovers:
    """The jobs that were ordered to end and still exist."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._ended_components: dict[str, str] = {}
        """Accounts of ended components by job name. Jobs with both are ended, even if found late."""
        self._leftovers_by_job: dict[str, Leftover] = {}

    def component_ended(self, name: str, user: str = "") -> None:
        """Remember the job name and account of an ended component, so that a late job of it is ended."""
        self._ended_components.pop(name, None)
        self._ended_components[name] = user
        if len(self._ended_components) > MAX_RETAINED_NAMES:
            del self._ended_components[next(iter(self._ended_components))]

    def component_started(self, name: str) -> None:
        self._ended_components.pop(name, None)

    def find_overdue(
        self, jobs: Iterable[LrmJob], ending: Iterable[LrmJob], duplicates: Iterable[LrmJob] = ()
    ) -> list[tuple[LrmJob, bool]]:
        """Process a snapshot's jobs, those of live components that were ordered to end, and their ``duplicates``.

        Return the jobs to end now, each with whether by force because it was ordered before.
        """
        now = self._clock.monotonic()
        ordered = {job.id: job for job in ending}
        alive = [job for job in jobs if job.state is not LrmJobState.ENDED]
        ended_jobs = {job.id: job for job in alive if self._ended_components.get(job.name) == job.user}
        ended_jobs |= {job.id: job for job in duplicates}
        self._leftovers_by_job = {
            id: leftover for id, leftover in self._leftovers_by_job.items() if id in ordered or id in ended_jobs
        }
        orders = []
        for job in (*ordered.values(), *ended_jobs.values()):
            leftover = self._leftovers_by_job.get(job.id)
            if leftover is None:
                self._leftovers_by_job[job.id] = Leftover(job, self._clock.now(), now, now)
                if job.id not in ordered:
                    orders.append((job, False))
                continue
            leftover.job = job
            if now >= leftover.ordered + FORCE_AFTER:
                leftover.ordered = now
                orders.append((job, True))
        return orders

    def record_refusal(self, job: LrmJob, refusal: str) -> None:
        """Record why the resource manager rejected ending a job by force."""
        if job.id in self._leftovers_by_job:
            self._leftovers_by_job[job.id].refusal = refusal

    def notices(self) -> list[str]:
        """Return a notice for users about each job that still exists, and since when it should not."""
        now = self._clock.now()
        return [
            f"the resource manager still holds job {leftover.job.id} ({leftover.job.name}"
            f"{f', {format_nodes(len(leftover.job.nodes))}' if leftover.job.nodes else ''}), "
            f"ordered to end at {clock_text(leftover.since, now, exact=True)}"
            + (f": {leftover.job.reason}" if leftover.job.reason else "")
            + (f"; {leftover.refusal}" if leftover.refusal else "")
            for leftover in self._leftovers_by_job.values()
            if self._clock.monotonic() >= leftover.began + REPORT_AFTER
        ]


def select_job(component: Component, jobs: Sequence[LrmJob]) -> tuple[LrmJob | None, list[LrmJob]]:
    """Select a component's job among all of its name. Return it, and the duplicates to end.

    An unanswered submission may have created a job, perhaps late. Select the job of a connected runner, else the
    recorded job if it has ended, else the oldest.
    """
    active = [job for job in jobs if job.state is not LrmJobState.ENDED]
    recorded = next((job for job in jobs if job.id == component.lrm_job), None)
    if not active or (len(active) == 1 and recorded in (None, active[0])):
        return recorded or next(iter(active), None) or (jobs[-1] if jobs else None), []
    runners = {node.lrm_job for node in component.nodes if node.runner is not None}
    connected = [job for job in active if job.id in runners]
    if connected:
        selected = min(connected, key=_age)
    elif recorded is not None and recorded.state is LrmJobState.ENDED:
        selected = recorded
    else:
        selected = min(active, key=_age)
    return selected, [job for job in active if job is not selected]


def _age(job: LrmJob) -> tuple[int, str]:
    """Sort key of jobs, which resource managers number upwards."""
    return len(job.id), job.id


def group_by_name(jobs: Iterable[LrmJob]) -> Mapping[tuple[str, str], list[LrmJob]]:
    """Group jobs by name and account, since another account may use the same name."""
    groups: dict[tuple[str, str], list[LrmJob]] = {}
    for job in jobs:
        groups.setdefault((job.name, job.user), []).append(job)
    return groups


async def sleep_awake(seconds: float) -> None:
    """Sleep for so many seconds in which this process runs. Time while it is stopped does not count.

    After a stop, arrived data is thus read before a timeout is acted on.
    """
    loop = asyncio.get_running_loop()
    remaining = seconds
    while remaining > 0:
        pause, began = min(SLEEP_SLICE, remaining), loop.time()
        await asyncio.sleep(pause)
        if loop.time() - began < pause + SLEEP_SLICE:
            remaining -= pause


class LrmJobs:
    """The agent's jobs in the resource manager."""

    def __init__(
        self,
        lrm: Lrm,
        monitor: LrmMonitor,
        reporter: Reporter,
        submission: Callable[[Component], LrmSubmission],
        files: ComponentFiles,
        runners: RunnerServer,
        stop_timeout: float = STOP_TIMEOUT,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._lrm, self._monitor, self._reporter, self._submission = lrm, monitor, reporter, submission
        self._files, self._runners, self._stop_timeout = files, runners, stop_timeout
        self._timeouts, self._clock = timeouts, clock
        self._leftovers = Leftovers(clock)
        self._awaited: set[str] = set()
        self._hanging_up: set[str] = set()
        """Names of components with released nodes and runners that are still connected."""
        self._opened = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._cancelling: set[str] = set()
        self._cancelled: set[str] = set()
        """Names of live components with jobs that the resource manager was ordered to end."""

    async def fetch_version(self) -> str:
        """Return the resource manager's name and version; empty if it does not report them."""
        await self._opened.wait()
        try:
            return await self._monitor.call_lrm(LrmOperation.VERSION, self._lrm.read_version())
        except SiteError as error:
            log.info("the resource manager does not report its version", action="version-unknown", reason=error.message)
            return ""

    def submit_component(self, component: Component, *, unsure: bool = False) -> None:
        """Submit a component's runner; ``unsure`` if it may have been submitted before."""
        self._leftovers.component_started(component.name)
        self._tasks.spawn(self._submit_component(component, unsure))

    def end_component(self, component: Component) -> None:
        """End a component: stop its runners, if any, and cancel its job if they do not end in time."""
        if component.ended:
            return
        component.send_to_runners(component.stop_message)
        if component.lrm_job is not None and component.name not in self._cancelling:
            self._cancelling.add(component.name)
            # Do not cancel a job that is ending by itself: that confuses Grid Engine.
            # Runners that were started may still have to reconnect to a restarted agent, and hold output.
            started = component.plan is not None or any(node.phase for node in component.nodes)
            self._tasks.spawn(self._cancel(component, self._stop_timeout if started else 0.0))

    async def watch_lrm(self) -> None:
        """Poll the resource manager until cancelled: at intervals, after its changes, and on request."""
        try:
            await self._open()
            for component in self._reporter.live.values():
                if component.lrm_job is not None:
                    self._lrm.expect_job(component.lrm_job, component.name, component.user)
            self._tasks.spawn(self._watch_changes())
            await self._monitor.wait_until_due(FIRST_POLL_DELAY)  # give the resource manager time for its first changes
            reported_at = 0.0
            while True:
                anyway = self._clock.monotonic() - reported_at >= self._timeouts.report_interval_s
                await self._poll_once(anyway=anyway)
                if anyway:
                    reported_at = self._clock.monotonic()
                await asyncio.sleep(MIN_POLL_INTERVAL)
                await self._monitor.wait_until_due()
        finally:
            self._tasks.cancel()
            await self._tasks.wait()

    async def _open(self) -> None:
        """Open the resource manager; retry until that succeeds."""
        pause = FIRST_POLL_DELAY
        while not self._opened.is_set():
            try:
                await self._monitor.poll_lrm(LrmOperation.OPEN, self._lrm.open())
                self._opened.set()
            except SiteError:
                await asyncio.sleep(pause)
                pause = min(MAX_OPEN_PAUSE, pause * 2)

    async def _watch_changes(self) -> None:
        async for _ in self._lrm.watch_changes():
            self._monitor.request_poll()

    async def _poll_once(self, *, anyway: bool) -> None:
        """Take a snapshot, update all components from it, and report. ``anyway``: report even if nothing changed."""
        snapshot, began = await self._monitor.take_snapshot()
        if snapshot is not None:
            self._match_jobs(snapshot, began)
            self._reporter.notices = [*self._leftovers.notices(), *snapshot.notices]
        if snapshot is not None or anyway:
            self._reporter.report_cluster(snapshot, even_unchanged=anyway)
        await self._monitor.notify_processed()

    def _match_jobs(self, snapshot: LrmSnapshot, began: float) -> None:
        """Update each component from its job in a snapshot begun at ``began`` (monotonic).

        End superfluous jobs: duplicates, and jobs without a component.
        """
        jobs_by_name = group_by_name(snapshot.jobs)
        ending: list[LrmJob] = []
        duplicates: list[LrmJob] = []
        for component in list(self._reporter.live.values()):
            job, superfluous = select_job(component, jobs_by_name.get((component.name, component.user), ()))
            if component.lrm_job is None or (job is None and self._may_exist(component, snapshot, began)):
                continue
            duplicates += superfluous
            for duplicate in superfluous:
                log.warning(
                    "several jobs with one name", action="duplicate-jobs", token=component.token, lrm_job=duplicate.id
                )
            try:
                self._apply_job(component, job, ending)
            except Exception as error:  # noqa: BLE001 whatever it is, the others have their turns
                self._fail_unprocessable(component, job, error)
        for job, by_force in self._leftovers.find_overdue(snapshot.jobs, ending, duplicates):
            self._tasks.spawn(self._end_now(job, by_force))

    def _may_exist(self, component: Component, snapshot: LrmSnapshot, began: float) -> bool:
        """Return whether a component's job may exist that a snapshot does not list.

        The snapshot may be from before the submission. That does no harm if the job has been ordered to end before its
        program was opened, or if its runners have sent or saved their results.
        """
        if snapshot.unreadable or component.submitted_at >= began:
            return True
        if component.submitted_at + self._lrm.max_snapshot_age_s < began:
            return False
        if component.stop is not None and component.plan is None:
            return False
        component.collect_results()
        return not all(node.result for node in component.nodes)

    def _apply_job(self, component: Component, job: LrmJob | None, ending: list[LrmJob]) -> None:
        """Update a component from its job in a snapshot. Add a cancelled job that still exists to ``ending``."""
        if job is not None and job.id != component.lrm_job:
            component.lrm_job = job.id
            component.folder.note_entry(lrm=job.id)
        if job is not None and job.state is LrmJobState.ENDED:
            self._expect_hang_up(component)
        if component.is_over(job):
            if not self._files.start_fetch(component, self._monitor.request_poll):
                return
            component.on_job_ended(job, self._lrm.product)
            self._ended_components(component)
        elif job is not None and (job.lost or job.fault) and component.may_fail:
            component.fail(job.reason, job.fault or "site")
            self.end_component(component)
        elif job is not None and component.name in self._cancelled and job.state is not LrmJobState.ENDED:
            ending.append(job)
        elif job is not None:
            component.on_job_alive(job)
            runs = job.state is LrmJobState.RUNNING and not job.starting and not job.gone
            if runs and not component.has_seen_all_runners and component.name not in self._awaited:
                self._awaited.add(component.name)
                self._tasks.spawn(self._await_runners(component, job.nodes))
        self._reporter.publish_status(component)

    def _fail_unprocessable(self, component: Component, job: LrmJob | None, error: Exception) -> None:
        """Fail a component after an error of its update, so that others are not affected."""
        component.fail(format_error(unexpected_error(error)))
        if component.is_over(job):
            component.mark_ended()
            self._ended_components(component)
            self._reporter.publish_status(component)
        else:
            self._fail_component(component)

    def _ended_components(self, component: Component) -> None:
        """Log the end of a component, and remember its job name, so that a late job of it is ended."""
        log.info("component ended", action="component-ended", token=component.token, error=component.error)
        self._leftovers.component_ended(component.name, component.user)
        self._cancelled.discard(component.name)

    def _fail_component(self, component: Component) -> None:
        self._reporter.publish_status(component)
        self.end_component(component)

    async def _await_runners(self, component: Component, nodes: Sequence[str]) -> None:
        """Fail the component if its runners do not connect in time; that is the site's fault."""
        await sleep_awake(self._timeouts.runner_connect_s)
        self._awaited.discard(component.name)
        if component.ended or component.stop is not None or component.has_seen_all_runners:
            return
        connected = {node.name for node in component.nodes if node.phase}
        node = next((name for name in nodes if name not in connected), "a node")
        component.fail(f"the runner on {node} runs but did not connect to the agent at {self._runners.address}")
        self._fail_component(component)

    def _expect_hang_up(self, component: Component) -> None:
        """Stop the runners of a component with an ended job, and disconnect them after a timeout."""
        if component.runners and component.name not in self._hanging_up:
            self._hanging_up.add(component.name)
            component.send_to_runners({"t": "stop"})  # its nodes may have new users
            self._tasks.spawn(self._await_hang_up(component))

    async def _await_hang_up(self, component: Component) -> None:
        """Disconnect a component's runners once they send nothing for ``HANG_UP_TIMEOUT`` seconds."""
        previous = -1
        while component.runners and previous != (
            previous := sum(runner.received_bytes for runner in component.runners)
        ):
            await sleep_awake(HANG_UP_TIMEOUT)
        for runner in component.runners:
            runner.close()
        self._hanging_up.discard(component.name)

    async def _submit_component(self, component: Component, unsure: bool) -> None:
        """Submit a component and report it; if that fails, fail it. ``unsure``: it may have been submitted before."""
        await self._opened.wait()
        try:
            component.lrm_job = await self._lrm_job_of(component, unsure)
        except SiteRejected as error:
            fault = cast(Fault, error.fault.value) if error.fault in FAULTS else "unknown"
            if fault == "site":  # reported first, so that no other job is sent here
                self._monitor.suspend_submission(format_error(error))
            component.fail(format_error(error), fault, error.sizes)
        except SiteUnavailable as error:
            component.fail(format_error(error))
        except OSError as error:
            reason = format_write_error(component.folder.path, error)
            self._monitor.suspend_submission(reason)
            component.fail(reason)
        except Exception as error:  # noqa: BLE001 whatever it is, the component has an end
            component.fail(format_error(unexpected_error(error)))
        component.submitted_at = self._clock.monotonic()
        if component.lrm_job is None:
            component.mark_ended()
            self._ended_components(component)
            self._monitor.request_poll()  # the last report of this cluster may be outdated
        else:
            component.folder.note_entry(lrm=component.lrm_job)
            self._lrm.expect_job(component.lrm_job, component.name, component.user)
            log.info(
                "component submitted", action="component-submitted", token=component.token, lrm_job=component.lrm_job
            )
        self._reporter.publish_status(component)
        if component.stop is not None or component.error:
            self.end_component(component)

    async def _lrm_job_of(self, component: Component, unsure: bool) -> str | None:
        """Submit a component's job and return its id; None if it was stopped before there was one. Raise ``SiteError``.

        A submission without an answer may have succeeded, or may still do so. Repeat it only after a pause in which its
        job would appear, and if no job of the name exists. A job that appears later is ended. A component with runners
        has a job: search for it as long as its program may run, even if the resource manager cannot tell.
        """
        monitor, lrm, attempt = self._monitor, self._lrm, 0
        failed = SiteUnavailable("no job of its name was found")
        while True:
            if (existing := next((node.lrm_job for node in component.nodes if node.lrm_job), None)) is not None:
                return existing
            attempt += 1
            try:
                lrm_job = (
                    await monitor.call_lrm(LrmOperation.FIND, lrm.find_job(component.name, component.user))
                    if unsure
                    else None
                )
                may_submit = component.stop is None and attempt < MAX_SUBMIT_TRIES and not component.has_runners
                if lrm_job is None and may_submit:
                    await component.folder.wait_synced()  # else a job could run without a record
                    lrm_job = await monitor.call_lrm(LrmOperation.SUBMIT, lrm.submit_job(self._submission(component)))
                    monitor.on_job_accepted()
                if lrm_job is not None or (component.stop is not None and not component.may_run):
                    return lrm_job
                is_answered = True
            except SiteRejected:
                if not component.may_run:
                    raise
                is_answered = True
            except SiteUnavailable as error:
                unsure, failed, is_answered = True, error, False
            has_runners = component.has_runners
            if attempt >= MAX_SUBMIT_TRIES and not component.may_run and (is_answered or not has_runners):
                raise failed
            if has_runners:
                await asyncio.sleep(FIND_INTERVAL)
                continue
            settling_time = await monitor.call_lrm(LrmOperation.SETTLE, lrm.settling_time())
            await self._settle(component, max(self._timeouts.submit_pause_s * 2**attempt, settling_time))

    async def _settle(self, component: Component, seconds: float) -> None:
        """Wait for so many seconds, or until a runner of the component connects."""
        end = self._clock.monotonic() + seconds
        while (remaining := end - self._clock.monotonic()) > 0 and not component.runners:  # noqa: ASYNC110
            await asyncio.sleep(min(remaining, SETTLE_CHECK_INTERVAL))

    async def _end_now(self, job: LrmJob, by_force: bool) -> None:
        """Cancel a job without a component. Log an error, and record it if even a forced deletion is rejected."""
        try:
            await self._monitor.call_lrm(
                LrmOperation.CANCEL, self._lrm.cancel_job(job.id, job.name, job.user, by_force=by_force)
            )
            self._monitor.request_poll()
        except SiteError as error:
            log.warning("cancel failed", action="cancel-failed", lrm_job=job.id, name=job.name, reason=error.message)
            if by_force and isinstance(error, SiteRejected):
                self._leftovers.record_refusal(job, f"{error.message}: {error.hint}" if error.hint else error.message)

    async def _cancel(self, component: Component, timeout: float) -> None:
        """Order the resource manager to end a component's job; repeat until it has ended."""
        try:
            await self._opened.wait()
            # An immediate stop may arrive during the grace period.
            while remaining := component.remaining_grace_s:  # noqa: ASYNC110
                await asyncio.sleep(min(remaining, GRACE_CHECK_INTERVAL))
            await asyncio.sleep(timeout)
            # Wait for the output that its runners had not sent when they were ordered to end.
            longest = self._clock.monotonic() + LAST_OUTPUT_TIMEOUT
            while timeout and (remaining := component.output.received_at + timeout - self._clock.monotonic()) > 0:
                if self._clock.monotonic() > longest:
                    break
                await asyncio.sleep(remaining)
            while not component.ended and component.lrm_job is not None:
                self._cancelled.add(component.name)
                try:
                    await self._monitor.call_lrm(
                        LrmOperation.CANCEL, self._lrm.cancel_job(component.lrm_job, component.name, component.user)
                    )
                    self._monitor.request_poll()
                except SiteError as error:
                    log.warning("cancel failed", action="cancel-failed", token=component.token, reason=error.message)
                await asyncio.sleep(STOP_TIMEOUT)
        finally:
            self._cancelling.discard(component.name)
