"""Advance reservations by REST: on all clusters or on none, bad input, jobs in them, and what clusters lose."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from koalapy.daemon import reservations
from koalapy.daemon.agents.questions import ANSWER_TIMEOUT, Questions
from koalapy.daemon.engine.engine import WorkItem
from koalapy.model.errors import StoreUnavailable
from koalapy.model.identity import Identity, Role
from koalapy.model.job import JobState
from koalapy.model.reports import ClusterReport, Inventory
from koalapy.scheduler.events import ClusterDrained, InventoryReceived, Reported
from koalapy.scheduler.rules import Rules
from tests.daemon.sites import Sites
from tests.serving import app_of, serving
from tests.signals import until

Json = dict[str, Any]
ADA = Identity("ada", Role.ADMIN, "test")
PATH = "/api/v1/reservations"
FLEXIBLE = {"type": "flexible", "total_size": 6}
ORDER = {"request": FLEXIBLE, "begin": "now+1h", "duration": "2h"}


def fixed(**sizes: int) -> Json:
    return {"type": "fixed", "components": [{"cluster": name, "size": size} for name, size in sizes.items()]}


@asynccontextmanager
async def start_daemon(path: Path, sites: Sites) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a daemon with connected agents of north and south, four nodes each."""
    sites.connect_agents("north", "south")
    async with serving(path / "koala.db", [], Rules(), sites) as api:
        engine = app_of(api).state.engine
        for name in ("north", "south"):
            report = Reported(name, ClusterReport(4, 4))
            await engine.commit(WorkItem(events=(InventoryReceived(name, Inventory(())), report)))
        yield api


def service_of(api: httpx2.AsyncClient) -> Any:
    return app_of(api).state.reservations


def end_lease(path: Path) -> None:
    """Let the next daemon start at once."""
    with closing(sqlite3.connect(path / "koala.db")) as database, database:
        database.execute("update lease set expires_at = 0")


def copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as original, closing(sqlite3.connect(target)) as duplicate:
        original.backup(duplicate)


async def headers_of(api: httpx2.AsyncClient, user: str) -> dict[str, str]:
    token = (await api.post("/api/v1/tokens", json={"user": user, "role": "user"})).json()
    return {"Authorization": f"Bearer {token['token']}"}


async def test_reservation_is_made_on_all_clusters_and_used_by_jobs_of_its_users(tmp_path: Path) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        answer = await api.post(PATH, json=ORDER | {"name": "lecture", "users": ["bob"]})
        made = answer.json()
        assert (answer.status_code, made["state"]) == (201, "made")
        assert {(part["cluster"], part["nodes"]) for part in made["parts"]} == {("north", 4), ("south", 2)}
        assert {key: order["nodes"] for key, order in sites.reserved.items()} == {
            ("north", made["site_name"]): 4,
            ("south", made["site_name"]): 2,
        }
        bob, eve = await headers_of(api, "bob"), await headers_of(api, "eve")
        job = {"request": FLEXIBLE, "command": ["true"], "reservation": "lecture"}
        submitted = (await api.post("/api/v1/jobs", json=job | {"walltime": "119m"}, headers=bob)).json()
        assert (submitted["begin"], submitted["deadline"]) == (made["begins_at"], made["ends_at"])
        assert submitted["state"] == "queued"
        explained = (await api.get(f"/api/v1/jobs/{submitted['id']}/explain")).json()
        assert explained["notes"] == ["it gets nodes of reservation lecture"]
        for change, user, field in (
            ({}, eve, "reservation"),
            ({"reservation": "other"}, bob, "reservation"),
            ({"walltime": "2h"}, bob, "walltime"),
            ({"request": {"type": "flexible", "total_size": 7}}, bob, "request"),
            ({"request": fixed(south=3)}, bob, "policy"),
        ):
            rejected = await api.post("/api/v1/jobs", json=job | change, headers=user)
            assert (rejected.status_code, rejected.json()["field"]) == (422, field), rejected.json()
            assert rejected.json()["hint"]
        assert (await api.get(PATH, headers=eve)).json() == {"reservations": []}
        assert (await api.get(f"{PATH}/lecture", headers=eve)).status_code == 404
        assert (await api.delete(f"{PATH}/lecture", headers=bob)).status_code == 403
        cancelled = (await api.delete(f"{PATH}/lecture")).json()
        assert (cancelled["state"], cancelled["reason"], sites.reserved) == ("cancelled", "was cancelled by ada", {})
        job_now = (await api.get(f"/api/v1/jobs/{submitted['id']}")).json()
        assert (job_now["state"], job_now["reason"]) == ("failed", "reservation lecture was cancelled by ada")
        assert (await api.delete(f"{PATH}/lecture")).status_code == 409


async def test_job_on_a_cluster_without_nodes_of_its_reservation_is_rejected(tmp_path: Path) -> None:
    async with start_daemon(tmp_path, Sites()) as api:
        name = (await api.post(PATH, json=ORDER | {"request": fixed(north=2)})).json()["name"]
        job = {"request": fixed(north=1, south=1), "command": ["true"], "reservation": name}
        problem = (await api.post("/api/v1/jobs", json=job)).json()
        assert problem["detail"] == f"request names south, where reservation {name} has no nodes"
        assert problem["hint"] == "it has north:2"


@pytest.mark.parametrize(
    ("change", "status", "field", "words"),
    [
        ({"begin": "2020-01-01T09:00"}, 422, "begin", "which has passed"),
        ({"begin": "9000"}, 422, "begin", "point in time"),
        ({"duration": 0}, 422, "duration", ""),
        ({"duration": "367-00:00:00"}, 422, "duration", "more than a year"),
        ({"begin": "now+3650d"}, 422, "duration", "more than a year"),
        ({"request": {"type": "flexible", "total_size": 0}}, 422, "request.total_size", ""),
        ({"request": {"type": "flexible", "total_size": 9}}, 422, "request.total_size", "8"),
        ({"request": fixed(north=5)}, 422, "request.components[0].size", "4"),
        ({"request": fixed(nowhere=1)}, 422, "request.components[0].cluster", "no such cluster"),
        ({"request": fixed(south=1, north=1)}, 422, "request", "drained"),
        ({"request": FLEXIBLE}, 422, "request", "north has 4"),
        ({"name": "a b"}, 422, "name", "cannot be one"),
        ({"name": "Koala-x"}, 422, "name", "cannot be one"),
        ({"name": "r7"}, 422, "name", "cannot be one"),
        ({"name": "taken"}, 422, "name", "another reservation"),
        ({"extra": 1}, 422, "extra", ""),
    ],
)
async def test_reservation_with_bad_input_names_field_and_remedy(
    tmp_path: Path, change: Json, status: int, field: str, words: str
) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        engine = app_of(api).state.engine
        await engine.commit(WorkItem(events=(ClusterDrained("south", reason="disks"),)))
        taken = ORDER | {"request": fixed(north=1), "name": "taken", "begin": "now+10h"}
        assert (await api.post(PATH, json=taken)).status_code == 201
        answer = await api.post(PATH, json=ORDER | {"request": fixed(north=1)} | change)
        problem = answer.json()
        assert (answer.status_code, problem["field"]) == (status, field), problem
        assert words in problem["detail"]
        assert problem["hint"]
        assert len(sites.reserved) == 1


async def test_reservation_by_user_without_right_returns_403(tmp_path: Path) -> None:
    async with start_daemon(tmp_path, Sites()) as api:
        answer = await api.post(PATH, json=ORDER, headers=await headers_of(api, "eve"))
        assert (answer.status_code, "setting reservations" in answer.json()["hint"]) == (403, True)
        assert (await api.post(PATH, json=ORDER, headers=await headers_of(api, "bob"))).status_code == 201


async def test_reservation_leaves_nothing_if_a_cluster_refuses(tmp_path: Path) -> None:
    sites = Sites(refusals={"south": "Slurm: access denied"})
    async with start_daemon(tmp_path, sites) as api:
        for request in (FLEXIBLE, fixed(north=1, south=1)):
            answer = await api.post(PATH, json=ORDER | {"request": request})
            assert (answer.status_code, sites.reserved) == (409, {})
            assert answer.json()["detail"] == "no nodes were reserved: south: Slurm: access denied"
        smaller = await api.post(PATH, json=ORDER | {"request": {"type": "nonfixed", "components": [{"size": 4}]}})
        assert smaller.json()["parts"] == [{"cluster": "north", "nodes": 4}]
        sites.refusals.clear()
        other = await api.post(PATH, json=ORDER | {"request": {"type": "flexible", "total_size": 4}})
        assert other.json()["parts"] == [{"cluster": "south", "nodes": 4}], "the nodes of north are taken then"
        sites.connect_agents("north", "south", reserves=False)
        answer = await api.post(PATH, json=ORDER | {"begin": "now+9h"})
        assert "north: its agent is too old to reserve nodes; update it" in answer.json()["detail"]
        names = [each["name"] for each in (await api.get(PATH)).json()["reservations"]]
        assert len(names) == len(set(names)) == 2, "failed ones are not listed"


async def test_audit_names_reservation_that_was_made_not_the_refused_try_before(tmp_path: Path) -> None:
    sites = Sites(refusals={"north": "busy"})
    async with start_daemon(tmp_path, sites) as api:
        answer = await api.post(PATH, json=ORDER | {"request": {"type": "flexible", "total_size": 4}})
        assert (answer.json()["name"], answer.json()["parts"]) == ("r2", [{"cluster": "south", "nodes": 4}])
        assert (await api.post(PATH, json=ORDER | {"request": fixed(north=1)})).status_code == 409
        await service_of(api).check()  # which stores that r1 has failed
        assert [each.state for each in service_of(api)._store.load()] == ["failed", "made", "failed"]
        entries = (await api.get("/api/v1/audit", params={"action": "make_reservation"})).json()["entries"]
        assert [(each["target"], each["outcome"], each["detail"]) for each in entries] == [
            ("reservation r2", "done", "south:4"),
            ("reservation r3", "refused", "409 north:1"),
        ]


async def test_restarted_daemon_keeps_reservation_and_removes_what_it_does_not_know(tmp_path: Path) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        kept = (await api.post(PATH, json=ORDER | {"name": "kept"})).json()
        prefix = kept["site_name"].rpartition("-")[0]
    end_lease(tmp_path)
    for name in ("north", "south"):
        sites.reserved[name, f"{prefix}-999"] = {}
    async with start_daemon(tmp_path, sites) as api:
        await service_of(api).check()
        assert {name for _, name in sites.reserved} == {kept["site_name"]}
        assert (await api.get(f"{PATH}/kept")).json() == kept
        job = {"request": FLEXIBLE, "command": ["true"], "reservation": "kept"}
        submitted = (await api.post("/api/v1/jobs", json=job)).json()
        del sites.reserved["south", kept["site_name"]]
        await service_of(api).check()
        broken = (await api.get(f"{PATH}/kept")).json()
        assert (broken["state"], broken["reason"], sites.reserved) == ("broken", "was removed on south", {})
        assert (await api.get(f"/api/v1/jobs/{submitted['id']}")).json()["state"] == JobState.FAILED


async def test_daemon_with_restored_database_uses_no_name_that_clusters_have(tmp_path: Path) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        copy_database(tmp_path / "koala.db", tmp_path / "backup.db")
        lost = (await api.post(PATH, json=ORDER)).json()
    copy_database(tmp_path / "backup.db", tmp_path / "koala.db")
    end_lease(tmp_path)
    async with start_daemon(tmp_path, sites) as api:
        other = ORDER | {"begin": "now+9h"}
        made = (await api.post(PATH, json=other)).json()
        assert (made["name"], made["state"]) == (lost["name"], "made")
        assert made["site_name"] != lost["site_name"]
        await service_of(api).check()
        assert {name for _, name in sites.reserved} == {made["site_name"]}


async def test_end_of_reservation_is_stored_together_with_that_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_daemon(tmp_path, Sites()) as api:
        service, engine = service_of(api), app_of(api).state.engine
        assert (await api.post(PATH, json=ORDER | {"name": "first"})).status_code == 201
        job = {"request": FLEXIBLE, "command": ["true"], "reservation": "first"}
        ident = (await api.post("/api/v1/jobs", json=job)).json()["id"]
        write, stored = engine._store.write, []

        def read() -> tuple[str, str]:
            with closing(sqlite3.connect(tmp_path / "koala.db")) as database:
                (state,) = database.execute("select state from jobs where id = ?", (ident,)).fetchone()
            return str(service._store.load()[0].state), state

        def write_and_read(batch: Any) -> None:
            stored.append(read())
            write(batch)
            stored.append(read())

        monkeypatch.setattr(engine._store, "write", write_and_read)
        assert (await api.delete(f"{PATH}/first")).status_code == 200
        assert list(dict.fromkeys(stored)) == [("made", "queued"), ("cancelled", "failed")]


async def test_cluster_out_of_reach_is_released_later_and_reservation_ends_by_itself(tmp_path: Path) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        service, clock = service_of(api), time.time
        assert (await api.post(PATH, json=ORDER | {"name": "first"})).status_code == 201
        sites.away.add("south")
        assert (await api.delete(f"{PATH}/first")).status_code == 200
        assert {cluster for cluster, _ in sites.reserved} == {"south"}
        sites.away.clear()
        await service.check()
        assert sites.reserved == {}
        begin = datetime.fromtimestamp(clock() - 30, UTC).isoformat()
        short = (await api.post(PATH, json=ORDER | {"name": "second", "begin": begin, "duration": 1})).json()
        assert short["begins_at"] > begin, "a begin that has just passed means now"
        engine = app_of(api).state.engine
        engine.clock = lambda: clock() + 5
        await service.check()
        assert ((await api.get(f"{PATH}/second")).json()["state"], sites.reserved) == ("over", {})


class TakingSites(Sites):
    """Sites where another user orders a reservation of the same name between two tries of the first one."""

    order: Any = None
    answers: list[httpx2.Response]

    async def ask_agent(self, cluster: str, kind: str, payload: Json, timeout: float = 0.0) -> Json:
        if kind == "unreserve" and self.order is not None:
            order, self.order = self.order, None
            self.answers = [await order()]
        return await super().ask_agent(cluster, kind, payload, timeout)


async def test_name_is_of_one_reservation_until_that_has_ended(tmp_path: Path) -> None:
    sites = TakingSites(refusals={"south": "Slurm: access denied"})
    async with start_daemon(tmp_path, sites) as api:
        small = ORDER | {"name": "lecture", "request": {"type": "flexible", "total_size": 1}}
        orders = [api.post(PATH, json=small | {"begin": f"now+{hours}h"}) for hours in (9, 19)]
        assert sorted(answer.status_code for answer in await asyncio.gather(*orders)) == [201, 422]
        assert (await api.delete(f"{PATH}/lecture")).status_code == 200
        bob = await headers_of(api, "bob")
        sites.order = lambda: api.post(PATH, json=small, headers=bob)
        wide = {"type": "nonfixed", "components": [{"size": 3}, {"size": 3}]}
        assert (await api.post(PATH, json=ORDER | {"name": "lecture", "request": wide})).status_code == 409
        assert [answer.status_code for answer in sites.answers] == [422], "the first one is not given up yet"
        made = (await api.post(PATH, json=small | {"users": ["ada"]}, headers=bob)).json()
        assert made["state"] == "made"
        assert (await api.get(f"{PATH}/lecture")).json() == made, "the live one, not ada's cancelled one"
        job = {"request": {"type": "flexible", "total_size": 1}, "command": ["true"], "reservation": "lecture"}
        assert (await api.post("/api/v1/jobs", json=job)).json()["deadline"] == made["ends_at"]


async def test_name_of_ended_reservation_is_not_free_while_its_jobs_run(tmp_path: Path) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        order = ORDER | {"name": "now", "begin": "now"}
        made = (await api.post(PATH, json=order)).json()
        job = {"request": FLEXIBLE, "command": ["true"], "reservation": "now"}
        ident = (await api.post("/api/v1/jobs", json=job)).json()["id"]
        assert (await api.get(f"/api/v1/jobs/{ident}")).json()["state"] != "queued"
        del sites.reserved["south", made["site_name"]]
        await service_of(api).check()
        assert (await api.get(f"{PATH}/now")).json()["state"] == "broken"
        assert "jobs of an ended one" in (await api.post(PATH, json=order)).json()["detail"]


@pytest.mark.parametrize("is_repeated", [True, False])
async def test_cancel_that_could_not_be_stored_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_repeated: bool
) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        service, engine = service_of(api), app_of(api).state.engine
        assert (await api.post(PATH, json=ORDER | {"name": "first"})).status_code == 201
        assert (await api.post(PATH, json=ORDER | {"name": "second", "request": fixed(south=1)})).status_code == 201
        await service.check()

        def fail(*_: object) -> None:
            raise StoreUnavailable("the database is full")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "commit", fail)
            assert (await api.delete(f"{PATH}/first")).status_code == 503
            assert (await api.get(f"{PATH}/first")).json()["state"] == "made"
        if is_repeated:
            assert (await api.delete(f"{PATH}/first")).status_code == 200
        else:
            await service.check()
        assert (await api.get(f"{PATH}/first")).json()["state"] == "cancelled"
        assert [each.name for each in engine.queries.reservations.all()] == ["second"]
        assert [each.state for each in service._store.load()] == ["cancelled", "made"]
        assert {cluster for cluster, _ in sites.reserved} == {"south"}


async def test_reservation_that_two_users_cancel_at_once_ends_once(tmp_path: Path) -> None:
    async with start_daemon(tmp_path, Sites()) as api:
        bob = await headers_of(api, "bob")
        assert (await api.post(PATH, json=ORDER | {"name": "first"}, headers=bob)).status_code == 201
        answers = await asyncio.gather(api.delete(f"{PATH}/first"), api.delete(f"{PATH}/first", headers=bob))
        stored = (await api.get(f"{PATH}/first")).json()
        assert [answer.json() for answer in answers if answer.status_code != 409] in ([stored], [stored, stored])


async def test_site_cannot_hold_up_the_release_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        kept = (await api.post(PATH, json=ORDER | {"request": fixed(south=2)})).json()
        prefix = kept["site_name"].rpartition("-")[0]
        monkeypatch.setattr(reservations, "MAX_RELEASED", 10)
        foreign = {("north", name): {} for name in (f"{prefix}-x", f"{prefix}-1\n", "maintenance")}
        sites.reserved |= foreign | {("north", f"{prefix}-{number}"): {} for number in range(100, 130)}
        sites.reserved["south", f"{prefix}-100"] = {}
        sites.kept.add(f"{prefix}-100")
        await service_of(api).check()
        assert len(sites.reserved) == 1 + len(foreign) + 30 + 1 - 9, "one is not released, and the others of ten are"
        sites.kept.clear()
        for _ in range(3):
            await service_of(api).check()
        assert sites.reserved.keys() == foreign.keys() | {
            (part["cluster"], kept["site_name"]) for part in kept["parts"]
        }
        answer = sites.ask_agent

        async def answer_too_late(cluster: str, kind: str, payload: Json, timeout: float = 0.0) -> Json:
            if kind == "unreserve":
                raise TimeoutError
            return await answer(cluster, kind, payload)

        monkeypatch.setattr(sites, "ask_agent", answer_too_late)
        sites.connect_agents("north")
        sites.reserved["north", f"{prefix}-200"] = {}
        await service_of(api).check()
        monkeypatch.setattr(sites, "ask_agent", answer)
        await service_of(api).check()
        assert ("north", f"{prefix}-200") not in sites.reserved


async def test_ended_reservations_are_dropped_and_live_ones_of_a_user_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = Sites()
    monkeypatch.setattr(reservations, "MAX_LIVE", 2)
    async with start_daemon(tmp_path, sites) as api:
        service, clock = service_of(api), time.time
        engine = app_of(api).state.engine
        small = ORDER | {"request": {"type": "flexible", "total_size": 1}, "begin": "now+300d"}
        answers = await asyncio.gather(*(api.post(PATH, json=small) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [201, 201, 409]
        assert (await api.post(PATH, json=small, headers=await headers_of(api, "bob"))).status_code == 201
        assert (await api.delete(f"{PATH}/r1")).status_code == 200
        sites.refusals |= {"north": "busy", "south": "busy"}
        assert (await api.post(PATH, json=small)).status_code == 409
        sites.refusals.clear()
        assert (await api.post(PATH, json=small)).status_code == 201
        for days, states in (
            (0.0, ["cancelled", "made", "made", "failed", "failed", "made"]),
            (0.1, ["cancelled", "made", "made", "made"]),
            (91.0, ["made", "made", "made"]),
        ):
            engine.clock = lambda days=days: clock() + 86400 * days
            await service.check()
            assert [each.state for each in service._store.load()] == states


class SilentSites(Sites):
    """Sites where the agent of south is connected and answers no question about reservations."""

    is_silent = True

    async def ask_agent(self, cluster: str, kind: str, payload: Json, timeout: float = ANSWER_TIMEOUT) -> Json:
        if cluster != "south" or not self.is_silent:
            return await super().ask_agent(cluster, kind, payload, timeout)
        if kind == "reserve":
            await super().ask_agent(cluster, kind, payload)  # it reserves, and its answer is lost
        return await Questions(lambda *_: True, lambda *_: False).ask_agent(cluster, kind, payload, timeout)


async def test_reservation_ends_everywhere_within_its_deadline_if_a_cluster_is_silent(tmp_path: Path) -> None:
    sites, loop = SilentSites(), asyncio.get_running_loop()
    async with start_daemon(tmp_path, sites) as api:
        began = loop.time()
        answer = await api.post(PATH, json=ORDER | {"request": fixed(north=1, south=1)})
        waited = loop.time() - began
        assert (answer.status_code, "south has not answered for 60 s" in answer.json()["detail"]) == (409, True)
        deadline = reservations.RESERVE_TIMEOUT_S + reservations.RELEASE_TIMEOUT_S
        assert waited == pytest.approx(deadline, abs=5), "to reserve, and to release"
        assert {cluster for cluster, _ in sites.reserved} == {"south"}
        sites.is_silent = False
        await service_of(api).check()
        assert sites.reserved == {}


@pytest.mark.parametrize("failing", ["first row", "last row", "last row, known before"])
async def test_reservation_while_disk_of_daemon_is_full_leaves_nothing_on_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        service, engine = service_of(api), app_of(api).state.engine
        is_full, write = True, engine._store.write

        def write_unless_full(record: Any) -> None:
            if is_full:
                raise StoreUnavailable("database or disk is full")
            write(record)

        with monkeypatch.context() as patch:
            patch.setattr(
                *((service._store, "save") if failing == "first row" else (engine._store, "write")), write_unless_full
            )
            if failing == "last row, known before":
                engine.database.note_failure("test", "database or disk is full")
            answer = await api.post(PATH, json=ORDER)
            engine.database.note_success("test")
        assert (answer.status_code, "disk is full" in answer.json()["detail"]) == (503, True), answer.json()
        assert (sites.reserved == {}) is (failing != "last row"), "that change is still tried"
        is_full = False
        if failing == "last row":
            await until(lambda: service.list_visible(ADA)[0].state == "made")
            assert {cluster for cluster, _ in sites.reserved} == {"north", "south"}
        await service.check()
        assert [each.state for each in service._store.load()] == ["made" if failing == "last row" else "failed"]


async def test_daemon_that_ends_while_disk_is_full_leaves_nothing_on_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = Sites()

    def fail(*_: object) -> None:
        raise StoreUnavailable("database or disk is full")

    with pytest.raises(StoreUnavailable):  # noqa: PT012 - raised by the end of the daemon
        async with start_daemon(tmp_path, sites) as api:
            monkeypatch.setattr(app_of(api).state.engine._store, "write", fail)
            assert (await api.post(PATH, json=ORDER)).status_code == 503
    assert {cluster for cluster, _ in sites.reserved} == {"north", "south"}
    end_lease(tmp_path)
    async with start_daemon(tmp_path, sites) as api:
        await service_of(api).check()
        assert (sites.reserved, (await api.get(PATH)).json()["reservations"]) == ({}, [])


async def test_reservation_begins_after_the_drain_in_force_has_ended(tmp_path: Path) -> None:
    sites = Sites()
    async with start_daemon(tmp_path, sites) as api:
        await api.post("/api/v1/clusters/south/drain", json={"reason": "disks", "end": "now+2h"})
        for request in (fixed(south=2), FLEXIBLE):
            early = await api.post(PATH, json=ORDER | {"request": request})
            assert (early.status_code, early.json()["field"], bool(early.json()["hint"])) == (422, "request", True)
            later = await api.post(PATH, json=ORDER | {"request": request, "begin": "now+3h"})
            assert later.status_code == 201, later.json()
            assert "south" in {part["cluster"] for part in later.json()["parts"]}
