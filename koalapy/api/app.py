"""The REST API as one FastAPI application, with its OpenAPI document and page."""

import asyncio
import base64
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader
from starlette.types import ASGIApp

from koalapy import __version__
from koalapy.api.access import access_of, build_authorizer
from koalapy.api.audit import AuditMiddleware, audit_router
from koalapy.api.clusters import clusters_router
from koalapy.api.direct import DirectSubmission
from koalapy.api.forecasts import explain_router
from koalapy.api.guard import AllowedHosts, Guard
from koalapy.api.jobs import jobs_router, submission_response
from koalapy.api.middleware import NOTHING, RequestLimiter, ResponseHeaders, UserRequestLimiter
from koalapy.api.monitoring import health_router
from koalapy.api.problems import ErrorPage, add_error_handlers, problem_responses
from koalapy.api.tokens import login_router, tokens_router
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login import LoginCodes
from koalapy.daemon.auth.pace import Pace
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.observability.audit import Audit

TAGS = [
    {"name": "jobs", "description": "Submit jobs, read their state and output, and cancel, hold or release them."},
    {"name": "files", "description": "Input files on the clusters, bundles of submitters, and results of jobs."},
    {"name": "clusters", "description": "The clusters of the grid, their use, and the placement policies."},
    {"name": "reservations", "description": "Nodes of several clusters that are reserved for a time."},
    {"name": "history", "description": "Outcomes of jobs and use of clusters, by day or week."},
    {"name": "record", "description": "Recordings of the scheduler's inputs, for `koala replay`."},
    {"name": "network", "description": "Bandwidth and latency between clusters, and orders to measure them."},
    {
        "name": "advisor",
        "description": "Learned run times of applications, and advised placements with their actual times.",
    },
    {"name": "tokens", "description": "Create, list and revoke tokens; logins and limits of the caller."},
    {"name": "audit", "description": "Recorded actions with their user, address and outcome."},
    {"name": "health", "description": "Health, readiness and alerts of the daemon."},
]


class Api(FastAPI):
    """An application that adds the security headers to every response, including those of FastAPI itself."""

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
    """Return the application with all its routes and middleware.

    ``hosts``: names by which clients may address the daemon. ``error_page`` renders problems for browsers.
    """
    authorize = build_authorizer(jobs.get_owned)
    app = Api(
        title="koalapy",
        version=__version__,
        description="A live co-allocating meta-scheduler.",
        openapi_tags=TAGS,
        redirect_slashes=False,
        openapi_url=None,  # FastAPI's own route would build the document on the event loop; see docs_router
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        dependencies=[Depends(authorize)],
    )
    jobs_routes = jobs_router(jobs)
    app.include_router(jobs_routes)
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
    _set_openapi(app)
    app.include_router(docs_router(app.openapi))
    add_error_handlers(app, error_page)
    route = next(route for route in jobs_routes.routes if isinstance(route, APIRoute) and route.name == "submit_job")
    # Before the router, within the error handlers and all middleware.
    app.router.middleware_stack = DirectSubmission(
        app.router.middleware_stack, route, authorize, jobs.submit, submission_response
    )
    app.add_middleware(UserRequestLimiter, max_requests=max_requests)
    app.add_middleware(Guard, identities=identities, hosts=hosts or AllowedHosts(), pace=pace or Pace())
    if audit is not None:
        app.add_middleware(AuditMiddleware, audit=audit)
    app.add_middleware(RequestLimiter, max_requests=max_requests)
    return app


def _declare_problems(path: str, operation: dict[str, Any]) -> None:
    """Add the problems that any operation with such parameters, body and access may return."""
    statuses = [400, 403, 421, 422, 429, 503]
    if access_of(path, operation["operationId"]) == "public":
        operation["security"] = []
    else:
        statuses.append(401)
    if "{" in path:
        statuses.append(404)
    if "requestBody" in operation:
        statuses.append(413)
    responses = operation["responses"]
    responses.pop("422", None)  # describes FastAPI's own error format
    operation["responses"] = {
        str(status): problem for status, problem in problem_responses(*statuses).items()
    } | responses
    for answer in responses.values():
        if "application/problem+json" in (content := answer.get("content", {})):
            content.pop("application/json", None)  # added by FastAPI for its own error format


def _set_openapi(app: FastAPI) -> None:
    """Make the OpenAPI document describe problem+json errors and bearer tokens."""

    def openapi() -> dict[str, Any]:
        """Return the OpenAPI document, which is built at the first call."""
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


def docs_router(build_document: Callable[[], Json]) -> APIRouter:
    """Return the routes ``/openapi.json`` and ``/docs``, a page without scripts.

    ``build_document`` takes half a second at its first call, so it runs in a thread, one call at a time.
    """
    router, lock = APIRouter(), asyncio.Lock()

    async def load_document() -> Json:
        async with lock:
            return await asyncio.to_thread(build_document)

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(await load_document())

    @router.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        environment = Environment(
            loader=PackageLoader("koalapy.api"), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        page = environment.get_template("docs.html").render(await load_document(), bounds=BOUNDS, style=STYLE)
        return HTMLResponse(page, headers=HEADERS)

    return router
