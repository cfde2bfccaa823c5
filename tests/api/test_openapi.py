"""The OpenAPI document, and the answers of every operation checked against it."""

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel

from koalapy.api.fields import Output, Problem
from tests.daemon.archives import GOOD, archive_of
from tests.daemon.sites import Sites, sha256_hex
from tests.serving import BUNDLE_LIMIT, Open

Json = dict[str, Any]


TEXTS_AND_ARCHIVES = (
    "text/calendar",
    "text/plain",
    "application/openmetrics-text",
    "text/event-stream",
    "application/x-tar",
    "application/x-ndjson",
)
"""Content types of answers that are not a single JSON value."""


def iterate_models(*kinds: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield these models and all their subclasses."""
    for kind in kinds:
        yield kind
        yield from iterate_models(*kind.__subclasses__())


class DeclaredAnswers:
    """Checks answers against the OpenAPI document and records the operations."""

    def __init__(self, document: Json) -> None:
        self.document = document
        self.checked_operations: set[str] = set()
        self._paths = {re.compile(re.sub(r"\{\w+\}", "[^/]+", path)): ops for path, ops in document["paths"].items()}

    async def check(self, answer: httpx2.Response) -> None:
        await answer.aread()
        request = answer.request
        method = request.method.lower()
        candidates = (ops for path, ops in self._paths.items() if path.fullmatch(request.url.path))
        operation = next(ops[method] for ops in candidates if method in ops)
        self.checked_operations.add(operation["operationId"])
        message = f"{operation['operationId']} {answer.status_code}: {answer.text}"
        assert str(answer.status_code) in operation["responses"], message
        declared = operation["responses"][str(answer.status_code)]
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in declared["content"], message
        assert set(declared.get("headers", {})) <= {name.title() for name in answer.headers}, message
        if kind not in TEXTS_AND_ARCHIVES:
            name = declared["content"][kind]["schema"]["$ref"].rpartition("/")[2]
            model = next(kind for kind in iterate_models(Output, Problem) if kind.__name__ == name)
            model.model_validate_json(answer.content, strict=True)


async def test_every_answer_conforms_to_document(open_api: Open, body: Json) -> None:
    sites = Sites({("north", "/m"): b"mesh", ("south", "/m"): b"mash", ("north", "/f"): {"a": b"1", "b": b"2"}})
    api = await open_api(placement_queue_limit=4, sites=sites)
    declared = DeclaredAnswers((await api.get("/openapi.json")).json())
    api.event_hooks = {"response": [declared.check]}
    coupled = {
        "type": "fixed",
        "components": [
            {"size": 1, "cluster": "north", "command": ["a"], "environment": {"A": "1"}},
            {"size": 2, "cluster": "south", "output": "out"},
        ],
    }
    nonfixed = {"type": "nonfixed", "components": [{"size": 1}]}
    key = {"Idempotency-Key": "k"}
    statuses = [
        (await api.post("/api/v1/jobs", json=change, headers=headers)).status_code
        for change, headers in [
            (body, key),
            (body, key),
            (body | {"name": "x"}, key),
            (body | {"request": coupled}, {}),
            (body | {"request": nonfixed}, {}),
            (body | {"nmae": "x"}, {}),
            (body, {}),
            (body, {}),
        ]
    ]
    assert statuses == [201, 200, 409, 201, 201, 422, 201, 429]
    assert (await api.get("/api/v1/jobs", params={"limit": 2})).json()["next"]
    job = (await api.get("/api/v1/jobs/2")).json()
    assert job["request"] == coupled
    assert (await api.get("/api/v1/jobs/3")).json()["request"] == nonfixed
    for path in (
        "/jobs/1",
        "/jobs/9",
        "/jobs/1/timeline",
        "/jobs/1/attempts",
        "/jobs/9/attempts?last=2",
        "/jobs/1/attempts?last=0",
        "/jobs/1/logs",
        "/jobs/9/logs",
        "/jobs/1/output",
        "/jobs/9/output",
        "/clusters",
        "/drains.ics",
        "/policies",
        "/clusters/north",
        "/clusters/x",
        "/clusters/north/nodes",
        "/clusters/north/nodes?limit=0",
        "/healthz",
        "/jobs?limit=x",
    ):
        await api.get(f"/api/v1{path}")
    for path in ("/jobs/1/explain", "/jobs/9/explain"):
        await api.get(f"/api/v1{path}")
    for job in (1, 9):
        for patch in ({}, {"request": {"total_size": 3}}, {"requst": {}}):
            await api.patch(f"/api/v1/jobs/{job}", json=patch)
            await api.post(f"/api/v1/jobs/{job}/explain", json=patch)
    for change in (body, body | {"nmae": "x"}):
        await api.post("/api/v1/explain", json=change)
        await api.post("/api/v1/forecast", json=change)
    for jobs in ([body, body], [body | {"nmae": "x"}], []):
        await api.post("/api/v1/jobs:batch", json={"jobs": jobs}, headers={"Idempotency-Key": "batch"})
    await api.get("/api/v1/advisor/record")
    for question in ({}, {"add": ["west=4"]}, {"add": ["west"]}, {"rlue": []}):
        await api.post("/api/v1/what-if", json=question)
    for path in ("/jobs/1/forecast", "/jobs/99/forecast", "/jobs/1/forecast?wait=x", "/clusters/north/drain"):
        await api.get(f"/api/v1{path}")
    for action in ("hold", "hold", "release", "cancel", "cancel"):
        await api.post(f"/api/v1/jobs/1/{action}")
    for order in ({"jobs": [1, 2, 9]}, {"jobs": []}, {"jbos": [1]}):
        for action in ("cancel", "hold", "release", "priority"):
            await api.post(f"/api/v1/jobs/{action}", json=order)
    await api.post("/api/v1/jobs/priority", json={"jobs": [2, 9], "priority": "high"})
    for path in ("/jobs/1/events", "/jobs/9/events"):
        await api.get(f"/api/v1{path}")
    await api.post("/api/v1/jobs/1/cancel", content=b"{", headers={"content-type": "application/json"})
    await api.post("/api/v1/clusters/north/clear")
    for action in ("drain", "drain", "resume", "resume", "lost"):
        await api.post(f"/api/v1/clusters/north/{action}")
    await api.post("/api/v1/clusters/north/drain", json={"by": 1})
    await api.get("/healthz")
    await api.get("/readyz")
    await api.get("/api/v1/readyz")
    for path in ("/metrics", "/livez", "/api/v1/livez", "/readyz?clusters=true", "/readyz?clusters=x"):
        await api.get(path)
    for path in (
        "/network",
        "/network/north/south/history",
        "/network/x/y/history",
        "/network?x=1",
        "/network/north/south/history?limit=0",
    ):
        await api.get(f"/api/v1{path}")
    for order in (None, {"clusters": ["north"]}, {"pairs": [["north", "x"]]}):
        await api.post("/api/v1/network/measure", json=order)
    for order in ({"request": nonfixed, "begin": "now", "duration": "1h"}, {}):
        await api.post("/api/v1/reservations", json=order)
    for path in ("", "/r1", "?x=1"):
        await api.get(f"/api/v1/reservations{path}")
    await api.delete("/api/v1/reservations/r1")
    for path in ("/advisor", "/advisor?x=1", "/advisor/record", "/advisor/record?application=wave&limit=0"):
        await api.get(f"/api/v1{path}")
    for path in ("/record", "/record?since=0"):
        await api.get(f"/api/v1{path}")
    for path in (
        "/audit",
        "/audit?limit=0",
        "/audit/verify",
        "/audit/verify?after=x",
        "/history",
        "/history?sums=true&sort=cpu&state=failed",
        "/history?since=x",
        "/usage",
        "/usage?by=user&step=week",
        "/usage?by=x",
    ):
        await api.get(f"/api/v1{path}")
    await api.get("/api/v1/alerts")
    for action in ("mark", "unmark"):
        for order in ({"kind": "disk", "action": "silence"}, {"kind": "disk"}, {"kind": "x"}):
            await api.post(f"/api/v1/alerts/{action}", json=order)
    for channel in ("mail", "mail", "webhook", "pager"):
        await api.post("/api/v1/alerts/test", json={"channel": channel})
    await request_files(api, sites)
    for order in (None, {"user": "bob", "role": "user", "expires": "8h", "note": "CI"}, {"role": "god"}):
        await api.post("/api/v1/tokens", json=order)
    for path in (
        "/tokens",
        "/tokens?all=true&user=bob",
        "/tokens?x=1",
        "/limits",
        "/limits/shares",
        "/limits?user=bob",
        "/limits?x=1",
    ):
        await api.get(f"/api/v1{path}")
    for order in ({"weight": 2, "reason": "more work"}, {"weight": -1}):
        await api.post("/api/v1/limits/shares/bob", json=order)
    for order in ({"tokens": [2]}, {"tokens": [9]}, {"all": True}, {"tokens": "x"}):
        await api.post("/api/v1/tokens/revoke", json=order)
    for token in (1, 9):
        await api.post(f"/api/v1/tokens/{token}/revoke")
    for path in ("/whoami", "/whoami?x=1"):
        await api.get(f"/api/v1{path}")
    for path in ("/login-codes", "/login-codes?x=1", "/logout", "/logout?x=1"):
        await api.post(f"/api/v1{path}")
    for ids in ([1, 9], []):
        await api.post("/api/v1/jobs/states", json={"jobs": ids})
    operations = {op["operationId"] for ops in declared.document["paths"].values() for op in ops.values()}
    assert declared.checked_operations == operations


async def request_files(api: Any, sites: Sites) -> None:
    """Request every operation on replicas, bundles and results."""
    for order in (
        {"name": "m", "cluster": "north", "path": "/m"},
        {"name": "m", "cluster": "south", "path": "/m"},
        {"name": "f", "cluster": "north", "path": "/f"},
        {"name": "x", "cluster": "north", "path": "/x"},
        {"nmae": "x"},
    ):
        await api.post("/api/v1/replicas", json=order)
    sites.away = {"north"}
    await api.post("/api/v1/replicas", json={"name": "x", "cluster": "north", "path": "/x"})
    for choice in (None, {"name": "m"}, {"name": "x"}, {"cluster": "w"}):
        await api.post("/api/v1/replicas/verify", json=choice)
    for path in (
        "/replicas",
        "/replicas?name=f",
        "/replicas?name=x",
        "/replicas?name=",
        f"/bundles/{'a' * 64}",
        "/jobs/1/results",
        "/jobs/x/results",
    ):
        await api.get(f"/api/v1{path}")
    for query in ("name=m&cluster=north", "name=m", ""):
        await api.delete(f"/api/v1/replicas?{query}")
    for body in (archive_of(GOOD), archive_of(GOOD), b"x" * 1000, b"x" * (BUNDLE_LIMIT + 1)):
        answer = await api.post("/api/v1/bundles", content=body)
    assert answer.status_code == 413
    assert (await api.get(f"/api/v1/bundles/{sha256_hex(archive_of(GOOD))}")).status_code == 200


async def test_document_references_and_tags_are_complete(open_api: Open) -> None:
    document = (await (await open_api()).get("/openapi.json")).json()
    components = document["components"]
    references = set(re.findall(r"'#/components/schemas/([^']+)'", str(document)))
    assert references <= set(components["schemas"])
    assert document["security"] == [{"bearer": []}]
    open_to_all = [path for path, ops in document["paths"].items() for op in ops.values() if op.get("security") == []]
    assert open_to_all == ["/healthz", "/livez", "/readyz"]
    assert components["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert components["schemas"]["JobSubmission"]["examples"]
    operations = [op for ops in document["paths"].values() for op in ops.values()]
    assert all(op["tags"] and op["description"] for op in operations)
    assert {tag for op in operations for tag in op["tags"]} == {tag["name"] for tag in document["tags"]}


@pytest.mark.evidence("W5")
async def test_docs_page_is_complete_and_loads_nothing(open_api: Open) -> None:
    api = await open_api()
    document = (await api.get("/openapi.json")).json()
    answer = await api.get("/docs")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    style = re.search("<style>(.*?)</style>", answer.text, re.DOTALL)
    assert style is not None
    assert base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode() in policy
    assert not re.findall(r"<script|src=|https?://|style=", answer.text)
    links = re.findall(r'href="([^"]*)"', answer.text)
    ids = re.findall(r'id="([^"]*)"', answer.text)
    assert {link for link in links if not link.startswith("#")} == {"/openapi.json"}
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert len(ids) == len(set(ids))
    operations = {op["operationId"] for ops in document["paths"].values() for op in ops.values()}
    assert operations | {f"schema-{name}" for name in document["components"]["schemas"]} == set(ids)
    for path in ("/redoc", "/docs/oauth2-redirect"):
        assert (await api.get(path)).status_code == 404


async def test_document_examples_can_be_submitted(open_api: Open) -> None:
    api = await open_api()
    document = (await api.get("/openapi.json")).json()
    for example in document["components"]["schemas"]["JobSubmission"]["examples"]:
        assert (await api.post("/api/v1/jobs", json=example)).status_code == 201
