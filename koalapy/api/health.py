"""The routes of the daemon's health: checks, and alerts."""

from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Query, Request

from koalapy.api.access import Caller, identity_of
from koalapy.api.derived import view_model
from koalapy.api.fields import Moment, Output, Problem
from koalapy.api.problems import RETRY_AFTER, problem
from koalapy.api.routes import api_router
from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.health import Check, HealthMonitor, HealthReport, Readiness
from koalapy.model.alert import Alert
from koalapy.model.errors import ProblemCode

Health = view_model("Health", HealthReport)


class ReadinessView(Output):
    """Whether jobs and actions are taken, and what that was seen by."""

    ready: bool
    checks: list[Check]


class NotReady(Problem):
    """The same as a problem, whose ``detail`` has the reasons."""

    ready: Literal[False] = False
    checks: list[Check] = []


class Liveness(Output):
    """That the daemon answers."""

    status: Literal["alive"] = "alive"


def health_router(
    health: HealthMonitor, operation: str = "health", ready: str = "ready", live: str = "live"
) -> APIRouter:
    """The daemon's health; ``operation``, ``ready`` and ``live`` are the names of its operations in OpenAPI."""
    router = APIRouter()

    @router.get("/healthz", response_model=Health, tags=["health"], operation_id=operation)
    async def healthz() -> Any:
        """Whether the daemon is well; ``degraded`` when something is wrong with it, or a cluster is neither usable nor
        drained."""
        return health.report()

    @router.get("/livez", response_model=Liveness, tags=["health"], operation_id=live)
    async def livez() -> Any:
        """Whether the daemon's loop moves; 503 when it hangs, so that it should be started again."""
        return Liveness()

    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/NotReady"}}}
    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"description": "Not ready", "model": NotReady, "content": content}
    }

    @router.get("/readyz", response_model=ReadinessView, tags=["health"], operation_id=ready, responses=not_ready)
    async def readyz(
        request: Request,
        clusters: bool = Query(False, description="503 also while an agent or a resource manager does not answer"),
    ) -> Any:
        """Whether jobs and actions are taken, with a reason for each check that fails; 503 while they are not."""
        readiness = health.readiness(of_clusters=clusters)
        if identity_of(request.scope) is None:
            readiness = readiness.for_strangers()
        return readiness if readiness.ready else _refusal(readiness)

    return router


def _refusal(readiness: Readiness) -> Any:
    checks = [asdict(check) for check in readiness.checks]
    return problem(
        ProblemCode.NOT_READY,
        "; ".join(readiness.reasons),
        hint="GET /healthz tells more",
        headers={"Retry-After": f"{RETRY_AFTER:.0f}"},
        more={"ready": False, "checks": checks},
    )


AlertView = view_model("AlertView", Alert)


class AlertList(Output):
    alerts: list[AlertView]  # type: ignore[valid-type]
    """The most urgent first."""
    looked_at: Moment | None
    """When it was last looked for them; null before the first time."""


def alerts_router(alerts: Alerts) -> APIRouter:
    router = api_router("health", "/alerts")

    @router.get("", response_model=AlertList)
    async def list_alerts(caller: Caller) -> Any:
        """What is wrong now, why, and what helps: operators are told all, others what concerns the clusters and their
        own jobs."""
        return {"alerts": alerts.visible_to(caller), "looked_at": alerts.looked_at}

    return router
