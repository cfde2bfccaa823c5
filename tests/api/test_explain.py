"""The routes that answer "why?", on the whole daemon but for its clusters."""

from typing import Any

import pytest

from tests.serving import Open

Json = dict[str, Any]


async def test_a_waiting_job_is_explained(open_api: Open, body: Json) -> None:
    api = await open_api()
    job = (await api.post("/api/v1/jobs", json=body)).json()
    answer = await api.get("/api/v1/jobs/1/explain")
    assert answer.status_code == 200
    found = answer.json()
    assert (found["job"], found["state"], found["headline"]) == (1, "queued", job["reason"])
    assert (found["position"], found["ahead"], found["smallest_change"], found["placement"]) == (1, 0, None, None)
    assert [(c["cluster"], c["state"], c["total"]) for c in found["clusters"]] == [
        ("north", "unreachable", 4),
        ("south", "unreachable", 4),
    ]
    assert "its agent has not connected yet" in found["clusters"][0]["reason"]


async def test_explanation_of_finished_job_is_its_end(open_api: Open, body: Json) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    await api.post("/api/v1/jobs/1/cancel", json={"reason": "enough"})
    found = (await api.get("/api/v1/jobs/1/explain")).json()
    assert (found["state"], found["position"], found["clusters"]) == ("cancelled", None, [])
    assert found["headline"].endswith(": enough")
    assert [(past["event"], past["reason"]) for past in found["reasons"]] == [("cancelled", "enough")]


async def test_an_unknown_job_is_not_explained(open_api: Open) -> None:
    answer = await (await open_api()).get("/api/v1/jobs/7/explain")
    assert (answer.status_code, answer.json()["field"]) == (404, "job")


async def test_a_submission_is_explained_and_not_made(open_api: Open, body: Json) -> None:
    api = await open_api()
    found = (await api.post("/api/v1/explain", json=body)).json()
    assert (found["job"], found["state"], found["position"]) == (None, "queued", 1)
    assert (await api.get("/api/v1/jobs")).json()["jobs"] == []
    assert (await api.post("/api/v1/jobs", json=body)).json()["id"] == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request": {"type": "flexible", "total_size": 9}}, "request.total_size"),
        ({"policy": "worst-fit"}, "policy"),
        ({"commando": []}, "commando"),
        ({"command": []}, "command"),
    ],
)
async def test_a_wrong_submission_is_refused_as_when_submitted(
    open_api: Open, body: Json, change: Json, field: str
) -> None:
    api = await open_api()
    asked = await api.post("/api/v1/explain", json=body | change)
    submitted = await api.post("/api/v1/jobs", json=body | change)
    assert asked.status_code == submitted.status_code == 422
    assert asked.json() == submitted.json()
    assert asked.json()["field"] == field


async def test_a_full_queue_is_told(open_api: Open, body: Json) -> None:
    api = await open_api(placement_queue_limit=1)
    await api.post("/api/v1/jobs", json=body)
    answer = await api.post("/api/v1/explain", json=body)
    assert answer.status_code == 429
    assert answer.headers["Retry-After"]
