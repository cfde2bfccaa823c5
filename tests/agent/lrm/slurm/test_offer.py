"""Idle nodes for grid jobs, by partitions, limits, reservations and backfill."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.lrm.port import LrmJob, LrmJobState, LrmSnapshot
from koalapy.agent.lrm.slurm.adapter import OFFER_MAX_AGE_S, make_snapshot
from koalapy.agent.lrm.slurm.answers import SlurmNode
from koalapy.agent.lrm.slurm.commands import SlurmCommands
from koalapy.agent.lrm.slurm.limits import Reservation, read_reservations
from koalapy.agent.lrm.slurm.offer import Offer, Partition, list_partitions, option_value, read_partitions
from koalapy.model.errors import SiteRejected
from koalapy.model.job_sizes import JobSizes
from tests.virtual_time import VirtualClock, VirtualTimeLoop

from .conftest import COLUMNS, FakeSlurm, recorded_queue
from .test_adapter import make_submission, own_account

# output of Slurm 22.05.8
PARTITIONS = "short|up|1|1:00:00\nlong*|up|1-infinite|infinite\nshut|down|1-infinite|infinite\n"
RESERVATIONS = """\
ReservationName=r1 StartTime=2026-11-22T05:24:06 EndTime=2026-11-22T06:24:06 Duration=01:00:00 Nodes=n[1-2] NodeCnt=2 \
CoreCnt=2 Features=(null) PartitionName=(null) Flags=SPEC_NODES TRES=cpu=2 Users=root State=ACTIVE Watts=n/a
ReservationName=m1 StartTime=2026-11-22T05:24:06 EndTime=2026-11-22T06:24:06 Duration=01:00:00 Nodes=n3 NodeCnt=1 \
Features=(null) PartitionName=(null) Flags=MAINT,SPEC_NODES TRES=cpu=1 Users=root State=ACTIVE Watts=n/a
ReservationName=later StartTime=2026-11-22T06:24:06 EndTime=2026-11-22T07:24:06 Duration=01:00:00 Nodes=n4 NodeCnt=1 \
Features=(null) PartitionName=(null) Flags=FLEX,SPEC_NODES TRES=cpu=1 Users=root State=INACTIVE Watts=n/a
"""
CONFIGURATION = (
    "BatchStartTimeout       = 10 sec\nMessageTimeout          = 10 sec\nResumeTimeout           = 300 sec\n"
)


def show_partitions(slurm: FakeSlurm, states: Mapping[str, str], partitions: Mapping[str, str] | None = None) -> None:
    """Set nodes with these states (a word and flags), in these partitions or in main."""
    nodes = [
        {
            "name": name,
            "state": text.split()[0],
            "state_flags": text.split()[1:],
            "partitions": (partitions or {}).get(name, "main").split(),
        }
        for name, text in states.items()
    ]
    slurm.set_answer("sinfo", json.dumps({"nodes": nodes, "errors": []}), when="*--json*")
    slurm.set_answer("squeue", "", when=COLUMNS)


def add_waiting_job(slurm: FakeSlurm, reason: str, *, state: str = "PENDING", description: str = "") -> None:
    """Add a waiting grid job of three nodes with this reason."""
    slurm.set_answer("squeue", recorded_queue({169}, state=state, reason=description or reason), when=COLUMNS)


async def take_snapshot(slurm: FakeSlurm, partition: str | None = "main", *options: str) -> LrmSnapshot:
    return await slurm.make_lrm(partition=partition, options=options).take_snapshot()


def node_counts(snapshot: LrmSnapshot) -> tuple[int, int, int, int]:
    return snapshot.total, snapshot.idle, snapshot.background, snapshot.down


STATES = {"n1": "idle RESERVED", "n2": "idle RESERVED", "n3": "idle MAINTENANCE RESERVED", "n4": "idle"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), (4, 1, 3, 0)),
        (("--reservation=r1",), (2, 2, 0, 0)),
        (("--reservation", "m1"), (1, 1, 0, 0)),
        (("--qos=low", "--reservation=r1,m1"), (3, 3, 0, 0)),
        (("--reservation=m1", "--reservation=r1"), (2, 2, 0, 0)),
        (("--reservation=r1,later",), (4, 3, 1, 0)),  # a flexible reservation also allows other nodes
    ],
)
async def test_reserved_nodes_are_idle_with_reservation_only(
    slurm: FakeSlurm, options: tuple[str, ...], expected: tuple[int, int, int, int]
) -> None:
    show_partitions(slurm, STATES)
    slurm.set_answer("scontrol", RESERVATIONS, when="show reservation*")
    snapshot = await take_snapshot(slurm, "main", *options)
    assert (node_counts(snapshot), snapshot.submit_error) == (expected, "")


@pytest.mark.parametrize(
    ("name", "error"),
    [("later", "reservation later begins at 2026-11-22T06:24:06"), ("gone", "there is no reservation gone")],
)
async def test_inactive_reservation_is_a_submit_error(slurm: FakeSlurm, name: str, error: str) -> None:
    show_partitions(slurm, STATES)
    slurm.set_answer("scontrol", RESERVATIONS, when="show reservation*")
    assert (await take_snapshot(slurm, "main", f"--reservation={name}")).submit_error == error


async def test_partition_that_is_down_has_no_nodes(slurm: FakeSlurm) -> None:
    slurm.set_answer("sinfo", PARTITIONS, when="*%P*")
    show_partitions(slurm, {"n1": "idle", "n2": "idle"}, {"n1": "shut", "n2": "shut"})
    snapshot = await take_snapshot(slurm, "shut")
    assert (node_counts(snapshot), snapshot.submit_error) == ((2, 0, 0, 2), "partition shut is DOWN")


async def test_partition_that_comes_up_has_nodes(slurm: FakeSlurm) -> None:
    slurm.set_answer("sinfo", PARTITIONS, when="*%P*")
    show_partitions(slurm, {"n1": "idle"}, {"n1": "shut"})
    lrm = slurm.make_lrm(partition="shut")
    assert (await lrm.take_snapshot()).idle == 0
    slurm.set_answer("sinfo", PARTITIONS.replace("down", "up"), when="*%P*")
    add_waiting_job(slurm, "PartitionDown")
    await lrm.take_snapshot()
    snapshot = await lrm.take_snapshot()
    assert (snapshot.idle, snapshot.submit_error) == (1, "")


async def test_snapshot_with_an_old_offer_reads_the_partitions_anew(
    slurm: FakeSlurm, virtual_loop: VirtualTimeLoop
) -> None:
    slurm.set_answer("sinfo", PARTITIONS, when="*%P*")
    show_partitions(slurm, {"n1": "idle"}, {"n1": "shut"})
    lrm = slurm.make_lrm(partition="shut", clock=VirtualClock(virtual_loop))
    await lrm.take_snapshot()
    slurm.set_answer("sinfo", PARTITIONS.replace("down", "up"), when="*%P*")
    assert (await lrm.take_snapshot()).idle == 0
    virtual_loop.jump(OFFER_MAX_AGE_S + 1)
    assert (await lrm.take_snapshot()).idle == 1


BOTH = {"n1": "short long", "n2": "short long", "n3": "long", "n4": "long shut"}


@pytest.mark.parametrize(
    ("partition", "expected", "notice"),
    [
        ("short", (2, 1, 0, 0), "a job in partition short gets at most 1 of its 2 nodes"),
        ("short,long", (4, 4, 0, 0), ""),
        ("short,shut", (3, 1, 0, 1), "a job in partitions short,shut gets at most 1 of its 3 nodes"),
        (None, (4, 4, 0, 0), ""),
    ],
)
async def test_idle_nodes_respect_limits_of_partitions(
    slurm: FakeSlurm, partition: str | None, expected: tuple[int, int, int, int], notice: str
) -> None:
    slurm.set_answer("sinfo", PARTITIONS, when="*%P*")
    show_partitions(slurm, dict.fromkeys(BOTH, "idle"), BOTH)
    snapshot = await take_snapshot(slurm, partition)
    assert (node_counts(snapshot), snapshot.notices) == (expected, (notice,) if notice else ())


async def test_submit_passes_several_partitions(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.set_answer("sinfo", PARTITIONS, when="*%P*")
    show_partitions(slurm, dict.fromkeys(BOTH, "idle"), BOTH)
    await slurm.make_lrm(partition="short,long").submit_job(make_submission(tmp_path, nodes=4))
    assert "--partition=short,long" in slurm.list_calls("sbatch")[0]


async def test_planned_nodes_are_idle_for_queued_grid_jobs(slurm: FakeSlurm) -> None:
    show_partitions(slurm, dict.fromkeys(("n1", "n2", "n3", "n4", "n5"), "idle PLANNED") | {"n6": "idle"})
    assert node_counts(await take_snapshot(slurm)) == (6, 1, 5, 0)
    add_waiting_job(slurm, "Resources")
    assert node_counts(await take_snapshot(slurm)) == (6, 4, 2, 0)


@pytest.mark.parametrize(
    ("reason", "description", "expected"),
    [
        ("Resources", "", "Slurm says Resources (it waits for nodes)"),
        ("Priority", "", "Slurm says Priority (jobs of higher priority come first)"),
        ("QOSMaxJobsPerUserLimit", "", "Slurm says QOSMaxJobsPerUserLimit (a limit of its quality of service)"),
        ("AssocGrpNodeLimit", "", "Slurm says AssocGrpNodeLimit (a limit of its account)"),
        ("Frostbite", "", "Slurm says Frostbite"),
        ("None", "", ""),
        (
            "ReqNodeNotAvail",
            "ReqNodeNotAvail, UnavailableNodes:n1",
            "Slurm says ReqNodeNotAvail, UnavailableNodes:n1 "
            "(nodes that it needs are reserved for other jobs, or not up)",
        ),
    ],
)
async def test_queued_job_has_reason(slurm: FakeSlurm, reason: str, description: str, expected: str) -> None:
    show_partitions(slurm, {"n1": "idle"})
    add_waiting_job(slurm, reason, description=description)
    (job,) = (await take_snapshot(slurm)).jobs
    assert (job.state, job.reason, job.fault, job.starting) == (LrmJobState.QUEUED, expected, None, 0.0)


async def test_limit_of_one_of_several_partitions_is_no_fault(slurm: FakeSlurm) -> None:
    slurm.set_answer("sinfo", PARTITIONS, when="*%P*")
    show_partitions(slurm, dict.fromkeys(BOTH, "idle"), BOTH)
    add_waiting_job(slurm, "PartitionTimeLimit")
    (job,) = (await take_snapshot(slurm, "short,long")).jobs
    assert (job.fault, job.reason) == (None, "Slurm says PartitionTimeLimit")
    (job,) = (await take_snapshot(slurm, "short")).jobs
    assert job.fault == "unsuitable"


@pytest.mark.parametrize(
    ("state", "reason", "starting"),
    [
        ("CONFIGURING", "None", 310.0),
        ("PENDING", "ReqNodeNotAvail, UnavailableNodes:n[1-2]", 310.0),
        ("PENDING", "ReqNodeNotAvail, UnavailableNodes:n[1-3]", 0.0),
        ("PENDING", "ReqNodeNotAvail, UnavailableNodes:n[", 0.0),
        ("RUNNING", "None", 0.0),
    ],
)
async def test_starting_nodes_have_slurms_timeout(slurm: FakeSlurm, state: str, reason: str, starting: float) -> None:
    slurm.set_answer("scontrol", CONFIGURATION, when="show config")
    show_partitions(slurm, {"n1": "allocated NOT_RESPONDING POWERING_UP", "n2": "down REBOOT_ISSUED", "n3": "down"})
    add_waiting_job(slurm, "None", state=state, description=reason)
    (job,) = (await take_snapshot(slurm)).jobs
    assert job.starting == starting
    assert bool(job.reason) is (state != "RUNNING")


def test_read_partitions_of_sinfo() -> None:
    assert read_partitions(PARTITIONS + "draining|drain|2-4\n\nodd\n") == {
        "short": Partition("short", "UP", False, 1, default_walltime=3600),
        "long": Partition("long", "UP", True, None),
        "shut": Partition("shut", "DOWN", False, None),
        "draining": Partition("draining", "DRAIN", False, 4, 2),
    }


@pytest.mark.parametrize(
    ("size", "minimum", "maximum"),
    [
        ("4-infinite", 4, None),
        ("8", 8, 8),
        ("1K-1.5K", 1024, 1536),
        ("1-1.50M", 1, 1572864),
        ("infinite", 1, None),
        ("", 1, None),
        ("?", 1, None),
    ],
)
def test_partition_has_its_least_and_most_nodes(size: str, minimum: int, maximum: int | None) -> None:
    partition = read_partitions(f"long|up|{size}\n")["long"]
    assert (partition.min_nodes, partition.max_nodes) == (minimum, maximum)


async def test_submit_rejected_for_size_reads_limits_again(slurm: FakeSlurm, tmp_path: Path) -> None:
    adapter = slurm.make_lrm(partition="main")
    slurm.set_answer("sbatch", "", errors="sbatch: error: Node count specification invalid\n", code=1)
    with pytest.raises(SiteRejected) as caught:
        await adapter.submit_job(make_submission(tmp_path, nodes=2))
    assert (caught.value.fault, "MinNodes" in caught.value.hint) == ("unsuitable", True)
    slurm.set_answer("sinfo", "main*|up|3-infinite\n", when="*%P*")
    with pytest.raises(SiteRejected, match="at least 3"):
        await adapter.submit_job(make_submission(tmp_path, nodes=2))


@pytest.mark.parametrize(("nodes", "size"), [(1, 1), (2, 2), (3, 8), (7, 8), (8, 8), (64, 64), (65, 65)])
def test_next_size_is_one_that_a_partition_takes(nodes: int, size: int) -> None:
    offer = Offer((Partition("a", max_nodes=2), Partition("b", max_nodes=64, min_nodes=8), Partition("c", "DOWN")))
    assert offer.next_size(nodes) == size


async def test_snapshot_of_partition_with_min_nodes_has_notice(slurm: FakeSlurm) -> None:
    slurm.set_answer("sinfo", "main*|up|3-infinite\n", when="*%P*")
    show_partitions(slurm, {"n1": "idle", "n2": "idle", "n3": "allocated", "n4": "idle"})
    snapshot = await take_snapshot(slurm)
    assert (snapshot.idle, snapshot.background, snapshot.notices) == (
        3,
        1,
        ("a job in partition main gets at least 3 nodes, and smaller ones are rejected",),
    )
    show_partitions(slurm, {"n1": "idle", "n2": "idle", "n3": "allocated", "n4": "allocated"})
    assert node_counts(snapshot := await take_snapshot(slurm)) == (4, 0, 2, 0)
    assert snapshot.withheld == 2, "local users have no idle nodes"


async def test_sinfo_has_option_noconvert(slurm: FakeSlurm) -> None:
    slurm.set_answer("sinfo", "main*|up|1-1K\n", when="*%P*")
    slurm.set_answer("sinfo", "main*|up|1-1030\n", when="*--noconvert*%P*")
    assert (await list_partitions(SlurmCommands(JobFolders.for_own_account(slurm.run).run_as)))[
        "main"
    ].max_nodes == 1030


def test_read_reservations_of_scontrol() -> None:
    reservations = read_reservations(RESERVATIONS + "No reservations in the system\n")
    assert all(entry.ends_at == (entry.begins_at or 0) + 3600 for entry in reservations.values())
    assert {name: replace(entry, begins_at=None, ends_at=None) for name, entry in reservations.items()} == {
        "r1": Reservation("r1", True, frozenset({"n1", "n2"}), "2026-11-22T05:24:06"),
        "m1": Reservation("m1", True, frozenset({"n3"}), "2026-11-22T05:24:06"),
        "later": Reservation("later", False, frozenset({"n4"}), "2026-11-22T06:24:06", flexible=True),
    }


def test_read_reservations_skips_invalid_others() -> None:
    odd = "ReservationName=odd Nodes=n[3- State=ACTIVE\n"
    assert set(read_reservations(odd + RESERVATIONS)) == {"r1", "m1", "later"}


@pytest.mark.parametrize("text", [["--reservation"], [], ["--reservations=x"], ["-r", "x"]])
def test_option_value_without_option_is_none(text: list[str]) -> None:
    assert option_value(text, "--reservation") is None


@given(
    st.lists(st.tuples(st.sampled_from(["IDLE", "IDLE PLANNED", "ALLOCATED", "DOWN"]), st.sets(st.sampled_from("ab")))),
    st.tuples(st.booleans(), st.none() | st.integers(1, 4), st.integers(1, 3)),
    st.integers(0, 5),
)
def test_idle_nodes_never_exceed_one_job(
    states: list[tuple[str, set[str]]], limits: tuple[bool, int | None, int], requested: int
) -> None:
    nodes = [
        SlurmNode(f"n{i}", words=frozenset(w.split()), partitions=frozenset(p)) for i, (w, p) in enumerate(states) if p
    ]
    up, maximum, minimum = limits
    first = Partition("a", "UP" if up else "DOWN", max_nodes=maximum, min_nodes=minimum)
    snapshot = make_snapshot(
        nodes, [LrmJob("1", "koala-a", LrmJobState.QUEUED)], Offer((first, Partition("b"))), requested
    )
    within = [sum(name in node.partitions and "IDLE" in node.words for node in nodes) for name in "ab"]
    assert snapshot.idle <= max(min(within[0], maximum or len(nodes)) if up else 0, within[1])
    assert snapshot.total == snapshot.idle + snapshot.withheld + snapshot.background + snapshot.down


def limit_lines(used: str) -> str:
    account = f"Account=grid UserName= Partition= ParentAccount=root(1) GrpTRES=cpu=N(0),node=3({used}) MaxTRESPJ="
    user = f"Account=grid UserName={own_account()}(1500) Partition= DefAssoc=Yes GrpTRES=node=N(0) MaxTRESPJ="
    return f"ClusterName=west {account}\nClusterName=west {user}\n"


async def test_snapshot_within_account_limit_withholds_other_nodes(slurm: FakeSlurm) -> None:
    config = "AccountingStorageType = accounting_storage/slurmdbd\nAccountingStorageEnforce = associations,limits,qos\n"
    slurm.set_answer("scontrol", config, when="show config")
    slurm.set_answer("scontrol", limit_lines("1"), when="show assoc_mgr*")
    slurm.set_answer("sinfo", "main*|up|2-infinite|n/a|infinite\n", when="*%P*")
    show_partitions(slurm, dict.fromkeys(("n1", "n2", "n3", "n4"), "idle"))
    lrm = slurm.make_lrm()
    snapshot = await lrm.take_snapshot()
    assert (snapshot.idle, snapshot.withheld, snapshot.job_sizes) == (2, 2, (JobSizes(2, 3, "main"),))
    assert "the limits of its account leave 2 nodes to further jobs" in snapshot.notices
    slurm.set_answer("scontrol", limit_lines("2"), when="show assoc_mgr*")
    assert (await lrm.take_snapshot()).idle == 0
    slurm.set_answer("scontrol", config.replace(",limits", ""), when="show config")
    assert (await slurm.make_lrm().take_snapshot()).idle == 4


async def test_snapshot_reports_present_and_coming_reservations(slurm: FakeSlurm) -> None:
    slurm.set_answer("scontrol", RESERVATIONS, when="show reservation*")
    slurm.set_answer("sinfo", "main*|up|1-infinite|1:00:00|2-00:00:00\n", when="*%P*")
    show_partitions(
        slurm, {"n1": "idle reserved", "n2": "idle reserved", "n3": "idle maintenance", "n4": "idle", "n5": "down"}
    )
    snapshot = await take_snapshot(slurm)
    reports = [(r.name, r.nodes, r.idle, r.ends - r.begins, r.default_walltime) for r in snapshot.reservations]
    assert reports == [("m1", 1, 0, 3600, 3600), ("r1", 2, 0, 3600, 3600), ("later", 1, 1, 3600, 3600)]
    assert (snapshot.idle, snapshot.background, snapshot.down) == (1, 3, 1)


async def test_suspended_job_says_so(slurm: FakeSlurm) -> None:
    slurm.set_answer("squeue", recorded_queue({167}, state="SUSPENDED"), when=COLUMNS)
    (job,) = (await take_snapshot(slurm)).jobs
    assert (job.state, job.reason) == (LrmJobState.RUNNING, "suspended by Slurm")


@pytest.mark.parametrize(
    ("reason", "limited"), [("AssocGrpNodeLimit", True), ("QOSMaxNodePerUserLimit", True), ("Resources", False)]
)
async def test_job_that_waits_for_account_limit_is_limited(slurm: FakeSlurm, reason: str, limited: bool) -> None:
    slurm.set_answer("squeue", recorded_queue({169}, state="PENDING", reason=reason), when=COLUMNS)
    (job,) = (await take_snapshot(slurm)).jobs
    assert job.limited == limited


async def test_rejected_size_says_whether_it_is_too_small_or_too_large(slurm: FakeSlurm, tmp_path: Path) -> None:
    adapter = slurm.make_lrm(partition="main")
    slurm.set_answer("sbatch", "", errors="sbatch: error: QOSMaxNodePerJobLimit\n", code=1)
    with pytest.raises(SiteRejected) as caught:
        await adapter.submit_job(make_submission(tmp_path, nodes=2))
    assert (caught.value.fault, caught.value.sizes) == ("unsuitable", "many")
    with pytest.raises(SiteRejected) as caught:
        await adapter.submit_job(make_submission(tmp_path, nodes=5))
    assert (caught.value.fault, caught.value.sizes) == ("limit", "many")
    slurm.set_answer("sinfo", "main*|up|3-infinite\n", when="*%P*")
    slurm.set_answer("sbatch", "", errors="sbatch: error: Node count specification invalid\n", code=1)
    with pytest.raises(SiteRejected) as caught:
        await adapter.submit_job(make_submission(tmp_path, nodes=2))
    assert (caught.value.fault, caught.value.sizes) == ("unsuitable", "few")


async def test_rejection_by_limits_of_all_partitions_says_which_sizes(slurm: FakeSlurm, tmp_path: Path) -> None:
    """As with ``EnforcePartLimits=ALL``."""
    slurm.set_answer("sinfo", "main*|up|3-infinite\nother|up|1-4\n", when="*%P*")
    slurm.set_answer("sbatch", "", errors="sbatch: error: Node count specification invalid\n", code=1)
    with pytest.raises(SiteRejected) as caught:
        await slurm.make_lrm(partition="main,other").submit_job(make_submission(tmp_path, nodes=2))
    assert (caught.value.fault, caught.value.sizes) == ("unsuitable", "few")
