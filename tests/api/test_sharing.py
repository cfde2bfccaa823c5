"""The REST route of the sharing report."""

from datetime import UTC, datetime
from typing import Any

import pytest

from koalapy.model.identity import Identity, Role
from koalapy.scheduler.rules import Rules
from tests.serving import Open, serving

Json = dict[str, Any]
PATH = "/api/v1/sharing"


async def test_sharing_without_ended_jobs_is_unclear(open_api: Open, body: Json) -> None:
    api = await open_api()
    for home in ("north", "south", ""):
        await api.post("/api/v1/jobs", json=body | {"home_site": home})
    answer = await api.get(PATH)
    assert answer.status_code == 200, answer.text
    report = answer.json()
    assert (report["every_site"], report["exclusions"]) == (
        "unclear",
        [{"reason": "not over yet", "count": 2, "jobs": [1, 2]}],
    )
    assert [(site["site"], site["nodes"], site["jobs"]) for site in report["sites"]] == [
        ("north", 4, 0),
        ("south", 4, 0),
    ]
    assert report["sites"][0] | {"grid": None, "alone": None, "gain": None, "low": None} == report["sites"][0]
    assert report["last"] == datetime.now(UTC).date().isoformat()


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"first": "2026-11-02", "last": "2026-11-01"}, "first"),
        ({"first": "yesterday"}, "first"),
        ({"days": "3"}, "days"),
    ],
)
async def test_sharing_with_invalid_days_returns_422(open_api: Open, query: dict[str, str], field: str) -> None:
    answer = await (await open_api()).get(PATH, params=query)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


async def test_sharing_of_days_without_records_is_unclear(open_api: Open) -> None:
    api = await open_api()
    report = (await api.get(PATH, params={"first": "0001-01-01", "last": "0001-01-01"})).json()
    assert (report["every_site"], report["exclusions"]) == ("unclear", [])
    later = (await api.get(PATH, params={"first": "9999-12-31", "last": "9999-12-31"})).json()
    assert later["start"] == later["end"]


async def test_sharing_is_for_operators_only(tmp_path: Any) -> None:
    people = {role.value: Identity("ada", role, "a test") for role in (Role.USER, Role.OPERATOR)}
    async with serving(tmp_path / "koala.db", [], Rules(), users=people) as api:
        statuses = [(await api.get(PATH, headers={"Authorization": f"Bearer {name}"})).status_code for name in people]
    assert statuses == [403, 200]
