"""The routes of clusters, policies and the daemon's health."""

from typing import Any

from fastapi import APIRouter

from koalapy.api import schemas
from koalapy.api.conversion import cluster_view
from koalapy.api.problems import declared
from koalapy.model.errors import NotFoundError
from koalapy.model.wording import known_names
from koalapy.ports import ClusterRecord, JobService


def clusters_router(service: JobService) -> APIRouter:
    """What the grid looks like."""
    router = APIRouter()

    def find(name: str) -> ClusterRecord:
        known = {record.name: record for record in service.clusters()}
        if name not in known:
            raise NotFoundError(
                f"there is no cluster {name}", field="cluster", value=name, hint=known_names(name, known)
            )
        return known[name]

    @router.get("/clusters", response_model=schemas.ClusterList, tags=["clusters"], operation_id="list_clusters",
                responses=declared(401))  # fmt: skip
    async def clusters() -> Any:
        """Every cluster with its nodes and state."""
        return {"clusters": [cluster_view(record) for record in service.clusters()]}

    @router.get("/clusters/{name}", response_model=schemas.ClusterView, tags=["clusters"], operation_id="show_cluster",
                responses=declared(401, 404, 422))  # fmt: skip
    async def cluster(name: str) -> Any:
        """One cluster."""
        return cluster_view(find(name))

    @router.post("/clusters/{name}/clear", response_model=schemas.ClusterView, tags=["clusters"],
                 operation_id="clear_cluster", responses=declared(401, 404, 422, 503))  # fmt: skip
    async def clear(name: str) -> Any:
        """Count a cluster's errors from zero again, and use it again."""
        find(name)
        return cluster_view(await service.clear_cluster(name))

    @router.get("/policies", response_model=schemas.PolicyList, tags=["policies"], operation_id="list_policies",
                responses=declared(401))  # fmt: skip
    async def policies() -> Any:
        """The placement policies."""
        return {"policies": list(service.policies())}

    return router


def health_router(service: JobService, operation: str = "health") -> APIRouter:
    """The daemon's health; ``operation`` is its name in OpenAPI."""
    router = APIRouter()

    @router.get("/healthz", response_model=schemas.Health, tags=["health"], operation_id=operation,
                responses=declared(401) if operation != "health" else None)  # fmt: skip
    async def healthz() -> Any:
        """Whether the daemon is well; ``degraded`` when a cluster is not usable."""
        return service.health()

    return router
