"""Database outages: users get an error within seconds, and rejected requests have no effect."""

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
from koalapy.store.sql import JobStore
from tests.daemon.sites import Sites
from tests.daemon.test_hub import running_daemon
from tests.serving import app_of, serving
from tests.signals import hanging_threads, until

JOBS = "/api/v1/jobs"
BODY = {"request": {"type": "flexible", "total_size": 6}, "command": ["true"], "owner": "ada"}
BUSY_TIMEOUT_MS = 20


@contextmanager
def lock_database(path: Path) -> Iterator[None]:
    """Hold an exclusive transaction in another connection."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("begin exclusive")
    yield
    connection.rollback()
    connection.close()


@contextmanager
def limit_file_size(path: Path) -> Iterator[None]:
    """Limit the size of files, so that no file can grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def fill_disk(path: Path) -> Iterator[None]:
    """Fill the disk of the database."""
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


def serve_daemon(path: Path, **options: Any) -> AbstractAsyncContextManager[httpx2.AsyncClient]:
    return serving(path, [], Rules(), busy_timeout_ms=BUSY_TIMEOUT_MS, **options)


def engine_of(api: httpx2.AsyncClient) -> Engine:
    engine: Engine = app_of(api).state.engine
    return engine


async def wait_until_ready(api: httpx2.AsyncClient) -> None:
    await until(lambda: not engine_of(api).database.problem)
    assert (await api.get("/readyz")).status_code == 200


def check_unavailable(answer: httpx2.Response, detail: str) -> None:
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (503, 503)
    assert int(answer.headers["Retry-After"]) > 0
    assert detail in problem["detail"]
    assert problem["hint"]


@pytest.mark.parametrize("trouble", [limit_file_size, lock_database])
async def test_submit_without_database_is_rejected_or_done_later(
    stack: AsyncExitStack, tmp_path: Path, trouble: Callable[[Path], Any]
) -> None:
    await check_refusals(stack, tmp_path / "koala.db", trouble)


@pytest.mark.processes
async def test_submit_with_full_disk_is_rejected_until_space_is_free(stack: AsyncExitStack, small_disk: Path) -> None:
    await check_refusals(stack, small_disk / "koala.db", fill_disk)


async def check_refusals(stack: AsyncExitStack, path: Path, trouble: Callable[[Path], Any]) -> None:
    api = await stack.enter_async_context(serve_daemon(path))
    queued = (await api.post(JOBS, json=BODY)).json()
    with trouble(path):
        accepted = await api.post(JOBS, json=BODY | {"name": "taken-on"})
        check_unavailable(accepted, "may still be made")
        rejected = [
            await api.post(JOBS, json=BODY | {"name": "refused"}, headers={"Idempotency-Key": "k"}),
            await api.post(f"{JOBS}/{queued['id']}/cancel"),
            await api.post(f"{JOBS}/{queued['id']}/hold"),
            await api.post("/api/v1/clusters/north/drain", json={"reason": "test"}),
            await api.post("/api/v1/clusters/north/clear"),
        ]
        for answer in rejected:
            check_unavailable(answer, "nothing was changed")
        assert [job["id"] for job in (await api.get(JOBS)).json()["jobs"]] == [queued["id"]]
        assert (await api.get(f"{JOBS}/{queued['id']}")).json()["state"] == "queued"
        health = (await api.get("/healthz")).json()
        assert (health["status"], health["ready"], len(health["problems"])) == ("degraded", False, 1)
        check_unavailable(await api.get("/readyz"), health["problems"][0])
    await wait_until_ready(api)
    assert (await api.get("/healthz")).json()["problems"] == []
    retried = await api.post(JOBS, json=BODY | {"name": "again"}, headers={"Idempotency-Key": "k"})
    assert retried.status_code == 201
    jobs = (await api.get(JOBS)).json()["jobs"]
    assert [job["name"] for job in jobs] == ["again", "taken-on", ""]
    assert {job["state"] for job in jobs} == {"queued"}


async def test_submit_queued_when_database_fails_is_rejected(
    stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "koala.db"
    api = await stack.enter_async_context(serve_daemon(path))
    write, started, proceed = JobStore.write, threading.Event(), threading.Event()
    monkeypatch.setattr(JobStore, "write", lambda *args: (started.set(), proceed.wait(), write(*args)))
    with lock_database(path):
        answers = [asyncio.create_task(api.post(JOBS, json=BODY | {"name": "1"}))]
        await until(started.is_set)  # its transaction is being tried
        answers += [asyncio.create_task(api.post(JOBS, json=BODY | {"name": name})) for name in "234"]
        await until(lambda: len(engine_of(api)._items) == 3)
        proceed.set()
        details = [(await answer).json()["detail"] for answer in answers]
        assert ["may still be made" in detail for detail in details] == [True, False, False, False]
        assert all("nothing was changed" in detail for detail in details[1:])
    await wait_until_ready(api)
    assert [job["name"] for job in (await api.get(JOBS)).json()["jobs"]] == ["1"]


async def test_submit_with_same_key_during_outage_makes_one_job(stack: AsyncExitStack, tmp_path: Path) -> None:
    path = tmp_path / "koala.db"
    api = await stack.enter_async_context(serve_daemon(path))
    key = {"Idempotency-Key": "k"}
    with lock_database(path):
        for _ in range(3):
            check_unavailable(await api.post(JOBS, json=BODY, headers=key), "database")
        unknown = await api.post(JOBS, json=BODY, headers=key)
        assert "same Idempotency-Key" in unknown.json()["hint"]
    answers = await asyncio.gather(*(api.post(JOBS, json=BODY, headers=key) for _ in range(3)))
    await wait_until_ready(api)
    answers += [await api.post(JOBS, json=BODY, headers=key)]
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert answers[-1].status_code == 200
    assert [job["id"] for job in (await api.get(JOBS)).json()["jobs"]] == [1]


async def test_request_during_hanging_database_returns_503(
    stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped PostgreSQL process gives neither an answer nor an error."""
    api = await stack.enter_async_context(serve_daemon(tmp_path / "koala.db"))
    await api.post(JOBS, json=BODY)
    proceed = threading.Event()

    def hanging(method: Callable[..., Any]) -> Callable[..., Any]:
        def hang(*args: Any) -> Any:
            proceed.wait()
            return method(*args)

        return hang

    for name in ("write", "page"):
        monkeypatch.setattr(JobStore, name, hanging(getattr(JobStore, name)))
    try:
        with hanging_threads():
            check_unavailable(await api.post(JOBS, json=BODY), "has not answered")
            check_unavailable(await api.post(JOBS, json=BODY), "nothing was changed")
            for answer in await asyncio.gather(*(api.get(JOBS) for _ in range(20))):  # more requests than threads
                check_unavailable(answer, "has not answered")
        assert (await api.get("/readyz")).status_code == 503
    finally:
        proceed.set()
    await wait_until_ready(api)
    assert len((await api.get(JOBS)).json()["jobs"]) == 2


async def test_lease_renewal_failure_rejects_submissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StoreUnavailable("the database does not answer: it is locked")

    async with running_daemon(tmp_path / "koala.db") as daemon:
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


async def test_lease_renewal_that_hangs_reports_database_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = threading.Event()
    async with running_daemon(tmp_path / "koala.db") as daemon:
        monkeypatch.setattr(daemon.store, "renew_lease", lambda *_: proceed.wait())
        renewing = asyncio.create_task(duties.Duties(daemon.engine, daemon.store, lambda: None).renew_lease())
        with hanging_threads():
            await daemon.engine.database.away.wait()
        assert daemon.engine.database.problem == "the database has not answered for 2 s"
        proceed.set()
        await renewing
        assert daemon.engine.database.problem == ""


async def test_add_replica_during_outage_returns_503(stack: AsyncExitStack, tmp_path: Path) -> None:
    path = tmp_path / "koala.db"
    sites = Sites()
    sites.content["north", "/m"] = b"x"
    api = await stack.enter_async_context(serve_daemon(path, sites=sites))
    order = {"name": "m", "cluster": "north", "path": "/m"}
    with lock_database(path):
        check_unavailable(await api.post("/api/v1/replicas", json=order), "database")
    await wait_until_ready(api)
    assert (await api.post("/api/v1/replicas", json=order)).status_code == 201


async def test_hanging_database_work_occupies_no_default_thread() -> None:
    proceed = threading.Event()
    hanging = [asyncio.ensure_future(run_in_database(proceed.wait)) for _ in range(40)]
    try:
        assert await asyncio.to_thread(lambda: "shown") == "shown"
        assert await query(lambda: "answered") == "answered"
    finally:
        proceed.set()
    assert await asyncio.gather(*hanging) == [True] * 40
