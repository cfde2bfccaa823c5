"""Errors as problem+json (RFC 9457): a message, the wrong field, a stable code and a hint."""

import json
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, get_args

import structlog
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from koalapy.api.job_views import (
    ComponentInput,
    Fixed,
    FixedComponent,
    Flexible,
    JobInput,
    JobSubmission,
    NonFixed,
    NonFixedComponent,
)
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.errors import BusyError, KoalaError, ProblemCode, UsageError, explain_error
from koalapy.model.wording import escape_surrogates, suggest_names

log = structlog.get_logger()

RETRY_AFTER_S = 5.0
"""Time after which a client may retry a request that the daemon cannot handle now."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
PAGE_HEADERS = ("retry-after", "allow")
"""Headers of a problem response that its page for browsers keeps."""
MAX_VALUE_LENGTH = 1000
"""Maximum length of a wrong value in a response, in characters of JSON. Longer ones are cut."""


def problem(
    code: ProblemCode,
    detail: str,
    *,
    field: str = "",
    value: Any = None,
    hint: str = "",
    headers: dict[str, str] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> JSONResponse:
    """Return a problem response with the message, the wrong field, a hint, and additional ``fields`` for programs."""
    if code.status in (401, 403, 429):
        describe_request(detail=detail)
    body = _problem_body(code, detail, field, value, hint) | dict(fields or {})
    return JSONResponse(body, code.status, headers, media_type="application/problem+json")


def describe_error(error: KoalaError) -> dict[str, Any]:
    """Return the problem of one item in a response about several items."""
    return _problem_body(error.code, error.message, error.field, error.value, error.hint)


def _problem_body(code: ProblemCode, detail: str, field: str, value: object, hint: str) -> dict[str, Any]:
    """Return the body of a problem (RFC 9457), with long texts cut."""
    return {
        "type": "about:blank",
        "title": HTTPStatus(code.status).phrase,
        "status": code.status,
        "code": code,
        "detail": _cut(escape_surrogates(detail)),
        "field": _cut(escape_surrogates(field)),
        "value": _json_value(value),
        "hint": hint,
    }


def _json_value(value: object) -> object:
    """Return a rejected value for a problem: as JSON if possible, else as text; a long one is cut."""
    if isinstance(value, list | dict) and len(text := repr(value)) > MAX_VALUE_LENGTH:
        return _cut(escape_surrogates(text))  # the encoder would take two seconds for a body of 1 MiB
    try:
        text = json.dumps(encoded := jsonable_encoder(value), ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return escape_surrogates(repr(value))[:MAX_VALUE_LENGTH]
    return encoded if len(text) <= MAX_VALUE_LENGTH else _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of the problems that a route may return."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


ErrorPage = Callable[[Request, int, dict[str, Any]], Response]
"""Renders a problem with a status as a page for browsers."""


def for_browser(request: Request, answer: JSONResponse) -> Response:
    """Return an error page instead of the JSON answer if a browser requests a page of the dashboard."""
    page: ErrorPage | None = request.app.state.error_page
    wants_page = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")
    if page is None or not wants_page:
        return answer
    response = page(request, answer.status_code, json.loads(bytes(answer.body)))
    response.headers.update({name: value for name, value in answer.headers.items() if name in PAGE_HEADERS})
    return response


def add_error_handlers(app: FastAPI, error_page: ErrorPage | None = None) -> None:
    """Convert every error of the application to a problem response, or to a page by ``error_page`` for browsers."""
    app.state.error_page = error_page
    app.add_exception_handler(KoalaError, _koala_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(WebSocketRequestValidationError, _socket_validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_disconnect)
    app.add_exception_handler(Exception, _internal_error)


async def _koala_error(request: Request | WebSocket, error: Exception) -> Response:
    """Answer a ``KoalaError`` with its problem; add Retry-After if the client may try again."""
    assert isinstance(error, KoalaError)
    retry_after = (
        error.retry_after if isinstance(error, BusyError) else RETRY_AFTER_S if error.code.status == 503 else None
    )
    headers = None if retry_after is None else {"Retry-After": str(max(1, round(retry_after)))}
    response = problem(
        error.code, error.message, field=error.field, value=error.value, hint=error.hint, headers=headers
    )
    # The caller sends the response, also to a WebSocket: one sent here would be sent twice.
    return response if isinstance(request, WebSocket) else for_browser(request, response)


async def _socket_validation_error(socket: Request | WebSocket, error: Exception) -> Response:
    """Answer invalid parameters of a WebSocket with the problem of the first one."""
    assert isinstance(error, WebSocketRequestValidationError)
    return await _koala_error(socket, usage_error(error.errors(), BaseModel))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the framework with a problem: unknown routes and methods, invalid and large bodies."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        # A route knows only its own method, so all routes are matched with each method.
        scopes = {method: dict(request.scope, method=method) for method in METHODS}
        routes = request.app.router.routes
        methods = {name for name in METHODS if any(route.matches(scopes[name])[0] is Match.FULL for route in routes)}
        headers["allow"] = ", ".join(sorted(methods | {"OPTIONS"}))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    if error.status_code in (404, 405):
        hint = "see /docs or GET /openapi.json for the routes"
        code = ProblemCode.NOT_FOUND if error.status_code == 404 else ProblemCode.METHOD_NOT_ALLOWED
        return for_browser(request, problem(code, str(error.detail), hint=hint, headers=headers))
    if error.status_code == 400:
        return problem(
            ProblemCode.INVALID_BODY,
            "the body is not valid JSON",
            field="body",
            hint="send one object in UTF-8",
            headers=headers,
        )
    code = next(code for code in ProblemCode if code.status == error.status_code)
    return problem(code, str(error.detail), headers=headers)


async def _client_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client has disconnected and does not receive it


async def _internal_error(request: Request, error: Exception) -> Response:
    """Log an unexpected error and answer with a problem without its details."""
    log.error("request failed", action="request-failed", path=request.url.path, exc_info=error)
    return for_browser(
        request,
        problem(
            ProblemCode.INTERNAL_ERROR,
            "an error in the daemon; its log has the details",
            hint="ask the operator to report it",
        ),
    )


async def _validation_error(request: Request, error: Exception) -> Response:
    """Answer a request that does not match its model with the problem of its first invalid field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        detail = f"the body is not valid JSON: {first['ctx']['error']}"
        return problem(ProblemCode.INVALID_BODY, detail, field="body", hint="send one object")
    body = request.scope["route"].body_field
    annotation = body and body.field_info.annotation
    types = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    model = next((kind for kind in types if issubclass(kind, BaseModel)), BaseModel)
    return await _koala_error(request, usage_error(error.errors(), model))


_REQUESTS: dict[str, type[BaseModel]] = {"fixed": Fixed, "nonfixed": NonFixed, "flexible": Flexible}
_COMPONENTS: dict[str, type[BaseModel]] = {"fixed": FixedComponent, "nonfixed": NonFixedComponent}
_KINDS = "fixed, nonfixed or flexible"
_CORRECTIONS = {
    "string_pattern_mismatch": ("with characters that are not allowed", "leave them out"),
    "nul": ("with a NUL character", "leave it out"),
}


def usage_error(errors: Sequence[Mapping[str, Any]], model: type[BaseModel]) -> UsageError:
    """Convert the most helpful of pydantic's errors; ``model`` is the type of the body."""
    # A misspelt required field is both unknown and missing: the first error is more helpful.
    error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    location = error["loc"]
    kind = str(error["type"])
    if kind == "string_pattern_mismatch" and "\0" in str(error.get("input")):
        kind = "nul"  # the likely cause of the mismatch
    if location[-1] == "[key]":
        field, name = _field_at(location[:-2]), error.get("input")
        wrong, hint = _explain(kind, error)
        detail = f"{field} has the name {_shorten_repr(name)}, {wrong or 'which is not a name'}"
        return _error(detail, field, name, hint or "use another")
    field, value = _field_at(location), error.get("input")
    if kind == "extra_forbidden":
        return _error(f"unknown field {field}", field, value, _suggest_fields(location, model))
    if kind == "missing":
        return _error(f"{field} is required", field, hint="add it")
    if kind == "union_tag_not_found":
        return _error(f"{field}.type is required", f"{field}.type", hint=f"use {_KINDS}")
    if kind == "union_tag_invalid":
        tag = error["ctx"]["tag"]
        return _error(f"{field}.type is {tag!r}", f"{field}.type", tag, f"use {_KINDS}")
    if kind == "model_attributes_type":
        hint = "send JSON with Content-Type: application/json" if field == "body" else "give fields and values"
        return _error(f"{field} is not an object", field, value, hint)
    wrong, hint = _explain(kind, error)
    if kind in ("string_too_long", "string_too_short", "too_long") and isinstance(value, list | dict):
        return _error(f"{field} has {len(value)} entries", field, len(value), hint)
    if kind == "array":
        problem = error["ctx"]["problem"]
        return _error(f"{field} {problem}", field, value, "give indices and ranges, each index once: 1-200%16, 3,7,9")
    if not hint:
        message = str(error["msg"])
        return _error(f"{field} is {_shorten_repr(value)}: {message[:1].lower()}{message[1:]}", field, value)
    return _error(f"{field} is {_shorten_repr(value)}{', ' if wrong else ''}{wrong}", field, value, hint)


def _explain(kind: str, error: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is wrong with a value and what to do; both empty if pydantic's message is used."""
    if kind == "correction":
        return error["ctx"]["problem"], error["ctx"]["hint"]
    return _CORRECTIONS.get(kind) or explain_error(kind, error.get("ctx"))


def _error(detail: str, field: str, value: object = None, hint: str = "") -> UsageError:
    return UsageError(detail, field=field, value=value, hint=hint)


def _shorten_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _field_at(location: Sequence[int | str]) -> str:
    """Format a location as a field name.

    For example, return ``request.components[1].size`` for ``("body", "request", "fixed", "components", 1, "size")``.
    """
    field = ""
    for index, part in enumerate(location):
        is_tag = index > 1 and part in _REQUESTS and location[index - 1] == "request"
        if index == 0 or is_tag:
            continue
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    return field or str(location[0])


def _suggest_fields(location: Sequence[int | str], model: type[BaseModel]) -> str:
    """Return a hint for an unknown field: similar names of the model at its location."""
    if location[1] == "jobs" and len(location) > 3:  # a job of a batch
        location, model = (location[0], *location[3:]), JobSubmission
    tag = str(location[2]) if len(location) > 3 else ""
    if "inputs" in location[:-1]:
        model = ComponentInput if tag in _COMPONENTS else JobInput
    elif tag in _COMPONENTS and len(location) > 4:
        model = _COMPONENTS[tag]
    elif tag in _REQUESTS:
        model = _REQUESTS[tag]
    if model is NonFixedComponent and location[-1] == "cluster":
        return "leave it out, or make the request fixed"
    return suggest_names(str(location[-1]), (field.alias or name for name, field in model.model_fields.items()))
