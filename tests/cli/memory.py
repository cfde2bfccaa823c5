"""A daemon's service in memory: a job's command says what becomes of it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace

from koalapy.daemon.alerts.health import HealthReport
from koalapy.daemon.forecast.forecasts import IfSubmitted
from koalapy.daemon.jobs.jobs import ActionResult, JobChange, JobRecord, Metrics
from koalapy.model.cluster import Drain, check_cluster
from koalapy.model.errors import BusyError, ConflictError, NotFoundError, StoreUnavailable
from koalapy.model.explanation import Explanation
from koalapy.model.identity import HighPriority, Identity, Role
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobId, JobSpec, JobState, Priority, TimelineEntry
from koalapy.model.request import ClusterName
from koalapy.policies.registry import builtin_policies
from koalapy.ports import ClusterRecord, JobFilter, MeanTimes, Usage
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.permissions import SubmissionRules, check_job_access
from koalapy.validation.submission import check_submission

LIMITS = Limits([ClusterLimits("north", 4), ClusterLimits("south", 4)], builtin_policies())
NORTH = ClusterRecord("north", "local", "usable", 4, 4, 0, 0, 0, 0, "", 0.0, 1, 1.0)
SOUTH = replace(NORTH, name="south", state="unusable", unusable=True, errors=3, reason="3 errors in a row")


class MemoryActions:
    """What is done to many jobs of a service in memory."""

    def __init__(self, service: "MemoryService") -> None:
        self._service = service

    async def cancel_jobs(
        self, jobs: Sequence[JobId], by: Identity, reason: str, *, warn: bool = False
    ) -> Sequence[ActionResult]:
        done = []
        for job in dict.fromkeys(jobs):
            try:
                done.append(ActionResult(job, await self._service.cancel(job, by, reason, warn=warn)))
            except ConflictError as error:
                known = self._service.make_record(job)
                done.append(
                    ActionResult(job, known)
                    if known.job.state is JobState.CANCELLED
                    else ActionResult(job, error=error)
                )
            except NotFoundError as error:
                done.append(ActionResult(job, error=error))
        return done

    async def hold_jobs(self, jobs: Sequence[JobId], by: Identity, reason: str) -> Sequence[ActionResult]:
        return [await self._changed(job, self._service.hold(job, by, reason)) for job in jobs]

    async def release_jobs(self, jobs: Sequence[JobId], by: Identity) -> Sequence[ActionResult]:
        return [await self._changed(job, self._service.release(job, by)) for job in jobs]

    async def _changed(self, job: JobId, change: Awaitable[JobRecord]) -> ActionResult:
        try:
            return ActionResult(job, await change)
        except NotFoundError as error:
            return ActionResult(job, error=error)

    async def set_priority(
        self, jobs: Sequence[JobId], priority: Priority, by: Identity, reason: str
    ) -> Sequence[ActionResult]:
        return [ActionResult(job, await self._service.set_priority(job, priority)) for job in jobs]


class MemoryService:
    """``echo TEXT`` succeeds, ``exit CODE`` fails, ``lost`` fails without a code, anything else goes on."""

    def __init__(self) -> None:
        self.bulk = MemoryActions(self)
        self.records: dict[JobId, Job] = {}
        self.keys: dict[str, JobId] = {}
        self.printed: dict[JobId, bytes] = {}
        self.south = SOUTH
        self.warned: set[JobId] = set()
        """Jobs that were cancelled with a warning."""
        self.explanation: Explanation | None = None
        self.told = IfSubmitted(at_once=True)
        """What "why?" is answered with, if not by the job's reason."""
        self.asked: JobSpec | None = None
        """The last submission that was only asked about."""
        self.changed = asyncio.Condition()
        self.unanswered = 0
        """How many questions for a job the database does not answer any more."""
        self.story: list[tuple[int, TimelineEntry]] = []
        """What is told of every job that is followed, with the restarts that it has had by then."""
        self.waited_for = threading.Event()
        """Set once somebody waits for a job that is not over."""
        self.followed = threading.Event()
        """Set once somebody has the output of such a job."""

    async def submit(self, spec: JobSpec, by: Identity, idempotency_key: str | None = None) -> tuple[JobRecord, bool]:
        if idempotency_key in self.keys:
            return self.make_record(self.keys[idempotency_key]), False
        if spec.name == "too many":
            raise BusyError("2 jobs wait already", retry_after=30.0, hint="submit again later")
        spec = SubmissionRules(HighPriority(Role.USER)).with_owner(spec, by)
        check_submission(replace(spec, policy="", policy_options=()), LIMITS)
        job = Job(len(self.records) + 1, spec, 1000.0, JobState.QUEUED, "too few idle nodes")
        self.keys[idempotency_key or ""] = job.id
        self.records[job.id], self.printed[job.id] = self._become(job)
        return self.make_record(job.id), True

    def _become(self, job: Job) -> tuple[Job, bytes]:
        match job.spec.command:
            case ("echo", text):
                return _over(job, JobState.SUCCEEDED, 0), text.encode() + b"\n"
            case ("exit", code):
                return _over(job, JobState.FAILED, int(code)), b"so far\n"
            case ("lost",):
                return _over(job, JobState.FAILED, None), b""
            case ("start", *words):
                component = Component(0, "north", 2, ComponentState.RUNNING, hosts=("127.0.1.1", "127.0.1.2"))
                attempt = Attempt(1, (component,), 1000.5, barrier_at=1001.0, launched_at=1001.5)
                running = replace(job, state=JobState.RUNNING, reason="", generation=1, attempt=attempt)
                return replace(running, placed_at=1000.5, started_at=1001.0), " ".join(words).encode()
        return job, b""

    async def _change(self, job: JobId, **fields: object) -> JobRecord:
        async with self.changed:
            self.records[job] = replace(self.records[job], **fields)  # type: ignore[arg-type]
            self.changed.notify_all()
        return await self.get(job)

    async def cancel(self, job: JobId, by: Identity, reason: str, *, warn: bool = False) -> JobRecord:
        self.warned |= {job} if warn else set()
        if (await self.get(job)).job.state.is_final:
            raise ConflictError(f"job {job} is over already", field="job", value=job)
        return await self._change(job, state=JobState.CANCELLED, reason=reason or "cancelled", ended_at=1009.0)

    async def hold(self, job: JobId, by: Identity, reason: str) -> JobRecord:
        await self.get(job)
        return await self._change(job, state=JobState.HELD, reason=reason)

    async def release(self, job: JobId, by: Identity) -> JobRecord:
        await self.get(job)
        return await self._change(job, state=JobState.QUEUED)

    async def set_priority(self, job: JobId, priority: Priority) -> JobRecord:
        known = (await self.get(job)).job
        return await self._change(job, spec=replace(known.spec, priority=priority))

    def get_cluster(self, name: ClusterName) -> ClusterRecord:
        known = {record.name: record for record in self.list_clusters()}
        check_cluster(name, known)
        return known[name]

    async def clear_cluster(self, cluster: ClusterName) -> ClusterRecord:
        self.get_cluster(cluster)
        self.south = replace(self.south, state="usable", errors=0, reason="")
        return self.south

    async def drain_cluster(
        self, cluster: ClusterName, by: Identity, reason: str, *, requeue: bool = False
    ) -> ClusterRecord:
        self.get_cluster(cluster)
        if reason or self.south.drained is None:
            used = 0 if requeue else 2
            self.south = replace(self.south, state="drained", drained=Drain(1000.0, by.user, reason), used=used)
        return self.south

    async def resume_cluster(self, cluster: ClusterName) -> ClusterRecord:
        self.get_cluster(cluster)
        if self.south.drained is None:
            raise ConflictError(f"cluster {cluster} is not drained", field="cluster", hint="see koala clusters")
        self.south = replace(self.south, state="unusable", drained=None)
        return self.south

    async def declare_cluster_lost(self, cluster: ClusterName, by: Identity, reason: str) -> ClusterRecord:
        self.get_cluster(cluster)
        return self.south

    async def get(self, job: JobId) -> JobRecord:
        if self.unanswered:
            self.unanswered -= 1
            raise StoreUnavailable("the database does not answer")
        if job not in self.records:
            raise NotFoundError(f"there is no job {job}", field="job", value=job, hint="see koala queue --all")
        return self.make_record(job)

    async def get_owned(self, job: JobId, by: Identity) -> JobRecord:
        record = await self.get(job)
        check_job_access(by, record.job)
        return record

    def make_record(self, job: JobId) -> JobRecord:
        return JobRecord(self.records[job], self.records[job].reason)

    async def list_page(self, which: JobFilter) -> tuple[Sequence[JobRecord], JobId | None]:
        found = [
            JobRecord(job, job.reason)
            for job in sorted(self.records.values(), key=lambda job: -job.id)
            if (not which.states or job.state in which.states)
            and which.owner in ("", job.spec.owner)
            and which.name in ("", job.spec.name)
            and which.home_site in ("", job.spec.home_site)
            and (which.before is None or job.id < which.before)
        ]
        before = found[which.limit - 1].job.id if len(found) > which.limit else None
        return found[: which.limit], before

    async def explain_job(self, job: JobId, by: Identity) -> Explanation:
        found = (await self.get(job)).job
        explanation = self.explanation or Explanation(None, found.state, found.reason or str(found.state))
        return replace(explanation, job=job)

    async def explain_submission(self, spec: JobSpec, by: Identity) -> Explanation:
        check_submission(replace(spec, policy="", policy_options=()), LIMITS)
        self.asked = spec
        return self.explanation or Explanation(None, JobState.PLACED, "would be placed at once on north (4 nodes)")

    async def complete_spec(self, spec: JobSpec, by: Identity) -> JobSpec:
        return spec

    async def forecast_submission(self, spec: JobSpec, patience: float) -> IfSubmitted:
        return self.told

    async def read_timeline(self, job: JobId) -> Sequence[TimelineEntry]:
        entries = [TimelineEntry(job, 1000.25, "submitted", JobState.QUEUED)]
        if (attempt := (await self.get(job)).job.attempt) is not None:
            entries.append(TimelineEntry(job, attempt.placed_at, "placed", JobState.PLACED))
        return entries

    async def list_attempts(self, job: JobId, last: int | None = None) -> tuple[JobRecord, Sequence[Attempt]]:
        record = await self.get(job)
        return record, [record.job.attempt] if record.job.attempt else []

    async def measure_use(self, since: float) -> Metrics:
        mean_times = {Priority.HIGH: MeanTimes(), Priority.LOW: MeanTimes(3, 1.5, 62.0, 60.5, 3725.25)}
        usage = Usage({"north": 7200.0}, mean_times, {JobState.SUCCEEDED: 2, JobState.FAILED: 1}, 4)
        return Metrics(3600.0 - since, 3600.0, usage, self.list_clusters(), 5, 1)

    async def wait_until_final(self, job: JobId, timeout: float) -> JobRecord:
        record = await self.get(job)
        if record.job.state.is_final:
            return record
        self.waited_for.set()
        try:
            async with asyncio.timeout(timeout), self.changed:
                await self.changed.wait_for(lambda: self.records[job].state.is_final)
        except TimeoutError:
            pass
        return await self.get(job)

    async def follow_output(self, job: JobId, follow: bool, component: int | None = None) -> AsyncIterator[bytes]:
        record = await self.get(job)
        if self.printed[job]:
            yield self.printed[job]
        if follow and not record.job.state.is_final:
            self.followed.set()
            async with self.changed:
                await self.changed.wait_for(lambda: self.records[job].state.is_final)

    async def follow_job(self, job: JobId, last: int) -> AsyncIterator[JobChange]:
        for number, (restarts, entry) in enumerate(self.story, 1):
            if number > last:
                record = await self.get(job)
                now = replace(record, job=replace(record.job, restarts=restarts))
                yield JobChange(now, ((number, replace(entry, job=job)),))

    def list_clusters(self) -> Sequence[ClusterRecord]:
        return [NORTH, self.south]

    def list_policies(self) -> Sequence[dict[str, object]]:
        return builtin_policies().describe_policies()

    def make_report(self) -> HealthReport:
        return HealthReport("ok", True, [], [], "0", 1, 0, 0, {})


def _over(job: Job, state: JobState, code: int | None) -> Job:
    return replace(job, state=state, reason="" if code == 0 else "the program failed", exit_code=code, ended_at=1002.0)
