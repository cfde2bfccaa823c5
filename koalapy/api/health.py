"""The routes of the daemon's health."""

from typing import Any, Literal

from fastapi import APIRouter, Query, Request

from koalapy.api.access import identity_of
from koalapy.api.fields import Output, Problem, as_json
from koalapy.api.problems import RETRY_AFTER, problem
from koalapy.daemon.alerts.health import CheckName, HealthMonitor, Readiness
from koalapy.model.errors import ProblemCode


class DiskView(Output):
    """Room on a disk in bytes, and how many files more may be made there, where that has a limit."""

    what: str
    path: str
    free: int
    size: int
    files: int | None


class Health(Output):
    """Jobs are counted as they are stored: whoever looks at one after that sees nothing older."""

    status: Literal["ok", "degraded"]
    ready: bool
    """Whether jobs and actions are taken."""
    problems: list[str]
    """What is wrong with the daemon itself."""
    disks: list[DiskView]
    """Where the daemon writes."""
    version: str
    epoch: int
    queued: int
    active: int
    clusters: dict[str, str]


class CheckView(Output):
    """One thing that was looked at."""

    name: CheckName
    cluster: str | None
    """Whose agent or resource manager it is."""
    ok: bool
    needed: bool
    """Whether the daemon is not ready without."""
    reason: str
    """What is wrong with it, or soon will be; empty when nothing is."""


class ReadinessView(Output):
    """Whether jobs and actions are taken, and what that was seen by."""

    ready: bool
    checks: list[CheckView]


class NotReady(Problem):
    """The same as a problem, whose ``detail`` has the reasons."""

    ready: Literal[False] = False
    checks: list[CheckView] = []


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
    checks = [as_json(CheckView.model_validate(check)) for check in readiness.checks]
    return problem(
        ProblemCode.NOT_READY,
        "; ".join(readiness.reasons),
        hint="GET /healthz tells more",
        headers={"Retry-After": f"{RETRY_AFTER:.0f}"},
        more={"ready": False, "checks": checks},
    )
