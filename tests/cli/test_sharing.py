"""``koala sharing report``: its page and its requests."""

import json
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from koalapy.client.client import Client
from tests.cli.conftest import Koala

Json = dict[str, Any]


def make_site(name: str, verdict: str, **changes: Any) -> Json:
    fields: Json = {"site": name, "nodes": 8, "speed": 1.0, "jobs": 120, "elsewhere": 40, "too_wide": 2}
    times = {"grid": 600.0, "alone": 4200.0, "gain": 3600.0, "low": 3000.0, "high": 4210.0}
    return fields | times | {"verdict": verdict} | changes


NO_JOBS: Json = dict.fromkeys(("jobs", "elsewhere", "too_wide"), 0)
NO_JOBS |= dict.fromkeys(("grid", "alone", "gain", "low", "high"))
REPORT: Json = {
    "first": "2026-11-01",
    "last": "2026-11-30",
    "every_site": "worse",
    "sites": [
        make_site("north", "better"),
        make_site("south", "worse", gain=-65.0, low=-70.0, high=-2.0, grid=125.0, alone=60.0),
        make_site("west", "unclear", **NO_JOBS),
    ],
    "exclusions": [{"reason": "too wide for their home site", "count": 7, "jobs": [1, 2, 3, 4, 5, 6, 7]}],
}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """Answer every request with ``REPORT``; return the requests."""
    requests: list[Json] = []

    def get(self: Client, path: str, *, patient: bool, **query: Any) -> Json:
        requests.append({"path": path, **query})
        return REPORT

    monkeypatch.setattr(Client, "get", get)
    return requests


def test_sharing_report_begins_with_verdict(koala: Koala, requests: list[Json]) -> None:
    lines = koala("sharing", "report").out.splitlines()
    assert lines[0] == "Not every site is better off: south would be by itself."
    assert [line.split() for line in lines[3:6]] == [
        ["north", "8", "120", "40", "2", "10:00", "1:10:00", "+1:00:00", "+50:00", "and", "+1:10:10", "better"],
        ["south", "8", "120", "40", "2", "2:05", "1:00", "-1:05", "-1:10", "and", "-0:02", "worse"],
        ["west", "8", "0", "0", "0", "-", "-", "-", "-", "-"],
    ]
    assert lines[-2:] == ["Jobs that do not count:", "  7 too wide for their home site: 1, 2, 3, 4 and 3 more"]


@pytest.mark.parametrize("verdict", ["better", "same", "unclear"])
def test_sharing_report_words_each_verdict(
    koala: Koala, requests: list[Json], monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    monkeypatch.setitem(REPORT, "every_site", verdict)
    first = koala("sharing", "report").out.splitlines()[0]
    assert ("cannot be told" in first) == (verdict == "unclear")
    assert ("better or worse off" in first) == (verdict == "same")


def test_sharing_report_requests_given_days(koala: Koala, requests: list[Json]) -> None:
    assert json.loads(koala("sharing", "report", "--json").out) == REPORT
    koala("sharing", "report", "--days", "7", "--last", "2026-03-02")
    koala("sharing", "report", "--days", "1000000", "--last", "0001-01-03")
    today = datetime.now(UTC).date()
    assert requests[0]["last"] in (today.isoformat(), (today - timedelta(days=1)).isoformat())
    assert date.fromisoformat(requests[0]["last"]) - date.fromisoformat(requests[0]["first"]) == timedelta(days=29)
    assert [(request["first"], request["last"]) for request in requests[1:]] == [
        ("2026-02-24", "2026-03-02"),
        ("0001-01-01", "0001-01-03"),
    ]


@pytest.mark.parametrize("wrong", [("--days", "0"), ("--last", "tomorrow"), ("--last", "2026-02-30")])
def test_sharing_report_with_invalid_days_is_rejected(
    koala: Koala, requests: list[Json], wrong: tuple[str, str]
) -> None:
    assert koala("sharing", "report", *wrong).code == 2
    assert not requests
