"""Reservations of an embedded cluster."""

import math
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.local.jobs import JobTable, LocalNode, RequestRejected
from koalapy.agent.lrm.port import LrmSubmission, ReservationOrder
from koalapy.model.errors import SiteFault, SiteRejected
from tests.agent.lrm.conftest import Site, eventually, pid_of_locald, stop_locald

NAME = "koala-0123456789ab-7"


class Table(JobTable):
    """A table of four nodes, with a time that the test sets."""

    def __init__(self, reservations_file: str = "", nodes: int = 4) -> None:
        self.now = 0.0
        addresses = [f"127.0.1.{number}" for number in range(1, nodes + 1)]
        super().__init__([LocalNode(address, address) for address in addresses], 1, reservations_file, lambda: self.now)

    def reserve(self, nodes: int = 3, begins: float = 100, ends: float = 200, name: str = NAME) -> list[str]:
        request = {"name": name, "nodes": nodes, "begins": begins, "ends": ends, "users": ["grid"]}
        return [address[-1] for address in self.reserve_nodes(request).nodes]

    def submit(self, nodes: int, walltime: float | None = None, **fields: Any) -> None:
        self.submit_job({"name": "x", "argv": ["true"], "nodes": nodes, "walltime": walltime, **fields})

    def start_all(self) -> list[str]:
        """Start what can be started; return the nodes of each job."""
        self.next_change_s()
        started = []
        while job := self.start_next_job():
            started.append("".join(node.address[-1] for node in job.nodes))
        return started


@pytest.mark.parametrize(
    ("now", "walltime", "nodes", "reservation", "started"),
    [
        (0, 100, 4, "", ["1234"]),
        (0, 101, 4, "", []),
        (0, 101, 1, "", ["1"]),
        (0, None, 1, "", ["1"]),
        (0, None, 2, "", []),
        (150, 1, 2, "", []),
        (200, None, 4, "", ["1234"]),
        (99, 1, 2, NAME, []),
        (100, None, 3, NAME, ["234"]),
        (199, 500, 2, NAME, ["23"]),
    ],
)
def test_job_gets_the_nodes_that_reservations_leave(
    now: float, walltime: float | None, nodes: int, reservation: str, started: list[str]
) -> None:
    table = Table()
    assert table.reserve() == ["4", "3", "2"]
    table.submit(nodes, walltime, reservation=reservation)
    table.now = now
    assert table.start_all() == started


def test_job_in_reservation_ends_with_it() -> None:
    table = Table()
    table.reserve()
    table.submit(1, reservation=NAME)
    table.submit(1, 30, reservation=NAME)
    table.now = 150
    table.start_all()
    assert [job.walltime for job in table.running.values()] == [50, 30]


def test_waiting_job_of_reservation_holds_up_no_other() -> None:
    table = Table()
    table.reserve()
    table.submit(3, reservation=NAME)
    table.submit(1)
    assert table.start_all() == ["1"]
    table.submit(4)
    table.now = 100
    assert table.start_all() == ["234"]


def test_job_that_must_wait_for_reserved_nodes_holds_up_no_other() -> None:
    table = Table()
    table.reserve()
    table.submit(2)
    table.submit(1)
    table.submit(2, 50)
    assert table.start_all() == ["1", "23"]
    for job in list(table.running.values()):
        table.end_job(job)
    table.now = 200
    assert table.start_all() == ["12"]


def test_job_that_only_reserved_nodes_suit_holds_up_no_other() -> None:
    table = Table()
    table.reserve(2, begins=0)
    table.submit(2, eligible=["127.0.1.3", "127.0.1.4"])
    table.submit(2)
    assert table.start_all() == ["12"]


def test_released_reservation_frees_nodes_and_its_jobs_continue() -> None:
    table = Table()
    table.reserve()
    table.submit(1, reservation=NAME)
    table.submit(3)
    table.now = 100
    assert table.start_all() == ["2"]
    table.submit(3, reservation=NAME)
    table.release_reservation(NAME)
    table.release_reservation(NAME)
    assert table.start_all() == ["134"]
    table.submit(2)
    for job in list(table.running.values()):
        table.end_job(job)
    assert table.start_all() == ["12"], "the job of the released reservation holds it up"


@pytest.mark.parametrize(
    ("walltime", "nodes", "begins", "kind"),
    [(None, 3, 100, "limit"), (50, 4, 100, ""), (101, 3, 100, "limit"), (None, 2, 100, ""), (None, 5, 100, "limit")],
)
def test_reserve_takes_no_nodes_of_jobs_that_run_then(
    walltime: float | None, nodes: int, begins: float, kind: str
) -> None:
    table = Table()
    table.submit(2, walltime)
    table.start_all()
    rejection = ""
    try:
        table.reserve(nodes, begins)
    except RequestRejected as error:
        rejection = error.kind
    assert rejection == kind


def test_reservations_overlap_in_time_on_other_nodes_only() -> None:
    table = Table()
    assert table.reserve(2, name="a") == ["4", "3"]
    assert table.reserve(2, 150, 300, name="b") == ["2", "1"]
    with pytest.raises(RequestRejected, match="0 of its 4 nodes are free then"):
        table.reserve(1, 199, 201, name="c")
    assert table.reserve(4, 300, 400, name="d") == ["4", "3", "2", "1"]
    assert table.reserve(1, 1, 2, name="a") == ["4", "3"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"reservation": "other"}, "there is no other"),
        ({"reservation": NAME, "nodes": 4}, "4 nodes requested, and it has 3"),
        ({"reservation": NAME, "user": "alice"}, "alice may not use"),
        ({"reservation": NAME, "eligible": ["127.0.1.1", "127.0.1.2"], "nodes": 2}, "it has 1 that are eligible"),
    ],
)
def test_job_that_never_gets_reserved_nodes_is_rejected(fields: dict[str, Any], error: str) -> None:
    table = Table()
    table.reserve()
    with pytest.raises(RequestRejected, match=error) as rejection:
        table.submit(**{"nodes": 1, **fields})
    assert rejection.value.kind == "reservation"
    assert not table.queue


def test_reservations_survive_in_their_file(tmp_path: Path) -> None:
    path = str(tmp_path / "reservations.json")
    Table(path).reserve(name="a")
    Table(path).reserve(1, name="b", ends=300)
    assert set(Table(path).reservations) == {"a", "b"}
    assert set(Table(path, nodes=2).reservations) == {"b"}
    Path(path).write_text("[")
    assert Table(path).reservations == {}
    broken = Table(str(tmp_path / "missing" / "file"))
    with pytest.raises(RequestRejected, match="cannot write") as rejection:
        broken.reserve()
    assert (rejection.value.kind, broken.reservations) == ("unavailable", {})


def test_begin_and_end_are_changes() -> None:
    table = Table()
    table.reserve()
    before = table.seq
    assert (table.next_change_s(), table.seq) == (100, before)
    table.now = 100
    assert (table.next_change_s(), table.seq) == (100, before + 1)
    table.now = 200
    assert (table.next_change_s(), table.seq, table.reservations) == (None, before + 2, {})


def test_random_jobs_never_have_foreign_reserved_nodes() -> None:
    for seed in range(60):
        dice, table = random.Random(seed), Table()
        held: dict[str, tuple[float, float, list[str]]] = {}
        for step in range(60):
            table.now += dice.choice([0, 1, 7])
            for job in [job for job in table.running.values() if job.ends_at <= table.now or dice.random() < 0.05]:
                table.end_job(job)
            if dice.random() < 0.4:
                begins = table.now + dice.randrange(40)
                try:
                    name, ends = str(step), begins + dice.randrange(1, 40)
                    held[name] = begins, ends, table.reserve(dice.randrange(1, 5), begins, ends, name)
                except RequestRejected:
                    pass
            walltime = dice.choice([None, *range(1, 60)])
            table.submit(dice.randrange(1, 5), walltime)
            if table.reservations and dice.random() < 0.5:
                reservation = dice.choice(list(table.reservations.values()))
                table.submit(len(reservation.nodes), walltime, reservation=reservation.name)
            table.start_all()
            for job in table.running.values():
                nodes = {node.address[-1] for node in job.nodes}
                for name, (begins, ends, reserved) in held.items():
                    if job.reservation == name:
                        assert nodes <= set(reserved)
                        assert begins <= table.now < ends
                        assert job.ends_at <= ends
                    elif begins <= table.now < ends:
                        assert not nodes & set(reserved)
            assert all(len(node.jobs) <= 1 for node in table.nodes)


@pytest.fixture
async def lrm(site: Site) -> AsyncIterator[LocalLrm]:
    lrm = LocalLrm(site.cluster, "koala-1-")
    await lrm.open()
    yield lrm
    await lrm.close()


@pytest.mark.processes
async def test_reserved_nodes_are_for_their_jobs_only(site: Site, lrm: LocalLrm) -> None:
    order = ReservationOrder(NAME, 3, 0.0, 4e9, [""])
    nodes = await lrm.reserve_nodes(order)
    assert await lrm.reserve_nodes(order) == nodes
    snapshot = await lrm.take_snapshot()
    (report,) = snapshot.reservations
    assert (report.name, report.nodes, report.idle, report.ends) == (NAME, 3, 0, 4e9)
    assert (snapshot.idle, snapshot.background) == (1, 3)
    folder = site.cluster.directory
    submission = LrmSubmission("koala-1-a", 3, ["/bin/sleep", "60"], {}, folder, folder / "out", reservation=NAME)
    await lrm.submit_job(submission)
    assert await lrm.list_reservations("koala-0123456789ab-") == [NAME]
    assert await lrm.list_reservations("koala-1") == []
    (job,) = (await lrm.take_snapshot()).jobs
    assert sorted(job.nodes) == sorted(nodes)
    await lrm.release_reservation(NAME)
    assert (await lrm.take_snapshot()).reservations == ()
    with pytest.raises(SiteRejected, match=f"there is no {NAME}") as rejection:
        await lrm.submit_job(submission)
    assert (rejection.value.fault, rejection.value.field) == (SiteFault.UNSUITABLE, "reservation")


@pytest.mark.processes
def test_reservation_survives_locald(site: Site) -> None:
    site.connection.request("reserve", name=NAME, nodes=2, begins=0, ends=4e9, users=["grid"])
    first = pid_of_locald(site.cluster)
    site.connection.close()
    stop_locald(site.cluster)
    successor = Site(site.cluster)
    assert pid_of_locald(site.cluster) != first
    assert [entry["name"] for entry in successor.list()["reservations"]] == [NAME]
    job = successor.submit("true", nodes=3)
    assert successor.find(job)["state"] == "queued"
    successor.connection.request("unreserve", name=NAME)
    assert successor.wait(job)["exit_code"] == 0
    assert eventually(lambda: math.isclose(successor.list()["idle"], 4))
    successor.connection.close()
