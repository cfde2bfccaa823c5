"""Quotas of bundles and results: old files are removed if possible, otherwise new ones are rejected."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.daemon.files import bundles, results
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.results import Results
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.daemon.jobs.quota import StorageLimits
from koalapy.model.errors import FullError, LimitReached, NeverAllowed, NotFoundError, StoreUnavailable, TooLargeError
from koalapy.model.job import Attempt, Component, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.request import FlexibleRequest
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.records import Batch
from koalapy.store.service_tables import FileStore
from koalapy.store.sql import JobStore
from tests.daemon.archives import archive_of, yield_pieces
from tests.databases import migrate
from tests.signals import MAX_WAIT_S, until

SIZE = 10240
"""Bytes of an archive of one small file."""
HOUR, DAY = bundles.MIN_RETENTION, results.MIN_RETENTION


def bundle_archive(name: str) -> bytes:
    data = archive_of({name: b"x"})
    assert len(data) == SIZE
    return data


class World:
    """A database with five jobs of one component, and a clock that the test sets."""

    def __init__(self, path: Path) -> None:
        database = make_engine(f"sqlite:///{path / 'koala.db'}")
        migrate(database)
        self.path = path
        self.jobs = JobStore(Database(database))
        self.store = FileStore(self.jobs.database)
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

    def end_job(self, job: int) -> None:
        """End a job."""
        self._jobs[job] = replace(self._jobs[job], state=JobState.SUCCEEDED, ended_at=self.now)
        self.jobs.write(Batch(1.0, self.jobs.epoch, {job: self._jobs[job]}))

    async def _list_attempts(self, job: int) -> tuple[JobRecord, list[Attempt]]:
        attempt = self._jobs[job].attempt
        assert attempt is not None
        return JobRecord(self._jobs[job], ""), [replace(attempt, generation=1), attempt]

    def make_bundles(self, quota: int, owners: Limits | None = None) -> Bundles:
        return Bundles(
            self.store,
            self.path / "bundles",
            StorageLimits(10**6, quota),
            clock=lambda: self.now,
            needed=lambda: self.needed,
            owners=owners,
        )

    def make_results(self, quota: int, owners: Limits | None = None) -> Results:
        return Results(
            self.store,
            self.path / "results",
            StorageLimits(10**6, quota),
            clock=lambda: self.now,
            attempts=self._list_attempts,
            owners=owners,
        )

    def stored_names(self, what: str) -> list[str]:
        """Return the stored files of a folder."""
        folder = self.path / what
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# Bundles


async def test_bundles_over_quota_remove_least_recently_used(world: World) -> None:
    store = world.make_bundles(3 * SIZE)
    a, b, c = [(await store.add_bundle(yield_pieces(bundle_archive(name))))[0].id for name in "abc"]
    world.now += HOUR + 1
    store.touch_bundle(a)
    world.needed = {b}
    d = (await store.add_bundle(yield_pieces(bundle_archive("d"))))[0].id
    assert world.stored_names("bundles") == sorted([a, b, d])
    assert sorted(bundle.id for bundle in world.store.bundles()) == sorted([a, b, d])
    with pytest.raises(NotFoundError):
        store.get_bundle(c)
    with pytest.raises(FullError, match=r"bundles_quota is 30\.7 KB, and all it has is needed") as refused:
        await store.add_bundle(yield_pieces(bundle_archive("e")))
    assert (refused.value.field, "bundles_quota" in refused.value.hint) == ("body", True)
    assert world.stored_names("bundles") == sorted([a, b, d])
    world.needed = set()
    e, created = await store.add_bundle(yield_pieces(bundle_archive("e")))
    assert created
    assert world.stored_names("bundles") == sorted([a, d, e.id])


@pytest.mark.evidence("U9")
async def test_bundle_larger_than_quota_removes_nothing(world: World) -> None:
    store = world.make_bundles(2 * SIZE)
    bundle, _ = await store.add_bundle(yield_pieces(bundle_archive("a")))
    world.now += HOUR + 1
    with pytest.raises(TooLargeError, match="larger than 1 MB"):
        await store.add_bundle(yield_pieces(bytes(10**6 + 1)), 10**6 + 1)
    assert world.stored_names("bundles") == [bundle.id]


async def test_bundles_uploaded_concurrently_share_quota(world: World) -> None:
    store = world.make_bundles(SIZE + SIZE // 2)
    both_began, began = asyncio.Event(), 0

    async def slowly(data: bytes) -> AsyncIterator[bytes]:
        nonlocal began
        yield data
        began += 1
        if began == 2:
            both_began.set()
        await both_began.wait()

    ended = await asyncio.gather(
        store.add_bundle(slowly(bundle_archive("a"))),
        store.add_bundle(slowly(bundle_archive("b"))),
        return_exceptions=True,
    )
    assert sorted(type(outcome).__name__ for outcome in ended) == ["FullError", "tuple"]
    assert len(world.stored_names("bundles")) == 1
    world.now += HOUR + 1
    assert (await store.add_bundle(yield_pieces(bundle_archive("c"))))[1], "what was refused takes no room"


async def test_bundle_uploaded_twice_concurrently_counts_once(world: World) -> None:
    store = world.make_bundles(2 * SIZE)
    sent = await asyncio.gather(*(store.add_bundle(yield_pieces(bundle_archive("a"))) for _ in range(2)))
    assert sorted(created for _, created in sent) == [False, True]
    assert (await store.add_bundle(yield_pieces(bundle_archive("b"))))[1]


async def test_bundle_with_aborted_upload_releases_quota(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koalapy.daemon.files.archives.PIECE_TIMEOUT", 0.01)
    monkeypatch.setattr("koalapy.daemon.files.archives.PIECE_SIZE", 1000)
    store = world.make_bundles(SIZE)

    async def breaks() -> AsyncIterator[bytes]:
        yield bundle_archive("a")[:-1000]
        raise ConnectionError

    async def stalls() -> AsyncIterator[bytes]:
        yield bundle_archive("a")[:-1000]
        await asyncio.Event().wait()

    for content, error in ((breaks(), ConnectionError), (stalls(), TimeoutError)):
        with pytest.raises(error):
            await store.add_bundle(content)
        assert world.stored_names("bundles") == []
    assert (await store.add_bundle(yield_pieces(bundle_archive("b"))))[1]


@pytest.mark.parametrize("restarted", [False, True])
async def test_bundle_with_lost_file_counts_once(world: World, restarted: bool) -> None:
    store = world.make_bundles(2 * SIZE)
    bundle, _ = await store.add_bundle(yield_pieces(bundle_archive("a")))
    store.path_of(bundle.id).unlink()
    with pytest.raises(NotFoundError):
        store.get_bundle(bundle.id)
    if restarted:
        store = world.make_bundles(2 * SIZE)
    assert (await store.add_bundle(yield_pieces(bundle_archive("a"))))[1]
    assert (await store.add_bundle(yield_pieces(bundle_archive("b"))))[1]
    with pytest.raises(FullError):
        await store.add_bundle(yield_pieces(bundle_archive("c")))


async def test_bundles_with_lowered_quota_are_removed_by_housekeeping(world: World) -> None:
    ids = [(await world.make_bundles(10 * SIZE).add_bundle(yield_pieces(bundle_archive(name))))[0].id for name in "abc"]
    less = world.make_bundles(SIZE)
    await less.remove_unused()
    assert len(world.stored_names("bundles")) == 3, "they were wanted a moment ago"
    world.now += HOUR + 1
    world.needed = {ids[1]}
    await less.remove_unused()
    assert world.stored_names("bundles") == [ids[1]]


async def test_bundle_with_unremovable_file_stays_known(world: World) -> None:
    """A bundle that is forgotten before its file is removed would not be retried until the next daemon."""
    store = world.make_bundles(2 * SIZE)
    a, _ = [(await store.add_bundle(yield_pieces(bundle_archive(name))))[0].id for name in "ab"]
    world.now += HOUR + 1
    store.path_of(a).unlink()
    (store.path_of(a) / "below").mkdir(parents=True)
    c = (await store.add_bundle(yield_pieces(bundle_archive("c"))))[0].id
    assert sorted(bundle.id for bundle in world.store.bundles()) == sorted([a, c]), "that made way which could"
    world.now += DAY + 1
    with pytest.raises(OSError, match=a):
        await store.remove_unused()
    assert ([bundle.id for bundle in world.store.bundles()], store.storage_use.used) == ([a], SIZE)
    (store.path_of(a) / "below").rmdir()
    store.path_of(a).rmdir()
    assert await store.remove_unused() == [a]
    assert (world.store.bundles(), store.storage_use.used) == ([], 0)


# Results


async def test_results_over_quota_remove_jobs_that_ended_first(world: World) -> None:
    store = world.make_results(2 * SIZE)
    for job in (2, 1):
        await store.store_result("north", f"{job}.2.0", yield_pieces(bundle_archive("a")))
        world.end_job(job)
        world.now += 10.0
    world.now += DAY - 20.0
    with pytest.raises(FullError, match=r"results_quota is 20\.5 KB, and all it has is of jobs") as full:
        await store.store_result("north", "3.2.0", yield_pieces(bundle_archive("a")))
    assert "results_quota" in full.value.hint
    world.now += 1.0
    await store.store_result("north", "3.2.0", yield_pieces(bundle_archive("a")))
    assert world.stored_names("results") == ["1/2.0.tar", "3/2.0.tar"]
    for now_and_after_a_restart in (store, world.make_results(2 * SIZE)):
        with pytest.raises(NotFoundError, match="the files of job 2 are not kept any more"):
            await now_and_after_a_restart.open_archive(2)
        assert list((await now_and_after_a_restart.open_archive(1))[1])


async def test_results_with_unremovable_files_stay_counted(world: World) -> None:
    """Results that are forgotten before their files are removed would be neither counted nor retried."""
    store = world.make_results(2 * SIZE)
    for job in (1, 2):
        await store.store_result("north", f"{job}.2.0", yield_pieces(bundle_archive("a")))
        world.end_job(job)
    world.now += DAY + 1.0
    folder = world.path / "results" / "1"
    folder.symlink_to(folder.rename(world.path / "aside"))
    with pytest.raises(OSError, match="rmtree on a symbolic link"):
        await store.remove_expired(world.now)
    assert os.listdir(world.path / "results") == ["1"], "that of the other is gone"
    for now_and_after_a_restart in (store, world.make_results(2 * SIZE)):
        assert now_and_after_a_restart.storage_use.used == SIZE
        with pytest.raises(FullError):
            await now_and_after_a_restart.store_result("north", "3.2.0", yield_pieces(bytes(2 * SIZE)))
    folder.unlink()
    (world.path / "aside").rename(folder)
    assert await store.remove_expired(world.now) == [1]
    assert (world.stored_names("results"), store.storage_use.used) == ([], 0)


@pytest.mark.parametrize("forget", ["clear_results", "forget_results"])
async def test_results_uploaded_while_others_are_removed_count_in_full(
    world: World, monkeypatch: pytest.MonkeyPatch, forget: str
) -> None:
    store, archive = world.make_results(3 * SIZE), bundle_archive("a")
    await store.store_result("north", "1.2.0", yield_pieces(archive))
    world.end_job(1)
    world.now += DAY + 1.0
    begun, counted, plain = threading.Event(), threading.Event(), getattr(world.store, forget)

    def forget_after_upload(jobs: Collection[int]) -> int:
        begun.set()
        assert counted.wait(MAX_WAIT_S)
        freed: int = plain(jobs)
        return freed

    monkeypatch.setattr(world.store, forget, forget_after_upload)
    monkeypatch.setattr("koalapy.daemon.files.archives.PIECE_SIZE", 1000)
    is_expiry = forget == "clear_results"
    removing = asyncio.ensure_future(store.remove_expired(world.now) if is_expiry else store.remove_results([1]))
    await until(begun.is_set)

    async def upload() -> AsyncIterator[bytes]:
        yield archive[:-1000]
        counted.set()
        await removing
        yield archive[-1000:]

    await store.store_result("north", "2.2.0", upload())
    assert store.storage_use.used == SIZE


async def test_results_removed_before_crash_are_forgotten_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = world.make_results(2 * SIZE)
    await store.store_result("north", "1.2.0", yield_pieces(bundle_archive("a")))
    world.end_job(1)
    world.now += DAY + 1.0

    def cut(jobs: object) -> int:
        raise StoreUnavailable("the database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "clear_results", cut)
        with pytest.raises(StoreUnavailable):
            await store.remove_expired(world.now)
    assert world.stored_names("results") == []
    again = world.make_results(2 * SIZE)
    with pytest.raises(NotFoundError, match="the files of job 1 are not kept any more"):
        await again.open_archive(1)
    assert await again.remove_expired(world.now) == [1]
    assert (again.storage_use.used, world.store.results_sizes()) == (0, {})


async def test_daemon_with_unremovable_leftover_starts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("bundles", "results"):
        (world.path / folder).mkdir(exist_ok=True)
        (world.path / folder / ".incoming-1").touch()

    def broken(self: Path, missing_ok: bool = False) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken)
        assert (world.make_bundles(SIZE).storage_use.used, world.make_results(SIZE).storage_use.used) == (0, 0)
    world.make_bundles(SIZE)
    world.make_results(SIZE)
    assert world.stored_names("bundles") == world.stored_names("results") == []


async def test_results_of_unfinished_jobs_are_never_removed(world: World) -> None:
    store = world.make_results(SIZE)
    await store.store_result("north", "1.2.0", yield_pieces(bundle_archive("a")))
    world.now += 10 * DAY
    with pytest.raises(FullError):
        await store.store_result("north", "2.2.0", yield_pieces(bundle_archive("a")))
    assert await store.remove_expired(1e12) == []
    assert world.stored_names("results") == ["1/2.0.tar"]


async def test_result_stored_again_counts_once(world: World) -> None:
    store = world.make_results(2 * SIZE)
    await store.store_result("north", "1.1.0", yield_pieces(bundle_archive("a")))
    for _ in range(3):
        await store.store_result("north", "1.2.0", yield_pieces(bundle_archive("a")))
    assert (world.stored_names("results"), sum(world.store.results_sizes().values())) == (["1/2.0.tar"], SIZE)
    await store.store_result("north", "2.2.0", yield_pieces(bundle_archive("a")))
    with pytest.raises(FullError):
        await world.make_results(2 * SIZE).store_result("north", "3.2.0", yield_pieces(bundle_archive("a")))


@pytest.mark.parametrize("restarted", [False, True])
async def test_result_after_crash_leaves_no_unknown_file(
    world: World, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    store = world.make_results(2 * SIZE)

    def crash(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", crash)
        with pytest.raises(StoreUnavailable, match="No space left on device"):
            await store.store_result("north", "1.2.0", yield_pieces(bundle_archive("a")))
    for folder in ("bundles", "results"):
        (world.path / folder).mkdir(exist_ok=True)
        (world.path / folder / ".incoming-0").write_bytes(bytes(5 * SIZE))
    if restarted:
        store = world.make_results(2 * SIZE)
        assert world.make_bundles(2 * SIZE)
        assert world.stored_names(".") == ["koala.db", "koala.db-shm", "koala.db-wal"]
    for job in (1, 2):
        await store.store_result("north", f"{job}.2.0", yield_pieces(bundle_archive("a")))
    with pytest.raises(FullError):
        await store.store_result("north", "3.2.0", yield_pieces(bundle_archive("a")))


# Limits of one user or group

FULL = "is 20.5 KB: 20.5 KB are in use and 10.2 KB more asked for"


def make_limits(settings: LimitSettings) -> Limits:
    return Limits(settings, lambda user: ("physics",) if user in ("bob", "carl") else (), "write to grid@example.org")


@pytest.mark.evidence("U10", "C13", "M4")
async def test_bundles_over_user_limit_remove_own_only(world: World) -> None:
    owners = make_limits(LimitSettings(UserLimits(bundle_bytes=2 * SIZE)))
    store = world.make_bundles(100 * SIZE, owners)
    of_bob = (await store.add_bundle(yield_pieces(bundle_archive("z")), owner="bob"))[0].id
    a, b = [(await store.add_bundle(yield_pieces(bundle_archive(name)), owner="alice"))[0].id for name in "ab"]
    with pytest.raises(LimitReached) as refused:
        await store.add_bundle(yield_pieces(bundle_archive("c")), owner="alice")
    assert refused.value.message == f"the limit bundle_bytes of alice {FULL}"
    assert (refused.value.field, refused.value.hint) == ("limits.bundle_bytes", "write to grid@example.org")
    world.now += HOUR + 1
    world.needed = {a}
    c = (await store.add_bundle(yield_pieces(bundle_archive("c")), owner="alice"))[0].id
    assert world.stored_names("bundles") == sorted([of_bob, a, c])
    with pytest.raises(NotFoundError):
        store.get_bundle(b)
    assert (await store.add_bundle(yield_pieces(bundle_archive("c")), owner="bob"))[0].owners == ("alice", "bob")
    # The bundle counts for both owners, also after a restart, and neither owner alone can displace it.
    for owner in ("alice", "bob"):
        (scope,) = owners.scopes(owner)
        assert await world.make_bundles(100 * SIZE, owners).size_of(scope) == 2 * SIZE
    world.needed, world.now = {a, of_bob}, world.now + HOUR + 1
    for owner in ("alice", "bob"):
        with pytest.raises(LimitReached):
            await store.add_bundle(yield_pieces(bundle_archive("d")), owner=owner)
    with pytest.raises(LimitReached):
        await store.add_bundle(yield_pieces(bundle_archive("z")), owner="alice")


async def test_bundle_larger_than_user_limit_is_rejected_early(world: World) -> None:
    store = world.make_bundles(100 * SIZE, make_limits(LimitSettings(UserLimits(bundle_bytes=SIZE - 1))))

    async def nothing() -> AsyncIterator[bytes]:
        raise AssertionError("it is read")
        yield b""

    with pytest.raises(NeverAllowed, match=r"bundle_bytes of alice is 10\.2 KB"):
        await store.add_bundle(nothing(), SIZE, "alice")
    with pytest.raises(NeverAllowed):
        await store.add_bundle(yield_pieces(bundle_archive("a")), owner="alice")
    assert world.stored_names("bundles") == []


async def test_bundles_of_group_share_limit(world: World) -> None:
    store = world.make_bundles(
        100 * SIZE, make_limits(LimitSettings(groups={"physics": UserLimits(bundle_bytes=2 * SIZE)}))
    )
    for name, owner in (("a", "bob"), ("b", "carl"), ("c", "alice"), ("d", "alice"), ("e", "alice")):
        await store.add_bundle(yield_pieces(bundle_archive(name)), owner=owner)
    with pytest.raises(LimitReached, match=r"bundle_bytes of the group physics is 20\.5 KB"):
        await store.add_bundle(yield_pieces(bundle_archive("f")), owner="bob")


@pytest.mark.evidence("M4")
async def test_results_over_user_limit_remove_own_only(world: World) -> None:
    owners = make_limits(LimitSettings(UserLimits(result_bytes=2 * SIZE)))
    store = world.make_results(100 * SIZE, owners)
    for job in (1, 2, 4):
        await store.store_result("north", f"{job}.2.0", yield_pieces(bundle_archive("a")))
        world.end_job(job)
        world.now += 1
    with pytest.raises(FullError) as refused:
        await store.store_result("north", "3.2.0", yield_pieces(bundle_archive("a")))
    assert refused.value.message == f"the limit result_bytes of alice {FULL}"
    assert refused.value.hint == "write to grid@example.org"
    world.now += DAY
    await store.store_result("north", "3.2.0", yield_pieces(bundle_archive("a")))
    assert world.stored_names("results") == ["2/2.0.tar", "3/2.0.tar", "4/2.0.tar"]
    (scope,) = owners.scopes("alice")
    assert await store.size_of(scope) == 2 * SIZE
