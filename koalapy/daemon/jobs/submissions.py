"""Dependencies between submitted jobs, idempotency keys, and the submission of several jobs in one transaction."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

import structlog

from koalapy.daemon.engine.database import find_by_key
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.application import printable_application_of
from koalapy.model.dependency import (
    MAX_BATCH_DEPENDENCIES,
    Clause,
    End,
    EndCondition,
    format_entry,
    resolve_ends,
    with_numbers,
)
from koalapy.model.errors import ConflictError, KoalaError, ProblemCode, naming_item, reject
from koalapy.model.identity import Identity
from koalapy.model.job import END_TEXTS, Job, JobId, JobState, new_job
from koalapy.model.job_spec import JobSpec
from koalapy.model.notification import AllowedRecipients
from koalapy.policies.registry import DEFAULTS
from koalapy.scheduler.events import Event, JobSubmitted
from koalapy.scheduler.queries import Queries
from koalapy.store.records import Submitted
from koalapy.store.sql import JobStore
from koalapy.validation.limits import Limits
from koalapy.validation.permissions import SubmissionRules, check_notifications, may_see_all_of, with_home_site
from koalapy.validation.request import check_size, check_times, with_all_indices
from koalapy.validation.submission import SubmissionChecks, hash_batch, hash_key, hash_spec

log = structlog.get_logger()

NO_JOB_HINT = "name a job that koala queue or koala history shows; jobs are removed some time after their end"
FinalStates = dict[JobId, JobState]
"""The final states of ended jobs, as stored."""


GetJobs = Callable[[Sequence[JobId]], Awaitable[Mapping[JobId, Job]]]
"""Returns those of the jobs that exist."""
ResolveFiles = Callable[[JobSpec, Identity], Awaitable[JobSpec]]
"""Returns a submission with the files that it names. Raises ``UsageError`` for those that do not exist."""


class ChangedMeanwhile(KoalaError):
    """A job has changed since it was read for a check; read and check it again."""


@dataclass(frozen=True, slots=True)
class RelatedJob:
    """A job that another one depends on, or that depends on it."""

    job: JobId
    condition: EndCondition
    """How the job that is waited for must end."""
    clause: int
    """Number of the entry in ``after``; jobs of one entry are alternatives."""
    state: JobState | None
    """None if the job was removed."""


RelatedJobs = tuple[Sequence[RelatedJob], Sequence[RelatedJob]]
"""The jobs that a job depends on, and the unfinished ones that depend on it."""


def list_related(job: Job, dependent_ids: Iterable[JobId], jobs: Mapping[JobId, Job]) -> RelatedJobs:
    """Return the jobs that a job depends on, and those that depend on it. ``jobs``: those of them that exist."""
    dependencies = [
        RelatedJob(dependency.job, dependency.condition, index, required.state if required is not None else None)
        for index, clause in enumerate(job.spec.after)
        for dependency in clause
        for required in (jobs.get(dependency.job),)
    ]
    dependents = [
        RelatedJob(dependent.id, dependency.condition, index, dependent.state)
        for ident in dependent_ids
        if (dependent := jobs.get(ident)) is not None
        for index, clause in enumerate(dependent.spec.after)
        for dependency in clause
        if dependency.job == job.id
    ]
    return dependencies, dependents


def find_fields(specs: Sequence[JobSpec], *, is_batch: bool) -> dict[JobId, str]:
    """Return the jobs that submissions name, with the first field that names each, such as ``jobs[3].after``.

    Raise ``UsageError`` if a batch names too many jobs, or if one names an entry of the batch that is not before it.
    """
    fields: dict[JobId, str] = {}
    for index, spec in enumerate(specs):
        field = f"jobs[{index}].after" if is_batch else "after"
        for ident in _jobs_of(spec.after):
            if ident > 0:
                fields.setdefault(ident, field)
            else:
                _check_entry(field, ident, index if is_batch else None)
        if is_batch and (count := len(fields)) > MAX_BATCH_DEPENDENCIES:
            problem = f"is the first with which the batch names more than {MAX_BATCH_DEPENDENCIES} different jobs"
            reject(field, count, problem, "submit it as several batches, or name an array instead of many jobs")
    return fields


def _check_entry(field: str, job: JobId, index: int | None) -> None:
    """Raise ``UsageError`` unless a job names an earlier entry of its batch. ``index``: its own; None without a
    batch."""
    name = format_entry(job)
    if index is None:
        hint = "name a job by its number, or submit both jobs by POST /api/v1/jobs:batch"
        reject(field, name, f"names {name}, an entry of a batch, but this is a single job", hint)
    if -1 - job >= index:
        problem = f"names {name}, " + ("the job itself" if -1 - job == index else "which is not before it in the batch")
        hint = f"name one of #0 to #{index - 1}, or put the jobs in another order" if index else "name no entry here"
        reject(field, name, problem, hint)


def _jobs_of(clauses: Iterable[Clause]) -> list[JobId]:
    return list(dict.fromkeys(dependency.job for clause in clauses for dependency in clause))


class IdempotencyKeys:
    """The submissions of idempotency keys. One query runs at a time; the next looks up all keys requested during it."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._next: tuple[set[str], asyncio.Task[Mapping[str, Submitted]]] | None = None
        """The keys of the next query, and the query."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks that are held or waited for; others are discarded."""

    def lock_of(self, key: str) -> asyncio.Lock:
        """Return the lock that prevents two concurrent submissions with one key from becoming two jobs."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def find_submission(self, key: str) -> Submitted | None:
        """Return the submission of a key, or None. Raise ``StoreUnavailable`` on timeout."""
        if self._next is None:
            pending = set[str]()
            self._next = pending, asyncio.create_task(self._run_lookup(pending))
        keys, lookup = self._next
        keys.add(key)
        return (await asyncio.shield(lookup)).get(key)

    async def _run_lookup(self, keys: set[str]) -> Mapping[str, Submitted]:
        """Return the earlier submissions of all keys that were requested until the query, by one query."""
        await asyncio.sleep(0)  # collect the keys of all tasks that are ready
        async with self._turn:  # at most until the query of another lookup times out
            self._next = None
            return await find_by_key(self._store.submitted, keys)


MAX_JOBS_AHEAD = 10**6
"""The most by which all agents together may raise the number of the next job during one daemon run. A larger jump is an
operator's decision (``first_job_number``)."""
JOBS_PER_TURN = 50
"""Jobs that are checked before other tasks run."""
HINT_UNKNOWN_OUTCOME = "look with koala queue --all before you submit again"
HINT_UNKNOWN_OUTCOME_OF_KEY = "submit it again with the same Idempotency-Key: it becomes one job"


class Submissions:
    """Submissions of jobs, of one or of a batch. Nothing is stored if one of them has an error.

    An error in a batch names the job, such as ``jobs[3].command``.
    """

    def __init__(
        self,
        engine: Engine,
        queries: Queries,
        store: JobStore,
        next_number: JobId,
        get_jobs: GetJobs,
        resolve_files: ResolveFiles | None = None,
        rules: SubmissionRules | None = None,
        recipients: AllowedRecipients | None = None,
    ) -> None:
        """``rules``: what callers may submit; ``recipients``: those that users may notify."""
        self._engine, self._queries, self._keys = engine, queries, IdempotencyKeys(store)
        self._next_number, self._max_jump = next_number, MAX_JOBS_AHEAD
        self._get_jobs, self._resolve_files = get_jobs, resolve_files
        self.rules, self._recipients = rules or SubmissionRules(), recipients or AllowedRecipients()
        self._checks = SubmissionChecks()
        self._submitting: set[asyncio.Task[tuple[Sequence[JobId], bool]]] = set()

    # Check

    def check_spec(self, spec: JobSpec, limits: Limits) -> None:
        """Raise ``UsageError`` for a job that can never run. ``limits``: those of the scheduler now."""
        self._checks.check(spec, limits)

    async def complete_spec(self, spec: JobSpec, caller: Identity) -> JobSpec:
        """Return the spec of the job that a submission would become. Check it like a real one; store nothing."""
        spec = await self._complete_spec(self.rules.with_owner(spec, caller), caller, self._queries.limits())
        self._queries.admit(spec)
        return spec

    async def _complete_spec(self, spec: JobSpec, caller: Identity, limits: Limits) -> JobSpec:
        """Return the spec with its policy, application, home site and the catalogued inputs.

        Raise ``UsageError`` if it can never run. ``limits``: those of the scheduler now.
        """
        spec = with_all_indices(spec)
        if spec.all_inputs or spec.result_inputs or spec.bundle is not None:
            check_size(spec, limits)  # before files are looked up
        check_notifications(spec, self._recipients)
        if self._resolve_files is not None:
            spec = await self._resolve_files(spec, caller)
        spec = with_home_site(spec, caller, self._queries.accounts)
        self.check_spec(spec, limits)
        check_times(spec, self._engine.clock())
        policy = spec.policy or DEFAULTS[spec.request.type]
        return spec.with_fields(policy=policy, application=printable_application_of(spec))

    async def find_unmet_dependencies(self, spec: JobSpec, caller: Identity) -> tuple[Clause, ...]:
        """Return the clauses of a submission's dependencies that do not hold now.

        Raise ``UsageError`` as a submission does.
        """
        while True:
            final_states = await self.read_final_states([spec], caller)
            with suppress(ChangedMeanwhile):
                return self.find_unmet(spec, final_states)
            await self._engine.commit(WorkItem())  # wait until the end of that job is written

    async def read_final_states(
        self, specs: Sequence[JobSpec], caller: Identity, *, is_batch: bool = False
    ) -> FinalStates:
        """Return the final states of the ended jobs that submissions name.

        Raise ``UsageError`` for jobs that do not exist or that the caller may not see, and for too many jobs.
        """
        fields = find_fields(specs, is_batch=is_batch)
        jobs = await self._get_jobs(list(fields)) if fields else {}
        states: FinalStates = {}
        for ident, name in fields.items():
            job = jobs.get(ident)
            if job is None:
                reject(name, ident, f"names job {ident}, which does not exist", NO_JOB_HINT)
            if not may_see_all_of(caller, job):
                reject(name, ident, f"names job {ident}, which is not yours", "name your own jobs only")
            if job.array_job is not None:
                hint = f"name the array, {job.array_job}"
                reject(name, ident, f"names task {job.display_name} of an array", hint)
            if job.state.is_final:
                states[ident] = job.state
        return states

    def find_unmet(self, spec: JobSpec, final_states: FinalStates, batch: Container[JobId] = ()) -> tuple[Clause, ...]:
        """Return the clauses of a submission that do not hold yet. To be called in the engine's loop.

        ``batch``: the other jobs of its batch.

        Raise ``UsageError`` if one can never hold, and ``ChangedMeanwhile`` if a job is neither unfinished nor among
        the final states.
        """
        ends: dict[JobId, End] = {}
        for ident in _jobs_of(spec.after):
            if ident in batch or self._queries.job(ident) is not None:
                continue
            if ident not in final_states:
                raise ChangedMeanwhile(f"job {ident} has just ended")
            state = final_states[ident]
            ends[ident] = End(END_TEXTS[state], state is JobState.SUCCEEDED)
        resolution = resolve_ends(spec.after, ends)
        if resolution.failure:
            problem = f"can never hold: {resolution.failure}"
            reject("after", resolution.failed_job, problem, "name another job, or JOB:any")
        return resolution.remaining

    # Store

    async def submit(
        self, specs: Sequence[JobSpec], caller: Identity, idempotency_key: str | None = None, *, is_batch: bool = True
    ) -> tuple[Sequence[JobId], bool]:
        """Store jobs and try to assign them to clusters. Return their numbers and whether they are new.

        If the user submitted the same with the same key before, return those numbers and False. Raise
        ``ConflictError`` for the same key with others, ``ForbiddenError`` for what the user may not submit.
        """
        owned: list[JobSpec] = []
        with _naming(is_batch, owned):
            for spec in specs:
                owned.append(self.rules.with_owner(spec, caller))
        if idempotency_key is None:
            storing = self._store_new(owned, caller, None, is_batch)
            return await self._engine.database.await_outcome(storing, HINT_UNKNOWN_OUTCOME), True
        # It goes on when the client disconnects: a retry with the same key must find its outcome.
        submitting = asyncio.create_task(self._submit_once(owned, caller, idempotency_key, is_batch))
        self._submitting.add(submitting)
        submitting.add_done_callback(self._submitting.discard)
        return await self._engine.database.await_outcome(submitting, HINT_UNKNOWN_OUTCOME_OF_KEY)

    async def _submit_once(
        self, specs: Sequence[JobSpec], caller: Identity, key: str, is_batch: bool
    ) -> tuple[Sequence[JobId], bool]:
        """Store jobs unless the user's key was used before; else return the earlier jobs and False."""
        user_key, digest = hash_key(caller.user, key), hash_batch(specs) if is_batch else hash_spec(specs[0])
        async with self._keys.lock_of(user_key):
            first = await self._keys.find_submission(user_key)
            if first is None:
                return await self._store_new(specs, caller, (user_key, digest), is_batch), True
        if digest != first.digest:
            raise ConflictError(
                f"the Idempotency-Key was used for job {first.job}, whose specification differs",
                field="Idempotency-Key",
                value=key,
                hint="use a new key for a new job",
                code=ProblemCode.IDEMPOTENCY_KEY_REUSED,
            )
        numbers, _ = number_jobs(first.job, map(with_all_indices, specs))
        describe_request(_format_numbers(numbers), "submitted before")
        return numbers, False

    async def _store_new(
        self, specs: Sequence[JobSpec], caller: Identity, key: tuple[str, str] | None, is_batch: bool
    ) -> Sequence[JobId]:
        """Check specifications, and store them as jobs with new numbers.

        ``key``: hash of the key, and of the specifications.
        """
        engine, queries = self._engine, self._queries
        find_fields(specs, is_batch=is_batch)  # rejects too many dependencies before anything is read
        complete: list[JobSpec] = []
        with _naming(is_batch, complete):
            for index, spec in enumerate(specs):
                if index % JOBS_PER_TURN == 0:
                    await asyncio.sleep(0)
                    limits = queries.limits()
                complete.append(await self._complete_spec(spec, caller, limits))

        final_states = await self.read_final_states(complete, caller, is_batch=is_batch)
        numbers, self._next_number = number_jobs(self._next_number, complete)
        numbered = [
            spec.with_fields(after=with_numbers(spec.after, numbers)) if spec.after else spec for spec in complete
        ]
        batch = frozenset(numbers)

        def make_events() -> tuple[Event, ...]:
            if is_batch:
                queries.admit_batch(complete)
            else:
                queries.admit(complete[0])
            now = engine.cycle_time
            events: list[Event] = []
            with _naming(is_batch, events):
                for number, spec in zip(numbers, numbered, strict=True):
                    awaits = self.find_unmet(spec, final_states, batch) if spec.after else ()
                    events.append(JobSubmitted(new_job(number, spec, now, awaits), caller.user))
            return tuple(events)

        describe_request(_format_numbers(numbers))
        submitted = Submitted(key[0], numbers[0], key[1]) if key else None
        while True:
            try:
                await engine.commit(WorkItem(prepare=make_events, submitted=submitted))
                return numbers
            except ChangedMeanwhile:
                await engine.commit(WorkItem())  # wait until the end of that job is written
            final_states = await self.read_final_states(complete, caller, is_batch=is_batch)

    def raise_next_number(self, job: JobId) -> bool:
        """Number new jobs above ``job``, which an agent knows from a lost database. Return False if it is too far."""
        jump = job + 1 - self._next_number
        if jump > self._max_jump:
            return False
        if jump > 0:
            self._max_jump -= jump
            log.warning("new jobs get numbers above those that agents know", action="job-numbers-raised", job=job)
            self._next_number = job + 1
        return True


def _naming(is_batch: bool, parsed: Sized) -> AbstractContextManager[None]:
    """Name the job of a batch in errors raised within the context: the one after those that are ``parsed``."""
    return naming_item(lambda: f"jobs[{len(parsed)}]") if is_batch else nullcontext()


def number_jobs(number: JobId, specs: Iterable[JobSpec]) -> tuple[list[JobId], JobId]:
    """Return the numbers of jobs from ``number`` on, and the next free one.

    The tasks of an array get the numbers after its own.
    """
    numbers = []
    for spec in specs:
        numbers.append(number)
        number += 1 + (spec.array.size if spec.array else 0)
    return numbers, number


def _format_numbers(numbers: Sequence[JobId]) -> str:
    return f"job {numbers[0]}" if len(numbers) == 1 else f"jobs {numbers[0]} to {numbers[-1]}"
