"""Malformed requests: each is answered with a problem, none with a server error."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from koalapy.api.guard import MAX_BODY_BYTES
from tests.serving import Open

JSON = {"content-type": "application/json"}
JOB = '{"request": {"type": "flexible", "total_size": 6}, "command": ["true"], %s}'
FLEXIBLE = '{"request": {"type": "flexible", "total_size": %s}, "command": ["true"]}'


@pytest.mark.evidence("U4")
@pytest.mark.parametrize(
    ("body", "field"),
    [
        (JOB % '"walltime": NaN', "walltime"),
        (JOB % '"walltime": Infinity', "walltime"),
        (JOB % '"walltime": true', "walltime"),
        (JOB % ('"walltime": "%sh"' % ("9" * 30)), "walltime"),
        (JOB % '"name": "\\ud800"', "name"),
        (JOB % '"name": "a\\u0000"', "name"),
        (JOB % '"name": "\\u001b[31m"', "name"),
        (JOB % '"owner": "two\\nlines"', "owner"),
        (JOB % '"workdir": "a\\u0000"', "workdir"),
        (JOB % '"\\ud800": 1', "body"),
        (JOB % ('"max_restarts": ' + "9" * 30), "max_restarts"),
        (JOB % '"environment": {"A": 1}', "environment.A"),
        (FLEXIBLE % "true", "request.total_size"),
        (FLEXIBLE % '"6"', "request.total_size"),
        (FLEXIBLE % "6.5", "request.total_size"),
        (FLEXIBLE % ("9" * 30), "request.total_size"),
        ("[]", "body"),
        ('"x"', "body"),
        ("null", "body"),
    ],
)
async def test_submit_with_strange_value_is_rejected(open_api: Open, body: str, field: str) -> None:
    answer = await (await open_api()).post("/api/v1/jobs", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    assert answer.json()["hint"]


TEXTS = [
    ('{"command": [%s]}', "command[0]"),
    ('{"command": ["true", %s]}', "command[1]"),
    ('{"environment": {"A": %s}}', "environment.A"),
    ('{"environment": {%s: "a"}}', "environment"),
    ('{"policy_options": {"metric": %s}}', "policy_options.metric"),
    ('{"policy_options": {%s: "a"}}', "policy_options"),
    ('{"workdir": %s}', "workdir"),
    ('{"collect": [%s]}', "collect[0]"),
    ('{"inputs": [{"file": "a", "as": %s}]}', "inputs[0].as"),
    ('{"bundle": %s}', "bundle"),
    ('{"request": {"type": "fixed", "components": [{"size": 1, "cluster": %s}]}}', "request.components[0].cluster"),
    (
        '{"request": {"type": "nonfixed", "components": [{"size": 1, "command": [%s]}]}}',
        "request.components[0].command[0]",
    ),
    (
        '{"request": {"type": "nonfixed", "components": [{"size": 1, "environment": {"A": %s}}]}}',
        "request.components[0].environment.A",
    ),
]


@pytest.mark.parametrize("odd", ['"a\\ud800"', '"\\udfff\\ud800"', '"a\\u0000b"'])
async def test_text_that_cannot_be_stored_is_rejected(open_api: Open, odd: str) -> None:
    """A job with such a text would break every list that contains it, and the connection of its cluster."""
    api = await open_api()
    job = {"request": {"type": "flexible", "total_size": 6}, "command": ["true"]}
    for text, field in TEXTS:
        changed = json.dumps(job | json.loads(text % odd))
        for path in ("/api/v1/jobs", "/api/v1/explain"):
            answer = await api.post(path, content=changed, headers=JSON)
            assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
            assert answer.json()["hint"] in ("remove lone surrogates", "leave it out")
    for path, text, field in (
        ("/clusters/north/drain", '{"reason": %s}', "reason"),
        ("/jobs/1/cancel", '{"reason": %s}', "reason"),
        ("/network/measure", '{"clusters": [%s]}', "clusters[0]"),
        ("/replicas", '{"name": "a", "cluster": "north", "path": %s}', "path"),
        ("/replicas/verify", '{"cluster": %s}', "cluster"),
    ):
        answer = await api.post(f"/api/v1{path}", content=text % odd, headers=JSON)
        assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    assert (await api.get("/api/v1/jobs")).json()["jobs"] == []


@pytest.mark.evidence("U4", "C15")
async def test_document_bounds_every_text_field(open_api: Open) -> None:
    document = (await (await open_api()).get("/openapi.json")).json()
    schemas: list[str] = []

    def check_schema(schema: Any, path: str) -> None:
        if reference := schema.get("$ref"):
            if (name := reference.rpartition("/")[2]) not in schemas:
                schemas.append(name)
                check_schema(document["components"]["schemas"][name], name)
            return
        if schema.get("type") == "string":
            bound = schema.keys() & {"pattern", "enum", "const"} or schema["format"] in (
                "duration-of-job",
                "point-in-time",
                "binary",
                "date",
            )
            assert bound, path
        if schema.get("type") == "object":
            assert schema.get("additionalProperties") is False or schema["propertyNames"]["pattern"], path
        parts = [(f"{path}.{name}", part) for name, part in schema.get("properties", {}).items()]
        for kind in ("anyOf", "oneOf", "allOf", "prefixItems"):
            parts += [(path, part) for part in schema.get(kind, ())]
        parts += [(path, part) for part in (schema.get("items"), schema.get("additionalProperties")) if part]
        for name, part in parts:
            check_schema(part, name)

    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                check_schema(parameter["schema"], f"{operation['operationId']} {parameter['name']}")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                check_schema(content["schema"], operation["operationId"])
    assert {"JobSubmission", "ComponentInput", "ActionReason", "DrainOrder", "ReplicaOrder"} <= set(schemas)


async def test_json_with_wrong_content_type_returns_422(open_api: Open) -> None:
    answer = await (await open_api()).post("/api/v1/jobs", content=FLEXIBLE % 6, headers={"content-type": "text/plain"})
    assert answer.status_code == 422
    assert "application/json" in answer.json()["hint"]


async def test_body_of_undeclared_size_is_limited(open_api: Open) -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(64):
            sent += 1
            yield b" " * (MAX_BODY_BYTES // 16)

    answer = await (await open_api()).post("/api/v1/jobs", content=pieces(), headers=JSON)
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"


async def test_body_of_maximum_size_is_accepted(open_api: Open, body: dict[str, Any]) -> None:
    text = json.dumps(body)
    padded = text + " " * (MAX_BODY_BYTES - len(text))
    assert (await (await open_api()).post("/api/v1/jobs", content=padded, headers=JSON)).status_code == 201


async def test_large_invalid_value_is_not_echoed(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api()
    for change in ({"name": "x" * 100_000}, {"x" * 100_000: 1}, {"policy_options": {"x" * 100_000: 1}}):
        answer = await api.post("/api/v1/jobs", json=body | change)
        assert answer.status_code == 422
        assert len(answer.content) < 6000


COMPONENT = {"size": 1}
NONFIXED = {"type": "nonfixed"}
LARGE_SUBMISSIONS: list[tuple[str, dict[str, Any]]] = [
    ("request.components", {"request": NONFIXED | {"components": [COMPONENT] * 20_000}}),
    ("request.components", {"request": NONFIXED | {"components": [COMPONENT] * 1001}}),
    ("request.components", {"request": {"type": "fixed", "components": [COMPONENT | {"cluster": "north"}] * 1001}}),
    ("request.split_options", {"request": {"type": "flexible", "total_size": 1, "split_options": [[1]] * 101}}),
    ("request.split_options[0]", {"request": {"type": "flexible", "total_size": 1001, "split_options": [[1] * 1001]}}),
    ("request.max_components", {"request": {"type": "flexible", "total_size": 6, "max_components": 1001}}),
    ("command", {"command": ["a"] * 10_001}),
    ("environment", {"environment": {str(number): "" for number in range(10_001)}}),
    ("policy_options", {"policy_options": {str(number): "" for number in range(101)}}),
    ("retry_on_exit", {"retry_on_exit": [1] * 256}),
    ("collect", {"collect": ["a"] * 1001}),
    ("inputs", {"inputs": [{"file": "a", "as": str(number)} for number in range(1001)]}),
    (
        "inputs",
        {
            "request": NONFIXED | {"components": [COMPONENT] * 1000},
            "inputs": [{"file": "a", "as": str(number)} for number in range(11)],
        },
    ),
    ("inputs", {"request": NONFIXED | {"components": [COMPONENT | {"inputs": [{"file": "a"}] * 11}] * 1000}}),
    ("command", {"request": NONFIXED | {"components": [COMPONENT] * 1000}, "command": ["a" * 300]}),
    ("command", {"request": NONFIXED | {"components": [COMPONENT] * 900}, "environment": {"A": "a" * 500}}),
]


@pytest.mark.evidence("U4")
@pytest.mark.parametrize(
    ("field", "change"), LARGE_SUBMISSIONS, ids=[f"{n}-{field}" for n, (field, _) in enumerate(LARGE_SUBMISSIONS)]
)
async def test_submit_with_too_many_values_is_rejected(
    open_api: Open, body: dict[str, Any], field: str, change: dict[str, Any]
) -> None:
    """Checking such a job would block the daemon, so its size is checked before all else."""
    api = await open_api()
    for path in ("/api/v1/jobs", "/api/v1/explain"):
        answer = await api.post(path, content=json.dumps(body | change, separators=(",", ":")), headers=JSON)
        assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
        assert answer.json()["hint"].startswith(("give at most", "put long arguments"))
        assert len(answer.content) < 2000


async def test_component_limit_follows_setting(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api(max_components_per_job=2)
    for count, status in ((2, 201), (3, 422)):
        request = {"type": "nonfixed", "components": [{"size": 1}] * count}
        answer = await api.post("/api/v1/jobs", json=body | {"request": request})
        assert answer.status_code == status
    assert "rules.max_components_per_job" in answer.json()["hint"]


async def test_every_path_reports_its_methods(open_api: Open) -> None:
    api = await open_api()
    paths = (await api.get("/openapi.json")).json()["paths"]
    assert len(paths) > 20
    for path, operations in paths.items():
        allowed = {"OPTIONS", *(method.upper() for method in operations)}
        allowed |= {"HEAD"} if path == "/api/v1/bundles/{bundle}" else set()
        # GET and PATCH match the route of a job with this number, which is rejected.
        actions = {f"/api/v1/jobs/{action}" for action in ("cancel", "hold", "release", "priority", "states")}
        allowed |= {"GET", "PATCH"} if path in actions else set()
        options = await api.options(re.sub(r"[{}]", "", path))
        assert (options.status_code, set(options.headers["allow"].split(", "))) == (204, allowed), path
        for method in {"PATCH", "PUT", "DELETE"} - allowed:
            answer = await api.request(method, options.request.url)
            assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, allowed), path
    assert (await api.options("/api/v1/nowhere")).status_code == 404


@pytest.mark.evidence("N2")
@pytest.mark.parametrize("header", ["secret", "Basic secret", "Bearer", "Bearer ", "Bearer secretx", "Bearer sécret"])
async def test_invalid_token_returns_401(open_api: Open, header: str) -> None:
    api = await open_api(tokens=["other", "secret"])
    headers = [(b"authorization", header.encode("latin-1"))]
    assert (await api.get("/api/v1/jobs", headers=headers)).status_code == 401
    assert (await api.get("/api/v1/nowhere", headers=headers)).status_code == 401


async def test_authorization_scheme_is_case_insensitive(open_api: Open) -> None:
    api = await open_api(tokens=["other", "secret"])
    for header in ("Bearer other", "bearer secret"):
        assert (await api.get("/api/v1/jobs", headers={"authorization": header})).status_code == 200
