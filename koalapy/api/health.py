"""The routes of the daemon's health."""

from typing import Any, Literal

from fastapi import APIRouter

from koalapy.api.fields import Output
from koalapy.api.problems import declared
from koalapy.model.errors import StoreUnavailable
from koalapy.service.health import HealthMonitor


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
    """Whether jobs and actions are taken: not while the database takes nothing."""
    problems: list[str]
    """What is wrong with the daemon itself."""
    disks: list[DiskView]
    """Where the daemon writes."""
    version: str
    epoch: int
    queued: int
    active: int
    clusters: dict[str, str]


def health_router(health: HealthMonitor, operation: str = "health", ready: str = "ready") -> APIRouter:
    """The daemon's health; ``operation`` and ``ready`` are the names of its operations in OpenAPI."""
    router = APIRouter()

    @router.get(
        "/healthz",
        response_model=Health,
        tags=["health"],
        operation_id=operation,
        responses=declared(401) if operation != "health" else None,
    )
    async def healthz() -> Any:
        """Whether the daemon is well; ``degraded`` when something is wrong with it, or a cluster is neither usable nor
        drained."""
        return health.report()

    @router.get(
        "/readyz",
        response_model=Health,
        tags=["health"],
        operation_id=ready,
        responses=declared(*([401] if operation != "health" else []), 503),
    )
    async def readyz() -> Any:
        """The same, with 503 while no jobs and actions are taken."""
        report = health.report()
        if not report.ready:
            raise StoreUnavailable("; ".join(report.problems), hint="GET /healthz tells more")
        return report

    return router
