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
      <owner>{owner}</owner>
      <state>{state}</state>
      <start_time>2037-11-29T12:00:00</start_time>
      <end_time>2037-11-29T13:00:00</end_time>
      <duration>01:00:00</duration>
{hosts}      <acl_list>
         <acl  user="alice"/>
      </acl_list>
   </ar_summary>
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


def summary(name: str = NAME, state: str = "w", hosts: str = "", id: str = "3", owner: str = OWNER) -> str:
    return SUMMARY.format(id=id, name=name, state=state, hosts=hosts, owner=owner)


def show(engine: FakeGridEngine, owner: str = OWNER) -> None:
    engine.set_answer("qrstat -u * -xml", summary(owner=owner))
    engine.set_answer("qrstat -ar 3 -xml", summary(hosts=HOSTS, owner=owner))


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


def listing(*jobs: tuple[str, str, str], used: int = 0, hosts: tuple[str, ...] = ("h2-1", "h2-2", "h2-3")) -> str:
    """Return an answer of qstat; each job has a number, an owner, and a host or none."""

    def rows(host: str) -> str:
        return "".join(
            f"<job_list><JB_job_number>{number}</JB_job_number><JB_owner>{owner}</JB_owner></job_list>\n"
            for number, owner, other in jobs
            if other == host
        )

    queues = "".join(
        f"<Queue-List><name>all.q@{host}</name><slots_used>{used}</slots_used>{rows(host)}</Queue-List>\n"
        for host in hosts
    )
    return f"<job_info><queue_info>{queues}</queue_info><job_info>{rows('')}</job_info></job_info>"


RUNNING, WAITING, OTHERS = ("7", "bob", "h2-2"), ("8", "alice", ""), ("9", "bob", "")
DESCRIPTION = "=====\njob_number:      {job}\nowner:    x\nar_id:       {ar}\n"


@pytest.mark.parametrize(
    ("jobs", "uses", "asked"),
    [
        ((RUNNING,), {"7": "4"}, ["7"]),
        ((WAITING, OTHERS, ("6", "bob", "h2-3")), {"8": "33"}, ["8"]),
        ((OTHERS, ("6", "bob", "h2-3")), {}, []),
    ],
)
async def test_release_ignores_jobs_outside_of_reservation(
    lrm: SgeLrm, engine: FakeGridEngine, jobs: tuple[tuple[str, str, str], ...], uses: dict[str, str], asked: list[str]
) -> None:
    show(engine)
    engine.set_answer("qstat", listing(*jobs))
    engine.set_answer("qrdel 3", "koala has deleted advance reservation 3\n")
    for job, ar in uses.items():
        engine.set_answer(f"qstat -j {job}", DESCRIPTION.format(job=job, ar=ar))
    await lrm.release_reservation(NAME)
    assert engine.list_calls("qrdel") == ["qrdel 3"]
    assert engine.list_calls("qstat -j") == [f"qstat -j {job}" for job in asked]


@pytest.mark.parametrize("job", [RUNNING, WAITING], ids=["running", "waiting"])
async def test_release_while_a_job_of_any_user_uses_reservation_is_unavailable(
    lrm: SgeLrm, engine: FakeGridEngine, job: tuple[str, str, str]
) -> None:
    show(engine)
    engine.set_answer("qstat", listing(job))
    engine.set_answer(f"qstat -j {job[0]}", DESCRIPTION.format(job=job[0], ar=3))
    with pytest.raises(SiteUnavailable, match="jobs use the reservation"):
        await lrm.release_reservation(NAME)
    assert engine.list_calls("qrdel") == []


@pytest.mark.parametrize(
    ("listed", "code", "described"),
    [
        ("", 0, ""),
        ("error: commlib error: got select error (Connection refused)\n", 1, ""),
        ("error: cannot allocate memory\n", 1, ""),
        ("<job_info><queue_info></queue_info><job_info></job_info></job_info>", 0, ""),
        (listing(hosts=("h2-1", "h2-3")), 0, ""),
        (listing(used=2), 0, ""),
        (listing(RUNNING).replace("<JB_owner>bob</JB_owner>", "<JB_owner>bob<"), 0, ""),
        (listing(RUNNING)[:-40], 0, ""),
        (listing(RUNNING), 0, ""),
        (listing(RUNNING), 0, "Following jobs do not exist: \n7\n"),
        (listing(RUNNING), 0, "=====\njob_num"),
        (listing(RUNNING, WAITING), 0, DESCRIPTION.format(job=8, ar=4)),
    ],
)
async def test_release_with_an_incomplete_answer_deletes_nothing(
    lrm: SgeLrm, engine: FakeGridEngine, listed: str, code: int, described: str
) -> None:
    show(engine)
    engine.set_answer("qstat", listed, code)
    for jobs in ("7", "7,8"):
        engine.set_answer(f"qstat -j {jobs}", described)
    with pytest.raises(SiteUnavailable):
        await lrm.release_reservation(NAME)
    assert engine.list_calls("qrdel") == []


@pytest.mark.parametrize("program", ["qrstat -u", "qstat -f", "qstat -j"])
async def test_release_with_an_answer_too_late_deletes_nothing(
    lrm: SgeLrm, engine: FakeGridEngine, program: str
) -> None:
    show(engine)
    engine.set_answer("qstat", listing(RUNNING))
    engine.set_answer("qstat -j 7", DESCRIPTION.format(job=7, ar=4))

    async def run(user: str, *argv: str, **options: object) -> object:
        if " ".join((Path(argv[0]).name, *argv[1:])).startswith(program):
            raise SiteUnavailable(f"{program} did not answer within 30 s")
        return await engine.run(*argv, **options)  # type: ignore[arg-type]

    lrm._commands._run_as = run  # type: ignore[assignment]
    with pytest.raises(SiteUnavailable, match="did not answer"):
        await lrm.release_reservation(NAME)
    assert engine.list_calls("qrdel") == []


async def test_reservation_of_another_account_is_not_ours(lrm: SgeLrm, engine: FakeGridEngine, tmp_path: Path) -> None:
    show(engine, owner="mallory")
    engine.set_answer("qrsub", "error: no suitable queues\n", 1)
    with pytest.raises(SiteRejected, match="no suitable queues"):
        await lrm.reserve_nodes(ORDER)
    await lrm.release_reservation(NAME)
    assert engine.list_calls("qrdel") == []
    assert await lrm.list_reservations("koala-0123456789ab-") == []
    with pytest.raises(SiteRejected, match="there is no advance reservation"):
        await lrm.submit_job(make_submission(tmp_path, reservation=NAME))
    assert [each.name for each in (await lrm.take_snapshot()).reservations] == ["ar 3"]


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
    assert AdvanceReservation("3", NAME, OWNER, BEGIN, BEGIN + 3600).longest_walltime(now) == longest


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


def test_read_reservations_skips_what_is_over_or_of_others_and_unreadable() -> None:
    for state, count in (("w", 1), ("r", 1), ("E", 1), ("x", 0), ("d", 0)):
        assert len(read_reservations(summary(state=state).encode())) == count
    assert read_reservations(summary("lecture", id="?").encode()) == []
    assert read_reservations(summary().replace(":00<", ":00.123456<").encode()) == read_reservations(summary().encode())
    assert read_reservations(summary("lecture").replace("2037-11-29T12", "never").encode()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "error: commlib error",
        "<qstat></qstat>",
        summary(id="?"),
        summary().replace("2037-11-29T12", "never"),
        summary().replace("</id>", "<"),
    ],
)
def test_read_reservations_of_incomplete_answer_is_unavailable(text: str) -> None:
    with pytest.raises(SiteUnavailable, match="qrstat"):
        read_reservations(text.encode())
