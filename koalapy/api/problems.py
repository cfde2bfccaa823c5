"""Errors as problem+json: one mapping from the error tree to HTTP."""

import json
from collections.abc import Callable, Mapping
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

from koalapy.api.invalid import explain
from koalapy.daemon.observability.audit import about
from koalapy.model.errors import BusyError, KoalaError, ProblemCode
from koalapy.model.wording import encodable

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


def problem_of(error: KoalaError) -> dict[str, Any]:
    """What is wrong with one of several things, where an answer tells of all."""
    return _problem(error.code, error.message, error.field, error.value, error.hint)


def _problem(code: ProblemCode, detail: str, field: str, value: object, hint: str) -> dict[str, Any]:
    """As ``fields.Problem``."""
    return {
        "type": "about:blank",
        "title": HTTPStatus(code.status).phrase,
        "status": code.status,
        "code": code,
        "detail": _cut(encodable(detail)),
        "field": _cut(encodable(field)),
        "value": _json_value(value),
        "hint": hint,
    }


def _json_value(value: object) -> object:
    """A value as it came, or as a text where it is too large, or no JSON."""
    try:
        text = json.dumps(plain := jsonable_encoder(value), ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return encodable(repr(value))[:MAX_VALUE_LENGTH]
    return plain if len(text) <= MAX_VALUE_LENGTH else _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Which problems a route may answer, for OpenAPI."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


ErrorPage = Callable[[Request, int, dict[str, Any]], Response]
"""What shows people in a browser a problem, of a status."""


def show_problems_by(app: FastAPI, page: ErrorPage) -> None:
    """Have problems shown as pages to who asks for pages."""
    app.state.error_page = page


def _for_browser(request: Request, answer: JSONResponse) -> Response:
    """As a page, where one was asked for and there are pages."""
    page: ErrorPage | None = getattr(request.app.state, "error_page", None)
    wants_page = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")
    if page is None or not wants_page:
        return answer
    shown = page(request, answer.status_code, json.loads(bytes(answer.body)))
    shown.headers.update({name: value for name, value in answer.headers.items() if name in KEPT_HEADERS})
    return shown


def install(app: FastAPI) -> None:
    """Have every error of the application answered as a problem."""
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
    """Every method that there is at a path: a route knows of its own only."""
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
    invalid = explain(error.errors(), _body_of(request))
    told = problem(
        ProblemCode.INVALID_VALUE, invalid.detail, field=invalid.field, value=invalid.value, hint=invalid.hint
    )
    return _for_browser(request, told)


def _body_of(request: Request) -> type[BaseModel]:
    """What the body should have been by the request's route."""
    body = request.scope["route"].body_field
    annotation = body and body.field_info.annotation
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), BaseModel)
