"""REST routes of jobs."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from koalapy.api.fields import as_json
from koalapy.api.job_views import job_view, view_for
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.model.identity import Identity, Role
from tests.serving import Open
from tests.signals import until
from tests.store.jobs import make_running_job

Body = dict[str, Any]


async def test_submitted_job_is_returned_with_timeline(open_api: Open, body: Body) -> None:
    api = await open_api()
    answer = await api.post("/api/v1/jobs", json=body)
    assert answer.status_code == 201
    assert answer.headers["location"] == "/api/v1/jobs/1"
    job = (await api.get("/api/v1/jobs/1")).json()
    assert {k: job[k] for k in ("id", "state", "owner", "policy", "exit_code", "components")} == {
        "id": 1,
        "state": "queued",
        "owner": "ada",
        "policy": "cluster-minimization",
        "exit_code": None,
        "components": [],
    }
    assert job["request"]["total_size"] == 6
    assert [entry["event"] for entry in job["timeline"]] == ["submitted"]
    assert "no cluster is usable" in job["reason"]
    assert (await api.get("/api/v1/jobs/1/timeline")).json()["timeline"] == job["timeline"]


async def test_concurrent_submissions_with_same_key_make_one_job(open_api: Open, body: Body) -> None:
    api = await open_api()
    submissions = [api.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "k"}) for _ in range(5)]
    answers = await asyncio.gather(*submissions)
    assert sorted(a.status_code for a in answers) == [200, 200, 200, 200, 201]
    assert {a.json()["id"] for a in answers} == {1}
    reused = await api.post("/api/v1/jobs", json=body | {"name": "x"}, headers={"Idempotency-Key": "k"})
    assert (reused.status_code, reused.json()["field"]) == (409, "Idempotency-Key")


async def test_same_key_after_rejection_makes_one_job(open_api: Open, body: Body) -> None:
    """A rejected client makes way for the waiting ones and comes after them when it retries."""
    api = await open_api(placement_queue_limit=10)
    for _ in range(10):
        await api.post("/api/v1/jobs", json=body)
    refused = asyncio.Event()

    async def submit_until_accepted() -> Any:
        while (answer := await submit_with_key(api, body, "k")).status_code == 429:
            refused.set()
        return answer

    clients = [asyncio.create_task(submit_until_accepted()) for _ in range(12)]
    await refused.wait()
    for job in range(1, 6):
        await api.post(f"/api/v1/jobs/{job}/cancel")
    answers = await asyncio.gather(*clients)
    assert sorted(answer.status_code for answer in answers) == [200] * 11 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert (await api.get("/healthz")).json()["queued"] == 6


async def test_each_key_makes_one_job_despite_disconnects(open_api: Open, body: Body) -> None:
    """Submissions, rejections and disconnects interleave at random."""
    api = await open_api(placement_queue_limit=3)
    jobs_by_key: dict[str, set[int]] = defaultdict(set)
    refused, queue_emptied = asyncio.Event(), asyncio.Condition()

    async def submit_until_accepted(key: str) -> None:
        while not (answer := await submit_with_key(api, body, key)).is_success:
            assert answer.status_code == 429
            async with queue_emptied:
                refused.set()
                await queue_emptied.wait()
        jobs_by_key[key].add(answer.json()["id"])

    async def disconnect_after(task: asyncio.Task[None], turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()

    async def serve_clients(clients: Sequence[tuple[str, int | None]]) -> None:
        """Submit with these keys and empty the queue when it is full. Cancel a client after its loop turns."""
        tasks = [asyncio.create_task(submit_until_accepted(key)) for key, _ in clients]
        leaving = [
            asyncio.create_task(disconnect_after(task, turns))
            for task, (_, turns) in zip(tasks, clients, strict=True)
            if turns
        ]
        while await until(lambda: refused.is_set() or all(task.done() for task in tasks)) and refused.is_set():
            refused.clear()
            for job in (await api.get("/api/v1/jobs?active=true")).json()["jobs"]:
                await api.post(f"/api/v1/jobs/{job['id']}/cancel")
            async with queue_emptied:
                queue_emptied.notify_all()
        for ended in await asyncio.gather(*tasks, *leaving, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError)

    drawn = random.Random(7)
    for turn in range(8):
        keys = [f"{turn}.{number}" for number in range(drawn.randint(1, 4))]
        turns = (drawn.randint(1, 40), drawn.randint(1, 400), None, None)
        await serve_clients([(drawn.choice(keys), drawn.choice(turns)) for _ in range(drawn.randint(2, 12))])
        await serve_clients([(key, None) for key in keys])
        assert [len(jobs_by_key[key]) for key in keys] == [1] * len(keys)


async def submit_with_key(api: Any, body: Body, key: str) -> Any:
    return await api.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": key})


async def test_job_actions_in_wrong_state_return_409(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)

    async def act_on_job(action: str) -> Any:
        return await api.post(f"/api/v1/jobs/1/{action}", json={"reason": "because"})

    assert (await act_on_job("release")).status_code == 409
    assert (await act_on_job("hold")).json()["state"] == "held"
    assert (await act_on_job("hold")).status_code == 409
    assert (await api.post("/api/v1/jobs/1/release")).json()["state"] == "queued"
    cancelled = (await act_on_job("cancel")).json()
    assert (cancelled["state"], cancelled["reason"]) == ("cancelled", "because")
    repeated = await act_on_job("cancel")
    assert repeated.status_code == 409
    assert repeated.json()["detail"] == "job 1 is already cancelled"


async def test_cancel_jobs_reports_result_per_job(open_api: Open, body: Body) -> None:
    api = await open_api()
    for _ in range(40):
        await api.post("/api/v1/jobs", json=body)
    await api.post("/api/v1/jobs/2/cancel")
    order = {"jobs": [*range(1, 41), 1, 999, -1], "reason": "no more"}
    answer = await api.post("/api/v1/jobs/cancel", json=order)
    assert answer.status_code == 200
    results = answer.json()["jobs"]
    assert [result["job"] for result in results] == [*range(1, 41), 999, -1]
    assert all((result["state"], result["problem"]) == ("cancelled", None) for result in results[:40])
    missing = [(result["state"], result["problem"]["status"], result["problem"]["detail"]) for result in results[40:]]
    assert missing == [(None, 404, "there is no job 999"), (None, 404, "there is no job -1")]
    assert (await api.post("/api/v1/jobs/cancel", json=order)).json()["jobs"] == results
    reasons = [(await api.get(f"/api/v1/jobs/{job}")).json()["reason"] for job in (1, 2, 40)]
    assert reasons == ["no more", "cancelled by ada", "no more"]


async def test_waiting_request_ends_with_job(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    answer = asyncio.create_task(api.get("/api/v1/jobs/1", params={"wait": 30}))
    await api.post("/api/v1/jobs/1/cancel")
    assert (await answer).json()["state"] == "cancelled"
    assert (await api.get("/api/v1/jobs/1/logs", params={"follow": True})).content == b""


async def test_output_ends_with_state_of_job(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    answer = await api.get("/api/v1/jobs/1/output", params={"attempt": 1, "offsets": "0:5,12:99"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.json() == {"state": "queued", "is_complete": True}
    for offsets in ("0", "0:", "a:1", "0:1,", "-1:2", "0:1;", "٣:1", "0:" + "9" * 19):
        answer = await api.get("/api/v1/jobs/1/output", params={"offsets": offsets})
        assert (answer.status_code, answer.json()["field"]) == (422, "offsets"), offsets


async def test_list_jobs_returns_filtered_pages(open_api: Open, body: Body) -> None:
    api = await open_api()
    for owner in ("ada", "bob") * 4:
        await api.post("/api/v1/jobs", json=body | {"owner": owner})
    for limit, expected in ((3, [[7, 5, 3], [1]]), (2, [[7, 5], [3, 1]])):
        url: str | None = f"/api/v1/jobs?owner=ada&limit={limit}&active=true"
        pages: list[list[int]] = []
        while url:
            page = (await api.get(url)).json()
            pages.append([job["id"] for job in page["jobs"]])
            url = page["next"]
        assert pages == expected
    nothing = {"jobs": [], "next": None, "count": None, "count_is_whole": True}
    assert (await api.get("/api/v1/jobs", params={"state": "running"})).json() == nothing


async def test_full_queue_rejects_jobs_until_one_ends(open_api: Open, body: Body) -> None:
    api = await open_api(placement_queue_limit=1, scan_interval=12.0)
    await api.post("/api/v1/jobs", json=body)
    key = {"Idempotency-Key": "k"}
    rejected = await api.post("/api/v1/jobs", json=body, headers=key)
    assert (rejected.status_code, rejected.headers["retry-after"]) == (429, "12")
    assert rejected.headers["content-type"] == "application/problem+json"
    assert "placement_queue_limit is 1" in rejected.json()["detail"]
    assert rejected.json()["hint"]
    await api.post("/api/v1/jobs/1/cancel")
    assert (await api.post("/api/v1/jobs", json=body, headers=key)).status_code == 201


async def test_submit_returns_placement_and_claiming_fields(open_api: Open, body: Body) -> None:
    api = await open_api()
    fields = {
        "coallocation": 2,
        "speed_ratio_min": 0.5,
        "claiming": "incremental",
        "claim_threshold": 0.25,
        "max_placement_tries": 9,
        "max_claiming_tries": 4,
        "retry_on_exit": [75, 1],
    }
    job = (await api.post("/api/v1/jobs", json=body | fields)).json()
    assert {name: job[name] for name in fields} == fields
    default = (await api.post("/api/v1/jobs", json=body)).json()
    assert [default[name] for name in fields] == ["allowed", None, None, None, None, None, []]
    assert (default["policy_options"], default["start_delay"]) == ({}, None)
    body |= {"request": {"type": "flexible", "total_size": 4}}
    for value, expected in (("allowed", "allowed"), ("never", "never"), (1, "never"), (None, "allowed")):
        assert (await api.post("/api/v1/jobs", json=body | {"coallocation": value})).json()["coallocation"] == expected


async def test_health_clusters_and_policies_are_listed(open_api: Open) -> None:
    api = await open_api()
    assert (await api.get("/healthz")).json()["status"] == "degraded"
    clusters = (await api.get("/api/v1/clusters")).json()["clusters"]
    assert [c["name"] for c in clusters] == ["north", "south"]
    assert (await api.get("/api/v1/clusters/north")).json() == clusters[0]
    assert (await api.post("/api/v1/clusters/north/clear")).status_code == 200
    names = {p["name"] for p in (await api.get("/api/v1/policies")).json()["policies"]}
    assert names >= {"fixed", "worst-fit", "cluster-minimization"}


async def test_every_route_declares_its_problems(open_api: Open) -> None:
    schema = (await (await open_api()).get("/openapi.json")).json()
    assert "Problem" in schema["components"]["schemas"]
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    operations = [op for path in schema["paths"].values() for op in path.values()]
    assert len({op["operationId"] for op in operations}) == len(operations) > 14
    for operation in operations:
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                assert list(answer["content"]) == ["application/problem+json"], (operation["operationId"], status)


@pytest.mark.parametrize(("rules", "status"), [({}, 422), ({"max_bytes_per_job": 400_000}, 201)])
async def test_submit_beyond_max_bytes_per_job_returns_422(
    open_api: Open, body: Body, rules: Body, status: int
) -> None:
    api = await open_api(**rules)
    answer = await api.post("/api/v1/jobs", json=body | {"environment": {f"V{n}": "x" * 1000 for n in range(300)}})
    assert answer.status_code == status
    if status == 422:
        assert answer.json()["field"] == "environment"
        assert "rules.max_bytes_per_job" in answer.json()["hint"]
        assert (await api.get("/api/v1/jobs")).json()["jobs"] == []


async def test_list_jobs_omits_large_fields(open_api: Open, body: Body) -> None:
    api = await open_api()
    component = {"size": 2, "command": ["/opt/solver", "x" * 1000], "environment": {"B": "y" * 1000}}
    request = {"type": "nonfixed", "components": [component, {"size": 1}]}
    large = {"environment": {"A": "z" * 1000}, "command": ["true", "w" * 1000], "collect": ["out*"], "request": request}
    await api.post("/api/v1/jobs", json=body | large)
    answer = await api.get("/api/v1/jobs")
    (job,) = answer.json()["jobs"]
    assert job["request"] == {"type": "nonfixed", "components": [{"size": 2}, {"size": 1}]}
    assert (job["id"], job["program"], job["owner"], job["state"]) == (1, "true", "ada", "queued")
    assert len(answer.content) < 2000
    assert (await api.get("/api/v1/jobs/1")).json()["environment"] == {"A": "z" * 1000}


def test_planned_start_is_shown_to_owner_only() -> None:
    record = JobRecord(make_running_job(1), "")
    assert as_json(job_view(record))["planned_start"] == {
        "at": "1970-01-01T00:02:00.000Z",
        "first": "1970-01-01T00:01:00.000Z",
        "moved_because": "local users took nodes on north",
        "is_certain": True,
        "clusters": ["north"],
        "earlier_starts": 30,
        "earlier_on_time": 27,
    }
    assert as_json(view_for(Identity("eve", Role.USER, "token 1"), record))["planned_start"] is None
