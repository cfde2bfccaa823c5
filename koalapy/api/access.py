"""Who may call which route: one table, and nothing that is not in it."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import Depends, Path
from pydantic import TypeAdapter, ValidationError
from starlette.requests import HTTPConnection
from starlette.types import Scope

from koalapy.api import fields
from koalapy.daemon.engine.database import READING_USER
from koalapy.daemon.observability.audit import under_way
from koalapy.model.errors import ForbiddenError, NotLoggedIn, ProblemCode
from koalapy.model.identity import Identity, Role
from koalapy.model.job import JobId

Access = Role | Literal["owner", "everybody", "agents"]
"""The least role; or the owner of the job that the path names, and operators; or everybody without a token; or agents,
whose routes look at tokens of their own."""
AGENT_PATHS = "/api/v1/agents/"
"""Below it are the agents' routes."""
UPLOAD_PATH = "/api/v1/bundles"
"""The route of large bodies, which has a limit of its own."""
ACCESS: Mapping[str, Access] = {
    "add_replica": Role.OPERATOR,
    "ask_what_if": Role.OPERATOR,
    "api_health": Role.USER,
    "api_live": Role.USER,
    "api_ready": Role.USER,
    "cancel_job": "owner",
    "cancel_jobs": Role.USER,
    "clear_cluster": Role.OPERATOR,
    "create_login_code": Role.USER,
    "create_token": Role.USER,
    "openapi": "everybody",
    "docs": "everybody",
    "declare_cluster_lost": Role.OPERATOR,
    "drain_cluster": Role.OPERATOR,
    "explain_job": "owner",
    "explain_submission": Role.USER,
    "export_record": Role.OPERATOR,
    "fetch_results": "owner",
    "follow_grid": Role.USER,
    "follow_job": "owner",
    "foretell_job": "owner",
    "foretell_submission": Role.USER,
    "has_bundle": Role.USER,
    "health": "everybody",
    "hold_job": "owner",
    "hold_jobs": Role.USER,
    "list_alerts": Role.USER,
    "list_attempts": "owner",
    "dashboard_events": Role.USER,
    "dashboard_file": "everybody",
    "dashboard_login": "everybody",
    "list_audit": Role.ADMIN,
    "list_clusters": Role.USER,
    "list_jobs": Role.USER,
    "list_policies": Role.USER,
    "list_replicas": Role.USER,
    "list_tokens": Role.USER,
    "live": "everybody",
    "logout": Role.USER,
    "measure_network": Role.OPERATOR,
    "read_logs": "owner",
    "ready": "everybody",
    "release_job": "owner",
    "release_jobs": Role.USER,
    "remove_replicas": Role.OPERATOR,
    "resume_cluster": Role.OPERATOR,
    "revoke_token": Role.USER,
    "revoke_tokens": Role.USER,
    "set_priority": Role.USER,
    "scrape": Role.USER,
    "scrape_openly": "everybody",
    "show_advisor": Role.USER,
    "show_advisor_record": Role.USER,
    "show_bundle": Role.USER,
    "show_cluster": Role.USER,
    "show_history": Role.USER,
    "show_job": Role.USER,
    "show_limits": Role.USER,
    "show_link_history": Role.USER,
    "show_metrics": Role.USER,
    "show_network": Role.USER,
    "show_sharing": Role.OPERATOR,
    "show_timeline": "owner",
    "start_background": Role.OPERATOR,
    "stop_background": Role.OPERATOR,
    "submit_job": Role.USER,
    "upload_bundle": Role.USER,
    "verify_audit": Role.ADMIN,
    "verify_replicas": Role.OPERATOR,
    "whoami": Role.USER,
}
"""By a route's operation; what is missing is for administrators only."""
Id = Annotated[int, Path(ge=-fields.MAX_ID, le=fields.MAX_ID, description="the job's id")]
_JOB: TypeAdapter[int] = TypeAdapter(Id)
READ_ONLY_OPERATIONS = frozenset({"ask_what_if", "explain_submission", "foretell_submission"})
"""Operations that change nothing, though they are no GET."""
AUDIT_NAMES = {"name": "cluster"}
_IDENTITY = "identity"
"""Where the guard leaves who has come in."""
_SESSION = "browser_session"
"""Where it leaves the token of a browser's login."""


def access_of(path: str, operation: str | None) -> Access:
    """Who may call a route."""
    return "agents" if path.startswith(AGENT_PATHS) else ACCESS.get(operation or "", Role.ADMIN)


def _target(connection: HTTPConnection, is_agents: bool) -> str:
    """What the path names, for the audit. What agents name beside their cluster would tell of their secrets."""
    named = connection.path_params.items()
    return ", ".join(
        f"{AUDIT_NAMES.get(name, name)} {told}" for name, told in named if not is_agents or name == "cluster"
    )


def set_identity(scope: Scope, identity: Identity) -> None:
    """Note who is behind a request."""
    scope[_IDENTITY] = identity


def identity_of(scope: Scope) -> Identity | None:
    """Who is behind a request, where the guard has noted it."""
    identity = scope.get(_IDENTITY)
    return identity if isinstance(identity, Identity) else None


def set_session(scope: Scope, token: str) -> None:
    """Note that a request is by a browser's login."""
    scope[_SESSION] = token


def session_of(scope: Scope) -> str:
    """The token of the browser's login that a request is by; empty of others."""
    return str(scope.get(_SESSION, ""))


def build_authorizer(
    theirs: Callable[[JobId, Identity], Awaitable[object]],
) -> Callable[[HTTPConnection], Awaitable[None]]:
    """What every route depends on; ``theirs`` raises ``ForbiddenError`` for a job that is somebody else's."""

    async def authorize(connection: HTTPConnection) -> None:
        """Whether who has come in may call the route; ``ForbiddenError``."""
        route = connection.scope["route"]
        operation = getattr(route, "operation_id", None) or route.name
        needed, identity = access_of(route.path, operation), identity_of(connection.scope)
        is_agents = needed == "agents"
        READING_USER.set("" if identity is None else identity.user)
        under_way(identity, operation, _target(connection, is_agents), change=operation not in READ_ONLY_OPERATIONS)
        if needed in ("everybody", "agents"):
            return
        least = needed if isinstance(needed, Role) else Role.USER
        if identity is None:
            raise NotLoggedIn("nobody is logged in", hint="log in first")
        if not identity.has_role(least):
            raise ForbiddenError(
                f"that is for {least}s",
                hint="ask an administrator of the daemon for the role",
                code=ProblemCode.ROLE_REQUIRED,
            )
        if needed == "owner" and not identity.has_role(Role.OPERATOR):
            # What is no number for the route is none here, and the route says so.
            with suppress(ValidationError):
                await theirs(_JOB.validate_python(connection.path_params["job"]), identity)

    return authorize


async def _caller(connection: HTTPConnection) -> Identity:
    identity = identity_of(connection.scope)
    if identity is None:
        raise NotLoggedIn("nobody is logged in")
    return identity


Caller = Annotated[Identity, Depends(_caller)]
"""Who calls a route."""
