"""The forms of a warning: a signal and the seconds before the stop."""

from typing import Any

import pytest

from tests.serving import Open


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("TERM@30", "TERM@30"),
        ("SIGUSR1@2m", "USR1@120"),
        ("usr2", "USR2@60"),
        ("10@1:30", "USR1@90"),
        ("TERM@0.5", "TERM@0.5"),
        (" INT@600 ", "INT@600"),
        (None, None),
    ],
)
async def test_warning_is_returned_in_normal_form(
    open_api: Open, body: dict[str, Any], written: str | None, expected: str | None
) -> None:
    api = await open_api()
    answer = await api.post("/api/v1/jobs", json=body | {"warning": written})
    assert (answer.status_code, answer.json()["warning"]) == (201, expected)
    assert (await api.get(f"/api/v1/jobs/{answer.json()['id']}")).json()["warning"] == expected


@pytest.mark.parametrize(("walltime", "status"), [(29, 422), (30, 422), (31, 201)])
async def test_warning_grace_must_be_shorter_than_walltime(
    open_api: Open, body: dict[str, Any], walltime: int, status: int
) -> None:
    answer = await (await open_api()).post("/api/v1/jobs", json=body | {"warning": "TERM@30", "walltime": walltime})
    assert answer.status_code == status
    if status == 422:
        assert "it would be warned before it has begun" in answer.json()["detail"]
        assert answer.json()["hint"] == "give fewer seconds, or a longer walltime"


async def test_cancel_and_drain_accept_warn(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api()
    jobs = [(await api.post("/api/v1/jobs", json=body | {"warning": "TERM@30"})).json()["id"] for _ in range(2)]
    assert (await api.post(f"/api/v1/jobs/{jobs[0]}/cancel", json={"warn": True})).status_code == 200
    results = (await api.post("/api/v1/jobs/cancel", json={"jobs": jobs, "warn": True})).json()["jobs"]
    assert [result["problem"] for result in results] == [None, None]
    drained = await api.post("/api/v1/clusters/north/drain", json={"requeue": True, "reason": "test"})
    assert (drained.status_code, drained.json()["state"]) == (200, "drained")
    for path in ("/jobs/1/cancel", "/clusters/north/drain"):
        answer = await api.post(f"/api/v1{path}", json={"warn": "soon", "requeue": "soon", "reason": "test"})
        assert answer.status_code == 422
