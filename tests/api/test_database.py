"""A database that takes nothing: users are told so within seconds, and what was refused never happens."""

import asyncio
import resource
import sqlite3
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from koalapy.daemon.engine import duties
from koalapy.daemon.engine.database import query, run_in_database
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.model.errors import StoreUnavailable
from koalapy.scheduler.rules import Rules
from koalapy.store.sql import SqlStore
from tests.daemon.sites import Sites
from tests.daemon.test_hub import running
from tests.serving import serving
from tests.signals import hanging_threads, until

JOBS = "/api/v1/jobs"
BODY = {"request": {"type": "flexible", "total_size": 6}, "command": ["true"], "owner": "ada"}
BUSY_TIMEOUT_MS = 20


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have another connection write, and not end."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin exclusive")
    yield
    other.rollback()
    other.close()


@contextmanager
def limited(path: Path) -> Iterator[None]:
    """Let no file grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def full(path: Path) -> Iterator[None]:
    """Fill the disk that holds nothing else."""
    filler = path.parent / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield
    filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("this account may not mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def start(path: Path, **more: Any) -> AbstractAsyncContextManager[httpx2.AsyncClient]:
    return serving(path, [], Rules(), busy_timeout_ms=BUSY_TIMEOUT_MS, **more)


def engine_of(api: httpx2.AsyncClient) -> Engine:
    engine: Engine = api._transport.app.state.engine  # type: ignore[attr-defined]
    return engine


async def ready(api: httpx2.AsyncClient) -> None:
    await until(lambda: not engine_of(api).database.problem)
    assert (await api.get("/readyz")).status_code == 200


def check_refusal(answer: httpx2.Response, words: str) -> None:
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (503, 503)
    assert int(answer.headers["Retry-After"]) > 0
    assert words in problem["detail"]
    assert problem["hint"]


@pytest.mark.parametrize("trouble", [limited, locked])
async def test_what_is_refused_never_happens_and_what_was_taken_on_does(
    stack: AsyncExitStack, tmp_path: Path, trouble: Callable[[Path], Any]
) -> None:
    await check_refusals(stack, tmp_path / "koala.db", trouble)


@pytest.mark.processes
async def test_submit_with_full_disk_is_refused_until_there_is_room(stack: AsyncExitStack, small_disk: Path) -> None:
    await check_refusals(stack, small_disk / "koala.db", full)


async def check_refusals(stack: AsyncExitStack, path: Path, trouble: Callable[[Path], Any]) -> None:
    api = await stack.enter_async_context(start(path))
    first = (await api.post(JOBS, json=BODY)).json()
    with trouble(path):
        taken_on = await api.post(JOBS, json=BODY | {"name": "taken-on"})
        check_refusal(taken_on, "may still be made")
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
    api = await stack.enter_async_context(start(path))
    write, tried, goes_on = SqlStore.write, threading.Event(), threading.Event()
    monkeypatch.setattr(SqlStore, "write", lambda *args: (tried.set(), goes_on.wait(), write(*args)))
    with locked(path):
        answers = [asyncio.create_task(api.post(JOBS, json=BODY | {"name": "1"}))]
        await until(tried.is_set)  # it is in the transaction that is being tried
        answers += [asyncio.create_task(api.post(JOBS, json=BODY | {"name": name})) for name in "234"]
        await until(lambda: len(engine_of(api)._items) == 3)
        goes_on.set()
        told = [(await answer).json()["detail"] for answer in answers]
        assert ["may still be made" in words for words in told] == [True, False, False, False]
        assert all("nothing was changed" in words for words in told[1:])
    await ready(api)
    assert [job["name"] for job in (await api.get(JOBS)).json()["jobs"]] == ["1"]


async def test_a_key_is_good_for_one_job_however_often_it_comes_meanwhile(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    path = tmp_path / "koala.db"
    api = await stack.enter_async_context(start(path))
    key = {"Idempotency-Key": "k"}
    with locked(path):
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
    api = await stack.enter_async_context(start(tmp_path / "koala.db"))
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
        with hanging_threads():
            check_refusal(await api.post(JOBS, json=BODY), "has not answered")
            check_refusal(await api.post(JOBS, json=BODY), "nothing was changed")
            for answer in await asyncio.gather(*(api.get(JOBS) for _ in range(20))):  # more than there are threads
                check_refusal(answer, "has not answered")
        assert (await api.get("/readyz")).status_code == 503
    finally:
        goes_on.set()
    await ready(api)
    assert len((await api.get(JOBS)).json()["jobs"]) == 2


async def test_a_lease_that_cannot_be_renewed_is_known_before_anybody_submits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoreUnavailable("the database does not answer: it is locked")

    async with running(tmp_path / "koala.db") as daemon:
        database, lost = daemon.engine.database, []
        calendar = duties.Duties(daemon.engine, daemon.store, lambda: lost.append(True))
        with monkeypatch.context() as patched:
            patched.setattr(daemon.store, "renew_lease", refuse)
            renewing = asyncio.create_task(calendar.renew_lease())
            await database.away.wait()
            with pytest.raises(StoreUnavailable, match="locked; nothing was changed"):
                await daemon.engine.commit(WorkItem())
            assert not renewing.done()
        await renewing
        assert (database.problem, lost) == ("", [])
        await daemon.engine.commit(WorkItem())


async def test_a_lease_whose_renewal_hangs_is_known_before_anybody_submits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    async with running(tmp_path / "koala.db") as daemon:
        monkeypatch.setattr(daemon.store, "renew_lease", lambda *_: goes_on.wait())
        renewing = asyncio.create_task(duties.Duties(daemon.engine, daemon.store, lambda: None).renew_lease())
        with hanging_threads():
            await daemon.engine.database.away.wait()
        assert daemon.engine.database.problem == "the database has not answered for 2 s"
        goes_on.set()
        await renewing
        assert daemon.engine.database.problem == ""


async def test_replicas_are_not_waited_for_while_the_database_is_away(stack: AsyncExitStack, tmp_path: Path) -> None:
    path = tmp_path / "koala.db"
    sites = Sites()
    sites.content["north", "/m"] = b"x"
    api = await stack.enter_async_context(start(path, sites=sites))
    order = {"name": "m", "cluster": "north", "path": "/m"}
    with locked(path):
        check_refusal(await api.post("/api/v1/replicas", json=order), "database")
    await ready(api)
    assert (await api.post("/api/v1/replicas", json=order)).status_code == 201


async def test_work_that_hangs_in_the_database_takes_no_thread_from_anything_else() -> None:
    goes_on = threading.Event()
    hanging = [asyncio.ensure_future(run_in_database(goes_on.wait)) for _ in range(40)]
    try:
        assert await asyncio.to_thread(lambda: "shown") == "shown"
        assert await query(lambda: "answered") == "answered"
    finally:
        goes_on.set()
    assert await asyncio.gather(*hanging) == [True] * 40
