"""What the API tells of what will become of jobs."""

from typing import Any

import pytest

from tests.serving import Open

WIDE = {"request": {"type": "flexible", "total_size": 3}, "command": ["program"]}


async def test_nobody_waits_and_nothing_is_changed(open_api: Open) -> None:
    found = (await (await open_api()).post("/api/v1/what-if", json={})).json()
    assert found["changed"] is None
    assert (found["as_it_is"]["jobs"], found["as_it_is"]["mean_wait"]) == ([], None)


async def test_a_job_that_waits_is_foretold(open_api: Open) -> None:
    """No cluster is connected, so that it starts only with one that is added."""
    api = await open_api()
    job = (await api.post("/api/v1/jobs", json=WIDE)).json()["id"]
    found = (await api.post("/api/v1/what-if", json={"add": ["west=4"], "rules": ["queue=fcfs"]})).json()
    (as_it_is,), (changed,) = found["as_it_is"]["jobs"], found["changed"]["jobs"]
    assert (as_it_is["job"], as_it_is["state"], as_it_is["starts"], as_it_is["not_run"]) == (job, "queued", None, 1.0)
    assert changed["starts"] == {"low": 0.0, "middle": 0.0, "high": 0.0}
    assert (await api.get(f"/api/v1/jobs/{job}/forecast")).json() == {"ready": True, "expected": as_it_is}


async def test_a_look_ahead_is_as_far_as_it_is_told(open_api: Open) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=WIDE)
    question = {"add": ["west=4"], "horizon": "24h"}
    found = (await api.post("/api/v1/what-if", json=question)).json()
    assert [found[way]["horizon"] for way in ("as_it_is", "changed")] == [86_400.0] * 2
    assert [found[way]["started"]["middle"] for way in ("as_it_is", "changed")] == [0, 1]
    # What is told of single jobs looks as far ahead as ever.
    told = (await api.get("/api/v1/jobs/1/forecast")).json()
    assert told["expected"]["not_run"] == 1.0
    refused = await api.post("/api/v1/what-if", json={"policy": "fixed"})
    assert (refused.status_code, refused.json()["field"]) == (422, "policy"), "it places no flexible request"


async def test_what_is_no_horizon_is_told_what_one_is(open_api: Open) -> None:
    api = await open_api()
    for text in ("soon", "-1s"):
        told = (await api.post("/api/v1/what-if", json={"horizon": text})).json()
        assert told["detail"] == f"horizon is '{text}', no duration"
        assert told["hint"] == "give seconds, or units with each number: 90m, 1h30m, 1:30:00"


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
async def test_a_change_that_cannot_be_is_refused_by_its_field(open_api: Open, body: Any, field: str) -> None:
    told = await (await open_api()).post("/api/v1/what-if", json=body)
    assert (told.status_code, told.json()["field"]) == (422, field), told.text
