"""Errors as problem+json: what is wrong with a request, its code, and the way out."""

import json
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, get_args

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from koalapy.api.job_views import ComponentInput, Fixed, FixedComponent, Flexible, JobInput, NonFixed, NonFixedComponent
from koalapy.daemon.observability.audit import about
from koalapy.model.corrections import explain_error
from koalapy.model.errors import BusyError, KoalaError, ProblemCode, UsageError
from koalapy.model.request import WarningSignal
from koalapy.model.wording import escape_surrogates, suggest_names

log = structlog.get_logger()

RETRY_AFTER = 5.0
"""Seconds after which it is worth to ask again what cannot be answered now."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
KEPT_HEADERS = ("retry-after", "allow")
MAX_VALUE_LENGTH = 1000
"""Characters of JSON up to which a wrong value is sent back."""


def problem(
    code: ProblemCode,
    detail: str,
    *,
    field: str = "",
    value: Any = None,
    hint: str = "",
    headers: dict[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
) -> JSONResponse:
    """Return a response that says what is wrong, where, and the way out, and ``more`` for programs."""
    if code.status in (401, 403, 429):
        about(detail=detail)
    body = _problem(code, detail, field, value, hint) | dict(more or {})
    return JSONResponse(body, code.status, headers, media_type="application/problem+json")


def describe_error(error: KoalaError) -> dict[str, Any]:
    """What is wrong with one of several things, where an answer tells of all."""
    return _problem(error.code, error.message, error.field, error.value, error.hint)


def _problem(code: ProblemCode, detail: str, field: str, value: object, hint: str) -> dict[str, Any]:
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
    try:
        text = json.dumps(plain := jsonable_encoder(value), ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return escape_surrogates(repr(value))[:MAX_VALUE_LENGTH]
    return plain if len(text) <= MAX_VALUE_LENGTH else _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Which problems a route may answer, for OpenAPI."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


ErrorPage = Callable[[Request, int, dict[str, Any]], Response]
"""What shows people in a browser a problem, of a status."""


def _for_browser(request: Request, answer: JSONResponse) -> Response:
    page: ErrorPage | None = request.app.state.error_page
    wants_page = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")
    if page is None or not wants_page:
        return answer
    shown = page(request, answer.status_code, json.loads(bytes(answer.body)))
    shown.headers.update({name: value for name, value in answer.headers.items() if name in KEPT_HEADERS})
    return shown


def add_error_handlers(app: FastAPI, error_page: ErrorPage | None = None) -> None:
    """Answer every error of the application as a problem, or by ``error_page`` to browsers."""
    app.state.error_page = error_page
    app.add_exception_handler(KoalaError, _koala_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _nobody_there)
    app.add_exception_handler(Exception, _bug)


async def _koala_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KoalaError)
    after = error.retry_after if isinstance(error, BusyError) else RETRY_AFTER if error.code.status == 503 else None
    headers = None if after is None else {"Retry-After": str(max(1, round(after)))}
    told = problem(error.code, error.message, field=error.field, value=error.value, hint=error.hint, headers=headers)
    return _for_browser(request, told)


def _allowed(request: Request) -> list[str]:
    """Return every method of a path, since a route knows only its own."""
    routes = request.app.router.routes
    asked = [(method, dict(request.scope, method=method)) for method in METHODS]
    there = [method for method, scope in asked if any(route.matches(scope)[0] is Match.FULL for route in routes)]
    return sorted([*there, "OPTIONS"])


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["allow"] = ", ".join(_allowed(request))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    if error.status_code in (404, 405):
        hint = "GET /openapi.json tells the routes"
        code = ProblemCode.NOT_FOUND if error.status_code == 404 else ProblemCode.METHOD_NOT_ALLOWED
        return _for_browser(request, problem(code, str(error.detail), hint=hint, headers=headers))
    if error.status_code == 400:
        return problem(
            ProblemCode.INVALID_BODY,
            "the body is no JSON",
            field="body",
            hint="send one object in UTF-8",
            headers=headers,
        )
    code = next(code for code in ProblemCode if code.status == error.status_code)
    return problem(code, str(error.detail), headers=headers)


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=400)


async def _bug(request: Request, error: Exception) -> Response:
    log.error("a request failed", action="request-failed", path=request.url.path, exc_info=error)
    return _for_browser(
        request, problem(ProblemCode.INTERNAL_ERROR, "the daemon made a mistake; its log has the details")
    )


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        detail = f"the body is no JSON: {first['ctx']['error']}"
        return problem(ProblemCode.INVALID_BODY, detail, field="body", hint="send one object")
    return await _koala_error(request, _usage_error(error.errors(), _body_of(request)))


def _body_of(request: Request) -> type[BaseModel]:
    body = request.scope["route"].body_field
    annotation = body and body.field_info.annotation
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), BaseModel)


_REQUESTS: dict[str, type[BaseModel]] = {"fixed": Fixed, "nonfixed": NonFixed, "flexible": Flexible}
_COMPONENTS: dict[str, type[BaseModel]] = {"fixed": FixedComponent, "nonfixed": NonFixedComponent}
_KINDS = "fixed, nonfixed or flexible"
_CORRECTIONS = {
    "one_line": ("with characters that cannot be shown", "leave them out"),
    "string_pattern_mismatch": ("with signs that may not be in it", "leave them out"),
    "nul": ("with a NUL in it", "leave it out"),
    "coallocation": ("no co-allocation", "use allowed, never, or the most clusters to combine"),
    "duration": ("no duration", "give seconds, or units with each number: 90m, 1h30m, 1:30:00"),
    "lease": ("no lease", "give more than 0 seconds, 40m, 1h30m, or none"),
    "bytes": ("no number of bytes", "give bytes, or a number with a unit: 16GB, 512MiB"),
    "bandwidth": ("no bandwidth", "give bytes per second, or a number with a unit: 1Gbit, 100MB"),
    "warning_scope": ("with a colon", "leave out what is before it: all processes of the program get the signal"),
    "warning_signal": ("with no signal that a program can catch", f"use {', '.join(WarningSignal)}, as TERM@30"),
    "warning_grace": ("with no duration after its @", "give seconds, as TERM@30, or USR1@2m"),
}
_DURATIONS = ("walltime", "lease", "horizon", "expires")
"""Fields whose number may also be written with units."""


def _usage_error(errors: Sequence[Mapping[str, Any]], model: type[BaseModel]) -> UsageError:
    """Return the most telling of pydantic's errors as one of ours; ``model`` is what the body should have been."""
    # A misspelt field that is needed is both unknown and missing: the first says more.
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    if first["loc"][-1] == "[key]":
        return _bad_name(first)
    field, kind, value = _field_of(first["loc"]), _kind(first), first.get("input")
    if kind == "extra_forbidden":
        return _refused(f"unknown field {field}", field, value, _known_beside(first["loc"], model))
    if kind == "missing":
        return _refused(f"{field} is required", field, hint="add it")
    if kind == "union_tag_not_found":
        return _refused(f"{field}.type is required", f"{field}.type", hint=f"use {_KINDS}")
    if kind == "union_tag_invalid":
        tag = first["ctx"]["tag"]
        return _refused(f"{field}.type is {tag!r}", f"{field}.type", tag, f"use {_KINDS}")
    if kind == "model_attributes_type":
        hint = "send JSON with Content-Type: application/json" if field == "body" else "give fields and values"
        return _refused(f"{field} is no object", field, value, hint)
    if field in _DURATIONS and kind == "float_parsing":
        kind = "duration"
    wrong, hint = _CORRECTIONS.get(kind) or explain_error(kind, first.get("ctx"))
    if kind in ("string_too_long", "string_too_short", "too_long") and isinstance(value, list | dict):
        return _refused(f"{field} has {len(value)} entries", field, len(value), hint)
    if not hint:
        wrong = str(first["msg"])
        return _refused(f"{field} is {_shown(value)}: {wrong[:1].lower()}{wrong[1:]}", field, value)
    return _refused(f"{field} is {_shown(value)}{', ' if wrong else ''}{wrong}", field, value, hint)


def _bad_name(error: Mapping[str, Any]) -> UsageError:
    field, name = _field_of(error["loc"][:-2]), error.get("input")
    wrong, hint = _CORRECTIONS.get(_kind(error)) or explain_error(_kind(error), error.get("ctx"))
    return _refused(
        f"{field} has the name {_shown(name)}, {wrong or 'which is no name'}", field, name, hint or "use another"
    )


def _refused(detail: str, field: str, value: object = None, hint: str = "") -> UsageError:
    return UsageError(detail, field=field, value=value, hint=hint)


def _kind(error: Mapping[str, Any]) -> str:
    """What is wrong, in pydantic's words; most patterns keep nothing out but NULs."""
    kind = str(error["type"])
    return "nul" if kind == "string_pattern_mismatch" and "\0" in str(error.get("input")) else kind


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _field_of(location: Sequence[int | str]) -> str:
    """``("body", "request", "fixed", "components", 1, "size")`` as ``request.components[1].size``."""
    field = ""
    for place, part in enumerate(location):
        is_tag = place == 2 and part in _REQUESTS and location[1] == "request"
        if place == 0 or is_tag:
            continue
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    return field or str(location[0])


def _known_beside(location: Sequence[int | str], model: type[BaseModel]) -> str:
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
