"""What components brought (``--collect``): one archive for each, and one of all for who asks."""

import asyncio
import shutil
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path

from koalapy.daemon.engine.database import query, run_in_database
from koalapy.daemon.files.archives import PIECE_SIZE, discard, incoming, keeping, plain_name, receive
from koalapy.daemon.jobs.jobs import JobRecord
from koalapy.daemon.jobs.quota import Excess, Quota, StorageLimits, StorageUse
from koalapy.model.errors import ConflictError, FullError, NotFoundError, ProblemCode
from koalapy.model.job import Attempt, JobId, JobState, parse_token
from koalapy.model.limits import Limits, Scope
from koalapy.model.request import ClusterName
from koalapy.ports import FileStore, StoredResult

MIN_RETENTION = 86400.0
"""Seconds after a job's end for which its results are kept though there is no room for others."""
MAX_STUCK = 100
"""Jobs whose files cannot be removed that are passed over at once: with more it is the disk's trouble."""
MAX_MTIME = 2**33
"""Seconds since the epoch that a file can have been changed at, as far as file systems know."""
Attempts = Callable[[JobId], Awaitable[tuple[JobRecord, Sequence[Attempt]]]]
"""A job and all its attempts; ``NotFoundError`` when there is no such job."""


class Results:
    """Takes the archives of components, and puts them together."""

    def __init__(
        self,
        store: FileStore,
        directory: Path,
        limits: StorageLimits,
        clock: Callable[[], float],
        attempts: Attempts,
        owners: Limits | None = None,
    ) -> None:
        """``owners``: what each may have."""
        self._owners = owners or Limits()
        self._store = store
        self._directory = directory
        self._limit = limits.archive
        self._clock = clock
        self._attempts = attempts
        self._changing = asyncio.Lock()
        """Held while a result comes or goes."""
        why = "all it has is of jobs that are not over, or ended within the last day"
        self._quota = Quota("results_quota", limits.quota, sum(store.results_sizes().values()), self._free, why)
        discard(directory, ())

    async def put(self, cluster: ClusterName, token: str, content: AsyncIterator[bytes]) -> StoredResult:
        """Keep what a component brought, in place of what it brought before; ``token`` is that of its stage."""
        job, generation, rank, owner = await self._component(cluster, token)
        with incoming(self._directory) as path, self._quota.hold() as hold:
            archive = await receive(content, path, self._limit, hold)
            result = StoredResult(job, generation, rank, cluster, archive.size, archive.files, self._clock())
            async with self._changing:
                await self._make_room_of(owner, archive.size)
                # Written down first: a file that nobody knows of would stay for ever.
                hold.keep(replaced_size=await run_in_database(self._store.save_result, result))
                await asyncio.to_thread(_keep, path, self._path(result), generation)
        return result

    @property
    def storage_use(self) -> StorageUse:
        return self._quota.use

    async def sizes(self) -> dict[str, int]:
        """Bytes that are kept of each user."""
        return await query(self._store.results_sizes)

    async def size_of(self, scope: Scope) -> int:
        """Bytes that are kept of a user, or of a group's members."""
        sizes = await self.sizes()
        return sum(size for owner, size in sizes.items() if self._owners.applies_to(scope, owner))

    async def _make_room_of(self, owner: str, size: int) -> None:
        """What an owner has too much of goes, that of jobs that ended first; ``FullError`` where that is not enough."""
        for scope in self._owners.scopes(owner):
            most = scope.limits.result_bytes
            if most is None:
                continue
            sizes = await run_in_database(self._store.results_sizes)
            theirs = {one: kept for one, kept in sizes.items() if self._owners.applies_to(scope, one)}
            over = sum(theirs.values()) + size - most
            if over > 0:
                gone, _ = await self._remove(self._clock() - MIN_RETENTION, over, list(theirs))
                over -= sum(gone.values())
            if excess := self._owners.find_excess(scope, "result_bytes", most + over - size, size):
                raise FullError(excess.text, field="limits.result_bytes", value=excess.value, hint=excess.hint)

    async def _component(self, cluster: ClusterName, token: str) -> tuple[JobId, int, int, str]:
        """The job, generation and rank of a stage on this very cluster from which files are collected; whose it is."""
        try:
            job, generation, rank, nonce = parse_token(token)
        except ValueError:
            raise NotFoundError(
                f"{token[:60]!r} is no stage", field="token", value=token, code=ProblemCode.COMPONENT_NOT_FOUND
            ) from None
        record, attempts = await self._attempts(job)
        attempt = next((a for a in attempts if (a.generation, a.nonce) == (generation, nonce)), None)
        gang = attempt.gang if attempt else ()
        if not any((component.rank, component.cluster) == (rank, cluster) for component in gang):
            raise NotFoundError(
                f"{token} is no component on {cluster}",
                field="token",
                value=token,
                code=ProblemCode.COMPONENT_NOT_FOUND,
            )
        if not record.job.spec.collect:
            raise ConflictError(f"nothing is collected of job {job}", field="token", value=token)
        return job, generation, rank, record.job.spec.owner

    async def archive(self, job: JobId) -> Iterator[bytes]:
        """One archive of all that the last attempt brought: a folder ``RANK-CLUSTER`` for each component.

        ``NotFoundError`` when there is nothing, with the reason.
        """
        record, _ = await self._attempts(job)
        spec, state = record.job.spec, record.job.state
        found = await query(self._store.results, job, record.job.generation)
        there = [result for result in found if self._path(result).is_file()]
        # While it waits to be tried again, what an attempt brought that failed is not the job's.
        if there and state not in (JobState.QUEUED, JobState.HELD):
            return _gathered(_joined([(self._path(result), f"{result.rank}-{result.cluster}") for result in there]))
        if not spec.collect:
            hint = "name the files at submission: koala submit --collect PATTERN"
            raise NotFoundError(
                f"nothing is collected of job {job}",
                field="job",
                value=job,
                hint=hint,
                code=ProblemCode.RESULTS_NOT_FOUND,
            )
        if not state.is_final:
            why, hint = f"job {job} is {state}: its files come when it ends", f"wait for it: koala wait {job}"
        elif found:
            why = f"the files of job {job} are not kept any more"
            hint = "fetch sooner, or have the daemon's operator raise results_keep and results_quota"
        else:
            why, hint = f"job {job} {state} and brought no files", f"see why: koala show {job}"
        raise NotFoundError(why, field="job", value=job, hint=hint, code=ProblemCode.RESULTS_NOT_FOUND)

    def _path(self, result: StoredResult) -> Path:
        return self._directory / str(result.job) / f"{result.generation}.{result.rank}.tar"

    async def tidy(self, before: float | None) -> list[JobId]:
        """Remove what jobs brought that ended before a moment, if there is one, and what there is too much of.

        ``OSError`` at the end when files of some stay.
        """
        gone: dict[JobId, int] = {}
        stuck: OSError | None = None
        if before is not None:
            async with self._changing:
                gone, stuck = await self._remove(before)
        with suppress(FullError):
            await self._quota.free_space()
        if stuck is not None:
            raise stuck
        return list(gone)

    async def remove(self, jobs: Sequence[JobId]) -> None:
        """All that jobs brought, which nobody will ask for any more; ``OSError`` when files stay, and the books do."""
        async with self._changing:
            for job in jobs:
                await asyncio.to_thread(self._remove_files, job)
            self._quota.used -= await run_in_database(self._store.forget_results, jobs)

    async def _free(self, excess: Excess) -> None:
        """Remove those of the jobs that ended first."""
        async with self._changing:
            if (enough := excess()) > 0:
                await self._remove(self._clock() - MIN_RETENTION, enough)

    async def _remove(
        self, before: float, enough: int | None = None, owners: Collection[str] | None = None
    ) -> tuple[dict[JobId, int], OSError | None]:
        """The jobs whose files are gone, and how many bytes these were; why files of others stay, if some do."""
        old = await run_in_database(self._store.old_results, before, owners)
        # Files first: one that the books have given up would stay for ever, and nobody would count it.
        gone, stuck = await asyncio.to_thread(self._remove_oldest, old, enough)
        self._quota.used -= await run_in_database(self._store.clear_results, gone)
        return gone, stuck

    def _remove_oldest(self, old: Mapping[JobId, int], enough: int | None) -> tuple[dict[JobId, int], OSError | None]:
        """Until so many bytes are gone, or all; one that cannot be removed keeps no other."""
        gone: dict[JobId, int] = {}
        stuck: list[OSError] = []
        for job, size in old.items():
            if (enough is not None and enough <= 0) or len(stuck) > MAX_STUCK:
                break
            try:
                self._remove_files(job)
            except OSError as error:
                stuck.append(error)
                continue
            gone[job] = size
            enough = None if enough is None else enough - size
        return gone, stuck[0] if stuck else None

    def _remove_files(self, job: JobId) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._directory / str(job))


def _keep(path: Path, place: Path, generation: int) -> None:
    """Put an archive in its place; those of earlier attempts nobody can have any more."""
    with keeping():
        place.parent.mkdir(exist_ok=True)
        for other in place.parent.glob("*.*.tar"):
            if int(other.name.partition(".")[0]) < generation:
                other.unlink(missing_ok=True)
        path.rename(place)


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in larger pieces, for each costs a change of threads."""
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= PIECE_SIZE:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def _joined(archives: Sequence[tuple[Path, str]]) -> Iterator[bytes]:
    """The members of several archives as one, each below a folder of its own."""
    for path, folder in archives:
        yield _header(tarfile.TarInfo(folder), tarfile.DIRTYPE, 0o755)
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined] # it would keep them all
                name = plain_name(member.name)
                if not name:
                    continue
                member.name = f"{folder}/{name}"
                yield _header(member, tarfile.DIRTYPE if member.isdir() else tarfile.REGTYPE, member.mode & 0o755)
                yield from _content(archive, member)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(member: tarfile.TarInfo, kind: bytes, mode: int) -> bytes:
    plain = tarfile.TarInfo(member.name)
    plain.type, plain.mode, plain.size = kind, mode, member.size if kind == tarfile.REGTYPE else 0
    plain.mtime = int(min(max(member.mtime, 0), MAX_MTIME)) if isfinite(member.mtime) else 0
    return plain.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    content = archive.extractfile(member) if member.isreg() else None
    while content is not None and (piece := content.read(PIECE_SIZE)):
        yield piece
    if content is not None and (rest := member.size % tarfile.BLOCKSIZE):
        yield bytes(tarfile.BLOCKSIZE - rest)
