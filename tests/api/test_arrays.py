"""REST routes of arrays and their tasks, on a daemon without nodes."""

from typing import Any

from koalapy.model.array import MAX_PENDING_RANGES
from tests.serving import Open

Body = dict[str, Any]


async def test_array_takes_a_number_for_itself_and_each_task(open_api: Open, body: Body) -> None:
    api = await open_api()
    array = (await api.post("/api/v1/jobs", json=body | {"array": "1-200%16"})).json()
    assert (array["id"], array["array"], array["state"]) == (1, "1-200%16", "queued")
    assert array["tasks"] == {"size": 200, "waiting": 200, "running": 0, "succeeded": 0, "failed": 0, "cancelled": 0}
    assert (await api.post("/api/v1/jobs", json=body)).json()["id"] == 202
    task = (await api.get("/api/v1/jobs/4")).json()
    assert (task["id"], task["array_job"], task["array_index"], task["tasks"]) == (4, 1, 3, None)
    assert (task["state"], task["reason"]) == ("queued", "waits for its turn in array 1")
    jobs = (await api.get("/api/v1/jobs")).json()["jobs"]
    assert [job["id"] for job in jobs] == [202, 1]
    assert (await api.get("/api/v1/jobs", params={"array": 1})).json()["jobs"] == []


async def test_waiting_tasks_are_cancelled_by_index_and_by_number(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body | {"array": "10-19"})
    array = (await api.post("/api/v1/jobs/1/cancel", json={"tasks": "12-14,19"})).json()
    assert (array["state"], array["tasks"]["cancelled"]) == ("queued", 4)
    assert (await api.get("/api/v1/jobs/4")).status_code == 404
    assert (await api.post("/api/v1/jobs/2/cancel")).json()["tasks"]["cancelled"] == 5
    results = (await api.post("/api/v1/jobs/cancel", json={"jobs": [3, 4]})).json()["jobs"]
    assert [(result["state"], result["problem"] and result["problem"]["status"]) for result in results] == [
        ("cancelled", None),
        (None, 404),
    ]
    assert (await api.get("/api/v1/jobs/1")).json()["tasks"]["cancelled"] == 6
    assert (await api.post("/api/v1/jobs/5/hold")).status_code == 404
    held = await api.post("/api/v1/jobs/7/hold")
    assert (held.status_code, held.json()["detail"]) == (409, "task 1[15] was not started")
    assert (await api.post("/api/v1/jobs/1/cancel")).json()["state"] == "cancelled"
    assert (await api.post("/api/v1/jobs/1/cancel")).status_code == 409


async def test_states_of_waiting_and_cancelled_tasks(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body | {"array": "1-3"})
    await api.post("/api/v1/jobs/1/cancel", json={"tasks": "2"})
    states = (await api.post("/api/v1/jobs/states", json={"jobs": [4, 1, 3]})).json()["jobs"]
    assert [(state["job"], state["state"]) for state in states] == [(4, "queued"), (1, "queued"), (3, None)]
    assert states[2]["problem"]["code"] == "job-not-found"
    listed = (await api.get("/api/v1/jobs", params={"ids": [1, 3]})).json()["jobs"]
    assert [job["id"] for job in listed] == [1]
    await api.post("/api/v1/jobs/1/cancel")
    states = (await api.post("/api/v1/jobs/states", json={"jobs": [1, 2]})).json()["jobs"]
    assert [state["state"] for state in states] == ["cancelled", None]
    too_many = await api.post("/api/v1/jobs/states", json={"jobs": list(range(1, 10_002))})
    assert too_many.status_code == 422


async def test_each_line_makes_a_task_and_selects_lines(open_api: Open, body: Body) -> None:
    api = await open_api()
    array = (await api.post("/api/v1/jobs", json=body | {"each_line": ["a", "", "c"], "array": "%2"})).json()
    assert (array["array"], array["tasks"]["size"], array["each_line"]) == ("1-3%2", 3, ["a", "", "c"])
    array = (await api.post("/api/v1/jobs", json=body | {"each_line": ["a", "", "c"], "array": "2-3"})).json()
    assert (array["id"], array["tasks"]["size"]) == (5, 2)


async def test_bulk_actions_on_an_array_and_its_tasks(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body | {"array": "1-5"})
    held = (await api.post("/api/v1/jobs/hold", json={"jobs": [3, 1]})).json()["jobs"]
    assert [(one["state"], one["problem"] and one["problem"]["detail"]) for one in held] == [
        (None, "job 3 is queued: it was not started"),
        ("held", None),
    ]
    cancelled = (await api.post("/api/v1/jobs/cancel", json={"jobs": [3, 1, 4]})).json()["jobs"]
    assert [one["state"] for one in cancelled] == ["cancelled", "cancelled", "cancelled"]
    assert (await api.get("/api/v1/jobs/1")).json()["tasks"]["cancelled"] == 5


async def test_task_that_never_started_is_named_with_its_state(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body | {"array": "10-14"})
    await api.post("/api/v1/jobs/1/cancel", json={"tasks": "12"})
    answer = await api.get("/api/v1/jobs/4")
    assert (answer.status_code, answer.json()["detail"], answer.json()["hint"]) == (
        404,
        "task 1[12] was cancelled before it started",
        "see koala show 1",
    )
    assert (await api.get("/api/v1/jobs/5")).json()["state"] == "queued"
    await api.post("/api/v1/jobs/1/cancel")
    for path in ("", "/explain", "/logs", "/timeline"):
        answer = await api.get(f"/api/v1/jobs/6{path}")
        assert (answer.status_code, answer.json()["detail"]) == (404, "task 1[14] was cancelled before it started")
    assert (await api.get("/api/v1/jobs/7")).json()["detail"] == "there is no job 7"


def split_array_text() -> str:
    """Return the indices to cancel of tasks 1 to 5000, so that the others wait in as many ranges as are possible."""
    return ",".join(str(index) for index in range(2, 2 * MAX_PENDING_RANGES, 2))


async def test_bulk_cancel_with_too_many_ranges_cancels_the_other_jobs_and_is_audited(
    open_api: Open, body: Body
) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    await api.post("/api/v1/jobs", json=body | {"array": "1-5000"})
    split = await api.post("/api/v1/jobs/2/cancel", json={"tasks": split_array_text()})
    assert split.json()["tasks"]["cancelled"] == MAX_PENDING_RANGES - 1
    order = {"jobs": [1, 2 + 4000, 2 + 4500]}
    results = (await api.post("/api/v1/jobs/cancel", json=order)).json()["jobs"]
    assert [result["state"] for result in results] == ["cancelled", None, None]
    detail = "the waiting tasks of array 2 would be in 1002 ranges of indices; at most 1000 are possible"
    assert [result["problem"]["detail"] for result in results[1:]] == [detail, detail]
    assert (await api.get("/api/v1/jobs/2")).json()["tasks"]["cancelled"] == MAX_PENDING_RANGES - 1
    entry = (await api.get("/api/v1/audit")).json()["entries"][-1]
    assert (entry["action"], entry["outcome"], entry["target"]) == ("cancel_jobs", "done", "job 1")


async def test_bulk_cancel_of_adjacent_tasks_needs_no_ranges_between_them(open_api: Open, body: Body) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body | {"array": "1-5000"})
    await api.post("/api/v1/jobs/1/cancel", json={"tasks": split_array_text()})
    first = 1 + 2 * MAX_PENDING_RANGES - 1
    await api.post("/api/v1/jobs/cancel", json={"jobs": [first + 2, first, first + 1]})
    tasks = (await api.get("/api/v1/jobs/1")).json()["tasks"]
    assert (tasks["waiting"], tasks["cancelled"]) == (5000 - 1002, 1002)
