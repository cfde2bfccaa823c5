"""The types of the client's answers have the fields that the API gives, and match the schema of the API."""

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
UNREAD = {
    "Alert": "cluster job user",
    "Attempt": "claim_at exit_code queue_time relayed response_time start_delay start_estimate startup_overhead "
    "streams wait_time",
    "AttemptComponent": "accounted_nodes cpu_available cpu_time error exit_code file_site hosts infrastructure "
    "measured_nodes peak_memory sources stage_size staged staged_at staging_since transfer_time warned_at",
    "Cluster": "last_heard processes_per_node speed trials",
    "Component": "exit_code lease lost_at unknown_since",
    "Job": "account after application array_fail awaits claim_threshold claiming coallocation collect communication "
    "cores each_line eligible_at environment error exclude features generation gpus interactive label launcher lease "
    "links mail_type mail_user max_claiming_tries max_placement_tries max_restarts output partition per_node_bandwidth "
    "placed_at policy_options processes_per_node qos retry_at retry_on_exit speed_ratio_min wait_time walltime warning "
    "webhook workdir workdir_optional",
    "ListedComponent": "exit_code",
    "ListedJob": "application claiming_tries generation launcher placed_at placement_tries queue_time response_time "
    "retry_at start_delay startup_overhead wait_time walltime",
    "TimelineEntry": "actor component generation",
}
"""By type, the fields of the API that no client reads."""
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
    unread = set(UNREAD.get(kind.__name__, "").split())
    assert schema["properties"].keys() - get_type_hints(kind).keys() == unread, f"{path}: extend the type or UNREAD"
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


def test_each_type_of_an_answer_is_compared() -> None:
    compared: set[Any] = set()

    def add_types(kind: Any) -> None:
        if is_typeddict(kind):
            compared.add(kind)
        for inner in get_type_hints(kind).values() if is_typeddict(kind) else get_args(kind):
            add_types(inner)

    for kind in (*SCHEMAS, answers.Alert):
        add_types(kind)
    types_of_answers = {kind for name, kind in vars(answers).items() if is_typeddict(kind) and not name.startswith("_")}
    assert compared == types_of_answers
    assert UNREAD.keys() <= {kind.__name__ for kind in compared}
