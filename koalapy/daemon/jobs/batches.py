"""Submit many different jobs in one transaction: all of them or none."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.daemon.jobs.dependencies import FinalStates, find_fields
from koalapy.daemon.jobs.idempotency import IdempotencyKeys, check_same_submission
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.errors import naming_item
from koalapy.model.identity import Identity
from koalapy.model.job import JobId, new_job
from koalapy.model.job_spec import JobSpec
from koalapy.ports import Submitted
from koalapy.scheduler.events import Event, JobSubmitted
from koalapy.scheduler.queries import Queries
from koalapy.validation.request import with_all_indices
from koalapy.validation.submission import hash_batch, hash_key

if TYPE_CHECKING:
    from koalapy.daemon.jobs.jobs import Jobs

JOBS_PER_TURN = 50
"""Jobs that are checked before other tasks run."""
HINT_UNKNOWN_OUTCOME = "look for the jobs with koala queue --all before you submit them again"


class BatchSubmission:
    """Submissions of several jobs. An error names the job, such as ``jobs[3].command``, and nothing is stored."""

    def __init__(self, jobs: "Jobs", engine: Engine, queries: Queries, keys: IdempotencyKeys) -> None:
        self._jobs, self._engine, self._queries, self._keys = jobs, engine, queries, keys

    async def submit(
        self, specs: Sequence[JobSpec], caller: Identity, idempotency_key: str | None = None
    ) -> tuple[Sequence[JobId], bool]:
        """Store jobs and try to assign them to clusters. Return their numbers and whether they are new.

        If the user submitted the same batch with the same key before, return those numbers and False. The errors are
        those of ``Jobs.submit``.
        """
        owned: list[JobSpec] = []
        with naming_item(lambda: f"jobs[{len(owned)}]"):
            for spec in specs:
                owned.append(self._jobs.rules.with_owner(spec, caller))
        if idempotency_key is None:
            storing = self._store_new(owned, caller, None)
            return await self._engine.database.await_outcome(storing, HINT_UNKNOWN_OUTCOME), True
        return await self._jobs.finish_submission(self._submit_once(owned, caller, idempotency_key))

    async def _submit_once(self, specs: Sequence[JobSpec], caller: Identity, key: str) -> tuple[Sequence[JobId], bool]:
        """Store jobs unless the user's key was used before; else return the earlier jobs and False."""
        user_key, digest = hash_key(caller.user, key), hash_batch(specs)
        async with self._keys.lock_of(user_key):
            first = await self._keys.find_submission(user_key)
            if first is None:
                return await self._store_new(specs, caller, (user_key, digest)), True
            check_same_submission(first, digest, key)
            numbers, _ = number_jobs(first.job, map(with_all_indices, specs))
            describe_request(_format_numbers(numbers), "they were submitted before")
            return numbers, False

    async def _store_new(
        self, specs: Sequence[JobSpec], caller: Identity, key: tuple[str, str] | None
    ) -> Sequence[JobId]:
        """Check specifications, and store them as jobs with new numbers.

        ``key``: hash of the key, and of the specifications.
        """
        engine, queries = self._engine, self._queries
        dependencies = self._jobs.dependencies
        find_fields(specs, is_batch=True)  # rejects too many dependencies before anything is read
        complete: list[JobSpec] = []
        with naming_item(lambda: f"jobs[{len(complete)}]"):
            for start in range(0, len(specs), JOBS_PER_TURN):
                limits = queries.limits()
                for spec in specs[start : start + JOBS_PER_TURN]:
                    complete.append(await self._jobs.complete_and_check(spec, caller, limits))
                await asyncio.sleep(0)

        async def read_states() -> FinalStates:
            return await dependencies.read_final_states(complete, caller, is_batch=True)

        final_states = await read_states()
        numbers = self._jobs.take_numbers(complete)

        def make_item(final_states: FinalStates) -> WorkItem:
            def make_events() -> tuple[Event, ...]:
                queries.admit_batch(complete)
                now = engine.cycle_time
                events: list[Event] = []
                with naming_item(lambda: f"jobs[{len(events)}]"):
                    for number, spec in zip(numbers, complete, strict=True):
                        awaits = dependencies.find_unmet(spec, final_states) if spec.after else ()
                        events.append(JobSubmitted(new_job(number, spec, now, awaits), caller.user))
                return tuple(events)

            return WorkItem(prepare=make_events, submitted=Submitted(key[0], numbers[0], key[1]) if key else None)

        describe_request(_format_numbers(numbers))
        await dependencies.commit(engine, make_item, read_states, final_states)
        return numbers


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
