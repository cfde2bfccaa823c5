"""Jobs are kept for a while after their end, and then nothing of theirs is."""

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
from koalapy.daemon.jobs.retention import Housekeeping, Retention, RetentionTimes
from koalapy.daemon.network.network import measurement_spec
from koalapy.model.errors import StoreUnavailable
from koalapy.model.job import Attempt, Component, Job, JobId, JobSpec, JobState
from koalapy.model.measurement import MeasurementSettings
from koalapy.model.request import FlexibleRequest
from koalapy.ports import Batch, OutputPiece, StoredBundle
from koalapy.store.files import SqlFiles
from koalapy.store.history import SqlHistory
from tests.daemon.archives import archive_of, pieces
from tests.daemon.test_hub import Daemon, running

SPEC = JobSpec(FlexibleRequest(1), ("true",), collect=("*",))
OWN = measurement_spec(("north", "south"), MeasurementSettings().command)
DAY = 86400.0
NOW = 1000 * DAY


class World:
    """A daemon's books with jobs of one component, all of which brought something and printed a line."""

    def __init__(self, path: Path, daemon: Daemon) -> None:
        self.path, self.daemon, self.store = path, daemon, daemon.store
        self.files = SqlFiles(self.store.database)
        self.jobs = daemon.jobs
        limits, attempts = StorageLimits(10**6, 10**9), self.jobs.list_attempts
        self.results = Results(self.files, path / "results", limits, clock=lambda: NOW, attempts=attempts)
        self.history = SqlHistory(self.store.database)
        self.ending = False

    def retention(self, jobs: float | None = 10 * DAY, internal: float = DAY, **more: Any) -> Retention:
        outputs = Outputs(self.daemon.engine, self.daemon.queries, self.store, self.daemon.kept)
        times = RetentionTimes(jobs, internal)
        return Retention(self.history, outputs, self.results, times, lambda: NOW, lambda: self.ending, **more)

    async def add(self, ident: JobId, ended: float | None, spec: JobSpec = SPEC) -> None:
        """One that ended so many seconds ago, if it has."""
        attempt = Attempt(1, (Component(0, "north", 1),), 1.0, nonce="a")
        job = Job(ident, spec, 1.0, JobState.RUNNING, generation=1, attempt=attempt)
        self.store.write(Batch(1.0, self.store.epoch, {ident: job}))
        if spec.collect:
            await self.results.store_result("north", f"{ident}.1.0.a", pieces(archive_of({"a": b"x"})))
        self.daemon.kept.append(job.token(0), [OutputPiece(0, b"line\n")])
        if ended is not None:
            over = replace(job, state=JobState.SUCCEEDED, ended_at=NOW - ended)
            self.store.write(Batch(1.0, self.store.epoch, {ident: over}))

    def there(self) -> dict[str, set[int]]:
        """Of which jobs there is something."""
        folders = {
            what: {int(entry.name) for entry in (self.path / what).iterdir() if entry.name.isdecimal()}
            for what in ("output", "results")
        }
        return {"books": {ident for ident in range(1, 100) if self.store.job(ident)}, **folders}


def block(folder: Path) -> None:
    """It is none any more that can be removed, not even by root."""
    folder.symlink_to(folder.rename(folder.with_name("aside-" + folder.name)))


def unblock(folder: Path) -> None:
    folder.unlink()
    folder.with_name("aside-" + folder.name).rename(folder)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[World]:
    async with running(path / "koala.db") as daemon:
        yield World(path, daemon)


ages = st.one_of(st.none(), st.sampled_from([0.5 * DAY, 2 * DAY, 9.9 * DAY, 10.1 * DAY, 500 * DAY]))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(ages, st.booleans()), min_size=1, max_size=12),
    st.sampled_from([None, DAY, 10 * DAY]),
    st.integers(1, 5),
)
async def test_exactly_those_go_whose_time_is_over(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[tuple[float | None, bool]], keep: float | None, at_once: int
) -> None:
    async with opened(tmp_path_factory.mktemp("world")) as world:
        stay: set[int] = set()
        for ident, (age, internal) in enumerate(jobs, 1):
            await world.add(ident, age, replace(SPEC, internal=internal))
            longest = DAY if internal else keep
            stay |= {ident} if age is None or longest is None or age <= longest else set()
        tidying = world.retention(keep)
        tidying._batch_size = at_once
        assert await tidying.remove_expired() == len(jobs) - len(stay)
        assert world.there() == dict.fromkeys(("books", "output", "results"), stay)
        assert world.results._quota.used == sum(world.files.results_sizes().values())
        assert await tidying.remove_expired() == 0
        assert world.store.load().next_job == len(jobs) + 1


async def test_what_measures_the_network_is_kept_for_a_shorter_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        await world.add(1, 2 * DAY, OWN)
        await world.add(2, 2 * DAY)
        await world.retention().remove_expired()
        assert world.there()["books"] == {2}


async def test_as_long_as_there_may_be_a_file_the_job_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as world:
        for ident in (1, 2, 3):
            await world.add(ident, 20 * DAY)
        tidying = world.retention()
        with monkeypatch.context() as patch:

            def away(jobs: object) -> None:
                raise StoreUnavailable("the database is locked")

            patch.setattr(world.history, "remove", away)
            with pytest.raises(StoreUnavailable):
                await tidying.remove_expired()
        assert world.there() == {"books": {1, 2, 3}, "output": set(), "results": set()}
        with monkeypatch.context() as patch:

            def broken(jobs: object) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr(world.daemon.kept, "remove", broken)
            with pytest.raises(OSError, match="Input/output"):
                await tidying.remove_expired()
        assert world.there()["books"] == {1, 2, 3}
        assert await tidying.remove_expired() == 3
        assert world.there() == {"books": set(), "output": set(), "results": set()}


@pytest.mark.parametrize("at_once", [1, 3, 50])
async def test_one_whose_files_cannot_be_removed_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """It is the oldest for ever, so that nothing was removed any more."""
    async with opened(tmp_path) as world:
        for ident in range(1, 8):
            await world.add(ident, (30 - ident) * DAY)
        tidying = world.retention()
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
            assert list(world.there().values()) == [{1, 4}] * 3
            with pytest.raises(OSError, match="Input/output"):
                await world.retention(max_stuck=1).remove_expired()
        assert await tidying.remove_expired() == 2
        assert world.there()["books"] == set()


@pytest.mark.parametrize("at_once", [1, 3, 50])
async def test_one_whose_results_cannot_be_removed_keeps_its_books_and_no_other(tmp_path: Path, at_once: int) -> None:
    """Nobody would know of them any more."""
    async with opened(tmp_path) as world:
        for ident in range(1, 8):
            await world.add(ident, (30 - ident) * DAY)
        for ident in (1, 4):
            block(tmp_path / "results" / str(ident))
        tidying = world.retention()
        tidying._batch_size = at_once
        with pytest.raises(OSError, match="rmtree on a symbolic link"):
            await tidying.remove_expired()
        there = world.there()
        assert (there["books"], there["results"]) == ({1, 4}, {1, 4})
        assert world.results._quota.used == sum(world.files.results_sizes().values()) > 0
        for ident in (1, 4):
            unblock(tmp_path / "results" / str(ident))
        assert await tidying.remove_expired() == 2
        assert world.there() == {"books": set(), "output": set(), "results": set()}
        assert world.results._quota.used == 0


async def test_files_of_one_sort_that_cannot_be_removed_keep_none_of_another(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        old = StoredBundle("a" * 64, 5, 1, NOW - 10 * DAY)
        world.files.save_bundles([old])
        bundles = Bundles(
            world.files, tmp_path / "bundles", StorageLimits(10**6, 10**9), needed=lambda: (), clock=lambda: NOW
        )
        (bundles.path_of(old.id) / "x").mkdir(parents=True)
        for ident in (1, 2):
            await world.add(ident, 5 * DAY)
        await world.add(3, 20 * DAY)
        block(tmp_path / "results" / "1")
        keeping = Housekeeping(bundles, world.results, world.retention(), 3 * DAY, lambda: NOW)
        await keeping.remove_expired()
        assert world.there() == {"books": {1, 2}, "output": {1, 2}, "results": {1}}


async def test_output_that_comes_meanwhile_leaves_nothing_behind(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        await world.add(1, 20 * DAY)
        tidying = world.retention()
        outputs = tidying._outputs
        assert await outputs.store_pieces("north", "1.1.0.a", [OutputPiece(5, b"late\n")]) == 10
        remove = world.history.remove

        def and_more_comes(jobs: list[JobId]) -> None:
            world.daemon.kept.append("1.1.0.a", [OutputPiece(0, b"from the very end\n")])
            remove(jobs)

        world.history.remove = and_more_comes  # type: ignore[assignment, method-assign]
        await tidying.remove_expired()
        assert world.there()["output"] == set()
        assert await outputs.store_pieces("north", "1.1.0.a", [OutputPiece(0, b"later still\n")]) is None
        assert world.there()["output"] == set()


async def test_a_daemon_that_ends_goes_on_the_next_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        await world.add(1, 20 * DAY)
        world.ending = True
        assert await world.retention().remove_expired() == 0
        assert world.there()["books"] == {1}


async def test_a_database_that_is_slow_is_asked_for_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as world:
        for ident in range(1, 15):
            await world.add(ident, 20 * DAY)
        asked: list[int] = []
        over = world.history.over

        def counted(before: float, limit: int, *, internal: bool) -> list[JobId]:
            asked.extend([] if internal else [limit])
            return over(before, limit, internal=internal)

        monkeypatch.setattr(world.history, "over", counted)
        transaction_s = 2 * retention.LONG_TRANSACTION
        times = count()
        tidying = world.retention(monotonic=lambda: next(times) * transaction_s)
        tidying._batch_size = 8
        await tidying.remove_expired()
        assert asked == [8, 4, 2, 1]
        transaction_s = 0.0
        for ident in range(20, 24):
            await world.add(ident, 20 * DAY)
        asked.clear()
        await tidying.remove_expired()
        assert asked == [1, 2, 4, 8]


async def test_a_full_disk_gets_room_before_the_database_needs_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as world:
        await world.add(1, 20 * DAY)

        def full(*_: object) -> int:
            raise StoreUnavailable("the database does not answer: database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(world.files, "forget_results", full)
            patch.setattr(world.history, "remove", full)
            with pytest.raises(StoreUnavailable):
                await world.retention().remove_expired()
        assert world.there() == {"books": {1}, "output": set(), "results": set()}
        assert await world.retention().remove_expired() == 1
        assert world.results._quota.used == 0
