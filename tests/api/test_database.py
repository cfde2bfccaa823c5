"""A database that takes nothing: users are told so within seconds, and what was refused never happens."""

import asyncio
import resource
import sqlite3
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from koalapy.model.errors import StoreUnavailable
from koalapy.scheduling.rules import Rules
from koalapy.service import database as module
from koalapy.service import duties
from koalapy.service import engine as loop
from koalapy.service.engine import WorkItem
from koalapy.store.sql import SqlStore
from tests import signals
from tests.api.conftest import serving
from tests.service.sites import Sites
from tests.service.test_hub import running

JOBS = "/api/v1/jobs"
BODY = {"request": {"type": "flexible", "total_size": 6}, "command": ["true"], "owner": "ada"}
DEADLINE = 20.0

Stop = Callable[[], Any]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process writes, and does not end."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin exclusive")
    yield
    other.rollback()
    other.close()


@contextmanager
def full(path: Path) -> Iterator[None]:
    """No file can grow: its disk is full, or where none may be mounted, there is a limit on files."""
    if path.parent.is_mount():
        filler = path.parent / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
        yield
        filler.unlink()
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, where that can be had."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=False).returncode == 0
    )
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def impatient() -> Iterator[None]:
    """Users wait longer. Only while the database does not answer: a slow machine is none of its trouble."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COMMIT_TIMEOUT", 0.1)
        patch.setattr(loop, "SLOW_AFTER", 0.1)
        yield


@pytest_asyncio.fixture
async def stack(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncExitStack]:
    monkeypatch.setattr(loop, "RETRY_PAUSE", 0.05)
    async with AsyncExitStack() as stack:
        yield stack


async def ready(api: httpx2.AsyncClient) -> None:

    async def is_ready() -> bool:
        return (await api.get("/readyz")).status_code == 200

    await signals.poll(is_ready)


def check_refusal(answer: httpx2.Response, words: str) -> None:
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (503, 503)
    assert int(answer.headers["Retry-After"]) > 0
    assert words in problem["detail"]
    assert problem["hint"]


@pytest.mark.parametrize("trouble", [full, locked])
async def test_what_is_refused_never_happens_and_what_was_taken_on_does(
    stack: AsyncExitStack, small_disk: Path, trouble: Callable[[Path], Any]
) -> None:
    path = small_disk / "koala.db"
    api = await stack.enter_async_context(serving(path, [], Rules()))
    first = (await api.post(JOBS, json=BODY)).json()
    with trouble(path):
        with impatient():
            taken_on = await api.post(JOBS, json=BODY | {"name": "taken-on"})
        check_refusal(taken_on, "not known yet")
        refused = [
            await api.post(JOBS, json=BODY | {"name": "refused"}, headers={"Idempotency-Key": "k"}),
            await api.post(f"{JOBS}/{first['id']}/cancel"),
            await api.post(f"{JOBS}/{first['id']}/hold"),
            await api.post("/api/v1/clusters/north/drain"),
            await api.post("/api/v1/clusters/north/clear"),
        ]
        for answer in refused:
            check_refusal(answer, "nothing was changed")
        assert [job["id"] for job in (await api.get(JOBS)).json()["jobs"]] == [first["id"]]
        assert (await api.get(f"{JOBS}/{first['id']}")).json()["state"] == "queued"
        health = (await api.get("/healthz")).json()
        assert (health["status"], health["ready"], len(health["problems"])) == ("degraded", False, 1)
        check_refusal(await api.get("/readyz"), health["problems"][0])
    await ready(api)
    assert (await api.get("/healthz")).json()["problems"] == []
    again = await api.post(JOBS, json=BODY | {"name": "again"}, headers={"Idempotency-Key": "k"})
    assert again.status_code == 201
    jobs = (await api.get(JOBS)).json()["jobs"]
    assert [job["name"] for job in jobs] == ["again", "taken-on", ""]
    assert {job["state"] for job in jobs} == {"queued"}


async def test_what_waited_for_its_turn_when_the_trouble_began_is_turned_away(
    stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "koala.db"
    api = await stack.enter_async_context(serving(path, [], Rules()))
    write, tried = SqlStore.write, threading.Event()
    monkeypatch.setattr(SqlStore, "write", lambda *args: (tried.set(), write(*args)))
    with locked(path), impatient():
        monkeypatch.setattr(loop, "SLOW_AFTER", 1.0)
        answers = [asyncio.create_task(api.post(JOBS, json=BODY | {"name": "1"}))]
        assert await asyncio.to_thread(tried.wait, DEADLINE), "it is in the transaction that is being tried"
        answers += [asyncio.create_task(api.post(JOBS, json=BODY | {"name": name})) for name in "234"]
        told = [(await answer).json()["detail"] for answer in answers]
        assert ["not known yet" in words for words in told] == [True, False, False, False]
        assert all("nothing was changed" in words for words in told[1:])
    await ready(api)
    assert [job["name"] for job in (await api.get(JOBS)).json()["jobs"]] == ["1"]


async def test_a_key_is_good_for_one_job_however_often_it_comes_meanwhile(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    path = tmp_path / "koala.db"
    api = await stack.enter_async_context(serving(path, [], Rules()))
    key = {"Idempotency-Key": "k"}
    with locked(path), impatient():
        for _ in range(3):
            check_refusal(await api.post(JOBS, json=BODY, headers=key), "database")
        unknown = await api.post(JOBS, json=BODY, headers=key)
        assert "same Idempotency-Key" in unknown.json()["hint"]
    answers = await asyncio.gather(*(api.post(JOBS, json=BODY, headers=key) for _ in range(3)))
    await ready(api)
    answers += [await api.post(JOBS, json=BODY, headers=key)]
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert answers[-1].status_code == 200
    assert [job["id"] for job in (await api.get(JOBS)).json()["jobs"]] == [1]


async def test_a_database_that_hangs_keeps_nobody_waiting(
    stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when PostgreSQL is stopped: neither an answer nor an error."""
    api = await stack.enter_async_context(serving(tmp_path / "koala.db", [], Rules()))
    await api.post(JOBS, json=BODY)
    goes_on = threading.Event()

    def hanging(method: Callable[..., Any]) -> Callable[..., Any]:
        def hang(*args: Any) -> Any:
            goes_on.wait()
            return method(*args)

        return hang

    for name in ("write", "page"):
        monkeypatch.setattr(SqlStore, name, hanging(getattr(SqlStore, name)))
    try:
        with impatient():
            check_refusal(await api.post(JOBS, json=BODY), "has not answered")
            check_refusal(await api.post(JOBS, json=BODY), "nothing was changed")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "QUERY_TIMEOUT", 0.2)
                for answer in await asyncio.gather(*(api.get(JOBS) for _ in range(20))):  # more than there are threads
                    check_refusal(answer, "has not answered")
        assert (await api.get("/readyz")).status_code == 503
    finally:
        goes_on.set()
    await ready(api)
    assert len((await api.get(JOBS)).json()["jobs"]) == 2


async def test_a_lease_that_cannot_be_renewed_is_known_before_anybody_submits(
    stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "RETRY_PAUSE", 0.05)
    monkeypatch.setattr(duties, "LEASE_RENEWAL", 4 * DEADLINE)  # it is tried for half as long
    monkeypatch.setattr("koalapy.store.engine.SQLITE_BUSY_TIMEOUT", 50)
    async with running(tmp_path / "koala.db") as daemon:
        database, lost = daemon.engine.database, []
        calendar = duties.Duties(daemon.engine, daemon.store, lambda: lost.append(True))
        with locked(tmp_path / "koala.db"):
            renewing = asyncio.create_task(calendar.renew_lease())
            async with asyncio.timeout(DEADLINE):
                await database.away.wait()
            with pytest.raises(StoreUnavailable, match="locked; nothing was changed"):
                await daemon.engine.commit(WorkItem())
            assert not renewing.done()
        await renewing
        assert (database.problem, lost) == ("", [])
        await daemon.engine.commit(WorkItem())


async def test_a_lease_whose_renewal_hangs_is_known_before_anybody_submits(
    stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "SLOW_AFTER", 0.05)
    goes_on = threading.Event()
    async with running(tmp_path / "koala.db") as daemon:
        monkeypatch.setattr(SqlStore, "renew_lease", lambda *_: goes_on.wait(DEADLINE))
        renewing = asyncio.create_task(duties.Duties(daemon.engine, daemon.store, lambda: None).renew_lease())
        async with asyncio.timeout(DEADLINE):
            await daemon.engine.database.away.wait()
        assert daemon.engine.database.problem == "the database has not answered for 0.05 s"
        goes_on.set()
        await renewing
        assert daemon.engine.database.problem == ""


async def test_replicas_are_not_waited_for_while_the_database_is_away(stack: AsyncExitStack, tmp_path: Path) -> None:
    path = tmp_path / "koala.db"
    sites = Sites()
    sites.content["north", "/m"] = b"x"
    api = await stack.enter_async_context(serving(path, [], Rules(), sites))
    order = {"name": "m", "cluster": "north", "path": "/m"}
    with locked(path), impatient():
        check_refusal(await api.post("/api/v1/replicas", json=order), "database")
    await ready(api)
    assert (await api.post("/api/v1/replicas", json=order)).status_code == 201


async def test_work_that_hangs_in_the_database_takes_no_thread_from_anything_else() -> None:
    goes_on = threading.Event()
    hanging = [asyncio.ensure_future(module.in_database(goes_on.wait)) for _ in range(40)]
    try:
        async with asyncio.timeout(DEADLINE):
            assert await asyncio.to_thread(lambda: "shown") == "shown"
            assert await module.query(lambda: "answered") == "answered"
    finally:
        goes_on.set()
    assert await asyncio.gather(*hanging) == [True] * 40
