"""Authorization: the table of routes and the roles that may call them."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import Depends, Path
from pydantic import TypeAdapter, ValidationError
from starlette.requests import HTTPConnection
from starlette.types import Scope

from koalapy.api import fields
from koalapy.daemon.engine.database import READING_USER
from koalapy.daemon.observability.audit import identify_request
from koalapy.model.errors import ForbiddenError, NotLoggedIn, ProblemCode
from koalapy.model.identity import Identity, Role
from koalapy.model.job import JobId

Access = Role | Literal["owner", "public", "agents"]
"""The access that a route requires:

- a role: callers with at least this role;
- ``owner``: the owner of the job in the path, and operators;
- ``public``: all callers, without a token;
- ``agents``: agents of clusters. These routes check the tokens themselves."""
AGENT_PATHS = "/api/v1/agents/"
"""Prefix of the agents' routes."""
UPLOAD_PATH = "/api/v1/bundles"
"""The route of bundles, which may be larger than other bodies."""
ACCESS: Mapping[str, Access] = {
    "add_replica": Role.OPERATOR,
    "ask_what_if": Role.OPERATOR,
    "api_health": Role.USER,
    "api_live": Role.USER,
    "api_ready": Role.USER,
    "cancel_job": "owner",
    "change_job": "owner",
    "cancel_jobs": Role.USER,
    "cancel_reservation": Role.USER,
    "clear_cluster": Role.OPERATOR,
    "create_login_code": Role.USER,
    "create_token": Role.USER,
    "openapi": "public",
    "docs": "public",
    "declare_cluster_lost": Role.OPERATOR,
    "drain_cluster": Role.OPERATOR,
    "explain_change": "owner",
    "explain_job": "owner",
    "explain_submission": Role.USER,
    "export_record": Role.OPERATOR,
    "fetch_results": "owner",
    "follow_grid": Role.USER,
    "follow_job": "owner",
    "follow_output": "owner",
    "foretell_job": "owner",
    "foretell_submission": Role.USER,
    "has_bundle": Role.USER,
    "health": "public",
    "hold_job": "owner",
    "hold_jobs": Role.USER,
    "list_alerts": Role.USER,
    "make_reservation": Role.USER,
    "mark_alert": Role.OPERATOR,
    "list_attempts": "owner",
    "dashboard_file": "public",
    "dashboard_login": "public",
    "list_audit": Role.ADMIN,
    "list_clusters": Role.USER,
    "list_nodes": Role.USER,
    "list_history": Role.USER,
    "list_jobs": Role.USER,
    "list_policies": Role.USER,
    "list_replicas": Role.USER,
    "list_reservations": Role.USER,
    "list_tokens": Role.USER,
    "show_calendar": Role.USER,
    "live": "public",
    "logout": Role.USER,
    "measure_network": Role.OPERATOR,
    "open_terminal": "owner",
    "preview_drain": Role.OPERATOR,
    "read_logs": "owner",
    "ready": "public",
    "release_job": "owner",
    "release_jobs": Role.USER,
    "remove_replicas": Role.OPERATOR,
    "resume_cluster": Role.OPERATOR,
    "revoke_token": Role.USER,
    "revoke_tokens": Role.USER,
    "set_priority": Role.USER,
    "scrape": Role.USER,
    "send_input": "owner",
    "scrape_openly": "public",
    "show_advisor": Role.USER,
    "show_advisor_record": Role.USER,
    "show_bundle": Role.USER,
    "show_cluster": Role.USER,
    "show_job": Role.USER,
    "show_limits": Role.USER,
    "list_shares": Role.USER,
    "set_weight": Role.OPERATOR,
    "list_states": Role.USER,
    "show_link_history": Role.USER,
    "show_network": Role.USER,
    "show_reservation": Role.USER,
    "show_timeline": "owner",
    "show_usage": Role.USER,
    "start_background": Role.OPERATOR,
    "stop_background": Role.OPERATOR,
    "submit_job": Role.USER,
    "submit_jobs": Role.USER,
    "test_notification": Role.OPERATOR,
    "unmark_alert": Role.OPERATOR,
    "upload_bundle": Role.USER,
    "verify_audit": Role.ADMIN,
    "verify_replicas": Role.OPERATOR,
    "whoami": Role.USER,
}
"""Access by operation id; an operation that is missing here is for administrators."""
Id = Annotated[int, Path(ge=-fields.MAX_ID, le=fields.MAX_ID, description="the job's id")]
_JOB: TypeAdapter[int] = TypeAdapter(Id)
READ_ONLY_OPERATIONS = frozenset(
    {"ask_what_if", "explain_change", "explain_submission", "foretell_submission", "list_states", "preview_drain"}
)
"""Operations that change nothing although their method is POST."""
AUDIT_NAMES = {"name": "cluster"}
"""Names of path parameters in the audit, for those with another name there."""
_IDENTITY = "identity"
"""Key of the request's scope under which the guard stores the authenticated caller."""
_SESSION = "browser_session"
"""Key of the request's scope under which the guard stores the token of a browser session."""
REJECTION = "rejection"
"""Key of the request's scope under which the guard stores the status of a rejection, which browsers get as a page."""


def access_of(path: str, operation: str | None) -> Access:
    """Return the access that a route requires, by its path and operation id."""
    return "agents" if path.startswith(AGENT_PATHS) else ACCESS.get(operation or "", Role.ADMIN)


def set_identity(scope: Scope, identity: Identity) -> None:
    """Store the authenticated caller of a request."""
    scope[_IDENTITY] = identity


def identity_of(scope: Scope) -> Identity | None:
    """Return the authenticated caller of a request, or None before authentication."""
    identity = scope.get(_IDENTITY)
    return identity if isinstance(identity, Identity) else None


def set_session(scope: Scope, token: str) -> None:
    """Store the token of the browser session that a request belongs to."""
    scope[_SESSION] = token


def session_of(scope: Scope) -> str:
    """Return the token of the browser session that a request belongs to; empty for other requests."""
    return str(scope.get(_SESSION, ""))


def build_authorizer(
    check_owner: Callable[[JobId, Identity], Awaitable[object]],
) -> Callable[[HTTPConnection], Awaitable[None]]:
    """Return the dependency of all routes that checks the caller's role and ownership.

    ``check_owner`` raises ``ForbiddenError`` for a job of another user.
    """

    async def authorize(connection: HTTPConnection) -> None:
        """Raise ``ForbiddenError`` or ``NotLoggedIn`` if the caller may not call the route."""
        route = connection.scope["route"]
        operation = getattr(route, "operation_id", None) or route.name
        access, identity = access_of(route.path, operation), identity_of(connection.scope)
        # Other parameters of agents' paths contain secrets.
        target = ", ".join(
            f"{AUDIT_NAMES.get(name, name)} {value}"
            for name, value in connection.path_params.items()
            if access != "agents" or name == "cluster"
        )
        READING_USER.set("" if identity is None else identity.user)
        identify_request(identity, operation, target, change=operation not in READ_ONLY_OPERATIONS)
        if access in ("public", "agents"):
            return
        minimum_role = access if isinstance(access, Role) else Role.USER
        if identity is None:
            raise NotLoggedIn("you are not logged in", hint="log in first")
        if not identity.has_role(minimum_role):
            raise ForbiddenError(
                f"this needs the role {minimum_role}, and you are {identity.role}",
                hint="ask an administrator of the daemon for the role",
                code=ProblemCode.ROLE_REQUIRED,
            )
        if access == "owner" and not identity.has_role(Role.OPERATOR):
            # The route itself rejects a job id that is not a number.
            with suppress(ValidationError):
                await check_owner(_JOB.validate_python(connection.path_params["job"]), identity)

    return authorize


async def require_identity(connection: HTTPConnection) -> Identity:
    """Return the authenticated caller; raise ``NotLoggedIn`` without one."""
    identity = identity_of(connection.scope)
    if identity is None:
        raise NotLoggedIn("you are not logged in", hint="log in first")
    return identity


Caller = Annotated[Identity, Depends(require_identity)]
"""The authenticated caller of a route."""
