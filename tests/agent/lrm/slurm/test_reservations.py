"""Reservations by ``scontrol``."""

import time
from pathlib import Path

import pytest

from koalapy.agent.lrm.port import ReservationOrder
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

from .conftest import FakeSlurm
from .test_adapter import make_submission

NAME = "koala-0123456789ab-7"
SHOWN = (
    f"ReservationName={NAME} StartTime=2026-11-22T05:24:06 EndTime=2026-11-22T06:24:06 Duration=01:00:00 "
    "Nodes=n[1-2] NodeCnt=2 CoreCnt=4 Features=(null) PartitionName=main Flags= TRES=cpu=4 Users=1500 State=INACTIVE\n"
)
NONE = "No reservations in the system\n"
ORDER = ReservationOrder(NAME, 2, time.time() + 1e6, time.time() + 2e6, ["", "alice"])


def show_after_create(slurm: FakeSlurm, text: str = SHOWN) -> None:
    """Show no reservation until the first is created."""
    original = slurm.run

    async def run(*argv: str, **options: object) -> object:
        if argv[:2] == ("scontrol", "create"):
            answer = await original(*argv, **options)  # type: ignore[arg-type]
            if not answer.code:
                slurm.set_answer("scontrol", text, when="show reservation*")
            return answer
        return await original(*argv, **options)  # type: ignore[arg-type]

    slurm.run = run  # type: ignore[method-assign,assignment]


def created(slurm: FakeSlurm) -> list[str]:
    return [call for call in slurm.list_calls("scontrol") if call.startswith("create")]


async def test_reserve_creates_once_and_returns_nodes(slurm: FakeSlurm) -> None:
    show_after_create(slurm)
    lrm = slurm.make_lrm(options=("--constraint=icelake",), partition="main")
    assert await lrm.reserve_nodes(ORDER) == ["n1", "n2"]
    assert await lrm.reserve_nodes(ORDER) == ["n1", "n2"]
    begin, end = int(ORDER.begins), int(ORDER.ends) + 1
    assert created(slurm) == [
        f"create reservation ReservationName={NAME} StartTime=uts{begin} EndTime=uts{end} NodeCnt=2 "
        "Users=1500,alice Features=icelake PartitionName=main"
    ]
    assert await lrm.list_reservations("koala-0123456789ab-") == [NAME]
    assert await lrm.list_reservations("koala-0123456789ac-") == []


async def test_reserve_from_now_names_no_time_in_the_past(slurm: FakeSlurm) -> None:
    show_after_create(slurm)
    await slurm.make_lrm().reserve_nodes(ReservationOrder(NAME, 2, 1.0, time.time() + 60, [""]))
    assert " StartTime=now " in created(slurm)[0]


BUSY = "Error creating the reservation: Requested nodes are busy"


@pytest.mark.parametrize(
    ("error", "attempts", "hint"),
    [
        (BUSY, 2, "choose another time"),
        ("Error creating the reservation: Access/permission denied", 1, "adminlevel=operator"),
        ("Error creating the reservation: Invalid user id", 1, "adminlevel=operator"),
        ("Error creating the reservation: Something new", 1, "choose another time"),
    ],
)
async def test_reserve_rejected_by_slurm_has_its_words_and_remedy(
    slurm: FakeSlurm, error: str, attempts: int, hint: str
) -> None:
    slurm.set_answer("scontrol", "", errors=f"{error}\n", code=1, when="create *")
    with pytest.raises(SiteRejected, match=error) as rejection:
        await slurm.make_lrm(partition="main,other").reserve_nodes(ORDER)
    assert hint in rejection.value.hint
    assert len(created(slurm)) == attempts


async def test_reserve_takes_next_partition_if_first_has_too_few_nodes(slurm: FakeSlurm) -> None:
    show_after_create(slurm)
    slurm.set_answer("scontrol", "", errors=f"{BUSY}\n", code=1, when="create *PartitionName=main")
    assert await slurm.make_lrm(partition="main,other").reserve_nodes(ORDER) == ["n1", "n2"]
    assert len(created(slurm)) == 2


async def test_reserve_of_fewer_nodes_than_ordered_is_undone(slurm: FakeSlurm) -> None:
    show_after_create(slurm, SHOWN.replace("n[1-2]", "n1"))
    with pytest.raises(SiteRejected, match="1 of 2 are free then"):
        await slurm.make_lrm(partition="main,other").reserve_nodes(ORDER)
    calls = [call.split()[0] for call in slurm.list_calls("scontrol") if not call.startswith("show")]
    assert calls == ["create", "delete"] * 2, "in each partition"


async def test_reserve_without_controller_is_unavailable(slurm: FakeSlurm) -> None:
    error = "Unable to contact slurm controller"
    slurm.set_answer("scontrol", "", errors=f"{error}\n", code=1, when="create *")
    with pytest.raises(SiteUnavailable, match=error):
        await slurm.make_lrm().reserve_nodes(ORDER)


async def test_reserve_within_configured_reservation_is_rejected(slurm: FakeSlurm) -> None:
    slurm.set_answer("scontrol", SHOWN.replace(NAME, "r1"), when="show reservation*")
    with pytest.raises(SiteRejected, match="run in Slurm's reservation r1"):
        await slurm.make_lrm(options=("--reservation=r1",)).reserve_nodes(ORDER)
    assert created(slurm) == []


async def test_reserve_of_excluded_nodes_is_undone(slurm: FakeSlurm) -> None:
    show_after_create(slurm)
    with pytest.raises(SiteRejected, match="reserved n2, which"):
        await slurm.make_lrm(options=("--exclude=n[2-3]",)).reserve_nodes(ORDER)
    assert slurm.list_calls("scontrol")[-1] == f"delete ReservationName={NAME}"


@pytest.mark.parametrize(
    ("shown", "error", "raised"),
    [
        (NONE, "Error deleting reservation: Requested reservation is invalid", None),
        ("", "Error deleting reservation: Requested reservation is in use", SiteUnavailable),
        ("slurm_load: ?", "Error deleting reservation: Requested reservation is in use", SiteUnavailable),
        (SHOWN, "", None),
        (SHOWN, "Error deleting reservation: Requested reservation is in use", SiteUnavailable),
        (SHOWN, "Error deleting reservation: Invalid user id", SiteRejected),
        (SHOWN, "Unable to contact slurm controller", SiteUnavailable),
    ],
)
async def test_release_of_unknown_reservation_is_no_error(
    slurm: FakeSlurm, shown: str, error: str, raised: type[Exception] | None
) -> None:
    slurm.set_answer("scontrol", shown, when="show reservation*")
    slurm.set_answer("scontrol", "", errors=error, code=bool(error), when="delete *")
    lrm = slurm.make_lrm()
    if raised is None:
        await lrm.release_reservation(NAME)
    else:
        with pytest.raises(raised):
            await lrm.release_reservation(NAME)


@pytest.mark.parametrize("text", ["", "?\n", "slurm_load_reservations: what"])
async def test_list_without_an_answer_about_reservations_is_unavailable(slurm: FakeSlurm, text: str) -> None:
    slurm.set_answer("scontrol", NONE, when="show reservation*")
    assert await slurm.make_lrm().list_reservations("koala-") == []
    slurm.set_answer("scontrol", text, when="show reservation*")
    with pytest.raises(SiteUnavailable, match="not about reservations"):
        await slurm.make_lrm().list_reservations("koala-")


async def test_job_names_its_reservation_last(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.set_answer("scontrol", SHOWN.replace(NAME, "r1") + SHOWN, when="show reservation*")
    lrm = slurm.make_lrm(options=("--reservation=r1",))
    await lrm.submit_job(make_submission(tmp_path, reservation=NAME))
    assert f" --reservation=r1 --reservation={NAME} " in slurm.list_calls("sbatch")[0]


@pytest.mark.parametrize(
    ("begins_in", "walltime", "limit"),
    [(100, None, "0:59:00"), (100, 120.0, "0:02:00"), (-1800, 7200.0, "0:29:00"), (-3590, 7200.0, "0:01:00")],
)
async def test_job_in_reservation_has_a_time_limit_within_it(
    slurm: FakeSlurm, tmp_path: Path, begins_in: float, walltime: float | None, limit: str
) -> None:
    begins = time.time() + begins_in
    times = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment)) for moment in (begins, begins + 3600)]
    shown = SHOWN.replace("2026-11-22T05:24:06", times[0]).replace("2026-11-22T06:24:06", times[1])
    slurm.set_answer("scontrol", shown, when="show reservation*")
    await slurm.make_lrm().submit_job(make_submission(tmp_path, reservation=NAME, walltime=walltime))
    assert f" --time={limit} " in slurm.list_calls("sbatch")[0]


async def test_job_of_unknown_reservation_is_rejected(slurm: FakeSlurm, tmp_path: Path) -> None:
    with pytest.raises(SiteRejected, match=f"there is no reservation {NAME}") as rejection:
        await slurm.make_lrm().submit_job(make_submission(tmp_path, reservation=NAME))
    assert rejection.value.fault is SiteFault.UNSUITABLE


@pytest.mark.parametrize(("reservation", "fault"), [(NAME, SiteFault.UNSUITABLE), ("", SiteFault.SITE)])
async def test_job_rejected_for_its_reservation_leaves_cluster_usable(
    slurm: FakeSlurm, tmp_path: Path, reservation: str, fault: SiteFault
) -> None:
    slurm.set_answer("scontrol", SHOWN, when="show reservation*")
    error = "sbatch: error: Batch job submission failed: Requested reservation is invalid\n"
    slurm.set_answer("sbatch", "", errors=error, code=1)
    with pytest.raises(SiteRejected) as rejection:
        await slurm.make_lrm().submit_job(make_submission(tmp_path, reservation=reservation))
    assert rejection.value.fault is fault


@pytest.mark.parametrize(
    ("error", "result", "hint"),
    [
        ("Error creating the reservation: Invalid user id", "not permitted", "adminlevel=operator"),
        ("Error creating the reservation: Invalid time specified", "permitted to 1500", ""),
        ("", "permitted to 1500", ""),
    ],
)
async def test_check_shows_right_to_reserve(slurm: FakeSlurm, error: str, result: str, hint: str) -> None:
    slurm.set_answer("scontrol", "", errors=error, code=bool(error), when="create *")
    finding = {entry.subject: entry for entry in await slurm.make_lrm().check_setup()}["reservations"]
    assert (finding.ok, result in finding.result, hint in finding.hint) == (True, True, True)
    deletions = [call for call in slurm.list_calls("scontrol") if call.startswith("delete")]
    assert deletions == ([] if error else ["delete ReservationName=koala-check"])
