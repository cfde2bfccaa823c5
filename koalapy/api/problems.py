"""Errors as problem+json: one mapping from the error tree to HTTP."""

from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from koalapy.api import schemas
from koalapy.model.errors import (
    BusyError,
    ConflictError,
    KoalaError,
    NotFoundError,
    SiteRejected,
    SiteUnavailable,
    StoreUnavailable,
    UsageError,
)

log = structlog.get_logger()

STATUS: dict[type[KoalaError], int] = {
    UsageError: 422,
    NotFoundError: 404,
    ConflictError: 409,
    BusyError: 429,
    SiteUnavailable: 503,
    StoreUnavailable: 503,
    SiteRejected: 502,
}
TAGS = ("fixed", "nonfixed", "flexible")
INPUTS = (
    schemas.JobSubmission, schemas.Fixed, schemas.NonFixed, schemas.Flexible,
    schemas.FixedComponent, schemas.NonFixedComponent, schemas.Why,
)  # fmt: skip


def problem(
    status: int,
    detail: str,
    *,
    field: str = "",
    value: Any = None,
    hint: str = "",
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """A response that says what is wrong, where, and the way out."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "field": field,
        "value": jsonable_encoder(value),
        "hint": hint,
    }
    return JSONResponse(body, status, headers, media_type="application/problem+json")


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Which problems a route may answer, for OpenAPI."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def install(app: FastAPI) -> None:
    """Have every error of the application answered as a problem."""
    app.add_exception_handler(KoalaError, _koala_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


async def _koala_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KoalaError)
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(max(1, round(error.retry_after)))} if isinstance(error, BusyError) else None
    return problem(status, error.message, field=error.field, value=error.value, hint=error.hint, headers=headers)


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))


async def _bug(request: Request, error: Exception) -> JSONResponse:
    log.error("a request failed", action="bug", path=request.url.path, exc_info=error)
    return problem(500, "the daemon made a mistake; its log has the details")


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return problem(400, f"the body is no JSON: {first['ctx']['error']}", field="body")
    path = _field(first["loc"])
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        known = {field for model in INPUTS for field in model.model_fields}
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        return problem(422, f"unknown field {path}", field=path, value=first["input"], hint=hint)
    said = first["msg"][:1].lower() + first["msg"][1:]
    hint = ""
    if first["type"].startswith("union_tag"):
        path, hint = f"{path}.type", f"use one of {', '.join(TAGS)}"
    return problem(422, f"{path}: {said}", field=path, value=first.get("input"), hint=hint)


def _field(location: tuple[Any, ...]) -> str:
    """``("body", "request", "fixed", "components", 1, "size")`` as ``request.components[1].size``."""
    field = ""
    for place, part in enumerate(location):
        tag = part in TAGS and place > 0 and location[place - 1] == "request"
        if place == 0 or tag:
            continue
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    return field or str(location[0])
