"""Bundles and results take no more room than they may: the old make way where that is allowed, else nothing comes."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.daemon.files import bundles, results
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.results import Results
from koalapy.daemon.jobs.jobs import JobRecord
from koalapy.daemon.jobs.quota import StorageLimits
from koalapy.model.errors import FullError, LimitReached, NeverAllowed, NotFoundError, StoreUnavailable, TooLargeError
from koalapy.model.job import Attempt, Component, Job, JobSpec, JobState
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.request import FlexibleRequest
from koalapy.ports import Batch
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.files import SqlFiles
from koalapy.store.opening import migrate
from koalapy.store.sql import SqlStore
from tests.daemon.archives import archive_of, pieces

SIZE = 10240
"""Bytes of an archive of one small file."""
HOUR, DAY = bundles.MIN_RETENTION, results.MIN_RETENTION


def named(name: str) -> bytes:
    data = archive_of({name: b"x"})
    assert len(data) == SIZE
    return data


class World:
    """A database with five jobs of one component, at a time of the test's own."""

    def __init__(self, path: Path) -> None:
        database = make_engine(f"sqlite:///{path / 'koala.db'}")
        migrate(database)
        self.path = path
        self.jobs = SqlStore(Database(database))
        self.store = SqlFiles(self.jobs.database)
        self.now = 1000.0
        self.needed: set[str] = set()
        spec = JobSpec(FlexibleRequest(1), ("true",), collect=("*",))
        owners = ("alice", "alice", "alice", "bob", "carl")
        attempt = Attempt(2, (Component(0, "north", 1),), 1.0)
        self._jobs = {
            i: Job(i, replace(spec, owner=owner), 1.0, JobState.RUNNING, generation=2, attempt=attempt)
            for i, owner in enumerate(owners, 1)
        }
        self.jobs.write(Batch(1.0, self.jobs.epoch, dict(self._jobs)))

    def end(self, job: int) -> None:
        """It is over now."""
        self._jobs[job] = replace(self._jobs[job], state=JobState.SUCCEEDED, ended_at=self.now)
        self.jobs.write(Batch(1.0, self.jobs.epoch, {job: self._jobs[job]}))

    async def _attempts(self, job: int) -> tuple[JobRecord, list[Attempt]]:
        attempt = self._jobs[job].attempt
        assert attempt is not None
        return JobRecord(self._jobs[job], ""), [replace(attempt, generation=1), attempt]

    def bundles(self, quota: int, owners: Limits | None = None) -> Bundles:
        return Bundles(
            self.store,
            self.path / "bundles",
            StorageLimits(10**6, quota),
            clock=lambda: self.now,
            needed=lambda: self.needed,
            owners=owners,
        )

    def results(self, quota: int, owners: Limits | None = None) -> Results:
        return Results(
            self.store,
            self.path / "results",
            StorageLimits(10**6, quota),
            clock=lambda: self.now,
            attempts=self._attempts,
            owners=owners,
        )

    def there(self, what: str) -> list[str]:
        """The files that are kept."""
        folder = self.path / what
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# Bundles


async def test_of_bundles_those_go_first_that_were_not_wanted_for_longest(world: World) -> None:
    kept = world.bundles(3 * SIZE)
    a, b, c = [(await kept.add_bundle(pieces(named(name))))[0].id for name in "abc"]
    world.now += HOUR + 1
    kept.touch_bundle(a)
    world.needed = {b}
    d = (await kept.add_bundle(pieces(named("d"))))[0].id
    assert world.there("bundles") == sorted([a, b, d])
    assert sorted(bundle.id for bundle in world.store.bundles()) == sorted([a, b, d])
    with pytest.raises(NotFoundError):
        kept.get_bundle(c)
    with pytest.raises(FullError, match=r"bundles_quota is 30\.7 KB, and all it has is needed") as refused:
        await kept.add_bundle(pieces(named("e")))
    assert (refused.value.field, "bundles_quota" in refused.value.hint) == ("body", True)
    assert world.there("bundles") == sorted([a, b, d])
    world.needed = set()
    e, created = await kept.add_bundle(pieces(named("e")))
    assert created
    assert world.there("bundles") == sorted([a, d, e.id])


@pytest.mark.evidence("U9")
async def test_nothing_makes_way_for_what_is_too_large(world: World) -> None:
    kept = world.bundles(2 * SIZE)
    bundle, _ = await kept.add_bundle(pieces(named("a")))
    world.now += HOUR + 1
    with pytest.raises(TooLargeError, match="larger than 1 MB"):
        await kept.add_bundle(pieces(bytes(10**6 + 1)), 10**6 + 1)
    assert world.there("bundles") == [bundle.id]


async def test_what_comes_at_once_does_not_take_the_same_room_twice(world: World) -> None:
    kept = world.bundles(SIZE + SIZE // 2)
    both_began, began = asyncio.Event(), 0

    async def slowly(data: bytes) -> AsyncIterator[bytes]:
        nonlocal began
        yield data
        began += 1
        if began == 2:
            both_began.set()
        await both_began.wait()

    ended = await asyncio.gather(
        kept.add_bundle(slowly(named("a"))), kept.add_bundle(slowly(named("b"))), return_exceptions=True
    )
    assert sorted(type(one).__name__ for one in ended) == ["FullError", "tuple"]
    assert len(world.there("bundles")) == 1
    world.now += HOUR + 1
    assert (await kept.add_bundle(pieces(named("c"))))[1], "what was refused takes no room"


async def test_the_same_sent_twice_at_once_takes_room_once(world: World) -> None:
    kept = world.bundles(2 * SIZE)
    sent = await asyncio.gather(*(kept.add_bundle(pieces(named("a"))) for _ in range(2)))
    assert sorted(created for _, created in sent) == [False, True]
    assert (await kept.add_bundle(pieces(named("b"))))[1]


async def test_what_breaks_off_or_does_not_go_on_gives_its_room_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koalapy.daemon.files.archives.PIECE_TIMEOUT", 0.01)
    monkeypatch.setattr("koalapy.daemon.files.archives.PIECE_SIZE", 1000)
    kept = world.bundles(SIZE)

    async def breaks() -> AsyncIterator[bytes]:
        yield named("a")[:-1000]
        raise ConnectionError

    async def stalls() -> AsyncIterator[bytes]:
        yield named("a")[:-1000]
        await asyncio.Event().wait()

    for content, error in ((breaks(), ConnectionError), (stalls(), TimeoutError)):
        with pytest.raises(error):
            await kept.add_bundle(content)
        assert world.there("bundles") == []
    assert (await kept.add_bundle(pieces(named("b"))))[1]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_bundle_whose_file_was_lost_takes_its_room_once(world: World, restarted: bool) -> None:
    kept = world.bundles(2 * SIZE)
    bundle, _ = await kept.add_bundle(pieces(named("a")))
    kept.path_of(bundle.id).unlink()
    if restarted:
        kept = world.bundles(2 * SIZE)
    assert (await kept.add_bundle(pieces(named("a"))))[1]
    assert (await kept.add_bundle(pieces(named("b"))))[1]
    with pytest.raises(FullError):
        await kept.add_bundle(pieces(named("c")))


async def test_a_smaller_quota_is_kept_by_the_next_round(world: World) -> None:
    ids = [(await world.bundles(10 * SIZE).add_bundle(pieces(named(name))))[0].id for name in "abc"]
    less = world.bundles(SIZE)
    await less.remove_expired()
    assert len(world.there("bundles")) == 3, "they were wanted a moment ago"
    world.now += HOUR + 1
    world.needed = {ids[1]}
    await less.remove_expired()
    assert world.there("bundles") == [ids[1]]


async def test_a_bundle_whose_file_stays_is_known_until_it_is_gone_and_keeps_no_other(world: World) -> None:
    """It was forgotten first, so that its file was tried again by the next daemon only."""
    kept = world.bundles(2 * SIZE)
    a, _ = [(await kept.add_bundle(pieces(named(name))))[0].id for name in "ab"]
    world.now += HOUR + 1
    kept.path_of(a).unlink()
    (kept.path_of(a) / "below").mkdir(parents=True)
    c = (await kept.add_bundle(pieces(named("c"))))[0].id
    assert sorted(bundle.id for bundle in world.store.bundles()) == sorted([a, c]), "that made way which could"
    world.now += DAY + 1
    with pytest.raises(OSError, match=a):
        await kept.remove_expired()
    assert ([bundle.id for bundle in world.store.bundles()], kept.storage_use.used) == ([a], SIZE)
    (kept.path_of(a) / "below").rmdir()
    kept.path_of(a).rmdir()
    assert await kept.remove_expired() == [a]
    assert (world.store.bundles(), kept.storage_use.used) == ([], 0)


# Results


async def test_results_of_the_jobs_that_ended_first_make_way_for_others(world: World) -> None:
    kept = world.results(2 * SIZE)
    for job in (2, 1):
        await kept.store_result("north", f"{job}.2.0", pieces(named("a")))
        world.end(job)
        world.now += 10.0
    world.now += DAY - 20.0
    with pytest.raises(FullError, match=r"results_quota is 20\.5 KB, and all it has is of jobs") as full:
        await kept.store_result("north", "3.2.0", pieces(named("a")))
    assert "results_quota" in full.value.hint
    world.now += 1.0
    await kept.store_result("north", "3.2.0", pieces(named("a")))
    assert world.there("results") == ["1/2.0.tar", "3/2.0.tar"]
    for now_and_after_a_restart in (kept, world.results(2 * SIZE)):
        with pytest.raises(NotFoundError, match="the files of job 2 are not kept any more"):
            await now_and_after_a_restart.open_archive(2)
        assert list(await now_and_after_a_restart.open_archive(1))


async def test_results_whose_files_stay_are_counted_until_they_are_gone(world: World) -> None:
    """They were given up first, so that a file that stayed was served, but neither counted nor tried again."""
    kept = world.results(2 * SIZE)
    for job in (1, 2):
        await kept.store_result("north", f"{job}.2.0", pieces(named("a")))
        world.end(job)
    world.now += DAY + 1.0
    folder = world.path / "results" / "1"
    folder.symlink_to(folder.rename(world.path / "aside"))
    with pytest.raises(OSError, match="rmtree on a symbolic link"):
        await kept.remove_expired(world.now)
    assert os.listdir(world.path / "results") == ["1"], "that of the other is gone"
    for now_and_after_a_restart in (kept, world.results(2 * SIZE)):
        assert now_and_after_a_restart.storage_use.used == SIZE
        with pytest.raises(FullError):
            await now_and_after_a_restart.store_result("north", "3.2.0", pieces(bytes(2 * SIZE)))
    folder.unlink()
    (world.path / "aside").rename(folder)
    assert await kept.remove_expired(world.now) == [1]
    assert (world.there("results"), kept.storage_use.used) == ([], 0)


async def test_results_whose_files_went_before_a_cut_are_given_up_by_the_next_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = world.results(2 * SIZE)
    await kept.store_result("north", "1.2.0", pieces(named("a")))
    world.end(1)
    world.now += DAY + 1.0

    def cut(jobs: object) -> int:
        raise StoreUnavailable("the database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "clear_results", cut)
        with pytest.raises(StoreUnavailable):
            await kept.remove_expired(world.now)
    assert world.there("results") == []
    again = world.results(2 * SIZE)
    with pytest.raises(NotFoundError, match="the files of job 1 are not kept any more"):
        await again.open_archive(1)
    assert await again.remove_expired(world.now) == [1]
    assert (again.storage_use.used, world.store.results_sizes()) == (0, {})


async def test_a_leftover_that_cannot_be_removed_keeps_no_daemon_from_its_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("bundles", "results"):
        (world.path / folder).mkdir(exist_ok=True)
        (world.path / folder / ".incoming-1").touch()

    def broken(self: Path, missing_ok: bool = False) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken)
        assert (world.bundles(SIZE).storage_use.used, world.results(SIZE).storage_use.used) == (0, 0)
    world.bundles(SIZE)
    world.results(SIZE)
    assert world.there("bundles") == world.there("results") == []


async def test_results_of_jobs_that_are_not_over_never_make_way(world: World) -> None:
    kept = world.results(SIZE)
    await kept.store_result("north", "1.2.0", pieces(named("a")))
    world.now += 10 * DAY
    with pytest.raises(FullError):
        await kept.store_result("north", "2.2.0", pieces(named("a")))
    await kept.remove_expired(None)
    assert world.there("results") == ["1/2.0.tar"]


async def test_what_a_component_brings_again_takes_its_room_once(world: World) -> None:
    kept = world.results(2 * SIZE)
    await kept.store_result("north", "1.1.0", pieces(named("a")))
    for _ in range(3):
        await kept.store_result("north", "1.2.0", pieces(named("a")))
    assert (world.there("results"), sum(world.store.results_sizes().values())) == (["1/2.0.tar"], SIZE)
    await kept.store_result("north", "2.2.0", pieces(named("a")))
    with pytest.raises(FullError):
        await world.results(2 * SIZE).store_result("north", "3.2.0", pieces(named("a")))


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_crash_leaves_nothing_that_nobody_knows_of(
    world: World, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    kept = world.results(2 * SIZE)

    def crash(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", crash)
        with pytest.raises(StoreUnavailable, match="No space left on device"):
            await kept.store_result("north", "1.2.0", pieces(named("a")))
    for folder in ("bundles", "results"):
        (world.path / folder).mkdir(exist_ok=True)
        (world.path / folder / ".incoming-0").write_bytes(bytes(5 * SIZE))
    if restarted:
        kept = world.results(2 * SIZE)
        assert world.bundles(2 * SIZE)
        assert world.there(".") == ["koala.db", "koala.db-shm", "koala.db-wal"]
    for job in (1, 2):
        await kept.store_result("north", f"{job}.2.0", pieces(named("a")))
    with pytest.raises(FullError):
        await kept.store_result("north", "3.2.0", pieces(named("a")))


# Of one user, or group

FULL = "is 20.5 KB: 20.5 KB are in use and 10.2 KB more asked for"


def limits(settings: LimitSettings) -> Limits:
    return Limits(settings, lambda user: ("physics",) if user in ("bob", "carl") else (), "write to grid@example.org")


@pytest.mark.evidence("U10", "C13", "M4")
async def test_a_user_s_bundles_make_way_for_his_own_only_and_else_no_more_come(world: World) -> None:
    owners = limits(LimitSettings(UserLimits(bundle_bytes=2 * SIZE)))
    kept = world.bundles(100 * SIZE, owners)
    of_bob = (await kept.add_bundle(pieces(named("z")), owner="bob"))[0].id
    a, b = [(await kept.add_bundle(pieces(named(name)), owner="alice"))[0].id for name in "ab"]
    with pytest.raises(LimitReached) as refused:
        await kept.add_bundle(pieces(named("c")), owner="alice")
    assert (
        refused.value.message
        == "the limit bundle_bytes of alice is 20.5 KB: 20.5 KB are in use and 10.2 KB more asked for"
    )
    assert (refused.value.field, refused.value.hint) == ("limits.bundle_bytes", "write to grid@example.org")
    world.now += HOUR + 1
    world.needed = {a}
    c = (await kept.add_bundle(pieces(named("c")), owner="alice"))[0].id
    assert world.there("bundles") == sorted([of_bob, a, c])
    with pytest.raises(NotFoundError):
        kept.get_bundle(b)
    assert (await kept.add_bundle(pieces(named("c")), owner="bob"))[0].owners == ("alice", "bob")
    # It counts for both, also for the next daemon, and makes way for neither alone.
    for owner in ("alice", "bob"):
        (scope,) = owners.scopes(owner)
        assert world.bundles(100 * SIZE, owners).size_of(scope) == 2 * SIZE
    world.needed, world.now = {a, of_bob}, world.now + HOUR + 1
    for owner in ("alice", "bob"):
        with pytest.raises(LimitReached):
            await kept.add_bundle(pieces(named("d")), owner=owner)
    with pytest.raises(LimitReached):
        await kept.add_bundle(pieces(named("z")), owner="alice")


async def test_what_nobody_may_ever_have_is_not_even_received(world: World) -> None:
    kept = world.bundles(100 * SIZE, limits(LimitSettings(UserLimits(bundle_bytes=SIZE - 1))))

    async def nothing() -> AsyncIterator[bytes]:
        raise AssertionError("it is read")
        yield b""

    with pytest.raises(NeverAllowed, match=r"bundle_bytes of alice is 10\.2 KB"):
        await kept.add_bundle(nothing(), SIZE, "alice")
    with pytest.raises(NeverAllowed):
        await kept.add_bundle(pieces(named("a")), owner="alice")
    assert world.there("bundles") == []


async def test_a_group_shares_its_room_for_bundles(world: World) -> None:
    kept = world.bundles(100 * SIZE, limits(LimitSettings(groups={"physics": UserLimits(bundle_bytes=2 * SIZE)})))
    for name, owner in (("a", "bob"), ("b", "carl"), ("c", "alice"), ("d", "alice"), ("e", "alice")):
        await kept.add_bundle(pieces(named(name)), owner=owner)
    with pytest.raises(LimitReached, match=r"bundle_bytes of the group physics is 20\.5 KB"):
        await kept.add_bundle(pieces(named("f")), owner="bob")


@pytest.mark.evidence("M4")
async def test_a_user_s_results_make_way_for_his_own_only_and_else_no_more_come(world: World) -> None:
    owners = limits(LimitSettings(UserLimits(result_bytes=2 * SIZE)))
    kept = world.results(100 * SIZE, owners)
    for job in (1, 2, 4):
        await kept.store_result("north", f"{job}.2.0", pieces(named("a")))
        world.end(job)
        world.now += 1
    with pytest.raises(FullError) as refused:
        await kept.store_result("north", "3.2.0", pieces(named("a")))
    assert (
        refused.value.message
        == "the limit result_bytes of alice is 20.5 KB: 20.5 KB are in use and 10.2 KB more asked for"
    )
    assert refused.value.hint == "write to grid@example.org"
    world.now += DAY
    await kept.store_result("north", "3.2.0", pieces(named("a")))
    assert world.there("results") == ["2/2.0.tar", "3/2.0.tar", "4/2.0.tar"]
    (scope,) = owners.scopes("alice")
    assert await kept.size_of(scope) == 2 * SIZE
