"""``koala sharing report``: what it says of what a daemon tells."""

import json
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from koalapy.client.client import Client
from tests.cli.conftest import Koala

Json = dict[str, Any]


def site(name: str, verdict: str, **changes: Any) -> Json:
    known: Json = {"site": name, "nodes": 8, "speed": 1.0, "jobs": 120, "elsewhere": 40, "too_wide": 2}
    times = {"grid": 600.0, "alone": 4200.0, "gain": 3600.0, "low": 3000.0, "high": 4210.0}
    return known | times | {"verdict": verdict} | changes


NOBODY: Json = dict.fromkeys(("jobs", "elsewhere", "too_wide"), 0)
NOBODY |= dict.fromkeys(("grid", "alone", "gain", "low", "high"))
FOUND: Json = {
    "first": "2026-11-01",
    "last": "2026-11-30",
    "every_site": "worse",
    "sites": [
        site("north", "better"),
        site("south", "worse", gain=-65.0, low=-70.0, high=-2.0, grid=125.0, alone=60.0),
        site("west", "unclear", **NOBODY),
    ],
    "exclusions": [{"reason": "too wide for their home site", "count": 7, "jobs": [1, 2, 3, 4, 5, 6, 7]}],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """What the daemon is asked; it tells ``FOUND``."""
    asked: list[Json] = []

    def get(self: Client, path: str, *, patient: bool, **query: Any) -> Json:
        asked.append({"path": path, **query})
        return FOUND

    monkeypatch.setattr(Client, "get", get)
    return asked


def test_who_gains_and_who_does_not_is_said_first(koala: Koala, asked: list[Json]) -> None:
    lines = koala("sharing", "report").out.splitlines()
    assert lines[0] == "Not every site is better off: south would be by itself."
    assert [line.split() for line in lines[3:6]] == [
        ["north", "8", "120", "40", "2", "10:00", "1:10:00", "+1:00:00", "+50:00", "and", "+1:10:10", "better"],
        ["south", "8", "120", "40", "2", "2:05", "1:00", "-1:05", "-1:10", "and", "-0:02", "worse"],
        ["west", "8", "0", "0", "0", "-", "-", "-", "-", "-"],
    ]
    assert lines[-2:] == ["Jobs that do not count:", "  7 too wide for their home site: 1, 2, 3, 4 and 3 more"]


@pytest.mark.parametrize("verdict", ["better", "same", "unclear"])
def test_what_holds_of_every_site(
    koala: Koala, asked: list[Json], monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    monkeypatch.setitem(FOUND, "every_site", verdict)
    first = koala("sharing", "report").out.splitlines()[0]
    assert ("cannot be told" in first) == (verdict == "unclear")
    assert ("better or worse off" in first) == (verdict == "same")


def test_which_days_are_asked_for(koala: Koala, asked: list[Json]) -> None:
    assert json.loads(koala("sharing", "report", "--json").out) == FOUND
    koala("sharing", "report", "--days", "7", "--last", "2026-03-02")
    koala("sharing", "report", "--days", "1000000", "--last", "0001-01-03")
    today = datetime.now(UTC).date()
    assert asked[0]["last"] in (today.isoformat(), (today - timedelta(days=1)).isoformat())
    assert date.fromisoformat(asked[0]["last"]) - date.fromisoformat(asked[0]["first"]) == timedelta(days=29)
    assert [(each["first"], each["last"]) for each in asked[1:]] == [
        ("2026-02-24", "2026-03-02"),
        ("0001-01-01", "0001-01-03"),
    ]


@pytest.mark.parametrize("wrong", [("--days", "0"), ("--last", "tomorrow"), ("--last", "2026-02-30")])
def test_days_that_there_are_not_are_refused(koala: Koala, asked: list[Json], wrong: tuple[str, str]) -> None:
    assert koala("sharing", "report", *wrong).code == 2
    assert not asked
