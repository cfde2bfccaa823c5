"""Store the files that components return (``--collect``); serve them as one archive or as inputs of others."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from koalapy.daemon.engine.database import query, run_in_database
from koalapy.daemon.files.archives import ArchivePart, converted_errors, join_archives, list_names, move_archive
from koalapy.daemon.files.stored_archives import Removal, StoredArchives
from koalapy.daemon.jobs.job_records import JobRecord, array_error
from koalapy.daemon.jobs.quota import StorageLimits
from koalapy.daemon.jobs.submissions import NO_JOB_HINT
from koalapy.model.dependency import ResultInput, with_dependencies
from koalapy.model.errors import ConflictError, FullError, NotFoundError, ProblemCode, reject
from koalapy.model.identity import Identity
from koalapy.model.job import Attempt, Job, JobId, JobState, parse_token
from koalapy.model.job_spec import JobSpec
from koalapy.model.limits import Limits, Scope
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list
from koalapy.runner.result_archive import Patterns
from koalapy.store.records import StoredResult
from koalapy.store.service_tables import FileStore
from koalapy.validation.inputs import check_result_inputs
from koalapy.validation.permissions import may_see_all_of

MIN_RETENTION = 86400.0
"""Seconds after a job's end for which its results are kept even if the quota is exceeded."""
MAX_STUCK = 100
"""Maximum number of jobs with unremovable files that one pass skips; more mean a fault of the disk."""
Attempts = Callable[[JobId], Awaitable[tuple[JobRecord, Sequence[Attempt]]]]
"""Returns a job and all its attempts; raises ``NotFoundError`` if there is no such job."""


class Results(StoredArchives[JobId]):
    """The stored results of components by job; they are served as one archive for each job."""

    QUOTA, LIMIT, MIN_RETENTION = "results_quota", "result_bytes", MIN_RETENTION
    REJECTION = "all it has is of jobs that are not over, or ended within the last day"

    def __init__(
        self,
        store: FileStore,
        directory: Path,
        storage: StorageLimits,
        clock: Callable[[], float],
        attempts: Attempts,
        owners: Limits | None = None,
        needed: Callable[[], Collection[JobId]] = frozenset,
    ) -> None:
        """``owners``: the limits of users and groups on stored results.

        ``needed`` returns the jobs with results that other jobs still need.
        """
        self._store, self._attempts, self._needed = store, attempts, needed
        super().__init__(directory, storage, sum(store.results_sizes().values()), clock, owners)

    async def store_result(self, cluster: ClusterName, token: str, content: AsyncIterator[bytes]) -> StoredResult:
        """Store the result archive of a component, replacing an earlier one.

        ``token`` names its folder on the cluster.
        """
        record, generation, rank = await self.find_component(cluster, token)
        job, spec = record.job.id, record.job.spec
        if not spec.collect:
            raise ConflictError(f"nothing is collected of job {job}", field="token", value=token)
        async with self._receive(content) as (archive, path, hold):
            result = StoredResult(job, generation, rank, cluster, archive.size, archive.files, self._clock())
            async with self._changing:
                if excess := await self._free_owner_space(spec.owner, archive.size):
                    raise FullError(excess.text, field="limits.result_bytes", value=excess.value, hint=excess.hint)
                # Store the entry first: a file without an entry would never be removed.
                hold.keep_bytes(replaced_size=await run_in_database(self._store.save_result, result))
                await asyncio.to_thread(_move_archive, path, self._path_of(result), generation)
        return result

    async def sizes_by_owner(self) -> dict[str, int]:
        """Return the bytes stored for each user."""
        return await query(self._store.results_sizes)

    async def size_of(self, scope: Scope) -> int:
        sizes = await self.sizes_by_owner()
        return sum(size for owner, size in sizes.items() if self._owners.applies_to(scope, owner))

    async def find_component(self, cluster: ClusterName, token: str) -> tuple[JobRecord, int, int]:
        """Return a component's job, attempt number and number in the attempt, by the token of its folder.

        Raise ``NotFoundError`` if there is no such component.
        """
        try:
            job, generation, rank, nonce = parse_token(token)
        except ValueError:
            raise _no_component(f"{token[:60]!r} is not the token of a component", token) from None
        record, attempts = await self._attempts(job)
        attempt = next((a for a in attempts if (a.generation, a.nonce) == (generation, nonce)), None)
        gang = attempt.gang if attempt else ()
        if not any((component.rank, component.cluster) == (rank, cluster) for component in gang):
            raise _no_component(f"{token} is not a component on {cluster}", token)
        return record, generation, rank

    async def open_archive(self, job: JobId, offset: int = 0, version: str = "") -> tuple[str, Iterator[bytes]]:
        """Return the version and the bytes of one archive of the last attempt's results.

        It has a folder ``RANK-CLUSTER`` by component. The version differs after each change of the content.

        ``offset``, ``version``: the bytes that the caller has, and the version that they are of. Raise
        ``NotFoundError`` with the reason if there are no results, ``ConflictError`` for an array or another version.
        """
        archives = await self.list_archives(job)
        current_version = hashlib.sha256(repr([result for result, _ in archives]).encode()).hexdigest()[:32]
        if version not in ("", current_version):
            problem, hint = f"the results of job {job} have changed", "download them again from the beginning"
            raise ConflictError(problem, field="version", value=version, hint=hint)
        parts = [ArchivePart(path, f"{result.rank}-{result.cluster}") for result, path in archives]
        return current_version, join_archives(parts, offset)

    async def list_archives(self, job: JobId) -> list[tuple[StoredResult, Path]]:
        """Return the results of a job's last attempt with their archives, in order of rank.

        Raise ``NotFoundError`` with the reason if there are none, ``ConflictError`` for an array.
        """
        record, _ = await self._attempts(job)
        spec, state = record.job.spec, record.job.state
        if record.job.tasks is not None:
            raise array_error(record.job, "the files are those of its tasks", "fetch")
        results = await query(self._store.results, job, record.job.generation)
        readable = [(result, path) for result in results if (path := self._path_of(result)).is_file()]
        # While the job waits for another attempt, the files of a failed attempt are not its results.
        if readable and state not in (JobState.QUEUED, JobState.HELD):
            return readable
        if not spec.collect:
            problem = f"nothing is collected of job {job}"
            hint = "name the files at submission: koala submit --collect PATTERN"
        elif not state.is_final:
            problem, hint = f"job {job} is {state}: its files come when it ends", f"wait for it: koala wait {job}"
        elif results:
            problem = f"the files of job {job} are not kept any more"
            hint = "fetch sooner, or have the daemon's operator raise results_keep and results_quota"
        else:
            problem, hint = f"job {job} {state} and brought no files", f"see why: koala show {job}"
        raise NotFoundError(problem, field="job", value=job, hint=hint, code=ProblemCode.RESULTS_NOT_FOUND)

    def _path_of(self, result: StoredResult) -> Path:
        return self._directory / str(result.job) / f"{result.generation}.{result.rank}.tar"

    async def remove_results(self, jobs: Sequence[JobId]) -> None:
        """Remove the results of forgotten jobs. Raise ``OSError`` if files cannot be removed; the entries then stay."""
        async with self._changing:
            for job in jobs:
                await asyncio.to_thread(self._remove_files, job)
            freed = await run_in_database(self._store.forget_results, jobs)
            self._quota.used -= freed  # uploads have changed it meanwhile

    async def _remove_until(
        self, horizon: float, enough: int | None = None, scope: Scope | None = None
    ) -> Removal[JobId]:
        owners = None
        if scope is not None:
            owners = [owner for owner in await self.sizes_by_owner() if self._owners.applies_to(scope, owner)]
        sizes = await run_in_database(self._store.old_results, horizon, owners)
        needed = self._needed()
        old = {job: size for job, size in sizes.items() if job not in needed}
        # Remove files first: a file without an entry would neither be removed later nor count against the quota.
        removed, failure = await asyncio.to_thread(self._remove_oldest, old, enough)
        freed = await run_in_database(self._store.clear_results, removed)
        self._quota.used -= freed  # uploads have changed it meanwhile
        return removed, failure

    def _remove_oldest(self, old: Mapping[JobId, int], enough: int | None) -> Removal[JobId]:
        """Remove files until ``enough`` bytes are removed; skip jobs with files that cannot be removed."""
        removed: dict[JobId, int] = {}
        failures: list[OSError] = []
        for job, size in old.items():
            if (enough is not None and enough <= 0) or len(failures) > MAX_STUCK:
                break
            try:
                self._remove_files(job)
            except OSError as error:
                failures.append(error)
                continue
            removed[job] = size
            enough = None if enough is None else enough - size
        return removed, failures[0] if failures else None

    def _remove_files(self, job: JobId) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._directory / str(job))


def _no_component(problem: str, token: str) -> NotFoundError:
    return NotFoundError(problem, field="token", value=token, code=ProblemCode.COMPONENT_NOT_FOUND)


def _move_archive(path: Path, target: Path, generation: int) -> None:
    """Move an archive to its path, and remove the archives of earlier attempts, which are no longer served."""
    with converted_errors():
        for earlier in target.parent.glob("*.*.tar"):
            if int(earlier.name.partition(".")[0]) < generation:
                earlier.unlink(missing_ok=True)
    move_archive(path, target)


MAX_SHOWN = 5
"""Collected files that a message names."""
MAX_SCANNED = 16
"""Archives of which one request keeps the names in memory."""
Scanned = dict[Path, frozenset[str]]
"""The entries of archives, and the folders above them. To read them takes seconds for an archive of many files."""


class ResultInputs:
    """The results that jobs get from other jobs."""

    def __init__(self, results: Results, get_job: Callable[[JobId], Awaitable[JobRecord]]) -> None:
        """``get_job`` raises ``NotFoundError`` if a job does not exist."""
        self._results, self._get_job = results, get_job

    async def resolve_spec(self, spec: JobSpec, caller: Identity) -> JobSpec:
        """Return a submission with the sources of its result inputs and the dependencies on them.

        Raise ``UsageError`` for a result that the caller cannot get.
        """
        if not spec.result_inputs:
            return spec
        check_result_inputs(spec)
        jobs: dict[JobId, Job | None] = {}
        for ident in {result_input.job for result_input in spec.result_inputs}:
            jobs[ident] = None
            with suppress(NotFoundError):
                jobs[ident] = (await self._get_job(ident)).job
        resolved: list[ResultInput] = []
        scanned: Scanned = {}
        for index, result_input in enumerate(spec.result_inputs):
            field = f"result_inputs[{index}]"
            job = _check_job(field, result_input, jobs[result_input.job], caller)
            resolved.append(_resolve_source(field, result_input, job))
            if job.state.is_final:
                try:
                    await self._find_part(resolved[-1], scanned)
                except NotFoundError as error:
                    reject(field, str(result_input), f"is {result_input}, but {error.message}", error.hint)
        inputs = tuple(resolved)
        return replace(spec, result_inputs=inputs, after=with_dependencies(spec.after, inputs))

    async def open_archive(self, cluster: ClusterName, token: str) -> Iterator[bytes]:
        """Return the bytes of one archive of the result inputs of a component, by the token of its folder.

        Raise ``NotFoundError`` if there is no such component, or if one of the results does not exist.
        """
        record, _, _ = await self._results.find_component(cluster, token)
        scanned: Scanned = {}
        result_inputs = record.job.spec.result_inputs
        return join_archives([await self._find_part(result_input, scanned) for result_input in result_inputs])

    async def _find_part(self, result_input: ResultInput, scanned: Scanned) -> ArchivePart:
        """Return the part of an archive that holds a result. Raise ``NotFoundError`` if none does, or several do."""
        archives = await self._results.list_archives(result_input.source)
        selected, parts, ranks = "/".join(_names_of(result_input)), [], []
        for result, path in archives:
            if result_input.rank not in (None, result.rank):
                continue
            if path not in scanned:
                if len(scanned) >= MAX_SCANNED:
                    scanned.clear()
                scanned[path] = await asyncio.to_thread(_find_entries, path)
            if selected in scanned[path]:
                parts.append(ArchivePart(path, result_input.file_name, selected))
                ranks.append(f"{result.rank} ({result.cluster})")
        if len(parts) == 1:
            return parts[0]
        if parts:
            components = f"components {format_list(ranks, separator=' and ')} of job {result_input.job_name}"
            example = replace(result_input, rank=0)
            problem = f"{components} each have {result_input.path}: name one by its number, as {example}"
            raise _no_result(problem, result_input, f"submit it again with {example}")
        names = await asyncio.to_thread(lambda: [*islice((n for _, p in archives for n in list_names(p)), MAX_SHOWN)])
        component = "" if result_input.rank is None else f"component {result_input.rank} of "
        hint = f"name a file that it collected, such as {format_list(names)}" if names else "see its output: koala logs"
        raise _no_result(f"{component}job {result_input.job_name} collected no {result_input.path}", result_input, hint)


def _no_result(problem: str, result_input: ResultInput, hint: str) -> NotFoundError:
    return NotFoundError(problem, field="token", value=str(result_input), hint=hint, code=ProblemCode.RESULTS_NOT_FOUND)


def _find_entries(path: Path) -> frozenset[str]:
    """Return the entries of an archive and the folders above them; "" is the whole. Raise ``OSError``."""
    entries: set[str] = set()
    for name in list_names(path):
        while name not in entries:
            entries.add(name)
            name = name.rpartition("/")[0]
    return frozenset(entries)


def _names_of(result_input: ResultInput) -> list[str]:
    return [name for name in result_input.path.split("/") if name not in ("", ".")]


def _check_job(field: str, result_input: ResultInput, job: Job | None, caller: Identity) -> Job:
    """Return the job that an input names. Reject one that does not exist, or that the caller may not see."""
    if job is None:
        reject(field, str(result_input), f"names job {result_input.job}, which does not exist", NO_JOB_HINT)
    if not may_see_all_of(caller, job):
        reject(field, str(result_input), f"names job {result_input.job}, which is not yours", "name your own jobs only")
    if job.array_job is not None:
        hint = f"name it {replace(result_input, job=job.array_job, index=job.array_index)}"
        reject(field, str(result_input), f"names task {job.display_name} of an array by the number {job.id}", hint)
    return job


def _resolve_source(field: str, result_input: ResultInput, job: Job) -> ResultInput:
    """Return an input with the number of the job or task that produces it. Reject one that can never exist."""
    name, array, position = result_input.job_name, job.spec.array, None
    if array is None and result_input.index is not None:
        hint = f"name it {replace(result_input, index=None)}"
        reject(field, str(result_input), f"names task {name}, but job {job.id} is no array", hint)
    if array is not None:
        if result_input.index is None:
            hint = f"name one of its tasks, as {replace(result_input, index=array.index_at(0))}"
            reject(field, str(result_input), f"names job {name}, which is an array", hint)
        position = array.position_of(result_input.index)
        if position is None:
            problem = f"names task {name}, but array {job.id} has the tasks {array}"
            reject(field, str(result_input), problem, "name one of them")
    if not Patterns(job.spec.collect).may_match(_names_of(result_input)):
        patterns = format_list([repr(pattern) for pattern in job.spec.collect], separator=" and ")
        problem = f"is {result_input}, but job {name} collects {f'only {patterns}' if patterns else 'nothing'}"
        reject(field, str(result_input), problem, f"submit job {name} with --collect {result_input.path}")
    return replace(result_input, source=job.id if position is None else job.id + 1 + position)
