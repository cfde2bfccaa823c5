"""Build the reference of the REST API from the daemon's OpenAPI document and the table of permissions."""

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from koalapy.api.access import access_of
from koalapy.model.errors import ProblemCode
from koalapy.model.identity import Role

Json = dict[str, Any]
FOR = {"owner": "the job's owner, and operators", "public": "everyone, without a token", "agents": "agents"}
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "maxLength": "up to"}
MANY_VALUES = 12


def document() -> Json:
    """Return the OpenAPI document of a temporary daemon without clusters."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KOALA_")}
        environment |= {"KOALA_DATABASE": "memory:", "KOALA_CLUSTERS": "{}", "XDG_STATE_HOME": folder}
        command = [sys.executable, "-m", "koalapy.cli.main", "serve", "--port", "0", "--data-dir", f"{folder}/data"]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as daemon:
            assert daemon.stdout is not None
            try:
                line = daemon.stdout.readline()
                if not line.startswith("koala serves "):
                    raise RuntimeError(f"the daemon does not start: {line}{daemon.communicate(timeout=10)[1]}")
                with urllib.request.urlopen(f"{line.split()[2]}/openapi.json", timeout=30) as answer:
                    api_document: Json = json.load(answer)
            finally:
                daemon.terminate()
                daemon.communicate(timeout=30)
    return api_document


def page(api_document: Json) -> str:
    """Return the reference as Markdown: codes of errors, permissions, operations and schemas."""
    return "\n".join(
        [_problem_codes(), _permissions(api_document), _every_operation(api_document), _schemas(api_document)]
    )


def _problem_codes() -> str:
    rows = [(f"`{code}`", str(code.status), code.meaning) for code in ProblemCode]
    return "\n".join(["", "### Error codes { #problem-codes }", "", *_table(("code", "status", "meaning"), rows)])


def _permissions(api_document: Json) -> str:
    """Return the table of the access that each operation needs."""
    rows = [
        (f"[`{method.upper()} {path}`](#{operation['operationId']})", str(access_of(path, operation["operationId"])))
        for path, operations in api_document["paths"].items()
        for method, operation in operations.items()
    ]
    lines = ["## Permissions", "", "`owner`: the job's owner and operators. `public`: no token is needed.", ""]
    return "\n".join([*lines, *_table(("operation", "access"), sorted(rows, key=lambda row: row[0]))])


def _every_operation(api_document: Json) -> str:
    operations = [
        (path, method, details)
        for path, methods in api_document["paths"].items()
        for method, details in methods.items()
    ]
    lines: list[str] = []
    for tag in api_document["tags"]:
        lines += [f"## {tag['name'].capitalize()}", "", tag["description"], ""]
        for path, method, operation in operations:
            if tag["name"] in operation["tags"]:
                lines += _operation(path, method, operation)
    return "\n".join(lines)


def _operation(path: str, method: str, operation: Json) -> Iterator[str]:
    name = operation["operationId"]
    access = access_of(path, name)
    whom = f"every {access}" if access == Role.USER else f"{access}s" if isinstance(access, Role) else FOR[access]
    yield f"### `{method.upper()} {path}` {{ #{name} }}"
    yield f"\n{operation['description'].strip().replace('``', '`')}\n"
    yield f"For {whom}.\n"
    rows = [
        (f"`{item['name']}`", item["in"], _type(item["schema"]), _describe(item, needed=item.get("required", False)))
        for item in operation.get("parameters", ())
    ]
    yield from _table(("parameter", "in", "value", "meaning"), rows)
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body, `{kind}`: {_type(content['schema'])}\n"
    answers = sorted(operation["responses"].items())
    well = [f"{status} {_answer(item)}" for status, item in answers if status < "400"]
    problems = ", ".join(status for status, _ in answers if status >= "400")
    yield f"Answers: {' · '.join(well)}; [errors](#errors): {problems}.\n"


def _answer(answer: Json) -> str:
    types = [_type(content["schema"]) for content in answer.get("content", {}).values() if content.get("schema")]
    description = answer["description"]
    return ", ".join([*([] if description == "Successful Response" else [description]), *types])


def _schemas(api_document: Json) -> str:
    lines = ["## Schemas", "", "The types of bodies and answers.", ""]
    for name, schema in sorted(api_document["components"]["schemas"].items()):
        needed = schema.get("required", ())
        lines += [f"### {name} {{ #schema-{name} }}", "", _cleaned(schema.get("description", "")), ""]
        rows = [
            (f"`{field}`", _type(field_schema), _describe(field_schema, needed=field in needed))
            for field, field_schema in schema.get("properties", {}).items()
        ]
        lines += _table(("field", "value", "meaning"), rows)
        if "enum" in schema or not rows:
            lines += [f"One of: {_type(schema)}", ""]
    return "\n".join(lines)


def _table(head: Iterable[str], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        titles = list(head)
        for row in (titles, ["---"] * len(titles), *rows):
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        yield ""


def _describe(schema: Json, *, needed: bool) -> str:
    return _cleaned(f"{'required. ' if needed else ''}{schema.get('description', '')}")


def _cleaned(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("``", "`")).replace("<", "&lt;").strip()


def _type(schema: Json) -> str:
    """Describe a schema briefly, with links to named schemas."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#schema-{name})"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(choice) for choice in choices))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        listed_values = ", ".join(f"`{value}`" for value in values[:MANY_VALUES])
        return f"{listed_values}, …" if len(values) > MANY_VALUES else listed_values
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(value_schema := schema.get("additionalProperties"), dict):
        return f"by name: {_type(value_schema)}"
    bounds = [
        f"{phrase} {schema[key]:g}" for key, phrase in BOUNDS.items() if key in schema and abs(schema[key]) < 10**7
    ]
    return ", ".join([str(schema.get("type", "anything")), *bounds])
