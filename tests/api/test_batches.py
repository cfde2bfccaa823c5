"""The route that submits many jobs in one transaction, and the direct way of single submissions."""

import asyncio
import json
from typing import Any

import pytest

from koalapy.model.limits import UserLimits
from tests.api.test_limits import make_limits
from tests.serving import Open

Body = dict[str, Any]
BATCH = "/api/v1/jobs:batch"


async def list_ids(api: Any) -> list[int]:
    return [job["id"] for job in (await api.get("/api/v1/jobs")).json()["jobs"]]


async def test_batch_is_stored_in_order_after_single_jobs(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    answer = await api.post(BATCH, json={"jobs": [body | {"name": name} for name in "abc"]})
    assert (answer.status_code, answer.json()) == (201, {"jobs": [2, 3, 4]})
    jobs = (await api.get("/api/v1/jobs")).json()["jobs"]
    assert [(job["id"], job["name"], job["state"]) for job in jobs[:3]] == [
        (4, "c", "queued"),
        (3, "b", "queued"),
        (2, "a", "queued"),
    ]
    timeline = (await api.get("/api/v1/jobs/3/timeline")).json()["timeline"]
    assert [entry["event"] for entry in timeline] == ["submitted"]
    (entry,) = (await api.get("/api/v1/audit", params={"action": "submit_jobs"})).json()["entries"]
    assert (entry["target"], entry["outcome"]) == ("jobs 2 to 4", "done")


async def test_batch_beyond_number_returns_422(open_api: Open, body: Body) -> None:
    api = await open_api()
    answer = await api.post(BATCH, json={"jobs": [body] * 1001})
    assert (answer.status_code, answer.json()["field"]) == (422, "jobs")
    assert (await api.post(BATCH, json={"jobs": [body] * 1000})).json()["jobs"] == list(range(1, 1001))


async def test_concurrent_batches_with_same_key_are_stored_once(open_api: Open, body: Body) -> None:
    api = await open_api()
    key = {"Idempotency-Key": "k"}
    answers = await asyncio.gather(*(api.post(BATCH, json={"jobs": [body] * 3}, headers=key) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]
    assert all(answer.json() == {"jobs": [1, 2, 3]} for answer in answers)
    for reused in ({"jobs": [body] * 2}, {"jobs": [body | {"name": "x"}] * 3}):
        answer = await api.post(BATCH, json=reused, headers=key)
        assert (answer.status_code, answer.json()["field"]) == (409, "Idempotency-Key")
    assert (await api.post("/api/v1/jobs", json=body, headers=key)).status_code == 409
    assert await list_ids(api) == [3, 2, 1]


async def test_batch_of_one_and_single_job_with_same_key_conflict(open_api: Open, body: Body) -> None:
    api = await open_api()
    key = {"Idempotency-Key": "k"}
    assert (await api.post("/api/v1/jobs", json=body, headers=key)).status_code == 201
    assert (await api.post(BATCH, json={"jobs": [body]}, headers=key)).status_code == 409


async def test_batch_beyond_queue_limit_is_rejected_as_a_whole(open_api: Open, body: Body) -> None:
    api = await open_api(placement_queue_limit=4)
    await api.post("/api/v1/jobs", json=body)
    rejected = await api.post(BATCH, json={"jobs": [body] * 4})
    assert (rejected.status_code, rejected.json()["field"]) == (429, "jobs[3]")
    assert int(rejected.headers["retry-after"]) > 0
    assert await list_ids(api) == [1]
    assert (await api.post(BATCH, json={"jobs": [body] * 3})).status_code == 201


async def test_batch_beyond_owner_limit_is_rejected_as_a_whole(open_api: Open, body: Body) -> None:
    api = await open_api(limits=make_limits(UserLimits(queued_jobs=3)))
    await api.post("/api/v1/jobs", json=body)
    rejected = await api.post(BATCH, json={"jobs": [body] * 3})
    problem = rejected.json()
    assert (rejected.status_code, problem["field"]) == (409, "jobs[2].limits.queued_jobs")
    assert problem["value"] == {"limit": 3, "used": 3, "asked": 1}
    assert await list_ids(api) == [1]
    assert (await api.post(BATCH, json={"jobs": [body] * 2})).status_code == 201


async def test_submission_by_router_and_direct_have_equal_answers(open_api: Open, body: Body) -> None:
    """A content type with a parameter takes the router's way."""
    api = await open_api()
    plain, parameter = {"Content-Type": "application/json"}, {"Content-Type": "application/json; charset=utf-8"}
    for change, status in (({}, 201), ({"walltime": "90m", "environment": {"A": "b"}}, 201), ({"nmae": 1}, 422)):
        content = json.dumps(body | change)
        answers = [await api.post("/api/v1/jobs", content=content, headers=h) for h in (plain, parameter)]
        assert [answer.status_code for answer in answers] == [status] * 2
        headers, others = ({**answer.headers, "location": "", "content-length": ""} for answer in answers)
        assert headers == others
        fields, other_fields = (
            {k: v for k, v in answer.json().items() if k not in ("id", "submitted_at")} for answer in answers
        )
        assert fields == other_fields


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b'{"a": NaN}', {}, 422),
        (b"\xff", {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"a": %s}' % (b"9" * 5000), {}, 400),
        (b"", {}, 422),
        (b"{}", {"Idempotency-Key": "k" * 201}, 422),
        (b" " * 1_100_000, {}, 413),
    ],
)
async def test_submission_with_wrong_body_or_key_is_a_problem(
    open_api: Open, content: bytes, headers: dict[str, str], status: int
) -> None:
    api = await open_api()
    answers = [
        await api.post("/api/v1/jobs", content=content, headers={"Content-Type": kind, **headers})
        for kind in ("application/json", "application/json;a=b")
    ]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert answers[0].json() == answers[1].json()
    assert status != 400 or "not valid JSON" in answers[0].json()["detail"]


async def test_submission_with_unknown_query_parameter_is_rejected(open_api: Open, body: Body) -> None:
    answer = await (await open_api()).post("/api/v1/jobs?dry=1", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, "dry")


async def test_batch_entry_waits_for_earlier_entries_by_index(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    graph = [[], ["#0"], ["#0:any", "#1:failed?1"], ["#2"]]
    key = {"Idempotency-Key": "graph"}
    batch = {"jobs": [body | {"after": after} for after in graph]}
    for status in (201, 200):
        answer = await api.post(BATCH, json=batch, headers=key)
        assert (answer.status_code, answer.json()) == (status, {"jobs": [2, 3, 4, 5]})
    jobs = [(await api.get(f"/api/v1/jobs/{job}")).json() for job in (2, 3, 4, 5)]
    assert [job["after"] for job in jobs] == [[], ["2:ok"], ["2:any", "3:failed?1:ok"], ["4:ok"]]
    assert [job["awaits"] for job in jobs] == [job["after"] for job in jobs]
    await api.post("/api/v1/jobs/2/cancel")
    states = [(await api.get(f"/api/v1/jobs/{job}")).json()["state"] for job in (3, 4, 5)]
    assert states == ["failed", "queued", "queued"]


async def test_batch_entry_waits_for_array_of_batch(open_api: Open, body: Body) -> None:
    api = await open_api()
    answer = await api.post(BATCH, json={"jobs": [body | {"array": "1-3"}, body | {"after": ["#0"]}]})
    assert answer.json() == {"jobs": [1, 5]}
    assert (await api.get("/api/v1/jobs/5")).json()["after"] == ["1:ok"]


@pytest.mark.parametrize(
    ("graph", "field", "problem"),
    [
        ([["#1"], []], "jobs[0].after", "names #1, which is not before it in the batch"),
        ([[], ["#1"]], "jobs[1].after", "names #1, the job itself"),
        ([["#0"], []], "jobs[0].after", "names #0, the job itself"),
        ([["#1"], ["#0"]], "jobs[0].after", "names #1, which is not before it in the batch"),
        ([[], ["#0?#7"]], "jobs[1].after", "names #7, which is not before it in the batch"),
        ([[], ["#-1"]], "jobs[1].after[0]", "#-1"),
        ([[], ["#0[1]"]], "jobs[1].after[0]", "#0[1]"),
        ([[], ["#0", "9"]], "jobs[1].after", "names job 9, which does not exist"),
    ],
)
async def test_batch_with_wrong_reference_to_entry_stores_nothing(
    open_api: Open, body: Body, graph: list[list[str]], field: str, problem: str
) -> None:
    api = await open_api()
    answer = await api.post(BATCH, json={"jobs": [body | {"after": after} for after in graph]})
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    assert problem in answer.json()["detail"]
    assert await list_ids(api) == []


async def test_single_job_with_reference_to_entry_returns_422(open_api: Open, body: Body) -> None:
    api = await open_api()
    for path in ("/api/v1/jobs", "/api/v1/explain"):
        answer = await api.post(path, json=body | {"after": ["#0"]})
        assert (answer.status_code, answer.json()["field"]) == (422, "after")
        assert "jobs:batch" in answer.json()["hint"]
    assert await list_ids(api) == []
