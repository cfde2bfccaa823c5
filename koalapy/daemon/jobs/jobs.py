"""Submissions, actions on jobs and clusters, and what is told of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import structlog

from koalapy.daemon.engine.database import QUERY_TIMEOUT_S, query
from koalapy.daemon.engine.engine import RETRY_INTERVAL_S, Engine, WorkItem
from koalapy.daemon.jobs.output import Outputs, OutputTail
from koalapy.daemon.observability.audit import about
from koalapy.model.application import summarize_job
from koalapy.model.errors import ConflictError, ForbiddenError, KoalaError, NotFoundError, ProblemCode, StoreUnavailable
from koalapy.model.explanation import Explanation
from koalapy.model.history import DAY
from koalapy.model.identity import Identity
from koalapy.model.job import Attempt, Job, JobId, JobSpec, JobState, Priority, TimelineEntry
from koalapy.model.notification import AllowedRecipients
from koalapy.model.request import ClusterName
from koalapy.policies.registry import DEFAULTS
from koalapy.ports import ClusterRecord, JobFilter, Store, Submitted, Usage
from koalapy.scheduler.events import (
    ClusterCleared,
    ClusterDrained,
    ClusterLost,
    ClusterResumed,
    Event,
    JobCancelled,
    JobHeld,
    JobPriorityChanged,
    JobReleased,
    JobSubmitted,
)
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.queries import Queries
from koalapy.validation.permissions import (
    SubmissionRules,
    check_is_theirs,
    check_notifications,
    may_see_all_of,
    with_home_site,
)
from koalapy.validation.request import check_size
from koalapy.validation.submission import check, hash_key, hash_spec

log = structlog.get_logger()

TIMELINE_PAGE = 500
"""Lines of a timeline that are read at once for who follows it."""
MAX_LINE_NUMBER = 2**31
MAX_JOBS_AHEAD = 1_000_000
"""By how much all agents together may raise the number of a daemon's next job while it lives."""
MAX_EXACT_SPAN = 2 * DAY
"""Seconds for which metrics are told to the second; of more whole days are told, which are added up already."""
Shown = Mapping[JobId, JobState]
"""The states in which jobs were when somebody decided what to do with them."""
NOTHING_SHOWN: Shown = {}
UNKNOWN_JOB = "see koala queue --all whether there is one, before you submit it again"
UNKNOWN_JOB_OF_KEY = "submit it again with the same Idempotency-Key: it becomes one job"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it is told to people: ``reason`` says why it waits or why it ended."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class JobChange:
    """A job after something changed, and the lines that its timeline has since, numbered from 1."""

    record: JobRecord
    timeline: tuple[tuple[int, TimelineEntry], ...]


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What became of one of several jobs that were acted on together: the job as it is, or what stood against it."""

    job: JobId
    record: JobRecord | None = None
    error: KoalaError | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """The grid from ``start`` to ``end``, which is now; the clusters and the counts of jobs are those of now."""

    start: float
    end: float
    usage: Usage
    clusters: Sequence[ClusterRecord]
    queued: int
    active: int


class Jobs:
    """Checks what users ask, hands it to the engine, and tells them how things stand."""

    def __init__(
        self,
        engine: Engine,
        queries: Queries,
        store: Store,
        outputs: Outputs,
        next_job: JobId,
        describe: Callable[[str], ClusterRecord],
        resolve: Callable[[JobSpec, Identity], Awaitable[JobSpec]] | None = None,
        rules: SubmissionRules | None = None,
        reachable: AllowedRecipients | None = None,
    ) -> None:
        """``rules``: what callers may ask for; ``reachable``: where users may have what told."""
        self._engine, self._queries = engine, queries
        self._resolve = resolve or _as_it_is
        self.rules = rules or SubmissionRules()
        self.bulk = BulkActions(self, queries, self.rules)
        self._reachable = reachable or AllowedRecipients()
        self._store = store
        self._outputs = outputs
        self._next_job = next_job
        self._max_claimed_job = next_job - 1 + MAX_JOBS_AHEAD
        self._describe = describe
        self._keys = IdempotencyKeys(store)
        self._submitting: set[asyncio.Task[tuple[JobRecord, bool]]] = set()

    # Submitting and acting

    async def submit(self, spec: JobSpec, by: Identity, idempotency_key: str | None = None) -> tuple[JobRecord, bool]:
        """Check, store and try a job; False with the first job when the key was used before for the same spec.

        The same key with another spec is a ``ConflictError``; keys are each user's own. ``ForbiddenError`` for what the
        user may not ask for.
        """
        spec = self.rules.with_owner(spec, by)
        if idempotency_key is None:
            return await self._engine.database.await_outcome(self._store_new(spec, by, None), UNKNOWN_JOB), True
        # It goes on when its client goes away: the next one with its key must find what becomes of it.
        submitting = asyncio.create_task(self._submit_once(spec, by, idempotency_key))
        self._submitting.add(submitting)
        submitting.add_done_callback(self._submitting.discard)
        return await self._engine.database.await_outcome(submitting, UNKNOWN_JOB_OF_KEY)

    async def _submit_once(self, spec: JobSpec, by: Identity, key: str) -> tuple[JobRecord, bool]:
        own = hash_key(by.user, key)
        async with self._keys.lock(own):
            first = await self._keys.find(own)
            if first is None:
                return await self._store_new(spec, by, (own, hash_spec(spec))), True
            if hash_spec(spec) != first.digest:
                raise ConflictError(
                    f"the Idempotency-Key was used for job {first.job}, which is not the same job",
                    field="Idempotency-Key",
                    value=key,
                    hint="use a new key for a new job",
                    code=ProblemCode.IDEMPOTENCY_KEY_REUSED,
                )
            about(f"job {first.job}", "it was submitted before")
            return await self.theirs(first.job, by), False

    async def _store_new(self, spec: JobSpec, by: Identity, key: tuple[str, str] | None) -> JobRecord:
        engine, queries = self._engine, self._queries
        spec = await self._checked(spec, by)
        ident, self._next_job = self._next_job, self._next_job + 1

        def prepare() -> tuple[Event, ...]:
            queries.admit(spec)
            return (JobSubmitted(Job(ident, spec, engine.clock()), by.user),)

        about(f"job {ident}")
        submitted = Submitted(key[0], ident, key[1]) if key else None
        await engine.commit(WorkItem(prepare=prepare, submitted=submitted))
        return await self.get(ident)

    def number_above(self, job: JobId) -> bool:
        """Give new jobs numbers above one that was given by a database that was lost; False when that is too far."""
        if job > self._max_claimed_job:
            return False
        if job >= self._next_job:
            log.warning("jobs are numbered above what agents know", action="job-numbers-raised", job=job)
            self._next_job = job + 1
        return True

    async def commit(self, item: WorkItem) -> None:
        """Hand something to the engine, and wait until it is written."""
        await self._engine.database.await_outcome(self._engine.commit(item))

    async def _checked(self, spec: JobSpec, by: Identity) -> JobSpec:
        """With its policy's name, its home site, and what the catalogue says of its inputs.

        ``UsageError`` for what can never work.
        """
        queries = self._queries
        check_size(spec, queries.limits())
        check_notifications(spec, self._reachable)
        spec = with_home_site(await self._resolve(spec, by), by, queries.accounts)
        check(spec, queries.limits())
        return replace(spec, policy=spec.policy or DEFAULTS[spec.request.type])

    async def cancel(self, job: JobId, by: Identity, reason: str, *, warn: bool = False) -> JobRecord:
        """With ``warn`` its program has the grace that it asked for."""
        return await self._act(job, by, JobCancelled(job, reason or f"cancelled by {by.user}", by.user, warn))

    async def hold(self, job: JobId, by: Identity, reason: str) -> JobRecord:
        return await self._act(job, by, JobHeld(job, reason or f"held by {by.user}", by.user))

    async def release(self, job: JobId, by: Identity) -> JobRecord:
        return await self._act(job, by, JobReleased(job, by.user))

    async def _act(self, job: JobId, by: Identity, event: Event) -> JobRecord:
        known = await self.theirs(job, by)
        if self._queries.job(job) is None:
            raise _over_already(known.job)
        await self.commit(WorkItem(events=(event,)))
        return await self.get(job)

    async def clear_cluster(self, cluster: ClusterName) -> ClusterRecord:
        self.cluster(cluster)
        await self.commit(WorkItem(events=(ClusterCleared(cluster),)))
        return self._describe(cluster)

    async def drain_cluster(
        self, cluster: ClusterName, by: Identity, reason: str, *, requeue: bool = False
    ) -> ClusterRecord:
        """With ``requeue`` the jobs there are stopped, and queue again."""
        self.cluster(cluster)
        await self.commit(WorkItem(events=(ClusterDrained(cluster, by.user, reason, requeue),)))
        return self._describe(cluster)

    async def resume_cluster(self, cluster: ClusterName) -> ClusterRecord:
        """``ConflictError`` when it is not drained."""
        self.cluster(cluster)

        def prepare() -> tuple[Event, ...]:
            if self._queries.grid[cluster].drained is None:
                raise ConflictError(
                    f"cluster {cluster} is not drained", field="cluster", value=cluster, hint="see koala clusters"
                )
            return (ClusterResumed(cluster),)

        await self.commit(WorkItem(prepare=prepare))
        return self._describe(cluster)

    async def declare_cluster_lost(self, cluster: ClusterName, by: Identity, reason: str) -> ClusterRecord:
        """Count the components of a cluster as over that is out of reach; ``ConflictError`` while its agent is
        connected."""
        self.cluster(cluster)
        await self.commit(WorkItem(events=(ClusterLost(cluster, by.user, reason),)))
        return self._describe(cluster)

    # Looking

    async def get(self, job: JobId) -> JobRecord:
        known = self._queries.job(job)
        found = known or await query(self._store.job, job)
        if found is None:
            raise _no_job(job)
        return self.record(found)

    async def theirs(self, job: JobId, by: Identity) -> JobRecord:
        """A job of which somebody may see and do all; ``ForbiddenError`` for others'."""
        record = await self.get(job)
        check_is_theirs(by, record.job)
        return record

    async def page(self, which: JobFilter) -> tuple[Sequence[JobRecord], JobId | None]:
        """Jobs, newest first, and what the ids of the next page are to be smaller than: None when this is the last.

        Where many are looked at for a few it is short, but has one.
        """
        page = await query(self._store.page, which)
        while not page.jobs and page.before is not None:
            page = await query(self._store.page, replace(which, before=page.before))
        return [self.record(job) for job in page.jobs], page.before

    async def several(self, jobs: Sequence[JobId]) -> dict[JobId, Job]:
        """Return the jobs of these numbers that exist, each once and in this order; those that are over as lists hold
        them."""
        wanted, queries = tuple(dict.fromkeys(jobs)), self._queries
        found = {job: known for job in wanted if (known := queries.job(job)) is not None}
        over = tuple(job for job in wanted if job not in found)
        before: JobId | None = None
        while over:
            ended, before = await self.page(JobFilter(limit=len(over), ids=over, before=before))
            found |= {record.job.id: summarize_job(record.job) for record in ended}
            if before is None:
                break
        return {job: found[job] for job in wanted if job in found}

    def record(self, job: Job) -> JobRecord:
        """A job as it is told to people."""
        if job.state is JobState.QUEUED:
            return JobRecord(job, self._queries.waiting_reason(job))
        return JobRecord(job, job.reason)

    async def timeline(self, job: JobId) -> Sequence[TimelineEntry]:
        await self.get(job)
        return await query(self._store.timeline, job)

    async def attempts(self, job: JobId, last: int | None = None) -> tuple[JobRecord, Sequence[Attempt]]:
        """A job and its attempts in order: all of them, or the last so many."""
        stored = await query(self._store.attempts, job, last)
        # Asked for afterwards, so that what is stored is never newer.
        record = await self.get(job)
        newest = record.job.attempt
        if newest is None:
            return record, stored
        if newest.generation > 1 and (not stored or stored[-1].generation < newest.generation):
            # It has just begun: how the one before ended is still being written.
            await self.commit(WorkItem())
            stored = await query(self._store.attempts, job, last)
        found = [*(attempt for attempt in stored if attempt.generation < newest.generation), newest]
        return record, found[-last:] if last else found

    async def explain(self, job: JobId, by: Identity) -> Explanation:
        """Return why a job waits, is where it is, or how it ended, with changes that the caller may make."""
        known = (await self.get(job)).job
        timeline = await query(self._store.timeline, job)
        queries = self._queries
        now, allowed = self._engine.clock(), self.rules.high_priority.is_allowed_to(by)
        return explain(queries, queries.job(job) or known, timeline, now, high_priority_allowed=allowed)

    async def explain_submission(self, spec: JobSpec, by: Identity) -> Explanation:
        """What would become of a submission now; it is checked as ``submit`` does, and nothing is stored."""
        spec, allowed = await self.as_submitted(spec, by), self.rules.high_priority.is_allowed_to(by)
        return explain_submission(self._queries, spec, self._engine.clock(), high_priority_allowed=allowed)

    async def as_submitted(self, spec: JobSpec, by: Identity) -> JobSpec:
        """The job that a submission would be taken for now; it is checked as ``submit`` does, and nothing is stored."""
        spec = await self._checked(self.rules.with_owner(spec, by), by)
        self._queries.admit(spec)
        return spec

    async def metrics(self, since: float) -> Metrics:
        """Of the last ``since`` seconds; of more than two days, from the beginning of the day on (UTC)."""
        now = self._engine.clock()
        start = now - since if since <= MAX_EXACT_SPAN else (now - since) // DAY * DAY
        usage = await query(self._store.usage, start, now)
        return Metrics(start, now, usage, self.clusters(), self._engine.stored_queued, self._engine.stored_active)

    async def wait(self, job: JobId, timeout: float) -> JobRecord:
        """The job as soon as it is final, or as it is after ``timeout`` seconds."""
        with self._engine.watch(job) as changed, suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not (await self.get(job)).job.state.is_final and not self._engine.draining:
                    await changed.wait()
                    changed.clear()
        return await self.get(job)

    async def changes(self, job: JobId, after: int) -> AsyncIterator[JobChange]:
        """The job as it is, and again at each change until it is final; the timeline beyond line ``after``.

        ``NotFoundError`` is raised at the first step.
        """
        before: Job | None = None
        after = min(after, MAX_LINE_NUMBER)
        with self._engine.watch(job) as changed:
            while True:
                record = await self.get(job)
                lines = await query(self._store.timeline, job, after, TIMELINE_PAGE)
                if lines or record.job != before:
                    yield JobChange(record, tuple(enumerate(lines, after + 1)))
                before = record.job
                after += len(lines)
                if len(lines) == TIMELINE_PAGE:
                    continue  # there may be more
                if record.job.state.is_final or self._engine.draining:
                    return
                await changed.wait()
                changed.clear()

    async def output(self, job: JobId, follow: bool, component: int | None = None) -> AsyncIterator[bytes]:
        """The output of the last attempt, in order of arrival; with ``follow`` until the job is final.

        What is not kept of it is told by a line in its place. ``NotFoundError`` is raised at the first step.
        """
        reading = self._outputs.read((await self.get(job)).job)
        with self._engine.watch(job) as changed:
            while True:
                try:
                    record = (await self.get(job)).job
                except NotFoundError:
                    return  # it is over, and not kept any more
                except StoreUnavailable:
                    if not follow or self._engine.draining:
                        raise
                    await asyncio.sleep(RETRY_INTERVAL_S)  # the job goes on, and so does who follows it
                    continue
                if record.generation != reading.generation:
                    reading = self._outputs.read(record)
                over = not follow or record.state.is_final
                async for text in reading.more(record, component, to_the_end=over):
                    yield text
                if over or self._engine.draining:
                    return
                await changed.wait()
                changed.clear()

    async def output_tails(self, job: JobId, most: int) -> Sequence[OutputTail]:
        """The ends of what the components of the last attempt wrote, in all at most so many bytes."""
        return await self._outputs.tails((await self.get(job)).job, most)

    def cluster(self, name: ClusterName) -> ClusterRecord:
        """``NotFoundError`` when there is none of that name."""
        self._engine.check_cluster(name)
        return self._describe(name)

    def clusters(self) -> Sequence[ClusterRecord]:
        return [self._describe(cluster.name) for cluster in self._queries.grid.clusters()]

    def policies(self) -> Sequence[dict[str, object]]:
        """``name``, ``serves`` (request types), ``summary`` of each policy."""
        return self._queries.policies.describe()


@dataclass(slots=True)
class Lookup:
    """Keys that will be asked for in one go."""

    keys: set[str] = field(default_factory=set)
    asking: "asyncio.Task[Mapping[str, Submitted]] | None" = None


class IdempotencyKeys:
    """What keys were used for: one lookup in the store at a time, and who comes meanwhile is in the next one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._next: Lookup | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock is kept by those who have it and those who wait for it."""

    def lock(self, key: str) -> asyncio.Lock:
        """Held by a submission under way, so that two with one key do not both become jobs."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def find(self, key: str) -> Submitted | None:
        """What a key was used for, as of now; ``StoreUnavailable``."""
        lookup = self._next
        if lookup is None:
            self._next = lookup = Lookup()
            lookup.asking = asyncio.ensure_future(self._ask(lookup))
        lookup.keys.add(key)
        assert lookup.asking is not None
        return (await asyncio.shield(lookup.asking)).get(key)

    async def _ask(self, lookup: Lookup) -> Mapping[str, Submitted]:
        await asyncio.sleep(0)  # for those who are there at this very moment
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S), self._turn:
                self._next = None
                return await query(self._store.submitted, lookup.keys)
        except TimeoutError:
            raise StoreUnavailable(
                f"the database has not answered for {QUERY_TIMEOUT_S:g} s", hint="ask again later"
            ) from None
        finally:
            if self._next is lookup:
                self._next = None


class BulkActions:
    """What stands against one job keeps no other from it; one that is as it should be is told as such.

    With ``shown`` nothing is done to a job that is in another state than it was shown in: who decided did not know.
    """

    def __init__(self, jobs: Jobs, queries: Queries, rules: SubmissionRules) -> None:
        self._jobs, self._queries, self._rules = jobs, queries, rules

    async def cancel(
        self, jobs: Sequence[JobId], by: Identity, reason: str, shown: Shown = NOTHING_SHOWN, *, warn: bool = False
    ) -> Sequence[ActionResult]:
        """With ``warn`` their programs have the grace that they asked for."""
        why = reason or f"cancelled by {by.user}"
        return await self._act(
            jobs, by, lambda job: JobCancelled(job.id, why, by.user, warn), shown, done=JobState.CANCELLED
        )

    async def hold(
        self, jobs: Sequence[JobId], by: Identity, reason: str, shown: Shown = NOTHING_SHOWN
    ) -> Sequence[ActionResult]:
        why = reason or f"held by {by.user}"

        def event(job: Job) -> Event | None:
            if not job.state.is_waiting:
                raise _wrong_state(job, "only queued jobs can be held", "cancel it instead")
            return JobHeld(job.id, why, by.user) if job.state is JobState.QUEUED else None

        return await self._act(jobs, by, event, shown)

    async def release(
        self, jobs: Sequence[JobId], by: Identity, shown: Shown = NOTHING_SHOWN
    ) -> Sequence[ActionResult]:
        def event(job: Job) -> Event | None:
            if not job.state.is_waiting:
                raise _wrong_state(job, "only held jobs can be released")
            return JobReleased(job.id, by.user) if job.state is JobState.HELD else None

        return await self._act(jobs, by, event, shown)

    async def set_priority(
        self, jobs: Sequence[JobId], priority: Priority, by: Identity, reason: str, shown: Shown = NOTHING_SHOWN
    ) -> Sequence[ActionResult]:
        """Raise ``ForbiddenError`` if the caller may not give jobs this priority."""
        self._rules.check_priority(priority, by, "leave it low")

        def event(job: Job) -> Event | None:
            if not job.state.is_waiting:
                raise _wrong_state(job, "only jobs that wait can be given another priority")
            is_new = job.spec.priority is not priority
            return JobPriorityChanged(job.id, priority, reason, by.user) if is_new else None

        return await self._act(jobs, by, event, shown)

    async def _act(
        self,
        jobs: Sequence[JobId],
        by: Identity,
        event_of: Callable[[Job], Event | None],
        shown: Shown,
        done: JobState | None = None,
    ) -> Sequence[ActionResult]:
        """Act on the caller's jobs that are not over.

        ``event_of`` returns what is to be done to one, None where it is as it should be already, and raises
        ``ConflictError`` where it cannot be done. Jobs that are over in the state ``done`` are as they should be.
        """
        wanted, queries = list(dict.fromkeys(jobs)), self._queries
        refused: dict[JobId, KoalaError] = {}

        def is_theirs(job: JobId) -> bool:
            known = queries.job(job)
            return known is not None and may_see_all_of(by, known)

        def prepare() -> tuple[Event, ...]:
            events = []
            for ident in wanted:
                job = queries.job(ident)
                if job is None or not may_see_all_of(by, job):
                    continue
                try:
                    _check_is_as_shown(job, shown)
                    event = event_of(job)
                except ConflictError as error:
                    refused[ident] = error
                else:
                    events += [event] if event is not None else []
            return tuple(events)

        others = [str(job) for job in wanted if queries.job(job) is not None and not is_theirs(job)]
        about(f"jobs {', '.join(map(str, wanted))}", f"not {by.user}'s: {', '.join(others)}" if others else "")
        if any(is_theirs(job) for job in wanted):
            await self._jobs.commit(WorkItem(prepare=prepare))
        known = {ident: self._jobs.record(job) for ident, job in (await self._jobs.several(wanted)).items()}
        return [_result(job, known.get(job), by, refused.get(job), done) for job in wanted]


def _no_job(job: JobId) -> NotFoundError:
    return NotFoundError(
        f"there is no job {job}", field="job", value=job, hint="see koala queue --all", code=ProblemCode.JOB_NOT_FOUND
    )


def _over_already(job: Job) -> ConflictError:
    return ConflictError(f"job {job.id} is {job.state} already", field="job", value=job.id)


def _wrong_state(job: Job, said: str, hint: str = "") -> ConflictError:
    return ConflictError(f"job {job.id} is {job.state}: {said}", field="job", value=job.id, hint=hint)


def _check_is_as_shown(job: Job, shown: Shown) -> None:
    before = shown.get(job.id, job.state)
    if before is not job.state:
        raise ConflictError(
            f"job {job.id} was {before} when it was chosen, and is {job.state} now: nothing was done to it",
            field="job",
            value=job.id,
            hint="look at it again",
        )


def _result(
    job: JobId, now: JobRecord | None, by: Identity, error: KoalaError | None, done: JobState | None
) -> ActionResult:
    if now is None:
        return ActionResult(job, error=_no_job(job))
    try:
        check_is_theirs(by, now.job)
    except ForbiddenError as forbidden:
        error = forbidden
    if error is None and now.job.state.is_final and now.job.state is not done:
        error = _over_already(now.job)
    return ActionResult(job, error=error) if error else ActionResult(job, now)


async def _as_it_is(spec: JobSpec, _: Identity) -> JobSpec:
    return spec
