"""The page Files: replicas on the clusters, bundles of users and results of jobs, with their storage use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.files import After, AfterCluster, ReplicaView
from koalapy.daemon.jobs.quota import StorageUse
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.rendering import with_query
from koalapy.model.identity import Role
from koalapy.ports import StoredBundle

MAX_BUNDLES = 200

Limit = Annotated[int, Query(ge=1, le=1000)]
LogicalFile = Annotated[fields.Text, Query(max_length=1000, description="only this logical file")]


@dataclass(frozen=True, slots=True)
class UserResults:
    """Bytes of stored results of a user's jobs."""

    user: str
    size: int


@dataclass(frozen=True, slots=True)
class FilesView:
    """Replicas, bundles and results; users see their own bundles and results, operators all."""

    name: str
    replicas: Sequence[ReplicaView]
    next: str
    bundles: Sequence[StoredBundle]
    more_bundles: int
    bundle_room: StorageUse
    results: Sequence[UserResults]
    result_room: StorageUse


def add_files(dashboard: Dashboard, services: Services) -> None:
    """Add the page of replicas, uploaded bundles and stored results."""
    files, bundles, results = services.files, services.bundles, services.results

    @dashboard.page("/files", "files.html", operation="list_replicas", title="Files", key="f")
    async def show(
        caller: Caller, name: LogicalFile = "", after: After = "", after_cluster: AfterCluster = "", limit: Limit = 100
    ) -> FilesView:
        """Return a page of replicas, and the bundles and results that the caller may see."""
        replicas = files.list_replicas(name or None, (after, after_cluster), limit + 1)
        page, next_page = replicas[:limit], ""
        if len(replicas) > limit:
            next_page = with_query("/files", name=name, after=page[-1].name, after_cluster=page[-1].cluster)
        visible_bundles = bundles.visible_to(caller)
        sizes = await results.sizes_by_owner()
        user_results = [
            UserResults(user, size)
            for user, size in sorted(sizes.items(), key=lambda pair: -pair[1])
            if caller.has_role(Role.OPERATOR) or user == caller.user
        ]
        return FilesView(
            name=name,
            replicas=[ReplicaView.model_validate(replica) for replica in page],
            next=next_page,
            bundles=visible_bundles[:MAX_BUNDLES],
            more_bundles=max(0, len(visible_bundles) - MAX_BUNDLES),
            bundle_room=bundles.storage_use,
            results=user_results,
            result_room=results.storage_use,
        )
