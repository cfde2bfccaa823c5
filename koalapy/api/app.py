"""The REST API as one FastAPI application, with its OpenAPI document and page."""

import asyncio
import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment, PackageLoader, Template
from starlette.types import ASGIApp

from koalapy import __version__
from koalapy.api.access import access_of, build_authorizer
from koalapy.api.audit import AuditMiddleware, audit_router
from koalapy.api.clusters import clusters_router
from koalapy.api.forecasts import explain_router
from koalapy.api.guard import AllowedHosts, Guard
from koalapy.api.jobs import jobs_router
from koalapy.api.middleware import NOTHING, RequestLimiter, ResponseHeaders, UserRequestLimiter
from koalapy.api.monitoring import health_router
from koalapy.api.problems import ErrorPage, add_error_handlers, problem_responses
from koalapy.api.tokens import login_router, tokens_router
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login_codes import LoginCodes
from koalapy.daemon.auth.pace import Pace
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.observability.audit import Audit

TAGS = [
    {"name": "jobs", "description": "Submit jobs, look at them, and act on them."},
    {"name": "files", "description": "Input files on the clusters, files of the submitter, and files that jobs bring."},
    {"name": "clusters", "description": "The clusters of the grid, and the placement policies."},
    {"name": "history", "description": "What has become of jobs, and how clusters were used, by days and weeks."},
    {"name": "record", "description": "What the scheduler was told, to be replayed."},
    {"name": "network", "description": "What is known of the network between clusters, and measuring it."},
    {"name": "advisor", "description": "What is known of applications, and what was predicted of their jobs."},
    {"name": "tokens", "description": "Make, list and revoke tokens."},
    {"name": "audit", "description": "Who did what, and from where."},
    {"name": "health", "description": "Whether the daemon is well."},
]


class Api(FastAPI):
    """With what every answer tells, also those of FastAPI itself."""

    def build_middleware_stack(self) -> ASGIApp:
        return ResponseHeaders(super().build_middleware_stack())


def create_app(
    jobs: Jobs,
    health: HealthMonitor,
    identities: Identities,
    routers: Sequence[APIRouter] = (),
    hosts: AllowedHosts | None = None,
    max_requests: int = 1000,
    pace: Pace | None = None,
    audit: Audit | None = None,
    codes: LoginCodes | None = None,
    *,
    error_page: ErrorPage | None = None,
) -> FastAPI:
    """The application: requests must show a token that the ``identities`` know, and name one of the ``hosts``."""
    app = Api(
        title="koalapy",
        version=__version__,
        description="A live co-allocating meta-scheduler.",
        openapi_tags=TAGS,
        redirect_slashes=False,
        openapi_url=None,  # which would be made by the loop: see docs_router
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        dependencies=[Depends(build_authorizer(jobs.theirs))],
    )
    app.include_router(jobs_router(jobs))
    app.include_router(explain_router(jobs))
    app.include_router(clusters_router(jobs))
    app.include_router(tokens_router(identities))
    app.include_router(login_router(identities, codes or LoginCodes()))
    if audit is not None:
        app.include_router(audit_router(audit))
    app.include_router(health_router(health))
    app.include_router(
        health_router(health, operation="api_health", ready="api_ready", live="api_live"), prefix="/api/v1"
    )
    for router in routers:
        app.include_router(router)
    _describe(app)
    app.include_router(docs_router(app.openapi))
    add_error_handlers(app, error_page)
    app.add_middleware(UserRequestLimiter, max_requests=max_requests)
    app.add_middleware(Guard, identities=identities, hosts=hosts or AllowedHosts(), pace=pace or Pace())
    if audit is not None:
        app.add_middleware(AuditMiddleware, audit=audit)
    app.add_middleware(RequestLimiter, max_requests=max_requests)
    return app


def _declare_problems(path: str, operation: dict[str, Any]) -> None:
    """Add the problems that follow from what an operation takes to those that its route declares."""
    statuses = [400, 403, 421, 422, 429, 503]
    if access_of(path, operation["operationId"]) == "everybody":
        operation["security"] = []
    else:
        statuses.append(401)
    if "{" in path:
        statuses.append(404)
    if "requestBody" in operation:
        statuses.append(413)
    responses = operation["responses"]
    responses.pop("422", None)  # in the form of FastAPI
    operation["responses"] = {
        str(status): problem for status, problem in problem_responses(*statuses).items()
    } | responses
    for answer in responses.values():
        if "application/problem+json" in (content := answer.get("content", {})):
            content.pop("application/json", None)  # which FastAPI adds for its form


def _describe(app: FastAPI) -> None:
    """Complete what FastAPI knows for OpenAPI: problems in place of its own error format, and bearer tokens."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes, tags=TAGS
            )
            operations = [operation for path in schema["paths"].values() for operation in path.values()]
            for path, methods in schema["paths"].items():
                for operation in methods.values():
                    _declare_problems(path, operation)
            used = {tag for operation in operations for tag in operation.get("tags", ())}
            schema["tags"] = [tag for tag in TAGS if tag["name"] in used]
            components = schema.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"bearer": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


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
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "maxLength": "up to", "format": "of format"}


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("koalapy.api"), autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    return environment.get_template("docs.html")


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
        return HTMLResponse(_template().render(await made(), bounds=BOUNDS, style=STYLE), headers=HEADERS)

    return router
