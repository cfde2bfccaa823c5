"""The routes of clusters, policies and the daemon's health."""

from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Path, Query

from koalapy.api import fields, grid_schemas, schemas
from koalapy.api.conversion import cluster_view, metrics_view
from koalapy.api.problems import declared
from koalapy.api.queries import refuse_unknown
from koalapy.model.errors import NotFoundError, StoreUnavailable
from koalapy.model.wording import known_names
from koalapy.ports import ClusterRecord
from koalapy.service.jobs import Jobs

SHORTEST = 0.001
"""Seconds: a shorter span ends where it begins, as far as clocks can tell."""
Name = Annotated[fields.Cluster, Path(description="the cluster's name")]
Since = Annotated[float, Query(ge=SHORTEST, le=fields.LONGEST, allow_inf_nan=False, description="seconds until now")]


def clusters_router(service: Jobs) -> APIRouter:
    """What the grid looks like."""
    router = APIRouter()

    def find(name: str) -> ClusterRecord:
        known = {record.name: record for record in service.clusters()}
        if name not in known:
            raise NotFoundError(
                f"there is no cluster {name}", field="cluster", value=name, hint=known_names(name, known)
            )
        return known[name]

    @router.get(
        "/clusters",
        response_model=grid_schemas.ClusterList,
        tags=["clusters"],
        operation_id="list_clusters",
        responses=declared(401),
    )
    async def clusters() -> Any:
        """Every cluster with its nodes and state."""
        return {"clusters": [cluster_view(record) for record in service.clusters()]}

    @router.get(
        "/clusters/{name}",
        response_model=grid_schemas.ClusterView,
        tags=["clusters"],
        operation_id="show_cluster",
        responses=declared(401, 404, 422),
    )
    async def cluster(name: Name) -> Any:
        """One cluster."""
        return cluster_view(find(name))

    @router.post(
        "/clusters/{name}/clear",
        response_model=grid_schemas.ClusterView,
        tags=["clusters"],
        operation_id="clear_cluster",
        responses=declared(401, 404, 422, 503),
    )
    async def clear(name: Name) -> Any:
        """Count a cluster's errors from zero again, and use it again."""
        find(name)
        return cluster_view(await service.clear_cluster(name))

    @router.post(
        "/clusters/{name}/drain",
        response_model=grid_schemas.ClusterView,
        tags=["clusters"],
        operation_id="drain_cluster",
        responses=declared(400, 401, 404, 413, 422, 503),
    )
    async def drain(name: Name, order: schemas.DrainOrder | None = None) -> Any:
        """Place nothing more on a cluster; its running jobs go on. Drained again, it has the newer order."""
        find(name)
        given = order or schemas.DrainOrder()
        return cluster_view(await service.drain_cluster(name, given.by, given.reason))

    @router.post(
        "/clusters/{name}/resume",
        response_model=grid_schemas.ClusterView,
        tags=["clusters"],
        operation_id="resume_cluster",
        responses=declared(401, 404, 409, 422, 503),
    )
    async def resume(name: Name) -> Any:
        """Use a drained cluster again."""
        find(name)
        return cluster_view(await service.resume_cluster(name))

    @router.get(
        "/metrics",
        response_model=grid_schemas.Metrics,
        tags=["clusters"],
        operation_id="show_metrics",
        dependencies=[Depends(refuse_unknown)],
        responses=declared(401, 422, 503),
    )
    async def metrics(since: Since = 3600.0) -> Any:
        """How well the clusters were used over the last ``since`` seconds, and how long jobs waited."""
        return metrics_view(await service.metrics(since))

    @router.get(
        "/policies",
        response_model=grid_schemas.PolicyList,
        tags=["policies"],
        operation_id="list_policies",
        responses=declared(401),
    )
    async def policies() -> Any:
        """The placement policies."""
        return {"policies": list(service.policies())}

    return router


def health_router(service: Jobs, operation: str = "health", ready: str = "ready") -> APIRouter:
    """The daemon's health; ``operation`` and ``ready`` are the names of its operations in OpenAPI."""
    router = APIRouter()

    @router.get(
        "/healthz",
        response_model=grid_schemas.Health,
        tags=["health"],
        operation_id=operation,
        responses=declared(401) if operation != "health" else None,
    )
    async def healthz() -> Any:
        """Whether the daemon is well; ``degraded`` when something is wrong with it, or a cluster is neither usable nor
        drained."""
        return service.health()

    @router.get(
        "/readyz",
        response_model=grid_schemas.Health,
        tags=["health"],
        operation_id=ready,
        responses=declared(*([401] if operation != "health" else []), 503),
    )
    async def readyz() -> Any:
        """The same, with 503 while no jobs and actions are taken."""
        health = service.health()
        if not health["ready"]:
            raise StoreUnavailable("; ".join(cast(list[str], health["problems"])), hint="GET /healthz tells more")
        return health

    return router
