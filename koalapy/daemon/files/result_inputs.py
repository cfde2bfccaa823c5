"""Results of jobs as inputs of other jobs (``--input-from``): checked at submission, and sent to agents."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from koalapy.daemon.files.joined_archives import ArchivePart, join_archives, list_names
from koalapy.daemon.files.results import Results
from koalapy.daemon.jobs.dependencies import NO_JOB_HINT
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.model.dependency import ResultInput, with_dependencies
from koalapy.model.errors import NotFoundError, ProblemCode, reject
from koalapy.model.identity import Identity
from koalapy.model.job import Job, JobId
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list
from koalapy.runner.result_archive import Patterns
from koalapy.validation.inputs import check_result_inputs
from koalapy.validation.permissions import may_see_all_of

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
        selected, parts, ranks = _plain_path(result_input), [], []
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


def _plain_path(result_input: ResultInput) -> str:
    return "/".join(_names_of(result_input))


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
