"""The types of the client's answers match the schema of the API."""

import types
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
from fastapi import FastAPI

from koalapy.api.monitoring import alerts_router
from koalapy.client import answers
from koalapy.daemon.alerts.alerts import Alerts
from koalapy.model.alert import AlertRules
from tests.serving import Open

Json = dict[str, Any]
SCHEMAS = {
    answers.ListedJob: "ListedJobView",
    answers.Job: "JobWithTimeline",
    answers.Attempt: "AttemptView",
    answers.Cluster: "ClusterView",
}
NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def json_types_of(schema: Json, schemas: Json) -> set[str]:
    """Return the JSON types that a schema allows."""
    if "$ref" in schema:
        return json_types_of(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    options = schema.get("anyOf") or schema.get("oneOf")
    return set().union(*(json_types_of(option, schemas) for option in options)) if options else {schema["type"]}


def compare_fields(kind: Any, schema: Json, schemas: Json, path: str) -> None:
    """Compare each field of a type, and of the types in it, with the schema."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for name, hint in get_type_hints(kind).items():
        declared = schema["properties"][name]
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        json_types = {"null" if option is type(None) else NAMES[_plain_type(option)] for option in options}
        assert json_types == json_types_of(declared, schemas), f"{path}.{name}"
        for option in options:
            inner = (get_args(option) or (option,))[0]
            if is_typeddict(inner):
                nested = declared.get("items") or next(
                    (schema_option for schema_option in declared.get("anyOf", []) if "$ref" in schema_option), declared
                )
                compare_fields(inner, nested, schemas, f"{path}.{name}")


def _plain_type(hint: Any) -> Any:
    return dict if is_typeddict(hint) else get_origin(hint) or hint


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
async def test_answer_type_matches_api_schema(open_api: Open, kind: type) -> None:
    schemas = (await (await open_api()).get("/openapi.json")).json()["components"]["schemas"]
    compare_fields(kind, schemas[SCHEMAS[kind]], schemas, kind.__name__)


def test_alert_type_matches_api_schema() -> None:
    app = FastAPI()
    app.include_router(
        alerts_router(Alerts((), AlertRules(), float), None)  # type: ignore[arg-type]
    )
    schemas = app.openapi()["components"]["schemas"]
    compare_fields(answers.Alert, schemas["AlertView"], schemas, "Alert")
