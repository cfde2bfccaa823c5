"""REST routes of forecasts and what-if questions."""

from typing import Any

import pytest

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


async def test_what_if_with_invalid_horizon_is_rejected(open_api: Open) -> None:
    api = await open_api()
    for text in ("soon", "-1s"):
        problem = (await api.post("/api/v1/what-if", json={"horizon": text})).json()
        assert problem["detail"] == f"horizon is '{text}', not a duration"
        assert problem["hint"] == "give each number a unit: 90s, 90m, 1h30m, or as 1:30:00"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"policy": "no-such"}, "policy"),
        ({"rules": ["queue"]}, "rules"),
        ({"rules": ["claim_factor=7"]}, "rules.claim_factor"),
        ({"rules": ["no_such=7"]}, "rules.no_such"),
        ({"rules": ["queue=[1"]}, "rules"),
        ({"rules": ["queue=2026-01-01"]}, "rules.queue"),
        ({"rules": ["queue=2026-99-99"]}, "rules"),
        ({"rules": ["queue=!!binary aGk="]}, "rules.queue"),
        ({"rules": ["queue=!!set {a}"]}, "rules.queue"),
        ({"rules": ["claim_grace=.nan"]}, "rules.claim_grace"),
        ({"rules": ["step_budget=.inf"]}, "rules.step_budget"),
        ({"rules": ["claim_grace=-.inf"]}, "rules.claim_grace"),
        ({"rules": ["queue=never"]}, "rules.queue"),
        ({"drain": ["nowhere"]}, "drain"),
        ({"add": ["west=0"]}, "add"),
        ({"add": ["west=x"]}, "add"),
        ({"add": ["north=4"]}, "add"),
        ({"add": ["west=4", "west=8"]}, "add"),
        ({"rules": ["queue=fcfs", "queue=scan"]}, "rules"),
        ({"walltimes": ["1=60", "1=90"]}, "walltimes"),
        ({"drain": ["north"], "resume": ["north"]}, "resume"),
        ({"first": 77}, "first"),
        ({"walltimes": ["77=90m"]}, "walltimes"),
        ({"walltimes": ["1=never"]}, "walltimes"),
        ({"polcy": "auto"}, "polcy"),
        ({"horizon": 59}, "horizon"),
        ({"horizon": "31d"}, "horizon"),
        ({"horizon": "soon"}, "horizon"),
        ({"horizon": True}, "horizon"),
    ],
)
async def test_what_if_with_invalid_change_is_rejected(open_api: Open, body: Any, field: str) -> None:
    answer = await (await open_api()).post("/api/v1/what-if", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
