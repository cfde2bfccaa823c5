"""Removal of expired jobs with all their files."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.results import Results
from koalapy.daemon.jobs import retention
from koalapy.daemon.jobs.output import Outputs
from koalapy.daemon.jobs.quota import StorageLimits
from koalapy.daemon.jobs.retention import Housekeeping, Retention
from koalapy.model.errors import StoreUnavailable
from koalapy.model.job import Attempt, Component, Job, JobId, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.store.history import HistoryStore
from koalapy.store.records import Batch, OutputPiece, StoredBundle
from koalapy.store.service_tables import FileStore
from tests.daemon.archives import archive_of, yield_pieces
from tests.daemon.test_hub import Daemon, running_daemon

SPEC = JobSpec(FlexibleRequest(1), ("true",), collect=("*",))
DAY = 86400.0
NOW = 1000 * DAY


class World:
    """A daemon's stores with jobs of one component, each with results and one line of output."""

    def __init__(self, path: Path, daemon: Daemon) -> None:
        self.path, self.daemon, self.store = path, daemon, daemon.store
        self.files = FileStore(self.store.database)
        self.jobs = daemon.jobs
        limits, attempts = StorageLimits(10**6, 10**9), self.jobs.list_attempts
        self.results = Results(self.files, path / "results", limits, clock=lambda: NOW, attempts=attempts)
        self.history = HistoryStore(self.store.database)
        self.ending = False

    def make_retention(self, jobs: float | None = 10 * DAY, internal: float = DAY, **options: Any) -> Retention:
        outputs = Outputs(self.daemon.engine, self.daemon.queries, self.store, self.daemon.kept)
        clock, is_ending = lambda: NOW, lambda: self.ending
        return Retention(self.history, outputs, self.results, jobs, internal, clock, is_ending, **options)

    async def add_job(self, ident: JobId, ended: float | None, spec: JobSpec = SPEC) -> None:
        """Add a job that ended ``ended`` seconds ago, or runs if that is None."""
        attempt = Attempt(1, (Component(0, "north", 1),), 1.0, nonce="a")
        job = Job(ident, spec, 1.0, JobState.RUNNING, generation=1, attempt=attempt)
        self.store.write(Batch(1.0, self.store.epoch, {ident: job}))
        if spec.collect:
            await self.results.store_result("north", f"{ident}.1.0.a", yield_pieces(archive_of({"a": b"x"})))
        self.daemon.kept.append(job.token(0), [OutputPiece(0, b"line\n")])
        if ended is not None:
            ended_job = replace(job, state=JobState.SUCCEEDED, ended_at=NOW - ended)
            self.store.write(Batch(1.0, self.store.epoch, {ident: ended_job}))

    def stored_files(self) -> dict[str, set[int]]:
        """Return the job ids with stored rows, output and results."""
        folders = {
            folder: {int(entry.name) for entry in (self.path / folder).iterdir() if entry.name.isdecimal()}
            for folder in ("output", "results")
        }
        return {"books": {ident for ident in range(1, 100) if self.store.job(ident)}, **folders}


def block_removal(folder: Path) -> None:
    """Replace a folder by a symbolic link, which even root cannot remove as a folder."""
    folder.symlink_to(folder.rename(folder.with_name("aside-" + folder.name)))


def unblock_removal(folder: Path) -> None:
    folder.unlink()
    folder.with_name("aside-" + folder.name).rename(folder)


@asynccontextmanager
async def opened_world(path: Path) -> AsyncIterator[World]:
    async with running_daemon(path / "koala.db") as daemon:
        yield World(path, daemon)


ages = st.one_of(st.none(), st.sampled_from([0.5 * DAY, 2 * DAY, 9.9 * DAY, 10.1 * DAY, 500 * DAY]))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(ages, st.booleans()), min_size=1, max_size=12),
    st.sampled_from([None, DAY, 10 * DAY]),
    st.integers(1, 5),
)
async def test_retention_removes_exactly_expired_jobs(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[tuple[float | None, bool]], keep: float | None, at_once: int
) -> None:
    async with opened_world(tmp_path_factory.mktemp("world")) as world:
        stay: set[int] = set()
        for ident, (age, internal) in enumerate(jobs, 1):
            await world.add_job(ident, age, replace(SPEC, internal=internal))
            longest = DAY if internal else keep
            stay |= {ident} if age is None or longest is None or age <= longest else set()
        tidying = world.make_retention(keep)
        tidying._batch_size = at_once
        assert await tidying.remove_expired() == len(jobs) - len(stay)
        assert world.stored_files() == dict.fromkeys(("books", "output", "results"), stay)
        assert world.results._quota.used == sum(world.files.results_sizes().values())
        assert await tidying.remove_expired() == 0
        assert world.store.load().next_job == len(jobs) + 1


async def test_retention_keeps_jobs_with_results_that_other_jobs_need(tmp_path: Path) -> None:
    async with opened_world(tmp_path) as world:
        for ident in (1, 2, 3):
            await world.add_job(ident, 20 * DAY)
        tidying = world.make_retention(needed=lambda: {2})
        tidying._batch_size = 1
        assert await tidying.remove_expired() == 2
        assert world.stored_files() == {"books": {2}, "output": {2}, "results": {2}}


async def test_retention_keeps_row_until_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_world(tmp_path) as world:
        for ident in (1, 2, 3):
            await world.add_job(ident, 20 * DAY)
        tidying = world.make_retention()
        with monkeypatch.context() as patch:

            def broken(jobs: object) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr(world.daemon.kept, "remove", broken)
            with pytest.raises(OSError, match="Input/output"):
                await tidying.remove_expired()
        assert world.stored_files()["books"] == {1, 2, 3}
        assert await tidying.remove_expired() == 3
        assert world.stored_files() == {"books": set(), "output": set(), "results": set()}


@pytest.mark.parametrize("at_once", [1, 3, 50])
async def test_retention_with_unremovable_files_removes_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The job remains the oldest, and must not block the removal of other jobs."""
    async with opened_world(tmp_path) as world:
        for ident in range(1, 8):
            await world.add_job(ident, (30 - ident) * DAY)
        tidying = world.make_retention()
        tidying._batch_size = at_once
        removed = world.daemon.kept.remove

        def broken(jobs: Collection[JobId]) -> None:
            removed(set(jobs) - {1, 4})
            if {1, 4} & set(jobs):
                raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(world.daemon.kept, "remove", broken)
            with pytest.raises(OSError, match="Input/output"):
                await tidying.remove_expired()
            assert list(world.stored_files().values()) == [{1, 4}] * 3
            with pytest.raises(OSError, match="Input/output"):
                await world.make_retention(max_stuck=1).remove_expired()
        assert await tidying.remove_expired() == 2
        assert world.stored_files()["books"] == set()


@pytest.mark.parametrize("at_once", [1, 3, 50])
async def test_retention_with_unremovable_results_keeps_counts(tmp_path: Path, at_once: int) -> None:
    """Without their counts no daemon would find the files again."""
    async with opened_world(tmp_path) as world:
        for ident in range(1, 8):
            await world.add_job(ident, (30 - ident) * DAY)
        for ident in (1, 4):
            block_removal(tmp_path / "results" / str(ident))
        tidying = world.make_retention()
        tidying._batch_size = at_once
        with pytest.raises(OSError, match="rmtree on a symbolic link"):
            await tidying.remove_expired()
        stored = world.stored_files()
        assert (stored["books"], stored["results"]) == ({1, 4}, {1, 4})
        assert world.results._quota.used == sum(world.files.results_sizes().values()) > 0
        for ident in (1, 4):
            unblock_removal(tmp_path / "results" / str(ident))
        assert await tidying.remove_expired() == 2
        assert world.stored_files() == {"books": set(), "output": set(), "results": set()}
        assert world.results._quota.used == 0


async def test_housekeeping_failure_of_one_kind_spares_others(tmp_path: Path) -> None:
    async with opened_world(tmp_path) as world:
        old = StoredBundle("a" * 64, 5, 1, NOW - 10 * DAY)
        world.files.save_bundles([old])
        bundles = Bundles(
            world.files, tmp_path / "bundles", StorageLimits(10**6, 10**9), needed=lambda: (), clock=lambda: NOW
        )
        (bundles.path_of(old.id) / "x").mkdir(parents=True)
        for ident in (1, 2):
            await world.add_job(ident, 5 * DAY)
        await world.add_job(3, 20 * DAY)
        block_removal(tmp_path / "results" / "1")
        keeping = Housekeeping(bundles, world.results, world.make_retention(), 3 * DAY, lambda: NOW)
        await keeping.remove_expired()
        assert world.stored_files() == {"books": {1, 2}, "output": {1, 2}, "results": {1}}


async def test_retention_with_late_output_leaves_nothing(tmp_path: Path) -> None:
    async with opened_world(tmp_path) as world:
        await world.add_job(1, 20 * DAY)
        tidying = world.make_retention()
        outputs = tidying._outputs
        assert await outputs.store_pieces("north", "1.1.0.a", [OutputPiece(5, b"late\n")]) == 10
        remove = world.history.remove

        def and_more_comes(jobs: list[JobId]) -> None:
            world.daemon.kept.append("1.1.0.a", [OutputPiece(0, b"from the very end\n")])
            remove(jobs)

        world.history.remove = and_more_comes  # type: ignore[assignment, method-assign]
        await tidying.remove_expired()
        assert world.stored_files()["output"] == set()
        assert await outputs.store_pieces("north", "1.1.0.a", [OutputPiece(0, b"later still\n")]) is None
        assert world.stored_files()["output"] == set()


async def test_retention_interrupted_is_continued_by_next_run(tmp_path: Path) -> None:
    async with opened_world(tmp_path) as world:
        await world.add_job(1, 20 * DAY)
        world.ending = True
        assert await world.make_retention().remove_expired() == 0
        assert world.stored_files()["books"] == {1}


async def test_retention_with_slow_database_reduces_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_world(tmp_path) as world:
        for ident in range(1, 15):
            await world.add_job(ident, 20 * DAY)
        limits: list[int] = []
        original = world.history.expired_jobs

        def counted(horizon: float, limit: int, *, internal: bool) -> list[JobId]:
            limits.extend([] if internal else [limit])
            return original(horizon, limit, internal=internal)

        monkeypatch.setattr(world.history, "expired_jobs", counted)
        transaction_s = 2 * retention.LONG_TRANSACTION
        times = count()
        tidying = world.make_retention(monotonic=lambda: next(times) * transaction_s)
        tidying._batch_size = 8
        await tidying.remove_expired()
        assert limits == [8, 4, 2, 1]
        transaction_s = 0.0
        for ident in range(20, 24):
            await world.add_job(ident, 20 * DAY)
        limits.clear()
        await tidying.remove_expired()
        assert limits == [1, 2, 4, 8]


async def test_retention_on_full_disk_removes_files_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_world(tmp_path) as world:
        await world.add_job(1, 20 * DAY)

        def full(*_: object) -> int:
            raise StoreUnavailable("the database does not answer: database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(world.files, "forget_results", full)
            patch.setattr(world.history, "remove", full)
            with pytest.raises(StoreUnavailable):
                await world.make_retention().remove_expired()
        assert world.stored_files() == {"books": {1}, "output": set(), "results": set()}
        assert await world.make_retention().remove_expired() == 1
        assert world.results._quota.used == 0
