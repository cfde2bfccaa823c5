"""History by REST: as JSON, as CSV, as a trace; and what users are told of others."""

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


async def cancelled(api: httpx2.AsyncClient, body: Json, **spec: str) -> int:
    job = (await api.post("/api/v1/jobs", json=body | spec)).json()["id"]
    answer = await api.post(f"/api/v1/jobs/{job}/cancel")
    assert answer.json()["state"] == "cancelled"
    return int(job)


async def history(api: httpx2.AsyncClient, headers: dict[str, str] | None = None, **query: str) -> Json:
    answer = await api.get("/api/v1/history", params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


async def test_jobs_that_end_are_told_by_user_and_in_all(open_api: Open, body: Json) -> None:
    api = await open_api()
    assert (await history(api))["since"] is None
    for name in ("ada", "ada", "bob"):
        await cancelled(api, body, owner=name)
    found = await history(api)
    assert (found["by"], found["step"], found["jobs_keep"]) == ("grid", "day", None)
    assert found["first"] == (datetime.fromisoformat(found["last"]) - timedelta(days=29)).date().isoformat()
    assert found["since"] >= TODAY.isoformat()
    assert sum(line["jobs"] for line in found["lines"]) == 3
    by_user = await history(api, by="user", step="all")
    assert [(line["name"], line["jobs"], line["cancelled"]) for line in by_user["lines"]] == [
        ("ada", 2, 2),
        ("bob", 1, 1),
    ]
    only = await history(api, by="user", step="week", name="bob")
    assert [line["name"] for line in only["lines"]] == ["bob"]
    long_ago = await history(api, first="2001-01-01", last="2001-02-01")
    assert long_ago["lines"] == []


async def test_as_a_table_with_commas_and_as_a_trace(open_api: Open, body: Json) -> None:
    api = await open_api()
    await cancelled(api, body, owner="=cmd()")
    answer = await api.get("/api/v1/history", params={"by": "user", "format": "csv"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["name"], row["jobs"], row["success"]) == ("'=cmd()", "1", "")
    assert row.keys() == (await history(api, by="user"))["lines"][0].keys()
    trace = await api.get("/api/v1/history", params={"format": "swf"})
    assert trace.headers["content-type"] == "text/plain; charset=utf-8"
    (job,) = swf.parse(trace.text.splitlines(), "trace").jobs
    assert (job.number, job.status) == (1, 5)


async def test_users_are_told_of_no_other_user(open_api: Open, body: Json) -> None:
    api = await open_api()
    made = (await api.post("/api/v1/tokens", json={"user": "bob", "role": "user"})).json()
    bob = {"Authorization": f"Bearer {made['token']}"}
    for name in ("ada", "bob"):
        await cancelled(api, body, owner=name)
    assert [line["name"] for line in (await history(api, bob, by="user"))["lines"]] == ["bob"]
    refused = await api.get("/api/v1/history", params={"by": "user", "name": "ada"}, headers=bob)
    assert (refused.status_code, refused.json()["field"]) == (403, "name")
    assert sum(line["jobs"] for line in (await history(api, bob))["lines"]) == 2
    trace = await api.get("/api/v1/history", params={"format": "swf"}, headers=bob)
    lines = [line.split() for line in trace.text.splitlines() if not line.startswith(";")]
    assert [(line[0], line[11]) for line in lines] == [("1", "-1"), ("2", "1")]


async def test_the_longest_span_costs_no_more_than_what_is_known(open_api: Open, body: Json) -> None:
    api = await open_api()
    await cancelled(api, body)
    found = await history(api, first="0001-01-01", last="9999-12-31", step="all", by="cluster")
    assert found["lines"] == []
    found = await history(api, first="0001-01-01", last="9999-12-31", step="all")
    assert [line["jobs"] for line in found["lines"]] == [1]


@pytest.mark.parametrize("form", ["json", "csv", "swf"])
async def test_days_at_the_ends_of_the_calendar_are_days(open_api: Open, form: str) -> None:
    api = await open_api()
    for query in ({"last": "0001-01-01"}, {"first": "9999-12-31", "last": "9999-12-31"}, {"last": "1970-01-01"}):
        answer = await api.get("/api/v1/history", params={"format": form} | query)
        assert (answer.status_code, bool(answer.text)) == (200, True)
