"""The pages of workloads: a run's report with its plots, for whom it is, and whatever stands in it."""

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

from koalapy.dashboard.pictures.cumulative import Spread, cumulative
from koalapy.dashboard.pictures.nodes_over_time import Held, nodes_over_time
from koalapy.dashboard.rendering import seconds
from koalapy.dashboard.workload_figures import held, spreads_of, uses_of
from tests.dashboard.people import Person, token_of
from tests.grid.embedded import Embedded
from tests.workload.reports import report_to_send, whole_report

EVIL = "<script>alert('x')</script>\"&"


@pytest.fixture(scope="module")
def people(grid: Embedded) -> Iterator[dict[str, Person]]:
    made = {name: Person(grid, token_of(grid, name)) for name in ("alice", "bob")}
    made["director"] = Person(grid, token_of(grid, "director", "operator"))
    yield made
    for person in made.values():
        person.close()


def sent(grid: Embedded, user: str, report: dict[str, Any], name: str) -> str:
    headers = {"Authorization": f"Bearer {token_of(grid, user)}"}
    answer = grid.http.post("/api/v1/workloads", json=report, params={"name": name}, headers=headers)
    return str(answer.raise_for_status().json()["id"])


def test_a_report_is_shown_with_its_measures_and_removed(grid: Embedded, people: dict[str, Person]) -> None:
    ident = sent(grid, "alice", report_to_send(), "w.jsonl.report")
    path, written = f"/workloads/{ident}", whole_report()
    for who in ("alice", "director"):
        assert f'href="{path}"' in people[who].see("/workloads")
        page = people[who].see(path)
        assert (page.count('<svg class="cumulative"'), page.count('<svg class="held"')) == (1, 4)
    told = people["alice"].told(f"{path}.json")
    for name in ("summary", "by_application", "by_size", "jobs"):
        assert told[name] == written[name], name
    assert [use["name"] for use in told["uses"]] == ["all", *written["utilisation"]["clusters"]]
    assert people["bob"].told("/workloads.json")["workloads"] == []
    for gone in (path, f"{path}.json", "/workloads/none"):
        people["bob"].see(gone, 404)
    form = {"csrf": people["bob"].see("/workloads").partition('name="csrf" value="')[2].partition('"')[0]}
    refused = people["bob"].http.post(f"{path}/remove", data=form, headers=people["bob"].origin)
    assert refused.status_code == 404
    done = people["alice"].send(path, f"{path}/remove")
    assert (done.status_code, done.headers["location"]) == (303, "/workloads")
    people["alice"].see(path, 404)


def test_whatever_stands_in_a_report_is_text(grid: Embedded, people: dict[str, Person]) -> None:
    report = report_to_send(interrupted=EVIL)
    job = report["jobs"][0] | {"application": EVIL, "policy": EVIL, "state": EVIL, "reason": EVIL, "priority": EVIL}
    job |= {"clusters": {EVIL: 1}, "wait_time": None, "id": None, "components": None, "submitted": None}
    report["jobs"] = [job]
    report["workload"] = {"preset": EVIL}
    report["samples"]["clusters"] = {EVIL: report["samples"]["clusters"].pop("north")}
    report["utilisation"]["clusters"] = {EVIL: {"nodes": 3, "ours": None, "background": None}}
    ident = sent(grid, "alice", report, EVIL)
    for path in ("/workloads", f"/workloads/{ident}"):
        page = people["director"].see(path)
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert" in page
        assert " style=" not in page
    assert people["director"].told(f"/workloads/{ident}.json")["jobs"] == [job]


@pytest.mark.parametrize("values", [[], [0.0], [1e12, 1e12], [0.0, 3.0, 9.0], [1e-9] * 500])
def test_pictures_are_well_formed(values: list[float]) -> None:
    spreads = [Spread(EVIL, len(values), sorted(values))] * 9
    spans = [Held(at, at + 1, 4, value, value) for at, value in enumerate(values)]
    for picture in (cumulative(spreads, EVIL, seconds), nodes_over_time(spans, EVIL, seconds)):
        assert bool(picture) == bool(values)
        if picture:
            assert "style" not in ElementTree.fromstring(picture).attrib
            assert "nan" not in picture


def test_means_over_time_are_those_of_the_whole() -> None:
    report = whole_report()
    for use in uses_of(report, 12):
        told = report["utilisation"]["all" if use.name == "all" else "clusters"]
        told = told if use.name == "all" else told[use.name]
        offered = sum(span.total for span in use.over_time)
        assert sum(span.jobs for span in use.over_time) / offered == pytest.approx(told["ours"], abs=1e-3)
        assert sum(span.local for span in use.over_time) / offered == pytest.approx(told["background"], abs=1e-3)
    assert held([], []) == held([1.0], []) == held([1.0, 1.0], [{}]) == []
    for spread in spreads_of(report["jobs"]):
        mean = report["summary"][f"{spread.name}_time"]
        assert sum(spread.spans) / len(spread.spans) == pytest.approx(mean)
        assert spread.within(0.0) == spread.spans[0] <= spread.within(0.5) <= spread.within(1.0) == spread.spans[-1]


def test_no_time_at_all_is_no_picture() -> None:
    look = {"total": [1, 1, 1], "used": [0, 0, 0], "background": [0, 0, 0]}
    assert held([0.0, 0.0, 5e-324], [look]) == []
