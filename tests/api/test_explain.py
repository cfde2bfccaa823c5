"""The routes that explain jobs, on a daemon without connected clusters."""

from typing import Any

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


async def test_explain_submission_creates_no_job(open_api: Open, body: Json) -> None:
    api = await open_api()
    explanation = (await api.post("/api/v1/explain", json=body)).json()
    assert (explanation["job"], explanation["state"], explanation["position"]) == (None, "queued", 1)
    assert (await api.get("/api/v1/jobs")).json()["jobs"] == []
    assert (await api.post("/api/v1/jobs", json=body)).json()["id"] == 1


async def test_explain_with_full_queue_returns_429(open_api: Open, body: Json) -> None:
    api = await open_api(placement_queue_limit=1)
    await api.post("/api/v1/jobs", json=body)
    answer = await api.post("/api/v1/explain", json=body)
    assert answer.status_code == 429
    assert answer.headers["Retry-After"]
