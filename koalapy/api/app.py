"""The REST API as one FastAPI application."""

import hmac
from collections.abc import Awaitable, Callable, Sequence

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from koalapy import __version__
from koalapy.api.clusters import clusters_router, health_router
from koalapy.api.jobs import jobs_router
from koalapy.api.problems import install, problem
from koalapy.api.schemas import Problem
from koalapy.ports import JobService

LARGEST_BODY = 1024 * 1024
"""Bytes."""

Next = Callable[[Request], Awaitable[Response]]


def create_app(service: JobService, tokens: Sequence[str] = (), routers: Sequence[APIRouter] = ()) -> FastAPI:
    """The application; with ``tokens``, requests must show one of them. ``routers`` look after themselves."""
    app = FastAPI(title="koalapy", version=__version__, description="A live co-allocating meta-scheduler.")
    app.include_router(jobs_router(service), prefix="/api/v1")
    app.include_router(clusters_router(service), prefix="/api/v1")
    app.include_router(health_router(service))
    for router in routers:
        app.include_router(router)
    install(app)
    app.middleware("http")(_guard(tokens))
    _describe_problems(app)
    return app


def _guard(tokens: Sequence[str]) -> Callable[[Request, Next], Awaitable[Response]]:
    """Lets in who shows a token, and no body that is too large."""

    async def guard(request: Request, call_next: Next) -> Response:
        if tokens and request.url.path.startswith("/api/") and not _is_known(request, tokens):
            return problem(
                401, "no valid token was shown", hint="set KOALA_TOKEN, or send Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > LARGEST_BODY:
            return problem(413, f"the body is larger than {LARGEST_BODY} bytes", field="body", value=length)
        return await call_next(request)

    return guard


def _is_known(request: Request, tokens: Sequence[str]) -> bool:
    shown = request.headers.get("authorization", "").removeprefix("Bearer ").strip().encode()
    # Every token is compared, so that the time taken tells nothing about them.
    matches = [hmac.compare_digest(shown, token.encode()) for token in tokens]
    return any(matches)


def _describe_problems(app: FastAPI) -> None:
    """Put the schema of problems where the routes refer to it, and no trace of FastAPI's own error format."""

    def openapi() -> dict[str, object]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas["Problem"] = Problem.model_json_schema()
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
