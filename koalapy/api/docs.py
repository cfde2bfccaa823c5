"""``/openapi.json``, and the page at ``/docs``, which says the same for people; it loads nothing and runs nothing."""

import asyncio
import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse

from koalapy.api.headers import NOTHING

Json = dict[str, Any]
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
code { background: #eee; padding: 0 .2em; } summary { cursor: pointer; } details { margin: .3rem 0; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid #ccc; padding: .2rem .6rem; text-align: left; }
@media (prefers-color-scheme: dark) {
    body { background: #111; color: #ddd; } code { background: #333; } a { color: #8bf; }
}
""".replace("\n", "")
HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {"Content-Security-Policy": f"{NOTHING}; style-src 'sha256-{HASH}'"}


def docs_router(document: Callable[[], Json]) -> APIRouter:
    """``document`` makes the OpenAPI document: once, for half a second, and anybody may be the first to ask for it. So
    that is done by another thread, one at a time."""
    router, making = APIRouter(), asyncio.Lock()

    async def made() -> Json:
        async with making:
            return await asyncio.to_thread(document)

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(await made())

    @router.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse("\n".join(_page(await made())), headers=HEADERS)

    return router


def _page(document: Json) -> Iterator[str]:
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
    yield f'<p>{escape(info["description"])} <a href="/openapi.json">openapi.json</a></p>'
    operations = [(path, method, found) for path, ops in document["paths"].items() for method, found in ops.items()]
    for tag in document["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2><p>{escape(tag['description'])}</p>"
        for path, method, operation in operations:
            if tag["name"] in operation["tags"]:
                yield from _operation(path, method, operation)
    yield "<h2>Schemas</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield from _schema(name, schema)
    yield "</body></html>"


def _operation(path: str, method: str, operation: Json) -> Iterator[str]:
    name = escape(operation["operationId"])
    yield f'<details id="{name}"><summary>{_code(f"{method.upper()} {path}")}</summary>'
    yield f"<p>{escape(operation['description'])}</p>"
    if parameters := operation.get("parameters"):
        yield _table(
            (_code(one["name"]), one["in"], _type(one["schema"]), _told(one, needed=one.get("required", False)))
            for one in parameters
        )
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>body, {escape(kind)}: {_type(content['schema'])}</p>"
    answers = (f"{status} {_answer(answer)}" for status, answer in sorted(operation["responses"].items()))
    yield f"<p>answers: {' · '.join(answers)}</p></details>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _told(one: Json, *, needed: bool) -> str:
    return escape(f"{'required. ' if needed else ''}{one.get('description', '')}")


def _table(rows: Iterable[Iterable[str]]) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{lines}</table>"


def _answer(answer: Json) -> str:
    types = [_type(content["schema"]) for content in answer.get("content", {}).values() if content.get("schema")]
    return ", ".join([escape(answer["description"]), *types])


def _schema(name: str, schema: Json) -> Iterator[str]:
    yield f'<details id="schema-{escape(name)}"><summary>{_code(name)}</summary>'
    yield f"<p>{escape(schema.get('description', ''))}</p>"
    needed = schema.get("required", ())
    fields = schema.get("properties", {}).items()
    yield _table((_code(field), _type(found), _told(found, needed=field in needed)) for field, found in fields)
    yield f"<p>{_type(schema)}</p></details>" if "enum" in schema else "</details>"


def _type(schema: Json) -> str:
    """A schema in a few words, with links to those that have names."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_type(one) for one in choices)
    if "enum" in schema or "const" in schema:
        return ", ".join(escape(str(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema]
    return escape(" ".join([str(schema.get("type", "anything")), *bounds]))


BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "maxLength": "up to", "format": "of format"}
