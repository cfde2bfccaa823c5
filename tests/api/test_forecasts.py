"""REST routes of forecasts and what-if questions."""

from tests.serving import Open

WIDE = {"request": {"type": "flexible", "total_size": 3}, "command": ["program"]}


async def test_what_if_without_jobs_changes_nothing(open_api: Open) -> None:
    answer = (await (await open_api()).post("/api/v1/what-if", json={})).json()
    assert answer["changed"] is None
    assert (answer["as_it_is"]["jobs"], answer["as_it_is"]["mean_wait"]) == ([], None)


async def test_forecast_of_waiting_job_depends_on_capacity(open_api: Open) -> None:
    """No cluster is connected, so the job starts only on an added one."""
    api = await open_api()
    job = (await api.post("/api/v1/jobs", json=WIDE)).json()["id"]
    answer = (await api.post("/api/v1/what-if", json={"add": ["west=4"], "rules": ["queue=fcfs"]})).json()
    (as_it_is,), (changed,) = answer["as_it_is"]["jobs"], answer["changed"]["jobs"]
    assert (as_it_is["job"], as_it_is["state"], as_it_is["starts"], as_it_is["not_run"]) == (job, "queued", None, 1.0)
    assert changed["starts"] == {"low": 0.0, "middle": 0.0, "high": 0.0}
    assert (await api.get(f"/api/v1/jobs/{job}/forecast")).json() == {"ready": True, "expected": as_it_is}


async def test_what_if_uses_requested_horizon(open_api: Open) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=WIDE)
    question = {"add": ["west=4"], "horizon": "24h"}
    answer = (await api.post("/api/v1/what-if", json=question)).json()
    assert [answer[variant]["horizon"] for variant in ("as_it_is", "changed")] == [86_400.0] * 2
    assert [answer[variant]["started"]["middle"] for variant in ("as_it_is", "changed")] == [0, 1]
    # Forecasts of single jobs keep their own horizon.
    forecast = (await api.get("/api/v1/jobs/1/forecast")).json()
    assert forecast["expected"]["not_run"] == 1.0
    rejected = await api.post("/api/v1/what-if", json={"policy": "fixed"})
    assert (rejected.status_code, rejected.json()["field"]) == (422, "policy"), "this policy places no flexible request"
