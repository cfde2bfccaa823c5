"""History of jobs by REST as JSON, CSV and trace, and the fields that it hides from users."""

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest

from koalapy.workload import swf
from tests.serving import Open

Json = dict[str, Any]
TODAY = datetime.now(UTC).date()


async def submit_cancelled_job(api: httpx2.AsyncClient, body: Json, **spec: str) -> int:
    job = (await api.post("/api/v1/jobs", json=body | spec)).json()["id"]
    answer = await api.post(f"/api/v1/jobs/{job}/cancel", json={"reason": "test"})
    assert answer.json()["state"] == "cancelled"
    return int(job)


async def get_history(api: httpx2.AsyncClient, headers: dict[str, str] | None = None, **query: str) -> Json:
    answer = await api.get("/api/v1/usage", params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    report: Json = answer.json()
    return report


async def test_history_counts_ended_jobs_by_user(open_api: Open, body: Json) -> None:
    api = await open_api()
    assert (await get_history(api))["since"] is None
    for name in ("ada", "ada", "bob"):
        await submit_cancelled_job(api, body, owner=name)
    report = await get_history(api)
    assert (report["by"], report["step"], report["jobs_keep"]) == ("grid", "day", None)
    assert report["first"] == (datetime.fromisoformat(report["last"]) - timedelta(days=29)).date().isoformat()
    assert report["since"] >= TODAY.isoformat()
    assert sum(line["jobs"] for line in report["lines"]) == 3
    by_user = await get_history(api, by="user", step="all")
    assert [(line["name"], line["jobs"], line["cancelled"]) for line in by_user["lines"]] == [
        ("ada", 2, 2),
        ("bob", 1, 1),
    ]
    report_of_bob = await get_history(api, by="user", step="week", name="bob")
    assert [line["name"] for line in report_of_bob["lines"]] == ["bob"]
    empty_report = await get_history(api, first="2001-01-01", last="2001-02-01")
    assert empty_report["lines"] == []


async def test_history_is_available_as_csv_and_trace(open_api: Open, body: Json) -> None:
    api = await open_api()
    await submit_cancelled_job(api, body, owner="=cmd()")
    answer = await api.get("/api/v1/usage", params={"by": "user", "format": "csv"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["name"], row["jobs"], row["success"]) == ("'=cmd()", "1", "")
    assert row.keys() == (await get_history(api, by="user"))["lines"][0].keys()
    trace = await api.get("/api/v1/usage", params={"format": "swf"})
    assert trace.headers["content-type"] == "text/plain; charset=utf-8"
    (job,) = swf.parse_trace(trace.text.splitlines(), "trace").jobs
    assert (job.number, job.status) == (1, 5)


async def test_history_of_user_hides_other_users(open_api: Open, body: Json) -> None:
    api = await open_api()
    token = (await api.post("/api/v1/tokens", json={"user": "bob", "role": "user"})).json()
    bob = {"Authorization": f"Bearer {token['token']}"}
    for name in ("ada", "bob"):
        await submit_cancelled_job(api, body, owner=name)
    assert [line["name"] for line in (await get_history(api, bob, by="user"))["lines"]] == ["bob"]
    answer = await api.get("/api/v1/usage", params={"by": "user", "name": "ada"}, headers=bob)
    assert (answer.status_code, answer.json()["field"]) == (403, "name")
    assert sum(line["jobs"] for line in (await get_history(api, bob))["lines"]) == 2
    trace = await api.get("/api/v1/usage", params={"format": "swf"}, headers=bob)
    lines = [line.split() for line in trace.text.splitlines() if not line.startswith(";")]
    assert [(line[0], line[11]) for line in lines] == [("1", "-1"), ("2", "1")]


async def test_history_of_longest_span_returns_recorded_jobs(open_api: Open, body: Json) -> None:
    api = await open_api()
    await submit_cancelled_job(api, body)
    report = await get_history(api, first="0001-01-01", last="9999-12-31", step="all", by="cluster")
    assert report["lines"] == []
    report = await get_history(api, first="0001-01-01", last="9999-12-31", step="all")
    assert [line["jobs"] for line in report["lines"]] == [1]


@pytest.mark.parametrize("form", ["json", "csv", "swf"])
async def test_history_accepts_first_and_last_calendar_days(open_api: Open, form: str) -> None:
    api = await open_api()
    for query in ({"last": "0001-01-01"}, {"first": "9999-12-31", "last": "9999-12-31"}, {"last": "1970-01-01"}):
        answer = await api.get("/api/v1/usage", params={"format": form} | query)
        assert (answer.status_code, bool(answer.text)) == (200, True)
