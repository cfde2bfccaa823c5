"""Forecast when waiting jobs start and end, as things are or with a change, by simulation in a child process."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

import structlog

from koalapy.daemon.forecast.subprocess_worker import run_in_subprocess
from koalapy.model.cluster import check_cluster, check_drain_times
from koalapy.model.dependency import Clause
from koalapy.model.errors import BusyError, UsageError
from koalapy.model.job import Job, JobId, JobState, new_job
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName, FlexibleRequest
from koalapy.model.wording import format_days
from koalapy.policies.registry import Registry
from koalapy.scheduler.explain.dry_run import DryRun
from koalapy.scheduler.queries import Queries
from koalapy.simulation.moment import moment_of
from koalapy.simulation.record.format import People
from koalapy.simulation.twin import (
    HORIZON,
    MAX_DRAWS,
    Answer,
    Change,
    Expected,
    Forecast,
    Interval,
    Question,
    Report,
    ignore_progress,
)
from koalapy.simulation.wire import answer_question, read_answer, write_question

log = structlog.get_logger()

FRESH_S = 60.0
"""Seconds for which a forecast is reused."""
MAX_SHOWN_AGE_S = 900.0
"""Age up to which pages show a forecast."""
SUBMISSION_TIMEOUT_S = 30.0
"""Timeout of the forecast of one submission."""
MAX_SUBMISSIONS = 8
"""The most concurrent forecasts of submissions; further ones are rejected."""
PREVIEW_HORIZON_S, PREVIEW_DRAWS = 8 * 3600.0, 5
"""Number of simulated seconds and of simulations of the preview of a drain, which compares medians."""
MIN_DELAY_S = 1.0
"""Least difference between two expected starts that counts as a delay."""
REST_FACTOR = 10.0
"""After a periodic forecast the next one waits this many times as long as it took."""


Submission = tuple[JobSpec, tuple[Clause, ...]]
"""A job to submit, and the clauses of its dependencies that do not hold yet."""


@dataclass(frozen=True, slots=True)
class _StoredForecast:
    made_at: float
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class IfSubmitted:
    """When a job would start and end if it were submitted now."""

    at_once: bool
    expected: Expected | None = None
    """None if the job would start at once, or if no forecast is known."""
    reason: str = ""
    """The reason why no start is known."""
    is_pending: bool = False
    """Whether the forecast is still being computed."""


@dataclass(frozen=True, slots=True)
class JobThere:
    """An unfinished job with nodes on a cluster, or a waiting one that requests nodes of it by name."""

    job: JobId
    owner: str
    nodes: int
    """Nodes on this cluster."""
    ends_within: float | None = None
    """Seconds until its walltime ends; None if it has no walltime, or if its program has not started."""


@dataclass(frozen=True, slots=True)
class DelayedJob:
    """A waiting job that would start later; times in seconds from now."""

    job: JobId
    owner: str
    starts: Interval
    changed: Interval | None
    """The start after the drain; None if it starts in no simulation."""


@dataclass(frozen=True, slots=True)
class DrainPreview:
    """The expected effect of draining a cluster, now or in a time to come."""

    cluster: ClusterName
    running: tuple[JobThere, ...]
    """Jobs with nodes there at the begin, which continue; a drain that requeues stops them.

    Without a simulation of a later begin, the jobs there now that may run until then.
    """
    bound: tuple[JobThere, ...]
    """Waiting jobs that request the cluster by name, so that they do not start before its end."""
    waiting: int
    """Number of waiting jobs."""
    begins_at: float | None = None
    """In seconds since the epoch; None: now."""
    ends_at: float | None = None
    """None: when it is resumed."""
    delayed: tuple[DelayedJob, ...] | None = None
    """Waiting jobs that would start later, those that would not start at all first, then by delay.

    None if nothing was simulated.
    """
    horizon: float = PREVIEW_HORIZON_S
    """Number of simulated seconds."""
    note: str = ""
    """Why simulations ended early; empty if none did."""


class Forecasts:
    """The forecasts of one daemon. One runs at a time, at low priority."""

    def __init__(
        self,
        queries: Queries,
        people: People,
        clock: Callable[[], float],
        policies: Callable[[], Registry],
        work: Callable[[Question], Awaitable[Answer]] | None = None,
    ) -> None:
        """``policies`` is a function of a module, so that the child process can call it."""
        self._queries, self._people, self._clock, self._policies = queries, people, clock, policies
        self._work = work or _answer_in_subprocess
        self._one_at_a_time = asyncio.Lock()
        self._latest: _StoredForecast | None = None
        self._under_way: asyncio.Task[None] | None = None
        self._submissions: dict[Submission, tuple[float, asyncio.Task[IfSubmitted]]] = {}
        """Running and recent forecasts of submissions, with their begin."""
        self._rests_until = 0.0

    async def what_if(
        self, change: Change, horizon: float = HORIZON, report: Report = ignore_progress, max_draws: int = MAX_DRAWS
    ) -> Answer:
        """Simulate a change. Raise ``UsageError`` or ``NotFoundError`` if it is invalid, ``BusyError`` on timeout."""
        if self._one_at_a_time.locked():
            report(0, 0)
        async with self._one_at_a_time:
            return await self._simulate_change(change, horizon, report, max_draws)

    def check_change(self, change: Change) -> None:
        """Raise ``UsageError`` or ``NotFoundError`` if a change is impossible now."""
        change.check(moment_of(self._queries, self._people, self._clock()), self._queries.policies)

    def describe_drain(
        self, cluster: ClusterName, begin: float | None = None, end: float | None = None
    ) -> DrainPreview:
        """Return the effects of a drain that need no simulation. Raise ``NotFoundError`` for an unknown cluster, and
        ``UsageError`` for impossible times.

        ``begin`` (None: now) and ``end`` (None: when it is resumed) are in seconds since the epoch.
        """
        check_cluster(cluster, [status.name for status in self._queries.grid.clusters()])
        check_drain_times(begin, end, self._clock())
        now, running, bound, waiting = self._clock(), dict[JobId, JobThere](), list[JobThere](), 0
        for token, nodes in self._queries.grid[cluster].nodes.live.items():
            if (match := self._queries.find(token)) is not None:
                job = match[0]
                counted = running[job.id].nodes if job.id in running else 0
                running[job.id] = JobThere(job.id, job.spec.owner, counted + nodes, _remaining_walltime(job, now))
        for job in self._queries.jobs():
            if job.state is JobState.QUEUED:
                waiting += 1
                if nodes := _nodes_by_name(job, cluster):
                    bound.append(JobThere(job.id, job.spec.owner, nodes))
        return DrainPreview(
            cluster,
            tuple(
                running[ident]
                for ident in sorted(running)
                if begin is None or (within := running[ident].ends_within) is None or now + within > begin
            ),
            tuple(sorted(bound, key=lambda entry: entry.job)),
            waiting,
            begin,
            end,
        )

    async def preview_drain(
        self,
        cluster: ClusterName,
        report: Report = ignore_progress,
        begin: float | None = None,
        end: float | None = None,
    ) -> DrainPreview:
        """Simulate the drain of a cluster from ``begin`` (None: now) to ``end`` (None: until it is resumed).

        Raise the errors of ``what_if``, and ``UsageError`` if it begins too late.
        """
        ahead = max(0.0, (begin or 0.0) - self._clock())
        if ahead + PREVIEW_HORIZON_S > HORIZON:
            hint = f"at most {HORIZON / 86_400:.0f} days are simulated; ask again later"
            raise UsageError("the drain begins too late to simulate it", field="begin", value=begin, hint=hint)
        preview = self.describe_drain(cluster, begin, end)
        begin = begin if ahead else None
        change = Change(drain=(cluster,), begin=begin, end=end)
        answer = await self.what_if(change, ahead + PREVIEW_HORIZON_S, report, PREVIEW_DRAWS)
        assert answer.changed is not None
        if begin is not None:
            preview = replace(preview, running=self._list_there(answer.changed.there))
        changed_starts = {expected.job: expected.starts for expected in answer.changed.jobs}
        delays: list[tuple[float, DelayedJob]] = []
        for expected in answer.as_it_is.jobs:
            job, changed = self._queries.unfinished(expected.job), changed_starts.get(expected.job)
            if job is not None and expected.starts is not None:
                delay = inf if changed is None else changed.middle - expected.starts.middle
                if delay >= MIN_DELAY_S:
                    delays.append((delay, DelayedJob(job.id, job.spec.owner, expected.starts, changed)))
        return replace(
            preview,
            delayed=tuple(delayed for _, delayed in sorted(delays, key=lambda pair: (-pair[0], pair[1].job))),
            horizon=min(answer.as_it_is.horizon, answer.changed.horizon),
            note=answer.changed.note or answer.as_it_is.note,
        )

    def _list_there(self, nodes: Mapping[JobId, int]) -> tuple[JobThere, ...]:
        """Return unfinished jobs with their nodes, by number, without tasks that are still to be started."""
        jobs = [job for ident in sorted(nodes) if (job := self._queries.unfinished(ident)) is not None]
        return tuple(
            JobThere(job.id, job.spec.owner, nodes[job.id], _remaining_walltime(job, self._clock())) for job in jobs
        )

    async def forecast_job(self, job: JobId, patience: float) -> tuple[bool, Expected | None]:
        """Return whether the forecast of an unfinished job is known within ``patience`` seconds, and the forecast.

        It is at most a minute old, and None for a job that is new or held.
        """
        if not self._is_fresh():
            if self._under_way is None or self._under_way.done():
                self._under_way = asyncio.create_task(self._refresh_forecast())
                self._under_way.add_done_callback(_retrieve_error)
            await asyncio.wait([self._under_way], timeout=patience)
            if not self._under_way.done():
                return False, None
            self._under_way.result()
        return True, None if self._latest is None else self._latest.forecast.of(job)

    @property
    def latest_forecast(self) -> Forecast | None:
        """Return the newest forecast of all jobs, without making one; None if there is none of the last minutes."""
        latest = self._latest
        is_recent = latest is not None and 0 <= self._clock() - latest.made_at < MAX_SHOWN_AGE_S
        return latest.forecast if latest is not None and is_recent else None

    async def forecast_submission(self, spec: JobSpec, patience: float, awaits: tuple[Clause, ...] = ()) -> IfSubmitted:
        """Forecast a job as if it were submitted now. Equal requests within a minute share the result.

        ``awaits``: the clauses of its dependencies that do not hold yet.
        """
        is_deferred = awaits or (spec.begin is not None and spec.begin > self._clock())
        if not spec.all_inputs and not is_deferred and DryRun(self._queries).placed_at_once(spec) is not None:
            return IfSubmitted(at_once=True)
        self._submissions = {
            earlier: (began, task)
            for earlier, (began, task) in self._submissions.items()
            if not task.done() or (self._is_recent(began) and not task.cancelled() and task.exception() is None)
        }
        submission = spec, awaits
        if submission not in self._submissions:
            if sum(not task.done() for _, task in self._submissions.values()) >= MAX_SUBMISSIONS:
                return IfSubmitted(False, reason="too many predictions are requested; retry in a minute")
            task = asyncio.create_task(self._forecast_submission(submission))
            task.add_done_callback(_retrieve_error)
            self._submissions[submission] = self._clock(), task
        _, asking = self._submissions[submission]
        await asyncio.wait([asking], timeout=patience)
        if not asking.done():
            reason = f"to work it out takes longer than {patience:g} s: ask again in a while"
            return IfSubmitted(False, reason=reason, is_pending=True)
        try:
            return asking.result()
        except TimeoutError:
            reason = f"to work it out takes longer than {SUBMISSION_TIMEOUT_S:g} s, for there is so much on this grid"
        except BusyError as error:
            reason = f"{error.message}: {error.hint}"
        except RuntimeError:
            reason = "it could not be worked out: the daemon's log says why"
        return IfSubmitted(False, reason=reason)

    async def forecast_periodically(self) -> None:
        """Make the forecast that pages show, unless no user's job waits or one is recent."""
        began = self._clock()
        if began < self._rests_until or self._is_fresh():
            return
        if not any(job.is_in_queue and not job.spec.internal for job in self._queries.jobs()):
            return
        try:
            await self._refresh_forecast()
        except (BusyError, RuntimeError) as error:
            log.warning("the periodic forecast failed", action="forecast-failed", error=str(error))
        ended = self._clock()
        self._rests_until = ended + REST_FACTOR * (ended - began)

    async def _forecast_submission(self, submission: Submission) -> IfSubmitted:
        """Forecast a job as the last of the queue."""
        async with self._one_at_a_time, asyncio.timeout(SUBMISSION_TIMEOUT_S):
            moment = moment_of(self._queries, self._people, self._clock())
            jobs = moment.beginning.jobs
            ident = 1 + max((job.last_number for job in jobs), default=0)
            last = 1 + max((job.queue_seq for job in jobs), default=0)
            spec, awaits = submission
            submitted = replace(new_job(ident, spec, moment.now, awaits), queue_seq=last)
            moment = replace(moment, beginning=replace(moment.beginning, jobs=(*jobs, submitted)))
            answer = await self._work(Question(moment, Change(), self._policies))
        forecast = answer.as_it_is
        expected = forecast.of(ident)
        span, reason = format_days(forecast.horizon), ""
        if expected is None:
            reason = "nothing came of it in the simulation"
        elif not expected.starts and forecast.note:
            reason = f"it does not surely start in the next {span}, and {forecast.note}"
        elif not expected.starts:
            reason = f"it started in no simulation of the next {span}"
        return IfSubmitted(False, expected, reason)

    def _is_fresh(self) -> bool:
        return self._latest is not None and self._is_recent(self._latest.made_at)

    def _is_recent(self, made_at: float) -> bool:
        return 0 <= self._clock() - made_at < FRESH_S

    async def _refresh_forecast(self) -> None:
        async with self._one_at_a_time:
            await self._simulate_change(Change())

    async def _simulate_change(
        self, change: Change, horizon: float = HORIZON, report: Report = ignore_progress, max_draws: int = MAX_DRAWS
    ) -> Answer:
        """Forecast with and without a change. Keep a forecast of full length for later requests.

        ``horizon`` is in seconds.
        """
        moment = moment_of(self._queries, self._people, self._clock())
        change.check(moment, self._queries.policies)
        answer = await self._work(Question(moment, change, self._policies, horizon, max_draws, report))
        if horizon < HORIZON:  # a shorter forecast lacks later starts, so it is not reused
            return answer
        self._latest = _StoredForecast(moment.now, answer.as_it_is)
        return answer


def _remaining_walltime(job: Job, now: float) -> float | None:
    """Return the seconds until the walltime of a job ends; None if it has none, or if its program has not started."""
    started = None if job.attempt is None else job.attempt.barrier_at
    return None if started is None or job.spec.walltime is None else max(0.0, started + job.spec.walltime - now)


def _nodes_by_name(job: Job, cluster: ClusterName) -> int:
    """Return the nodes that a job requests of a cluster by its name."""
    request = job.spec.request
    components = () if isinstance(request, FlexibleRequest) else request.components
    return sum(component.size for component in components if component.cluster == cluster)


async def _answer_in_subprocess(question: Question) -> Answer:
    values = write_question(question)
    return read_answer(await run_in_subprocess(answer_question, values, question.policies, report=question.report))


def _retrieve_error(task: "asyncio.Task[None] | asyncio.Task[IfSubmitted]") -> None:
    """Retrieve the error of a task that no client may be waiting for, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
