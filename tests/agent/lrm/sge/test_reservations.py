"""Advance reservations by ``qrsub``."""

import time
from pathlib import Path

import pytest

from koalapy.agent.lrm.port import ReservationOrder
from koalapy.agent.lrm.sge.adapter import SgeLrm
from koalapy.agent.lrm.sge.answers import AdvanceReservation, read_reservations
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

from .conftest import OWNER, FakeGridEngine, RememberingControl
from .test_adapter import make_submission

NAME = "koala-0123456789ab-7"
SUMMARY = """<?xml version='1.0'?>
<qrstat xmlns:xsd="http://www.w3.org/2001/XMLSchema">
   <ar_summary>
      <id>{id}</id>
      <name>{name}</name>
      <owner>koala</owner>
      <state>{state}</state>
      <start_time>2037-11-29T12:00:00</start_time>
      <end_time>2037-11-29T13:00:00</end_time>
      <duration>01:00:00</duration>
{hosts}   </ar_summary>
</qrstat>
"""
HOSTS = """      <granted_slots_list>
         <granted_slots  queue_instance="all.q@h2-1" slots="2"/>
         <granted_slots  queue_instance="all.q@h2-2" slots="2"/>
      </granted_slots_list>
"""
NONE = "<?xml version='1.0'?>\n<qrstat xmlns:xsd=\"http://www.w3.org/2001/XMLSchema\">\n</qrstat>\n"
BEGIN = time.mktime((2037, 11, 29, 12, 0, 0, 0, 0, -1))
ORDER = ReservationOrder(NAME, 2, BEGIN, BEGIN + 3600, ["", "alice"])


def show(engine: FakeGridEngine, name: str = NAME, state: str = "w") -> None:
    engine.set_answer("qrstat -u * -xml", SUMMARY.format(id=3, name=name, state=state, hosts=""))
    engine.set_answer("qrstat -ar 3 -xml", SUMMARY.format(id=3, name=name, state=state, hosts=HOSTS))


@pytest.fixture
def lrm(engine: FakeGridEngine, control: RememberingControl) -> SgeLrm:
    for name in ("qrstat", "qrsub", "qrdel"):
        (engine.programs / name).touch()
        (engine.programs / name).chmod(0o755)
    engine.set_answer("qrstat -u * -xml", NONE)
    return engine.make_lrm(control)


async def test_reserve_asks_for_whole_nodes(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    original = engine.run

    async def run(*argv: str, **options: object) -> object:
        if argv[0].endswith("qrsub"):
            show(engine)
        return await original(*argv, **options)  # type: ignore[arg-type]

    engine.set_answer("qrsub", "Your advance reservation 3 has been granted\n")
    lrm._commands._run_as = lambda user, *argv, **options: run(*argv, **options)  # type: ignore[assignment]
    assert await lrm.reserve_nodes(ORDER) == ["h2-1", "h2-2"]
    assert await lrm.reserve_nodes(ORDER) == ["h2-1", "h2-2"]
    assert engine.list_calls("qrsub") == [
        f"qrsub -N {NAME} -e 203711291300.00 -a 203711291200.00 -pe koala 4 -q all.q -u {OWNER},alice"
    ]
    assert await lrm.list_reservations("koala-0123456789ab-") == [NAME]
    assert len(engine.list_calls("qrstat -ar")) == 1


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("error: no suitable queues\n", "choose another time"),
        ('error: user "koala" has no permission to create an advance reservation\n', "qconf -au"),
    ],
)
async def test_reserve_rejected_by_grid_engine_has_its_words_and_remedy(
    lrm: SgeLrm, engine: FakeGridEngine, text: str, hint: str
) -> None:
    engine.set_answer("qrsub", text, 1)
    with pytest.raises(SiteRejected, match=text.strip()) as rejection:
        await lrm.reserve_nodes(ORDER)
    assert hint in rejection.value.hint


async def test_reserve_within_configured_reservation_is_rejected(
    lrm: SgeLrm, engine: FakeGridEngine, control: RememberingControl
) -> None:
    with pytest.raises(SiteRejected, match="run in an advance reservation"):
        await engine.make_lrm(control, native_specification="-ar 5").reserve_nodes(ORDER)
    assert engine.list_calls("qrsub") == []


async def test_release_deletes_unused_reservation(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    await lrm.release_reservation(NAME)
    show(engine)
    engine.set_answer("qrdel 3", "koala has deleted advance reservation 3\n")
    await lrm.release_reservation(NAME)
    assert engine.list_calls("qrdel") == ["qrdel 3"]


async def test_release_while_jobs_use_reservation_is_unavailable(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    show(engine)
    engine.show_recording("busy.xml")
    jobs = ",".join(job.id for job in await lrm._list_jobs("prs") if job.name.startswith("koala-"))
    engine.set_answer(f"qstat -j {jobs}", "job_number:    7\nar_id:                      3\n")
    with pytest.raises(SiteUnavailable, match="jobs use the reservation"):
        await lrm.release_reservation(NAME)
    assert engine.list_calls("qrdel") == []


async def test_job_names_the_number_of_its_reservation(
    lrm: SgeLrm, engine: FakeGridEngine, control: RememberingControl, tmp_path: Path
) -> None:
    show(engine)
    submission = make_submission(tmp_path, reservation=NAME)
    await lrm.submit_job(submission)
    assert control.native[0][control.native[0].index("-ar") :][:2] == ["-ar", "3"]
    engine.set_answer("qrstat -u * -xml", NONE)
    with pytest.raises(SiteRejected, match="there is no advance reservation") as rejection:
        await lrm.submit_job(submission)
    assert rejection.value.fault is SiteFault.UNSUITABLE


@pytest.mark.parametrize(
    ("now", "longest"), [(BEGIN - 1e5, 3520.0), (BEGIN + 1800, 1720.0), (BEGIN + 3599, 1.0), (BEGIN + 1e5, 1.0)]
)
def test_job_in_reservation_has_a_limit_within_it(now: float, longest: float) -> None:
    assert AdvanceReservation("3", NAME, BEGIN, BEGIN + 3600).longest_walltime(now) == longest


async def test_job_in_reservation_has_a_limit_even_without_walltime(
    lrm: SgeLrm, engine: FakeGridEngine, control: RememberingControl, tmp_path: Path
) -> None:
    show(engine)
    for walltime in (None, 10.0, 1e6):
        await lrm.submit_job(make_submission(tmp_path, reservation=NAME, walltime=walltime))
    limits = [float(word[5:]) for native in control.native for word in native if word.startswith("h_rt=")]
    longest = lrm._reservations.known[0].longest_walltime(time.time())
    assert limits == [pytest.approx(longest, abs=30), min(10.0, longest), pytest.approx(longest, abs=30)]


async def test_snapshot_lists_reservations(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    show(engine)
    snapshot = await lrm.take_snapshot()
    (report,) = snapshot.reservations
    assert (report.name, report.nodes, report.idle) == (NAME, 2, 2)
    assert (report.begins, report.ends) == (BEGIN, BEGIN + 3600)


@pytest.mark.parametrize(
    ("list_name", "text", "result"),
    [
        ("arusers", f"name    arusers\nentries {OWNER},bob\n", "permitted to"),
        ("arusers", "entries NONE\n", "not permitt"),
    ],
)
async def test_check_shows_right_to_reserve(
    lrm: SgeLrm, engine: FakeGridEngine, list_name: str, text: str, result: str
) -> None:
    engine.set_answer(f"qconf -su {list_name}", text)
    finding = await lrm._reservations.check_right()
    assert (finding.ok, finding.result.startswith(result), bool(finding.hint)) == (True, True, "not" in result)


def test_read_reservations_skips_what_is_over_or_unreadable() -> None:
    for state, count in (("w", 1), ("r", 1), ("E", 1), ("x", 0), ("d", 0)):
        assert len(read_reservations(SUMMARY.format(id=3, name=NAME, state=state, hosts="").encode())) == count
    assert read_reservations(SUMMARY.format(id="?", name=NAME, state="r", hosts="").encode()) == []
    with pytest.raises(SiteUnavailable, match="not XML"):
        read_reservations(b"error: commlib error")
