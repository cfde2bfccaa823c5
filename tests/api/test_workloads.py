"""Reports of workload runs: whose they are, what is taken for one, and how many are kept."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from koalapy.daemon.workload_reports import MAX_REPORTS, WorkloadReports
from koalapy.model.errors import FullError, NotFoundError
from koalapy.model.identity import Identity, Role
from tests.api.test_access import opened
from tests.serving import Open
from tests.workload.reports import report_to_send, whole_report

PATH = "/api/v1/workloads"
ADA, BOB = Identity("ada", Role.USER, "a test"), Identity("bob", Role.USER, "a test")
DIRECTOR = Identity("director", Role.OPERATOR, "a test")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_report_is_its_senders_and_operators(tmp_path: Path) -> None:
    async with opened(tmp_path) as api:
        sent = await api.ask("ada", "POST", PATH, json=report_to_send(), params={"name": "w.report"})
        assert sent.status_code == 201, sent.text
        line = sent.json()
        one = f"{PATH}/{line['id']}"
        assert (line["owner"], line["name"], line["policy"], line["jobs"]) == ("ada", "w.report", "worst-fit", 45)
        again = await api.ask("ada", "POST", PATH, json=report_to_send(), params={"name": "w.report"})
        assert (again.status_code, again.json()) == (200, line)
        for who, seen in (("ada", [line]), ("director", [line]), ("bob", [])):
            assert (await api.ask(who, "GET", PATH)).json() == {"workloads": seen, "more": 0}
        for method in ("GET", "DELETE"):
            refused = await api.ask("bob", method, one)
            none = await api.ask("bob", method, f"{PATH}/{'0' * 32}")
            assert (refused.status_code, none.status_code) == (404, 404)
            assert refused.text.replace(line["id"], "0" * 32) == none.text
        assert (await api.ask("ada", "GET", one)).json()["report"]["jobs"] == whole_report()["jobs"]
        assert (await api.ask("director", "DELETE", one)).json() == line
        assert (await api.ask("ada", "GET", one)).status_code == 404


async def test_what_follows_from_the_jobs_is_worked_out_here(open_api: Open) -> None:
    api = await open_api()
    ident = (await api.post(PATH, json=report_to_send())).json()["id"]
    told, written = (await api.get(f"{PATH}/{ident}")).json()["report"], whole_report()
    for name in ("summary", "by_application", "by_size", "utilisation", "samples", "run"):
        assert told[name] == written[name], name


def changed(where: str, value: Any) -> dict[str, Any]:
    """A report in which one thing is another."""
    sent = copy.deepcopy(report_to_send())
    *way, last = where.split(".")
    place: Any = sent
    for name in way:
        place = place[int(name)] if name.isdecimal() else place[name]
    place[last] = value
    return sent


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("koala_workload_report", 2),
        ("summary", {}),
        ("run.began", "yesterday"),
        ("run.complete", "yes"),
        ("run.seconds", "long"),
        ("jobs", []),
        ("jobs.0.nodes", -1),
        ("jobs.0.wait_time", 1e300),
        ("jobs.0.command", "true"),
        ("jobs.0.clusters", {"": 1}),
        ("jobs.0.state", "a\ud800"),
        ("utilisation.all", {}),
        ("workload.recipe", {}),
        ("samples.at", [2.0, 1.0]),
        ("samples.clusters.north.used", [1]),
    ],
)
async def test_what_is_no_report_is_refused(open_api: Open, where: str, value: Any) -> None:
    api = await open_api()
    body = json.dumps(changed(where, value))
    answer = await api.post(PATH, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, where.partition(".")[0] in answer.json()["field"]) == (422, True), answer.text
    assert (await api.get(PATH)).json()["workloads"] == []


async def test_a_report_that_is_too_large_is_refused(open_api: Open) -> None:
    sent = report_to_send()
    sent["jobs"] *= 100
    assert (await (await open_api()).post(PATH, json=sent)).status_code == 413


async def test_nobody_s_reports_make_way_for_those_of_one_who_has_more(tmp_path: Path) -> None:
    first = WorkloadReports(tmp_path, 2**30, iter(range(100)).__next__)
    bobs, _ = await first.keep("bob", "", report_to_send())
    quota = int(3.5 * first.room.used)
    reports = WorkloadReports(tmp_path, quota, iter(range(1, 100)).__next__)
    kept = [(await reports.keep("ada", str(number), report_to_send()))[0] for number in range(5)]
    assert reports.room.used <= quota
    assert [one.id for one in reports.seen_by(DIRECTOR)] == [kept[4].id, kept[3].id, bobs.id]
    with pytest.raises(NotFoundError):
        await reports.read(ADA, kept[0].id)
    assert len(names_in(tmp_path)) == 3
    with pytest.raises(FullError, match="workloads_quota is 10 bytes"):
        await WorkloadReports(tmp_path / "small", 10, iter(range(9)).__next__).keep("ada", "", report_to_send())
    assert "small" not in names_in(tmp_path)


async def test_of_an_owner_so_many_are_kept_and_the_oldest_go(tmp_path: Path) -> None:
    reports = WorkloadReports(tmp_path, 2**30, iter(range(1000)).__next__)
    small = report_to_send()
    small |= {"jobs": small["jobs"][:1], "samples": {"at": [], "clusters": {}}}
    for number in range(MAX_REPORTS + 2):
        await reports.keep("ada", str(number), small)
    await reports.keep("bob", "", small)
    assert [one.name for one in reports.seen_by(ADA)] == [str(n) for n in range(MAX_REPORTS + 1, 1, -1)]
    assert len(reports.seen_by(BOB)) == 1


async def test_they_are_there_after_a_restart_and_what_is_none_stays_out(tmp_path: Path) -> None:
    before = WorkloadReports(tmp_path, 2**30, iter(range(10)).__next__)
    kept, _ = await before.keep("ada", "w", report_to_send())
    (tmp_path / "odd.report").write_text("{}\n{}\n")
    (tmp_path / ".incoming-1").write_text("half")
    (tmp_path / "other.report").write_text((tmp_path / f"{kept.id}.report").read_text())
    after = WorkloadReports(tmp_path, 2**30, iter(range(10)).__next__)
    assert after.seen_by(ADA) == [kept]
    assert await after.read(ADA, kept.id) == await before.read(ADA, kept.id)
    assert names_in(tmp_path) == sorted([f"{kept.id}.report", "odd.report", "other.report"])
