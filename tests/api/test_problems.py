"""The code of each problem, by which programs distinguish problems."""

from collections.abc import Mapping
from typing import Any

import pytest

from deploy.documentation import rest_page
from koalapy.api import problems
from koalapy.model.errors import ProblemCode
from tests.serving import Open

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "options", "code"),
    [
        ("GET", "/nowhere", {}, ProblemCode.NOT_FOUND),
        ("PUT", "/jobs", {}, ProblemCode.METHOD_NOT_ALLOWED),
        ("GET", "/jobs/9", {}, ProblemCode.JOB_NOT_FOUND),
        ("GET", "/jobs/9/logs", {}, ProblemCode.JOB_NOT_FOUND),
        ("GET", "/jobs/9/timeline", {}, ProblemCode.JOB_NOT_FOUND),
        ("POST", "/jobs/9/cancel", {}, ProblemCode.JOB_NOT_FOUND),
        ("GET", "/clusters/x", {}, ProblemCode.CLUSTER_NOT_FOUND),
        ("GET", "/replicas?name=x", {}, ProblemCode.REPLICA_NOT_FOUND),
        ("GET", f"/bundles/{'a' * 64}", {}, ProblemCode.BUNDLE_NOT_FOUND),
        ("GET", "/jobs/1/results", {}, ProblemCode.RESULTS_NOT_FOUND),
        ("POST", "/tokens/9/revoke", {}, ProblemCode.TOKEN_NOT_FOUND),
        ("POST", "/clusters/north/resume", {}, ProblemCode.CONFLICT),
        ("POST", "/jobs/1/release", {}, ProblemCode.CONFLICT),
        ("POST", "/jobs", {"content": b"{", "headers": JSON}, ProblemCode.INVALID_BODY),
        ("POST", "/jobs", {"content": b" " * 1_100_000, "headers": JSON}, ProblemCode.BODY_TOO_LARGE),
        ("POST", "/jobs", {"json": {"nmae": "x"}}, ProblemCode.INVALID_VALUE),
        ("GET", "/jobs?limit=0", {}, ProblemCode.INVALID_VALUE),
        ("GET", "/jobs", {"headers": {"Host": "evil.example"}}, ProblemCode.UNKNOWN_HOST),
        ("GET", "/jobs", {"headers": {"Authorization": "Bearer wrong"}}, ProblemCode.NOT_LOGGED_IN),
        ("POST", "/jobs", {"headers": {"Origin": "http://evil.example"}}, ProblemCode.FOREIGN_ORIGIN),
    ],
)
async def test_request_problem_has_its_code(
    open_api: Open, body: dict[str, Any], method: str, path: str, options: Mapping[str, Any], code: ProblemCode
) -> None:
    api = await open_api()
    assert (await api.post("/api/v1/jobs", json=body)).status_code == 201
    answer = await api.request(method, f"/api/v1{path}", **options)
    assert (answer.json()["code"], answer.json()["status"], answer.status_code) == (code, code.status, code.status)
    assert answer.headers["content-type"] == "application/problem+json"


async def test_reused_key_and_full_queue_have_problem_codes(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api(placement_queue_limit=1)
    key = {"Idempotency-Key": "k"}
    await api.post("/api/v1/jobs", json=body, headers=key)
    rejected = await api.post("/api/v1/jobs", json=body | {"name": "x"}, headers=key)
    assert rejected.json()["code"] == ProblemCode.IDEMPOTENCY_KEY_REUSED
    assert (await api.post("/api/v1/jobs", json=body)).json()["code"] == ProblemCode.BUSY
    (cancelled,) = (await api.post("/api/v1/jobs/cancel", json={"jobs": [9]})).json()["jobs"]
    assert cancelled["problem"]["code"] == ProblemCode.JOB_NOT_FOUND


def test_api_page_lists_every_problem_code() -> None:
    document = {"paths": {}, "tags": [], "components": {"schemas": {}}}
    for code in ProblemCode:
        assert f"| `{code}` | {code.status} | {code.meaning} |" in rest_page.page(document)


async def test_problem_of_large_value_has_its_begin(open_api: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding a large value would hold the daemon for seconds."""
    monkeypatch.setattr(problems, "jsonable_encoder", lambda _: pytest.fail("it is encoded"))
    api = await open_api()
    response = await api.post("/api/v1/jobs", json=[{}] * 1000)
    assert response.status_code == 422
    assert response.json()["value"].startswith("[{}, {}, ")
