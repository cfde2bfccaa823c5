"""REST routes of jobs that wait for other jobs or a time, on a daemon without nodes."""

from typing import Any

from tests.serving import Open

Body = dict[str, Any]


async def test_dependent_job_waits_and_fails_with_its_dependency(open_api: Open, body: Body) -> None:
    api = await open_api()
    for after in ([], [1], ["2:any"], ["2:failed?1", "1:any"]):
        await api.post("/api/v1/jobs", json=body | {"after": after})
    waiting = (await api.get("/api/v1/jobs/4")).json()
    assert (waiting["after"], waiting["awaits"]) == (["2:failed?1:ok", "1:any"], ["2:failed?1:ok", "1:any"])
    assert waiting["reason"] == "waits for either job 2 to fail or job 1 to succeed, and job 1 to end"
    assert [(d["job"], d["condition"], d["clause"], d["state"]) for d in waiting["dependencies"]] == [
        (2, "failed", 0, "queued"),
        (1, "ok", 0, "queued"),
        (1, "any", 1, "queued"),
    ]
    first = (await api.get("/api/v1/jobs/1")).json()
    assert [(d["job"], d["condition"]) for d in first["dependents"]] == [(2, "ok"), (4, "ok"), (4, "any")]
    explained = (await api.get("/api/v1/jobs/2/explain")).json()
    assert (explained["headline"], explained["position"]) == ("waits for job 1 to succeed", None)
    await api.post("/api/v1/jobs/1/cancel")
    states = [(await api.get(f"/api/v1/jobs/{job}")).json() for job in (2, 3, 4)]
    assert [job["state"] for job in states] == ["failed", "queued", "queued"]
    assert states[0]["reason"] == "dependency: job 1 was cancelled, and it had to succeed"
    assert [(job["awaits"], job["eligible_at"] is None) for job in states[1:]] == [([], False)] * 2
    assert states[0]["dependencies"][0]["state"] == "cancelled"


async def test_dependency_on_a_task_names_the_array(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body | {"array": "5-9"})
    answer = (await api.post("/api/v1/jobs", json=body | {"after": [3]})).json()
    assert (answer["detail"], answer["hint"]) == ("after names task 1[6] of an array", "name the array, 1")
    assert (await api.post("/api/v1/jobs", json=body | {"after": [1], "array": "1-3"})).json()["awaits"] == ["1:ok"]
    await api.post("/api/v1/jobs/1/cancel")
    dependent = (await api.get("/api/v1/jobs/7")).json()
    assert (dependent["state"], dependent["tasks"]["failed"]) == ("failed", 3)


async def test_time_without_zone_is_utc_and_now_is_the_clock_of_the_daemon(open_api: Open, body: Body) -> None:
    api = await open_api()
    job = (await api.post("/api/v1/jobs", json=body | {"begin": "2100-06-01T10:00", "deadline": "now+900d"})).json()
    assert "deadline" in job["detail"]
    job = (await api.post("/api/v1/jobs", json=body | {"begin": "2100-06-01T10:00"})).json()
    assert (job["begin"], job["deadline"]) == ("2100-06-01T10:00:00.000Z", None)
    assert job["reason"] == "waits until 2100-06-01 10:00:00 UTC"


async def test_repeated_submission_with_relative_begin_is_one_job(open_api: Open, body: Body) -> None:
    api = await open_api()
    answers = [
        await api.post("/api/v1/jobs", json=body | {"begin": "now+1h"}, headers={"Idempotency-Key": "k"})
        for _ in range(2)
    ]
    assert [(answer.status_code, answer.json()["id"]) for answer in answers] == [(201, 1), (200, 1)]


async def test_jobs_of_a_batch_depend_on_earlier_jobs_and_errors_name_the_job(open_api: Open, body: Body) -> None:
    api = await open_api()
    for _ in range(2):
        await api.post("/api/v1/jobs", json=body)
    await api.post("/api/v1/jobs/2/cancel")
    for after, detail in (([9], "names job 9, which does not exist"), ([2], "can never hold: job 2 was cancelled")):
        answer = await api.post("/api/v1/jobs:batch", json={"jobs": [body, body | {"after": after}]})
        assert (answer.status_code, answer.json()["field"]) == (422, "jobs[1].after")
        assert detail in answer.json()["detail"]
    many = [body | {"after": list(range(first, first + 1000))} for first in range(10, 5010, 1000)]
    answer = await api.post("/api/v1/jobs:batch", json={"jobs": [*many, body | {"after": [1]}]})
    assert (answer.status_code, answer.json()["field"]) == (422, "jobs[5].after")
    assert "more than 5000 different jobs" in answer.json()["detail"]
    answer = await api.post("/api/v1/jobs:batch", json={"jobs": [body | {"after": [1]}, body | {"after": ["1?2:any"]}]})
    assert answer.status_code == 201
    waiting = [job for job in (await api.get("/api/v1/jobs")).json()["jobs"] if "waits for job 1" in job["reason"]]
    assert len(waiting) == 1
