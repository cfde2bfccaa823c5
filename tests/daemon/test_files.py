"""The replica catalogue, bundles and results, with simulated files on clusters."""

import asyncio
import io
import resource
import signal
import tarfile
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from koalapy.daemon.files.bundles import RETENTION, Bundles
from koalapy.daemon.files.files import Files
from koalapy.daemon.files.results import Results
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.daemon.jobs.quota import StorageLimits
from koalapy.model.errors import (
    ConflictError,
    NotFoundError,
    SiteFault,
    SiteRejected,
    StoreUnavailable,
    TooLargeError,
    UsageError,
)
from koalapy.model.job import Attempt, Component, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.replica import Catalogue, Replica, ReplicaState
from koalapy.model.request import Bundle, FlexibleRequest, InputFile
from koalapy.scheduler.events import ReplicasChanged
from koalapy.store.records import Batch
from koalapy.store.service_tables import FileStore
from tests import signals
from tests.daemon.archives import BAD_ARCHIVES, GOOD, archive_of, make_archive, unpack_archive, yield_pieces
from tests.daemon.sites import Sites, sha256_hex
from tests.daemon.test_hub import Daemon, running_daemon
from tests.identities import DIRECTOR


@dataclass
class World:
    daemon: Daemon
    sites: Sites
    store: FileStore
    bundles: Bundles
    files: Files
    changes: list[ReplicasChanged]
    """The changes that the scheduler received."""
    needed: set[str]
    """Bundles that unfinished jobs need."""

    def state_of(self, name: str, cluster: str) -> ReplicaState:
        """Return the state of a replica. Assert that catalogue and store agree."""
        replica = self.daemon.engine.catalogue.get(name, cluster)
        assert replica in self.store.replicas()
        assert replica is not None
        return replica.state


def make_bundles(
    store: FileStore,
    folder: Path,
    limit: int = 10**6,
    needed: Collection[str] = (),
    clock: Callable[[], float] = lambda: 1000.0,
) -> Bundles:
    return Bundles(store, folder, StorageLimits(limit, 10**9), clock, lambda: needed)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        sites = Sites()
        store = FileStore(daemon.store.database)
        needed: set[str] = set()
        bundles = make_bundles(store, tmp_path / "bundles", 100_000, needed)
        changes: list[ReplicasChanged] = []
        apply = daemon.scheduler.apply

        def listening(event: object, now: float) -> None:
            if isinstance(event, ReplicasChanged):
                changes.append(event)
            apply(event, now)  # type: ignore[arg-type]

        daemon.scheduler.apply = listening  # type: ignore[method-assign, assignment]
        yield World(daemon, sites, store, bundles, Files(daemon.engine, store, sites, bundles), changes, needed)


async def wait_until(look: Callable[[], bool]) -> None:
    await signals.until(lambda: look())


# The catalogue


async def test_add_replica_stores_report_of_agent(world: World) -> None:
    world.sites.content["north", "/data/mesh"] = b"mesh"
    replica = await world.files.add_replica("climate/mesh", "north", "/data/mesh")
    assert (replica.size, replica.checksum, replica.parts) == (4, sha256_hex(b"mesh"), None)
    assert world.files.list_replicas() == world.store.replicas() == [replica]
    assert world.changes == [ReplicasChanged("climate/mesh", ("north",))]
    assert Catalogue(world.store.replicas()).good_sites("climate/mesh") == ("north",)


async def test_add_replica_with_other_content_is_rejected(world: World) -> None:
    world.sites.content |= {("north", "/m"): b"mesh", ("south", "/m"): b"mash", ("south", "/n"): b"mesh"}
    await world.files.add_replica("m", "north", "/m")
    with pytest.raises(ConflictError, match="south:/m is another file than the m on north") as refused:
        await world.files.add_replica("m", "south", "/m")
    assert "koala replicas remove m" in refused.value.hint
    assert [replica.cluster for replica in world.files.list_replicas("m")] == ["north"]
    await world.files.add_replica("m", "south", "/n")
    assert world.changes[-1] == ReplicasChanged("m", ("north", "south"))


async def test_add_replica_concurrently_accepts_one_content(world: World) -> None:
    world.sites.content |= {("north", "/m"): b"mesh", ("south", "/m"): b"mash"}
    ended = await asyncio.gather(
        world.files.add_replica("m", "north", "/m"), world.files.add_replica("m", "south", "/m"), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in ended) == ["ConflictError", "Replica"]
    assert len(world.files.list_replicas("m")) == 1


async def test_add_replica_may_replace_only_replica(world: World) -> None:
    world.sites.content["north", "/m"] = b"mesh"
    await world.files.add_replica("m", "north", "/m")
    world.sites.content["north", "/m"] = b"finer mesh"
    assert (await world.files.add_replica("m", "north", "/m")).size == 10
    assert len(world.files.list_replicas("m")) == 1


async def test_verify_replicas_reports_each_state(world: World) -> None:
    content = world.sites.content
    content |= {("north", f"/{name}"): b"mesh" for name in "abcd"} | {("south", "/a"): b"mesh"}
    for name in "abcd":
        await world.files.add_replica(name, "north", f"/{name}")
    await world.files.add_replica("a", "south", "/a")
    content["north", "/b"] = b"mash"
    del content["north", "/c"]
    content["north", "/d"] = SiteRejected("/d cannot be read: Permission denied", fault=SiteFault.UNREADABLE)
    world.sites.away = {"south"}
    verified = await world.files.verify_replicas()
    assert [(v.replica.name, v.replica.cluster, v.replica.state.value, v.problem) for v in verified] == [
        ("a", "north", "good", ""),
        ("a", "south", "good", "south is out of reach"),
        ("b", "north", "changed", ""),
        ("c", "north", "missing", ""),
        ("d", "north", "unreadable", ""),
    ]
    assert "SHA-256 begins with" in verified[2].replica.reason
    assert (verified[3].replica.reason, verified[4].replica.reason) == (
        "/c is not there",
        "/d cannot be read: Permission denied",
    )
    assert [world.state_of(name, "north").value for name in "abcd"] == ["good", "changed", "missing", "unreadable"]
    assert {t.file: t.sites for t in world.changes} == {"a": ("north", "south"), "b": (), "c": (), "d": ()}
    content["north", "/b"] = b"mesh"
    (again,) = await world.files.verify_replicas("b", "north")
    assert (again.replica.state, again.replica.reason) == (ReplicaState.GOOD, "")
    assert world.changes[-1] == ReplicasChanged("b", ("north",))


async def test_verify_replicas_during_add_keeps_new_replica(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    content = world.sites.content
    content["north", "/m"] = b"mesh"
    await world.files.add_replica("m", "north", "/m")
    content["north", "/m"] = b"mash"
    real = world.files._read_state

    async def read_state(replica: Replica) -> Replica:
        state = await real(replica)
        await world.files.add_replica("m", "north", "/m")
        return state

    monkeypatch.setattr(world.files, "_read_state", read_state)
    (verified,) = await world.files.verify_replicas("m")
    assert (verified.replica.state, verified.replica.checksum) == (ReplicaState.GOOD, sha256_hex(b"mash"))
    assert world.state_of("m", "north") is ReplicaState.GOOD


async def test_verify_replicas_with_old_content_is_not_good_again(world: World) -> None:
    content = world.sites.content
    content |= {("north", "/m"): b"mesh", ("south", "/m"): b"new mesh"}
    await world.files.add_replica("m", "north", "/m")
    del content["north", "/m"]
    await world.files.verify_replicas("m")
    await world.files.add_replica("m", "south", "/m")
    content["north", "/m"] = b"mesh"
    north, south = await world.files.verify_replicas("m")
    assert (north.replica.state, south.replica.state) == (ReplicaState.CHANGED, ReplicaState.GOOD)
    assert north.replica.reason.endswith("as on south")
    assert world.changes[-1].sites == ("south",)


async def test_remove_replicas_forgets_one_or_all(world: World) -> None:
    world.sites.content |= {("north", "/m"): b"", ("south", "/m"): b""}
    for cluster in ("north", "south"):
        await world.files.add_replica("m", cluster, "/m")
    assert [r.cluster for r in await world.files.remove_replicas("m", "north")] == ["north"]
    assert world.changes[-1] == ReplicasChanged("m", ("south",))
    await world.files.remove_replicas("m")
    assert world.changes[-1] == ReplicasChanged("m", ())
    assert world.store.replicas() == []


async def test_mark_spoiled_excludes_replica_with_reason(world: World) -> None:
    world.sites.content |= {("north", "/m"): b"mesh", ("south", "/m"): b"mesh"}
    for cluster in ("north", "south"):
        await world.files.add_replica("m", cluster, "/m")
    del world.sites.content["north", "/m"]
    assert world.files.mark_spoiled("m", "north", "rsync said no") == (ReplicasChanged("m", ("south",)),)
    assert world.files.mark_spoiled("m", "north", "again") == ()
    assert world.files.mark_spoiled("x", "north", "unknown") == ()
    await wait_until(lambda: world.daemon.engine.catalogue.get("m", "north").state is ReplicaState.MISSING)  # type: ignore[union-attr]
    assert world.state_of("m", "north") is ReplicaState.MISSING


async def test_mark_spoiled_replica_does_not_recover_by_itself(world: World) -> None:
    world.sites.content["north", "/m"] = b"mesh"
    await world.files.add_replica("m", "north", "/m")
    question_count = len(world.sites.questions)
    world.files.mark_spoiled("m", "north", "the checksum is another")
    await wait_until(lambda: len(world.sites.questions) > question_count)
    await wait_until(lambda: not world.files._background.running)
    assert world.state_of("m", "north") is ReplicaState.UNREADABLE
    assert world.files.list_replicas("m")[0].reason == "the checksum is another"
    await world.files.verify_replicas("m")
    assert world.state_of("m", "north") is ReplicaState.GOOD


async def test_resolve_spec_fills_in_inputs(world: World) -> None:
    world.sites.content["north", "/m"] = b"mesh"
    await world.files.add_replica("m", "north", "/m")
    bundle, _ = await world.bundles.add_bundle(yield_pieces(archive_of(GOOD)))
    spec = JobSpec(FlexibleRequest(1), ("wave",), inputs=(InputFile("m"),), bundle=Bundle(bundle.id, 0, 0))
    resolved = await world.files.resolve_spec(spec, DIRECTOR)
    assert resolved.inputs == (InputFile("m", 4, ("north",)),)
    assert resolved.bundle == Bundle(bundle.id, bundle.size, 3)
    with pytest.raises(UsageError, match="the bundle contains data, which is also the name of an input"):
        await world.files.resolve_spec(replace(spec, inputs=(InputFile("m", target="data"),)), DIRECTOR)
    with pytest.raises(UsageError, match="there is no bundle") as refused:
        await world.files.resolve_spec(replace(spec, bundle=Bundle("f" * 64, 0, 0)), DIRECTOR)
    assert (refused.value.field, "--stage" in refused.value.hint) == ("bundle", True)


# Bundles


async def test_add_bundle_accepts_archives_of_tar(world: World) -> None:
    names = {"./": None, "./a/": None, "./a/é -x": b"1", "./a/..b": b"2", "l" * 200 + "/" + "m" * 200: b"3"}
    bundle, _ = await world.bundles.add_bundle(yield_pieces(archive_of(names)))
    assert bundle.files == 3


async def test_bundle_needed_or_recently_used_is_kept(world: World, tmp_path: Path) -> None:
    now = 1000.0
    needed: set[str] = set()
    bundles = make_bundles(world.store, tmp_path / "bundles", needed=needed, clock=lambda: now)
    kept = [(await bundles.add_bundle(yield_pieces(archive_of({name: b""}))))[0].id for name in "abc"]
    now += RETENTION
    bundles.touch_bundle(kept[1])
    now += 1
    needed.add(kept[0])
    assert await bundles.remove_unused() == [kept[2]]
    assert sorted(bundle.id for bundle in world.store.bundles()) == sorted(kept[:2])
    assert {bundle.used_at for bundle in world.store.bundles()} == {now, now - 1}
    with pytest.raises(NotFoundError):
        bundles.get_bundle(kept[2])
    now += RETENTION
    for leftover in (".incoming-x", "f" * 64):
        (tmp_path / "bundles" / leftover).touch()
    again = make_bundles(world.store, tmp_path / "bundles", clock=lambda: now)
    assert await again.remove_unused() == [kept[1]]
    assert [path.name for path in (tmp_path / "bundles").iterdir()] == [kept[0]]


async def test_bundle_top_names_after_restart_are_known(world: World, tmp_path: Path) -> None:
    bundle, _ = await world.bundles.add_bundle(yield_pieces(archive_of(GOOD)))
    again = make_bundles(world.store, tmp_path / "bundles")
    assert await world.bundles.top_names(bundle.id) == await again.top_names(bundle.id) == {"run.sh", "data"}


def said_of(kind: bytes, content: bytes) -> bytes:
    """Return an archive member of type ``kind``, such as an extended header of any size."""
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, len(content)
    return header.tobuf(tarfile.USTAR_FORMAT) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def make_record(key: str, value: str) -> bytes:
    return b"%07d %s=%s\n" % (len(key) + len(value) + 10, key.encode(), value.encode())


ONE = tarfile.TarInfo("one").tobuf()
END = bytes(1024)


@pytest.mark.parametrize(
    "data",
    [
        said_of(tarfile.XHDTYPE, make_record("path", "a" * 300_000)) + ONE,
        said_of(tarfile.GNUTYPE_LONGNAME, b"a" * 300_000) + ONE,
        said_of(tarfile.XHDTYPE, make_record("path", "/".join("a" * 20_000))) + ONE,
        said_of(tarfile.XGLTYPE, make_record("k", "v")) * 3000 + ONE,
        b"".join(
            said_of(tarfile.XGLTYPE, make_record(f"k{i}", "v")) + tarfile.TarInfo(f"f{i}").tobuf() for i in range(200)
        ),
    ],
    ids=["pax", "gnu", "deep", "chain", "common"],
)
async def test_check_archive_memory_use_is_bounded(world: World, data: bytes) -> None:
    bundles = make_bundles(world.store, world.bundles.path_of("x").parent, 10**8)
    with pytest.raises(UsageError) as caught:
        await bundles.add_bundle(yield_pieces(data + END, 100_000))
    assert caught.value.field == "body"


async def test_check_archive_with_too_many_files_is_rejected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koalapy.daemon.files.archives.MAX_NAMES", 5)
    await world.bundles.add_bundle(yield_pieces(archive_of({f"a/{i}": b"" for i in range(4)})))
    with pytest.raises(TooLargeError, match="more than 5 files"):
        await world.bundles.add_bundle(yield_pieces(archive_of({f"a/{i}": b"" for i in range(5)})))


async def test_add_bundle_on_full_disk_raises_store_unavailable(world: World, tmp_path: Path) -> None:
    bundles = make_bundles(world.store, tmp_path / "full", 10**8)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))
    try:
        with pytest.raises(StoreUnavailable, match="cannot be stored: File too large"):
            await bundles.add_bundle(yield_pieces(archive_of({"a": b"x" * 4_000_000}), 300_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "full").iterdir()) == []


async def test_bundle_touched_during_removal_stays(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    bundles = make_bundles(world.store, tmp_path / "bundles", clock=lambda: now)
    kept = [(await bundles.add_bundle(yield_pieces(archive_of({name: b""}))))[0].id for name in "ab"]
    now += RETENTION + 1
    real = world.store.remove_bundle

    def removing(bundle: str) -> None:
        bundles.touch_bundle(kept[1])
        real(bundle)

    monkeypatch.setattr(world.store, "remove_bundle", removing)
    assert await bundles.remove_unused() == [kept[0]]
    assert [bundle.id for bundle in world.store.bundles()] == [kept[1]]


async def test_remove_expired_with_lost_needed_file_removes_others(world: World) -> None:
    bundle, _ = await world.bundles.add_bundle(yield_pieces(archive_of(GOOD)))
    world.bundles.path_of(bundle.id).unlink()
    world.needed |= {bundle.id, "f" * 64}
    assert await world.bundles.remove_unused() == []


async def test_bundle_that_was_not_stored_is_not_listed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(bundles: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as broken:
        broken.setattr(world.store, "save_bundles", refuse)
        with pytest.raises(StoreUnavailable):
            await world.bundles.add_bundle(yield_pieces(archive_of(GOOD)))
    bundle, created = await world.bundles.add_bundle(yield_pieces(archive_of(GOOD)))
    assert created
    assert [found.id for found in world.store.bundles()] == [bundle.id]


# Results


COLLECTING = JobSpec(FlexibleRequest(2), ("true",), collect=("*",))


class Tried:
    """A job with two attempts, the last on north and south."""

    def __init__(self, world: World, spec: JobSpec = COLLECTING, state: JobState = JobState.SUCCEEDED) -> None:
        store = world.daemon.store
        self.attempts = [
            Attempt(1, (Component(0, "south", 2),), 1.0),
            Attempt(
                2,
                (
                    Component(0, "north", 1),
                    Component(1, "west", 1, superseded=True),
                    Component(2, "south", 1, replaces=1),
                ),
                2.0,
            ),
        ]
        self.job = Job(7, spec, 1.0, state, generation=2, attempt=self.attempts[-1])
        store.write(Batch(1.0, store.epoch, {7: self.job}))

    async def __call__(self, job: int) -> tuple[JobRecord, list[Attempt]]:
        if job != 7:
            raise NotFoundError(f"there is no job {job}", field="job")
        return JobRecord(self.job, ""), self.attempts


def results_of(
    world: World, path: Path, tried: Tried, quota: int = 10**9, clock: Callable[[], float] = lambda: 5.0
) -> Results:
    return Results(world.store, path / "results", StorageLimits(100_000, quota), clock=clock, attempts=tried)


async def test_results_of_components_form_one_archive(world: World, tmp_path: Path) -> None:
    results = results_of(world, tmp_path, Tried(world))
    await results.store_result("south", "7.1.0", yield_pieces(archive_of({"of-the-first": b"x"})))
    await results.store_result("south", "7.2.1", yield_pieces(archive_of({"old": b"x"})))
    await results.store_result("north", "7.2.0", yield_pieces(archive_of(GOOD | {"./d/": None})))
    stored = await results.store_result("south", "7.2.1", yield_pieces(archive_of({"é" * 90: b"y" * 513})))
    assert (stored.rank, stored.cluster, stored.files) == (1, "south", 1)
    contents = unpack_archive(b"".join((await results.open_archive(7))[1]))
    expected = {f"0-north/{name}": content for name, content in GOOD.items()}
    assert contents == expected | {
        "0-north": None,
        "0-north/d": None,
        "1-south": None,
        "1-south/" + "é" * 90: b"y" * 513,
    }


async def test_rest_of_results_is_served_until_they_change(world: World, tmp_path: Path) -> None:
    results = results_of(world, tmp_path, Tried(world))
    await results.store_result("north", "7.2.0", yield_pieces(archive_of(GOOD)))
    version, pieces = await results.open_archive(7)
    whole = b"".join(pieces)
    for offset in (0, 1, 511, 512, 513, len(whole) - 1, len(whole), len(whole) + 1):
        same_version, rest = await results.open_archive(7, offset, version)
        assert (b"".join(rest), same_version) == (whole[offset:], version)
    await results.store_result("south", "7.2.1", yield_pieces(archive_of({"a": b"1"})))
    with pytest.raises(ConflictError, match="the results of job 7 have changed"):
        await results.open_archive(7, 512, version)


@pytest.mark.parametrize(("mtime", "expected"), [(9.2e18, 2**33), (-5.0, 0), (1e9, 10**9)])
async def test_results_with_impossible_times_are_corrected(
    world: World, tmp_path: Path, mtime: float, expected: int
) -> None:
    member = tarfile.TarInfo("a")
    member.mtime = mtime
    results = results_of(world, tmp_path, Tried(world))
    await results.store_result("north", "7.2.0", yield_pieces(make_archive((member, b"1"))))
    with tarfile.open(fileobj=io.BytesIO(b"".join((await results.open_archive(7))[1]))) as served:
        assert served.getmember("0-north/a").mtime == expected


@pytest.mark.evidence("G3")
@pytest.mark.parametrize("token", ["7.2.1", "7.2.2", "7.3.0", "8.1.0", "7.2", "x", "7.2.-1", "../../7.2.0"])
async def test_store_result_from_other_cluster_is_rejected(world: World, tmp_path: Path, token: str) -> None:
    results = results_of(world, tmp_path, Tried(world))
    with pytest.raises(NotFoundError):
        await results.store_result("north", token, yield_pieces(archive_of(GOOD)))


async def test_store_result_of_job_without_collect_is_rejected(world: World, tmp_path: Path) -> None:
    results = results_of(world, tmp_path, Tried(world, replace(COLLECTING, collect=())))
    with pytest.raises(ConflictError):
        await results.store_result("north", "7.2.0", yield_pieces(archive_of(GOOD)))


async def test_store_result_with_bad_archive_keeps_earlier_result(world: World, tmp_path: Path) -> None:
    results = results_of(world, tmp_path, Tried(world))
    await results.store_result("north", "7.2.0", yield_pieces(archive_of({"a": b"1"})))
    with pytest.raises(UsageError):
        await results.store_result("north", "7.2.0", yield_pieces(BAD_ARCHIVES["symbolic link"]))
    with pytest.raises(TooLargeError):
        await results.store_result("north", "7.2.0", yield_pieces(archive_of({"a": b"x" * 200_000})))
    assert unpack_archive(b"".join((await results.open_archive(7))[1]))["0-north/a"] == b"1"


@pytest.mark.parametrize(
    ("spec", "state", "reason"),
    [
        (replace(COLLECTING, collect=()), JobState.SUCCEEDED, "nothing is collected of job 7"),
        (COLLECTING, JobState.RUNNING, "job 7 is running: its files come when it ends"),
        (COLLECTING, JobState.FAILED, "job 7 failed and brought no files"),
        (COLLECTING, JobState.QUEUED, "job 7 is queued: its files come when it ends"),
        (COLLECTING, JobState.HELD, "job 7 is held: its files come when it ends"),
    ],
)
async def test_open_archive_without_files_explains_reason(
    world: World, tmp_path: Path, spec: JobSpec, state: JobState, reason: str
) -> None:
    results = results_of(world, tmp_path, Tried(world, spec, state))
    if state.is_waiting:  # the files of a failed attempt are not the results
        await results.store_result("north", "7.2.0", yield_pieces(archive_of({"a": b"1"})))
    with pytest.raises(NotFoundError, match=reason) as refused:
        await results.open_archive(7)
    assert refused.value.hint
