"""The services of a daemon in memory. The command of a job decides its end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from koalapy.daemon.alerts.health import HealthReport
from koalapy.daemon.forecast.forecasts import IfSubmitted
from koalapy.daemon.jobs.job_records import ActionResult, JobChange, JobRecord
from koalapy.daemon.jobs.output import OutputEnd, OutputText
from koalapy.daemon.jobs.submissions import RelatedJobs
from koalapy.model.array import TaskIndices
from koalapy.model.cluster import Drain, check_cluster
from koalapy.model.dependency import Clause
from koalapy.model.errors import BusyError, ConflictError, NotFoundError, StoreUnavailable, naming_item
from koalapy.model.identity import Identity, Permission, Role
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobId, JobState, TimelineEntry
from koalapy.model.job_spec import JobSpec, OutputStream, Priority
from koalapy.model.placement import Explanation
from koalapy.model.request import ClusterName
from koalapy.policies.registry import builtin_policies
from koalapy.store.records import ClusterRecord, JobFilter
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.permissions import SubmissionRules, check_job_access
from koalapy.validation.submission import check_submission

LIMITS = Limits([ClusterLimits("north", 4), ClusterLimits("south", 4)], builtin_policies())
NORTH = ClusterRecord("north", "local", "usable", 4, 4, 0, 0, 0, 0, "", 0.0, 1, 1.0)
SOUTH = replace(NORTH, name="south", state="unusable", unusable=True, errors=3, reason="3 errors in a row")


class MemoryActions:
    """Bulk actions on the jobs of ``MemoryService``."""

    def __init__(self, service: "MemoryService") -> None:
        self._service = service

    async def cancel_jobs(
        self, jobs: Sequence[JobId], caller: Identity, reason: str, *, warn: bool = False
    ) -> Sequence[ActionResult]:
        results = []
        for job in dict.fromkeys(jobs):
            try:
                results.append(ActionResult(job, await self._service.cancel(job, caller, reason, warn=warn)))
            except ConflictError as error:
                record = self._service.make_record(job)
                results.append(
                    ActionResult(job, record)
                    if record.job.state is JobState.CANCELLED
                    else ActionResult(job, error=error)
                )
            except NotFoundError as error:
                results.append(ActionResult(job, error=error))
        return results

    async def hold_jobs(self, jobs: Sequence[JobId], caller: Identity, reason: str) -> Sequence[ActionResult]:
        return [await self._action_result(job, self._service.hold(job, caller, reason)) for job in jobs]

    async def release_jobs(self, jobs: Sequence[JobId], caller: Identity) -> Sequence[ActionResult]:
        return [await self._action_result(job, self._service.release(job, caller)) for job in jobs]

    async def _action_result(self, job: JobId, change: Awaitable[JobRecord]) -> ActionResult:
        try:
            return ActionResult(job, await change)
        except NotFoundError as error:
            return ActionResult(job, error=error)

    async def set_priority(
        self, jobs: Sequence[JobId], priority: Priority, caller: Identity, reason: str
    ) -> Sequence[ActionResult]:
        return [ActionResult(job, await self._service.set_priority(job, priority)) for job in jobs]


class MemoryBatches:
    """Submissions of several jobs to ``MemoryService``."""

    def __init__(self, service: "MemoryService") -> None:
        self._service = service

    async def submit(
        self, specs: Sequence[JobSpec], caller: Identity, idempotency_key: str | None = None
    ) -> tuple[range, bool]:
        for index, spec in enumerate(specs):
            with naming_item(lambda index=index: f"jobs[{index}]"):
                check_submission(replace(spec, policy="", policy_options=()), LIMITS)
        records = [(await self._service.submit(spec, caller))[0] for spec in specs]
        return range(records[0].job.id, records[-1].job.id + 1), True

    async def complete_spec(self, spec: JobSpec, caller: Identity) -> JobSpec:
        return spec

    async def find_unmet_dependencies(self, spec: JobSpec, caller: Identity) -> tuple[Clause, ...]:
        return ()


class MemoryService:
    """``echo TEXT`` succeeds, ``exit CODE`` fails, ``lost`` fails without a code, other commands do not end."""

    def __init__(self) -> None:
        self.bulk = MemoryActions(self)
        self.submissions = MemoryBatches(self)
        self.records: dict[JobId, Job] = {}
        self.keys: dict[str, JobId] = {}
        self.output: dict[JobId, bytes] = {}
        self.incomplete_output: set[JobId] = set()
        """Jobs with output that is missing."""
        self.south = SOUTH
        self.warned: set[JobId] = set()
        """Jobs that were cancelled with a warning."""
        self.explanation: Explanation | None = None
        self.forecast = IfSubmitted(at_once=True)
        """The answer to requests for a forecast of a submission."""
        self.explained_spec: JobSpec | None = None
        """The last submission that was explained."""
        self.changed = asyncio.Condition()
        self.failing_reads = 0
        """Number of further reads of a job that fail."""
        self.timeline_entries: list[tuple[int, TimelineEntry]] = []
        """Timeline entries of every followed job, each with the number of restarts."""
        self.wait_started = threading.Event()
        """Set when a client waits for an unfinished job."""
        self.output_followed = threading.Event()
        """Set when a client follows the output of an unfinished job."""

    async def submit(
        self, spec: JobSpec, caller: Identity, idempotency_key: str | None = None
    ) -> tuple[JobRecord, bool]:
        if idempotency_key in self.keys:
            return self.make_record(self.keys[idempotency_key]), False
        if spec.name == "too many":
            raise BusyError("2 jobs wait already", retry_after=30.0, hint="submit again later")
        spec = SubmissionRules(Permission(Role.USER)).with_owner(spec, caller)
        check_submission(replace(spec, policy="", policy_options=()), LIMITS)
        job = Job(len(self.records) + 1, spec, 1000.0, JobState.QUEUED, "too few idle nodes")
        self.keys[idempotency_key or ""] = job.id
        self.records[job.id], self.output[job.id] = self._run_command(job)
        return self.make_record(job.id), True

    def _run_command(self, job: Job) -> tuple[Job, bytes]:
        match job.spec.command:
            case ("echo", text):
                return _end_job(job, JobState.SUCCEEDED, 0), text.encode() + b"\n"
            case ("exit", code):
                return _end_job(job, JobState.FAILED, int(code)), b"so far\n"
            case ("lost",):
                return _end_job(job, JobState.FAILED, None), b""
            case ("start", *words):
                component = Component(0, "north", 2, ComponentState.RUNNING, hosts=("127.0.1.1", "127.0.1.2"))
                attempt = Attempt(1, (component,), 1000.5, barrier_at=1001.0, launched_at=1001.5)
                running = replace(job, state=JobState.RUNNING, reason="", generation=1, attempt=attempt)
                return replace(running, placed_at=1000.5, started_at=1001.0), " ".join(words).encode()
        return job, b""

    async def _update_job(self, job: JobId, **fields: object) -> JobRecord:
        async with self.changed:
            self.records[job] = replace(self.records[job], **fields)  # type: ignore[arg-type]
            self.changed.notify_all()
        return await self.get(job)

    async def cancel(
        self, job: JobId, caller: Identity, reason: str, *, warn: bool = False, tasks: TaskIndices | None = None
    ) -> JobRecord:
        self.warned |= {job} if warn else set()
        if (await self.get(job)).job.state.is_final:
            raise ConflictError(f"job {job} is over already", field="job", value=job)
        return await self._update_job(job, state=JobState.CANCELLED, reason=reason or "cancelled", ended_at=1009.0)

    async def hold(self, job: JobId, caller: Identity, reason: str) -> JobRecord:
        await self.get(job)
        return await self._update_job(job, state=JobState.HELD, reason=reason)

    async def release(self, job: JobId, caller: Identity) -> JobRecord:
        await self.get(job)
        return await self._update_job(job, state=JobState.QUEUED)

    async def set_priority(self, job: JobId, priority: Priority) -> JobRecord:
        job_before = (await self.get(job)).job
        return await self._update_job(job, spec=replace(job_before.spec, priority=priority))

    async def change(self, job: JobId, caller: Identity, apply: Callable[[JobSpec], JobSpec], reason: str) -> JobRecord:
        spec = apply((await self.get(job)).job.spec)
        check_submission(spec, LIMITS)
        return await self._update_job(job, spec=spec)

    async def explain_change(
        self, job: JobId, caller: Identity, apply: Callable[[JobSpec], JobSpec], reason: str
    ) -> Explanation:
        explanation = await self.explain_submission(apply((await self.get(job)).job.spec), caller)
        return replace(explanation, job=job)

    async def list_related(self, job: Job) -> RelatedJobs:
        return (), ()

    def get_cluster(self, name: ClusterName) -> ClusterRecord:
        records = {record.name: record for record in self.list_clusters()}
        check_cluster(name, records)
        return records[name]

    async def clear_cluster(self, cluster: ClusterName) -> ClusterRecord:
        self.get_cluster(cluster)
        self.south = replace(self.south, state="usable", errors=0, reason="")
        return self.south

    async def drain_cluster(
        self,
        cluster: ClusterName,
        caller: Identity,
        reason: str,
        *,
        requeue: bool = False,
        begin: float | None = None,
        end: float | None = None,
    ) -> ClusterRecord:
        self.get_cluster(cluster)
        if begin is not None:
            self.south = replace(self.south, planned_drains=(Drain(1000.0, caller.user, reason, begin, end),))
            return self.south
        used = 0 if requeue else 2
        self.south = replace(self.south, state="drained", drained=Drain(1000.0, caller.user, reason), used=used)
        return self.south

    async def resume_cluster(
        self, cluster: ClusterName, *, planned: bool = False, begin: float | None = None, ordered: float | None = None
    ) -> ClusterRecord:
        self.get_cluster(cluster)
        if planned or begin is not None:
            drains = tuple(each for each in self.south.planned_drains if begin not in (None, each.since))
            self.south = replace(self.south, planned_drains=drains)
        elif self.south.drained is None:
            raise ConflictError(
                f"cluster {cluster} is not drained",
                field="cluster",
                hint="nothing to resume; koala clusters shows the drained ones",
            )
        self.south = replace(self.south, state="unusable", drained=None)
        return self.south

    async def declare_cluster_lost(self, cluster: ClusterName, caller: Identity, reason: str) -> ClusterRecord:
        self.get_cluster(cluster)
        return self.south

    async def get(self, job: JobId) -> JobRecord:
        if self.failing_reads:
            self.failing_reads -= 1
            raise StoreUnavailable("the database does not answer")
        if job not in self.records:
            raise NotFoundError(f"there is no job {job}", field="job", value=job, hint="see koala history")
        return self.make_record(job)

    async def get_many(self, jobs: Sequence[JobId]) -> dict[JobId, Job]:
        return {job: self.records[job] for job in jobs if job in self.records}

    async def get_owned(self, job: JobId, caller: Identity) -> JobRecord:
        record = await self.get(job)
        check_job_access(caller, record.job)
        return record

    def make_record(self, job: JobId) -> JobRecord:
        return JobRecord(self.records[job], self.records[job].reason)

    async def list_page(self, job_filter: JobFilter) -> tuple[Sequence[JobRecord], JobId | None]:
        matching = [
            JobRecord(job, job.reason)
            for job in sorted(self.records.values(), key=lambda job: -job.id)
            if (not job_filter.states or job.state in job_filter.states)
            and job_filter.owner in ("", job.spec.owner)
            and job_filter.name in ("", job.spec.name)
            and job_filter.home_site in ("", job.spec.home_site)
            and job_filter.array == job.array_job
            and (job_filter.ids is None or job.id in job_filter.ids)
            and (job_filter.before is None or job.id < job_filter.before)
        ]
        next_before = matching[job_filter.limit - 1].job.id if len(matching) > job_filter.limit else None
        return matching[: job_filter.limit], next_before

    async def count(self, job_filter: JobFilter) -> tuple[int, bool]:
        return len((await self.list_page(replace(job_filter, limit=10**6)))[0]), True

    async def list_unfinished(self, job_filter: JobFilter, sort: str, offset: int) -> tuple[list[JobRecord], int]:
        """Return a page of unfinished jobs: active ones, newest first, then queued and held ones, oldest first."""
        records, _ = await self.list_page(replace(job_filter, limit=10**6))
        queued, held = (
            [record for record in records[::-1] if record.job.state is state]
            for state in (JobState.QUEUED, JobState.HELD)
        )
        ordered = [*(record for record in records if record.job.state.is_active), *queued, *held]
        return ordered[offset : offset + job_filter.limit], len(ordered)

    async def explain_job(self, job: JobId, caller: Identity) -> Explanation:
        record = (await self.get(job)).job
        explanation = self.explanation or Explanation(None, record.state, record.reason or str(record.state))
        return replace(explanation, job=job)

    async def explain_submission(self, spec: JobSpec, caller: Identity) -> Explanation:
        check_submission(replace(spec, policy="", policy_options=()), LIMITS)
        self.explained_spec = spec
        return self.explanation or Explanation(None, JobState.PLACED, "would be placed at once on north (4 nodes)")

    async def forecast_submission(self, spec: JobSpec, patience: float, awaits: tuple[Clause, ...] = ()) -> IfSubmitted:
        return self.forecast

    async def read_timeline(self, job: JobId) -> Sequence[TimelineEntry]:
        entries = [TimelineEntry(job, 1000.25, "submitted", JobState.QUEUED)]
        if (attempt := (await self.get(job)).job.attempt) is not None:
            entries.append(TimelineEntry(job, attempt.placed_at, "placed", JobState.PLACED))
        return entries

    async def list_attempts(self, job: JobId, last: int | None = None) -> tuple[JobRecord, Sequence[Attempt]]:
        record = await self.get(job)
        return record, [record.job.attempt] if record.job.attempt else []

    async def wait_until_final(self, job: JobId, timeout: float) -> JobRecord:
        record = await self.get(job)
        if record.job.state.is_final:
            return record
        self.wait_started.set()
        try:
            async with asyncio.timeout(timeout), self.changed:
                await self.changed.wait_for(lambda: self.records[job].state.is_final)
        except TimeoutError:
            pass
        return await self.get(job)

    async def follow_output(
        self,
        job: JobId,
        follow: bool,
        component: int | None = None,
        stream: OutputStream | None = None,
        last_lines: int | None = None,
        attempt: int = 0,
        offsets: Mapping[int, int] | None = None,
    ) -> AsyncIterator[OutputText | OutputEnd]:
        record = (await self.get(job)).job
        beginning = (offsets or {}).get(0, 0)
        if data := self.output[job][beginning:]:
            yield OutputText(max(1, record.generation), 0, beginning + len(data), 0, data)
        if follow and not record.state.is_final:
            self.output_followed.set()
            async with self.changed:
                await self.changed.wait_for(lambda: self.records[job].state.is_final)
        yield OutputEnd(self.records[job].state, job not in self.incomplete_output)

    async def follow_job(self, job: JobId, last: int) -> AsyncIterator[JobChange]:
        for number, (restarts, entry) in enumerate(self.timeline_entries, 1):
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


def _end_job(job: Job, state: JobState, code: int | None) -> Job:
    return replace(job, state=state, reason="" if code == 0 else "the program failed", exit_code=code, ended_at=1002.0)
