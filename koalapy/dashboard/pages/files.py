"""The page Files: input files on the clusters, what users sent along, and what jobs brought, with the room for them."""

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
Ask = Annotated[fields.Text, Query(max_length=1000, description="only of this logical file")]


@dataclass(frozen=True, slots=True)
class ResultsOf:
    """Bytes of results that are kept of a user's jobs."""

    user: str
    size: int


@dataclass(frozen=True, slots=True)
class FilesView:
    """Users see their own bundles and results, operators all; replicas are everybody's."""

    name: str
    replicas: Sequence[ReplicaView]
    next: str
    bundles: Sequence[StoredBundle]
    more_bundles: int
    bundle_room: StorageUse
    results: Sequence[ResultsOf]
    result_room: StorageUse


def add_files(dashboard: Dashboard, services: Services) -> None:
    files, bundles, results = services.files, services.bundles, services.results

    @dashboard.page("/files", "files.html", operation="list_replicas", title="Files", key="f")
    async def show(
        caller: Caller, name: Ask = "", after: After = "", after_cluster: AfterCluster = "", limit: Limit = 100
    ) -> FilesView:
        found = files.list(name or None, (after, after_cluster), limit + 1)
        page = found[:limit]
        more = with_query("/files", name=name, after=page[-1].name, after_cluster=page[-1].cluster) if page else ""
        sent = bundles.seen_by(caller)
        sizes = await results.sizes()
        brought = [
            ResultsOf(user, size)
            for user, size in sorted(sizes.items(), key=lambda pair: -pair[1])
            if caller.has_role(Role.OPERATOR) or user == caller.user
        ]
        return FilesView(
            name=name,
            replicas=[ReplicaView.model_validate(replica) for replica in page],
            next=more if len(found) > limit else "",
            bundles=sent[:MAX_BUNDLES],
            more_bundles=max(0, len(sent) - MAX_BUNDLES),
            bundle_room=bundles.storage_use,
            results=brought,
            result_room=results.storage_use,
        )
