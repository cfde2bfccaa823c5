"""The page of the REST API: of the OpenAPI document that a daemon gives, and of the table of who may do what."""

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
    """What a daemon without clusters, of which nothing stays, says of its API."""
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
                    found: Json = json.load(answer)
            finally:
                daemon.terminate()
                daemon.communicate(timeout=30)
    return found


def page(found: Json) -> str:
    """Return the reference as Markdown: codes of errors, permissions, operations and schemas."""
    return "\n".join([_problem_codes(), _permissions(found), _every_operation(found), _schemas(found)])


def _problem_codes() -> str:
    rows = [(f"`{code}`", str(code.status), code.meaning) for code in ProblemCode]
    return "\n".join(["", "### Error codes { #problem-codes }", "", *_table(("code", "status", "meaning"), rows)])


def _permissions(found: Json) -> str:
    """Return the table of the access that each operation needs."""
    rows = [
        (f"[`{method.upper()} {path}`](#{operation['operationId']})", str(access_of(path, operation["operationId"])))
        for path, operations in found["paths"].items()
        for method, operation in operations.items()
    ]
    lines = ["## Permissions", "", "`owner`: the job's owner and operators. `public`: no token is needed.", ""]
    return "\n".join([*lines, *_table(("operation", "access"), sorted(rows, key=lambda row: row[0]))])


def _every_operation(found: Json) -> str:
    operations = [(path, method, one) for path, all_ in found["paths"].items() for method, one in all_.items()]
    lines: list[str] = []
    for tag in found["tags"]:
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
        (f"`{one['name']}`", one["in"], _type(one["schema"]), _told(one, needed=one.get("required", False)))
        for one in operation.get("parameters", ())
    ]
    yield from _table(("parameter", "in", "value", "meaning"), rows)
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body, `{kind}`: {_type(content['schema'])}\n"
    answers = sorted(operation["responses"].items())
    well = [f"{status} {_answer(one)}" for status, one in answers if status < "400"]
    problems = ", ".join(status for status, _ in answers if status >= "400")
    yield f"Answers: {' · '.join(well)}; [errors](#errors): {problems}.\n"


def _answer(answer: Json) -> str:
    types = [_type(content["schema"]) for content in answer.get("content", {}).values() if content.get("schema")]
    words = answer["description"]
    return ", ".join([*([] if words == "Successful Response" else [words]), *types])


def _schemas(found: Json) -> str:
    lines = ["## Schemas", "", "The types of bodies and answers.", ""]
    for name, schema in sorted(found["components"]["schemas"].items()):
        needed = schema.get("required", ())
        lines += [f"### {name} {{ #schema-{name} }}", "", _cleaned(schema.get("description", "")), ""]
        rows = [
            (f"`{own}`", _type(one), _told(one, needed=own in needed))
            for own, one in schema.get("properties", {}).items()
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


def _told(one: Json, *, needed: bool) -> str:
    return _cleaned(f"{'required. ' if needed else ''}{one.get('description', '')}")


def _cleaned(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("``", "`")).replace("<", "&lt;").strip()


def _type(schema: Json) -> str:
    """A schema in a few words, with links to those that have names."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#schema-{name})"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(one) for one in choices))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        told = ", ".join(f"`{value}`" for value in values[:MANY_VALUES])
        return f"{told}, …" if len(values) > MANY_VALUES else told
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(of := schema.get("additionalProperties"), dict):
        return f"by name: {_type(of)}"
    bounds = [f"{word} {schema[key]:g}" for key, word in BOUNDS.items() if key in schema and abs(schema[key]) < 10**7]
    return ", ".join([str(schema.get("type", "anything")), *bounds])
