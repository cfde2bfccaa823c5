"""The REST API: what it answers, and how it refuses."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.serving import Open
from tests.signals import until

Body = dict[str, Any]


async def test_a_submitted_job_is_there(open_api: Open, body: Body) -> None:
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


async def test_the_same_key_is_the_same_job_even_at_once(open_api: Open, body: Body) -> None:
    api = await open_api()
    same = [api.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "k"}) for _ in range(5)]
    answers = await asyncio.gather(*same)
    assert sorted(a.status_code for a in answers) == [200, 200, 200, 200, 201]
    assert {a.json()["id"] for a in answers} == {1}
    other = await api.post("/api/v1/jobs", json=body | {"name": "x"}, headers={"Idempotency-Key": "k"})
    assert (other.status_code, other.json()["field"]) == (409, "Idempotency-Key")


async def test_the_same_key_is_one_job_when_the_first_to_try_was_refused(open_api: Open, body: Body) -> None:
    """Who is refused leaves the turn to those who wait, and comes after them when it tries again."""
    api = await open_api(placement_queue_limit=10)
    for _ in range(10):
        await api.post("/api/v1/jobs", json=body)
    refused = asyncio.Event()

    async def client() -> Any:
        while (answer := await _submit(api, body, "k")).status_code == 429:
            refused.set()
        return answer

    clients = [asyncio.create_task(client()) for _ in range(12)]
    await refused.wait()
    for job in range(1, 6):
        await api.post(f"/api/v1/jobs/{job}/cancel")
    answers = await asyncio.gather(*clients)
    assert sorted(answer.status_code for answer in answers) == [200] * 11 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert (await api.get("/healthz")).json()["queued"] == 6


async def test_so_many_keys_are_so_many_jobs(open_api: Open, body: Body) -> None:
    """However submissions and refusals fall together, and whoever goes away in between."""
    api = await open_api(placement_queue_limit=3)
    made: dict[str, set[int]] = defaultdict(set)
    refused, emptied = asyncio.Event(), asyncio.Condition()

    async def client(key: str) -> None:
        while not (answer := await _submit(api, body, key)).is_success:
            assert answer.status_code == 429
            async with emptied:
                refused.set()
                await emptied.wait()
        made[key].add(answer.json()["id"])

    async def leave(task: asyncio.Task[None], turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()

    async def served(clients: Sequence[tuple[str, int | None]]) -> None:
        """Submit with these keys, and empty the queue when it is full; cancel a client after so many loop turns."""
        tasks = [asyncio.create_task(client(key)) for key, _ in clients]
        leaving = [
            asyncio.create_task(leave(task, turns)) for task, (_, turns) in zip(tasks, clients, strict=True) if turns
        ]
        while await until(lambda: refused.is_set() or all(task.done() for task in tasks)) and refused.is_set():
            refused.clear()
            for job in (await api.get("/api/v1/jobs?active=true")).json()["jobs"]:
                await api.post(f"/api/v1/jobs/{job['id']}/cancel")
            async with emptied:
                emptied.notify_all()
        for ended in await asyncio.gather(*tasks, *leaving, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError)

    drawn = random.Random(7)
    for turn in range(8):
        keys = [f"{turn}.{number}" for number in range(drawn.randint(1, 4))]
        turns = (drawn.randint(1, 40), drawn.randint(1, 400), None, None)
        await served([(drawn.choice(keys), drawn.choice(turns)) for _ in range(drawn.randint(2, 12))])
        await served([(key, None) for key in keys])
        assert [len(made[key]) for key in keys] == [1] * len(keys)


async def _submit(api: Any, body: Body, key: str) -> Any:
    return await api.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": key})


async def test_hold_release_cancel(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)

    async def act(action: str) -> Any:
        return await api.post(f"/api/v1/jobs/1/{action}", json={"reason": "because"})

    assert (await act("release")).status_code == 409
    assert (await act("hold")).json()["state"] == "held"
    assert (await act("hold")).status_code == 409
    assert (await api.post("/api/v1/jobs/1/release")).json()["state"] == "queued"
    cancelled = (await act("cancel")).json()
    assert (cancelled["state"], cancelled["reason"]) == ("cancelled", "because")
    again = await act("cancel")
    assert again.status_code == 409
    assert again.json()["detail"] == "job 1 is already cancelled"


async def test_many_are_cancelled_in_one_request_each_by_itself(open_api: Open, body: Body) -> None:
    api = await open_api()
    for _ in range(40):
        await api.post("/api/v1/jobs", json=body)
    await api.post("/api/v1/jobs/2/cancel")
    order = {"jobs": [*range(1, 41), 1, 999, -1], "reason": "no more"}
    answer = await api.post("/api/v1/jobs/cancel", json=order)
    assert answer.status_code == 200
    done = answer.json()["jobs"]
    assert [one["job"] for one in done] == [*range(1, 41), 999, -1]
    assert all((one["state"], one["problem"]) == ("cancelled", None) for one in done[:40])
    missing = [(one["state"], one["problem"]["status"], one["problem"]["detail"]) for one in done[40:]]
    assert missing == [(None, 404, "there is no job 999"), (None, 404, "there is no job -1")]
    assert (await api.post("/api/v1/jobs/cancel", json=order)).json()["jobs"] == done
    reasons = [(await api.get(f"/api/v1/jobs/{job}")).json()["reason"] for job in (1, 2, 40)]
    assert reasons == ["no more", "cancelled by ada", "no more"]


async def test_how_many_are_cancelled_at_once_has_bounds(open_api: Open) -> None:
    api = await open_api()
    wrong = {
        "jobs": [[], list(range(1001)), None, "1"],
        "jobs[1]": [[1, "2"], [1, 2**53 + 1], [1, True]],
        "reson": [[1]],
    }
    for field, values in wrong.items():
        for value in values:
            more = {"reson": "x"} if field == "reson" else {}
            answer = await api.post("/api/v1/jobs/cancel", json={"jobs": value} | more)
            assert (answer.status_code, answer.json()["field"]) == (422, field), value
    assert answer.json()["hint"] == "did you mean reason? known: jobs, reason, warn"


async def test_waiting_ends_with_the_job(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    waiting = asyncio.create_task(api.get("/api/v1/jobs/1", params={"wait": 30}))
    await api.post("/api/v1/jobs/1/cancel")
    assert (await waiting).json()["state"] == "cancelled"
    assert (await api.get("/api/v1/jobs/1/logs", params={"follow": True})).content == b""


async def test_pages(open_api: Open, body: Body) -> None:
    api = await open_api()
    for owner in ("ada", "bob") * 4:
        await api.post("/api/v1/jobs", json=body | {"owner": owner})
    url: str | None = "/api/v1/jobs?owner=ada&limit=3&active=true"
    seen: list[int] = []
    while url:
        page = (await api.get(url)).json()
        seen += [job["id"] for job in page["jobs"]]
        url = page["next"]
    assert seen == [7, 5, 3, 1]
    assert (await api.get("/api/v1/jobs", params={"state": "running"})).json() == {"jobs": [], "next": None}


def _fixed(**component: object) -> Body:
    return {"request": {"type": "fixed", "components": [component]}}


WRONG_FORMS: list[tuple[Body, str, str]] = [
    ({"siez": 1}, "siez", "unknown field"),
    ({"request": {"type": "flexible", "total_size": 6, "total": 1}}, "request.total", "unknown field"),
    ({"request": {"type": "flexible"}}, "request.total_size", "required"),
    ({"request": {"type": "big"}}, "request.type", "big"),
    ({"request": {"total_size": 6}}, "request.type", ""),
    (_fixed(size="x", cluster="north"), "request.components[0].size", "integer"),
    ({"policy": "worst-fitt"}, "policy", "worst-fitt"),
    ({"policy": "worst-fit"}, "policy", "flexible"),
    ({"walltime": "soon"}, "walltime", ""),
    ({"priority": "urgent"}, "priority", ""),
    ({"coallocation": "sometimes"}, "coallocation", "sometimes"),
    ({"coallocation": True}, "coallocation", "True"),
    ({"coallocation": 1.5}, "coallocation", "1.5"),
    ({"memory": "16G"}, "memory", "no number of bytes"),
    ({"memory": True}, "memory", "no number of bytes"),
    ({"memory": 2**54}, "memory", "18014398509481984"),
    ({"per_node_bandwidth": "fast"}, "per_node_bandwidth", "no bandwidth"),
    ({"per_node_bandwidth": -1}, "per_node_bandwidth", "-1"),
    ({"per_node_bandwidth": 1e16}, "per_node_bandwidth", "1e+16"),
    ({"claiming": "eager"}, "claiming", "eager"),
    ({"claim_threshold": True}, "claim_threshold", "True"),
    ({"speed_ratio_min": "x"}, "speed_ratio_min", "x"),
    ({"retry_on_exit": ["x"]}, "retry_on_exit[0]", "x"),
    ({"policy_options": {"metric": 1}}, "policy_options.metric", "1"),
    ({"policy_options": {"colour": "red"}}, "policy_options.colour", "options"),
    ({"policy_options": ["metric"]}, "policy_options", ""),
]
"""Changes of a job whose form is wrong, with the field that the refusal names and a part of what it says."""
PASSED_ON: list[tuple[Body, str, str]] = [
    ({"request": {"type": "flexible", "total_size": 9}}, "request.total_size", "8 nodes"),
    (_fixed(size=1, cluster="nroth"), "request.components[0].cluster", "nroth"),
    ({"retry_on_exit": [75, 0]}, "retry_on_exit[1]", "0"),
]
"""Some that are refused by what tests/validation tests."""


async def test_submit_with_wrong_field_returns_422_naming_it(open_api: Open, body: Body) -> None:
    api = await open_api()
    for change, field, says in WRONG_FORMS + PASSED_ON:
        answer = await api.post("/api/v1/jobs", json=body | change)
        problem = answer.json()
        assert (answer.status_code, problem["field"]) == (422, field), (change, problem)
        assert answer.headers["content-type"] == "application/problem+json"
        assert says in problem["detail"], change
    assert (await api.get("/api/v1/jobs")).json()["jobs"] == []


async def test_a_full_queue_takes_jobs_again_once_there_is_room(open_api: Open, body: Body) -> None:
    api = await open_api(placement_queue_limit=1, scan_interval=12.0)
    await api.post("/api/v1/jobs", json=body)
    key = {"Idempotency-Key": "k"}
    refused = await api.post("/api/v1/jobs", json=body, headers=key)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "12")
    assert refused.headers["content-type"] == "application/problem+json"
    assert "placement_queue_limit is 1" in refused.json()["detail"]
    assert refused.json()["hint"]
    await api.post("/api/v1/jobs/1/cancel")
    assert (await api.post("/api/v1/jobs", json=body, headers=key)).status_code == 201


async def test_what_placing_and_claiming_are_told_is_shown(open_api: Open, body: Body) -> None:
    api = await open_api()
    told = {
        "coallocation": 2,
        "speed_ratio_min": 0.5,
        "claiming": "incremental",
        "claim_threshold": 0.25,
        "max_placement_tries": 9,
        "max_claiming_tries": 4,
        "retry_on_exit": [75, 1],
    }
    job = (await api.post("/api/v1/jobs", json=body | told)).json()
    assert {name: job[name] for name in told} == told
    plain = (await api.post("/api/v1/jobs", json=body)).json()
    assert [plain[name] for name in told] == ["allowed", None, None, None, None, None, []]
    assert (plain["policy_options"], plain["start_delay"]) == ({}, None)
    body |= {"request": {"type": "flexible", "total_size": 4}}
    for given, shown in (("allowed", "allowed"), ("never", "never"), (1, "never"), (None, "allowed")):
        assert (await api.post("/api/v1/jobs", json=body | {"coallocation": given})).json()["coallocation"] == shown


async def test_health_clusters_policies(open_api: Open) -> None:
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


async def test_submit_with_more_bytes_than_a_job_may_have_returns_422_with_field_and_setting(
    open_api: Open, body: Body
) -> None:
    api = await open_api()
    large = {f"V{n}": "x" * 1000 for n in range(300)}
    answer = await api.post("/api/v1/jobs", json=body | {"environment": large})
    assert (answer.status_code, answer.json()["field"]) == (422, "environment")
    assert "rules.max_bytes_per_job" in answer.json()["hint"]
    assert (await api.get("/api/v1/jobs")).json()["jobs"] == []


async def test_submit_with_raised_max_bytes_per_job_accepts_a_larger_job(open_api: Open, body: Body) -> None:
    api = await open_api(max_bytes_per_job=400_000)
    large = {f"V{n}": "x" * 1000 for n in range(300)}
    assert (await api.post("/api/v1/jobs", json=body | {"environment": large})).status_code == 201


async def test_list_jobs_shows_program_and_size_and_nothing_of_what_may_be_large(open_api: Open, body: Body) -> None:
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
