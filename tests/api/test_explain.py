"""The routes that explain jobs, on a daemon without connected clusters."""

from typing import Any

import pytest

from tests.serving import Open

Json = dict[str, Any]


async def test_explain_waiting_job_returns_position_and_clusters(open_api: Open, body: Json) -> None:
    api = await open_api()
    job = (await api.post("/api/v1/jobs", json=body)).json()
    answer = await api.get("/api/v1/jobs/1/explain")
    assert answer.status_code == 200
    explanation = answer.json()
    assert (explanation["job"], explanation["state"], explanation["headline"]) == (1, "queued", job["reason"])
    assert (
        explanation["position"],
        explanation["ahead"],
        explanation["smallest_change"],
        explanation["placement"],
    ) == (1, 0, None, None)
    assert [(c["cluster"], c["state"], c["total"]) for c in explanation["clusters"]] == [
        ("north", "unreachable", 4),
        ("south", "unreachable", 4),
    ]
    assert "its agent has not connected yet" in explanation["clusters"][0]["reason"]


async def test_explain_finished_job_returns_its_end(open_api: Open, body: Json) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    await api.post("/api/v1/jobs/1/cancel", json={"reason": "enough"})
    explanation = (await api.get("/api/v1/jobs/1/explain")).json()
    assert (explanation["state"], explanation["position"], explanation["clusters"]) == ("cancelled", None, [])
    assert explanation["headline"].endswith(": enough")
    assert [(entry["event"], entry["reason"]) for entry in explanation["reasons"]] == [("cancelled", "enough")]


async def test_explain_unknown_job_returns_404(open_api: Open) -> None:
    answer = await (await open_api()).get("/api/v1/jobs/7/explain")
    assert (answer.status_code, answer.json()["field"]) == (404, "job")


async def test_explain_submission_creates_no_job(open_api: Open, body: Json) -> None:
    api = await open_api()
    explanation = (await api.post("/api/v1/explain", json=body)).json()
    assert (explanation["job"], explanation["state"], explanation["position"]) == (None, "queued", 1)
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
async def test_explain_invalid_submission_fails_like_submit(
    open_api: Open, body: Json, change: Json, field: str
) -> None:
    api = await open_api()
    explained = await api.post("/api/v1/explain", json=body | change)
    submitted = await api.post("/api/v1/jobs", json=body | change)
    assert explained.status_code == submitted.status_code == 422
    assert explained.json() == submitted.json()
    assert explained.json()["field"] == field


async def test_explain_with_full_queue_returns_429(open_api: Open, body: Json) -> None:
    api = await open_api(placement_queue_limit=1)
    await api.post("/api/v1/jobs", json=body)
    answer = await api.post("/api/v1/explain", json=body)
    assert answer.status_code == 429
    assert answer.headers["Retry-After"]
