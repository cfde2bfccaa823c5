"""The routes of the network: what is known of the links, and having them measured."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query

from koalapy.api.conversion import moment
from koalapy.api.fields import Cluster
from koalapy.api.network_schemas import LinkHistory, MeasureOrder, MeasuringView, NetworkView
from koalapy.api.problems import declared
from koalapy.api.queries import refuse_unknown
from koalapy.model.errors import UsageError
from koalapy.model.measurement import Measurement
from koalapy.service.links import Pair, pair_of
from koalapy.service.network import Asked, LinkRecord, Network

Name = Annotated[Cluster, Path(description="a cluster's name")]
Limit = Annotated[int, Query(ge=1, le=1000, description="how many lines at most")]


def network_router(network: Network) -> APIRouter:
    """What lies between the clusters."""
    router = APIRouter(prefix="/api/v1/network", tags=["network"], dependencies=[Depends(refuse_unknown)])

    @router.get("", response_model=NetworkView, operation_id="show_network", responses=declared(401, 422))
    async def show() -> Any:
        """Every link of the grid, between two clusters or within one, and how it is known."""
        links = network.links()
        return {
            "clusters": [link.pair[0] for link in links if link.pair[0] == link.pair[1]],
            "links": [_link_view(link) for link in links],
            "stale_after": network.stale_after,
        }

    @router.post(
        "/measure",
        status_code=202,
        response_model=MeasuringView,
        operation_id="measure_network",
        responses=declared(400, 401, 413, 422),
    )
    async def measure(order: MeasureOrder | None = None) -> Any:
        """Have links measured, by jobs of low priority, and tell what is under way: at once, but in the first seconds
        after the daemon's start once the agents have connected."""
        await network.agents_had_their_chance()
        given, since = order or MeasureOrder(), network.now()
        asked = network.measure(given.clusters, None if given.pairs is None else _pairs(given.pairs))
        return {"since": moment(since), "links": [_asked_view(one) for one in asked]}

    @router.get(
        "/{one}/{other}/history",
        response_model=LinkHistory,
        operation_id="show_link_history",
        responses=declared(401, 404, 422, 503),
    )
    async def history(one: Name, other: Name, limit: Limit = 20) -> Any:
        """What was measured between two clusters, or within one, newest first."""
        found = await network.history(one, other, limit)
        first, second = pair_of(one, other)
        return {"one": first, "other": second, "measurements": [_measurement_view(line) for line in found]}

    return router


def _pairs(given: Sequence[Sequence[str]]) -> list[Pair]:
    for index, names in enumerate(given):
        if len(names) != 2:
            raise UsageError(
                f"pairs[{index}] has {len(names)} clusters, not two",
                field=f"pairs[{index}]",
                value=list(names),
                hint="give two names, the same twice for the network within a cluster",
            )
    return [(names[0], names[1]) for names in given]


def _link_view(link: LinkRecord) -> dict[str, Any]:
    known = link.known
    return {
        "one": link.pair[0],
        "other": link.pair[1],
        "state": link.state,
        "latency": link.link.latency,
        "bandwidth": link.link.bandwidth,
        "bandwidth_back": known.link_back.bandwidth,
        "kind": known.newest.kind if known.newest and not known.unreachable else None,
        "at": moment(known.newest.at) if known.newest and not known.unreachable else None,
        "tried_at": moment(known.tried_at),
        "error": known.error,
        "under_way": {"job": link.under_way.job} if link.under_way else None,
    }


def _asked_view(asked: Asked) -> dict[str, Any]:
    return {"one": asked.pair[0], "other": asked.pair[1], "job": asked.job, "reason": asked.reason}


def _measurement_view(line: Measurement) -> dict[str, Any]:
    return {
        "kind": line.kind,
        "at": moment(line.at),
        "source": line.one,
        "latency": line.latency,
        "bandwidth": line.bandwidth,
        "bandwidth_back": line.back,
        "job": line.job,
        "error": line.error,
    }
