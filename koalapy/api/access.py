"""Who may call which route: one table, and nothing that is not in it."""

from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import Depends
from starlette.requests import HTTPConnection
from starlette.types import Scope

from koalapy.model.errors import ForbiddenError
from koalapy.model.identity import Identity, Role

Access = Role | Literal["everybody", "agents"]
"""The least role; or everybody without a token; or agents, whose routes look at tokens of their own."""
AGENTS = "/api/v1/agents/"
"""Below it are the agents' routes."""
ACCESS: Mapping[str, Access] = {
    "add_replica": Role.USER,
    "api_health": Role.USER,
    "api_ready": Role.USER,
    "cancel_job": Role.USER,
    "cancel_jobs": Role.USER,
    "clear_cluster": Role.OPERATOR,
    "create_token": Role.USER,
    "docs": "everybody",
    "drain_cluster": Role.OPERATOR,
    "explain_job": Role.USER,
    "explain_submission": Role.USER,
    "fetch_results": Role.USER,
    "follow_job": Role.USER,
    "has_bundle": Role.USER,
    "health": "everybody",
    "hold_job": Role.USER,
    "logout": Role.USER,
    "list_attempts": Role.USER,
    "list_clusters": Role.USER,
    "list_jobs": Role.USER,
    "list_policies": Role.USER,
    "list_replicas": Role.USER,
    "list_tokens": Role.USER,
    "measure_network": Role.OPERATOR,
    "read_logs": Role.USER,
    "ready": "everybody",
    "release_job": Role.USER,
    "remove_replicas": Role.USER,
    "resume_cluster": Role.OPERATOR,
    "revoke_token": Role.USER,
    "revoke_tokens": Role.USER,
    "show_advisor": Role.USER,
    "show_advisor_record": Role.USER,
    "show_bundle": Role.USER,
    "show_cluster": Role.USER,
    "show_job": Role.USER,
    "show_link_history": Role.USER,
    "show_metrics": Role.USER,
    "show_network": Role.USER,
    "show_timeline": Role.USER,
    "start_background": Role.OPERATOR,
    "stop_background": Role.OPERATOR,
    "submit_job": Role.USER,
    "upload_bundle": Role.USER,
    "verify_replicas": Role.USER,
    "whoami": Role.USER,
}
"""By a route's operation; what is missing is for administrators only."""
_IDENTITY = "identity"
"""Where the guard leaves who has come in."""


def access_of(path: str, operation: str | None) -> Access:
    """Who may call a route."""
    return "agents" if path.startswith(AGENTS) else ACCESS.get(operation or "", Role.ADMIN)


def admit(scope: Scope, identity: Identity) -> None:
    """Note who is behind a request."""
    scope[_IDENTITY] = identity


def identity_of(scope: Scope) -> Identity | None:
    """Who is behind a request, where the guard has noted it."""
    identity = scope.get(_IDENTITY)
    return identity if isinstance(identity, Identity) else None


async def authorize(connection: HTTPConnection) -> None:
    """Whether who has come in may call the route; ``ForbiddenError``. Every route depends on it."""
    route = connection.scope["route"]
    needed = access_of(route.path, getattr(route, "operation_id", None))
    if not isinstance(needed, Role):
        return
    identity = connection.scope.get(_IDENTITY)
    if identity is None or not identity.may(needed):
        raise ForbiddenError(f"that is for {needed}s", hint="ask an administrator of the daemon for the role")


async def _caller(connection: HTTPConnection) -> Identity:
    identity = connection.scope.get(_IDENTITY)
    if not isinstance(identity, Identity):
        raise ForbiddenError("nobody is logged in")
    return identity


Caller = Annotated[Identity, Depends(_caller)]
"""Who calls a route."""
