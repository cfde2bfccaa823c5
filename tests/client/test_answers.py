"""The types of the client's answers are those of the API's schema."""

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


def kinds(schema: Json, schemas: Json) -> set[str]:
    """Return the JSON types that a schema allows."""
    if "$ref" in schema:
        return kinds(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    options = schema.get("anyOf") or schema.get("oneOf")
    return set().union(*(kinds(one, schemas) for one in options)) if options else {schema["type"]}


def check(kind: Any, schema: Json, schemas: Json, where: str) -> None:
    """Compare each field of a type, and of the types in it, with the schema."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for name, hint in get_type_hints(kind).items():
        declared = schema["properties"][name]
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        named = {"null" if one is type(None) else NAMES[_plain(one)] for one in options}
        assert named == kinds(declared, schemas), f"{where}.{name}"
        for one in options:
            inner = (get_args(one) or (one,))[0]
            if is_typeddict(inner):
                nested = declared.get("items") or next(
                    (each for each in declared.get("anyOf", []) if "$ref" in each), declared
                )
                check(inner, nested, schemas, f"{where}.{name}")


def _plain(hint: Any) -> Any:
    return dict if is_typeddict(hint) else get_origin(hint) or hint


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
async def test_type_of_answer_is_that_of_the_schema(open_api: Open, kind: type) -> None:
    schemas = (await (await open_api()).get("/openapi.json")).json()["components"]["schemas"]
    check(kind, schemas[SCHEMAS[kind]], schemas, kind.__name__)


def test_type_of_alert_is_that_of_the_schema() -> None:
    app = FastAPI()
    app.include_router(alerts_router(Alerts((), AlertRules(), float)))
    schemas = app.openapi()["components"]["schemas"]
    check(answers.Alert, schemas["AlertView"], schemas, "Alert")
