"""The routes of the network: state and history of the links between clusters, and orders to measure them."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import AliasPath, ConfigDict, Field

from koalapy.api.derived import view_model
from koalapy.api.fields import Cluster, Input, Output, Text, Timestamp
from koalapy.api.routes import api_router
from koalapy.daemon.network.links import LinkState
from koalapy.daemon.network.network import LinkRecord, Network
from koalapy.model.cluster import Link, pair_of
from koalapy.model.errors import reject
from koalapy.model.measurement import Measurement, MeasurementKind

Name = Annotated[Cluster, Path(description="a cluster's name")]
Limit = Annotated[int, Query(ge=1, le=1000, description="maximum number of measurements")]
MAX_ORDERED = 10_000
"""Maximum number of clusters or pairs in one request."""
PairOfNames = Annotated[list[Text], Field(json_schema_extra={"minItems": 2, "maxItems": 2})]
NOT_EMPTY = {"minItems": 1}
BOTH: dict[str, Any] = {
    "properties": {name: {"type": "array"} for name in ("clusters", "pairs")},
    "required": ["clusters", "pairs"],
}


class MeasureOrder(Input):
    """The links to measure: all between ``clusters``, or those in ``pairs``; by default all links of the grid."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"not": BOTH})

    clusters: Annotated[list[Text], Field(max_length=MAX_ORDERED, json_schema_extra=NOT_EMPTY)] | None = None
    pairs: Annotated[list[PairOfNames], Field(max_length=MAX_ORDERED, json_schema_extra=NOT_EMPTY)] | None = None
    """Pairs of cluster names; the same name twice for the network within a cluster."""


class UnderWayView(Output):
    """A measurement that is queued or running; ``job`` is null while it is queued."""

    job: int | None


class LinkView(view_model("_Link", Link, "", only={"latency", "bandwidth"})):  # type: ignore[misc]
    """The network between two clusters, or within one (``one`` = ``other``), as policies use it."""

    one: str
    other: str
    state: LinkState
    bandwidth_back: float | None
    """Bytes per second from ``other`` to ``one``."""
    kind: MeasurementKind | None
    """Kind of the newest measurement; null where nothing was measured."""
    at: Timestamp | None
    """Time of the newest measurement."""
    tried_at: Timestamp | None
    """Time of the last ping-pong measurement, including failed ones."""
    error: str
    """The reason for which nodes cannot reach each other, or for which the last measurement failed."""
    under_way: UnderWayView | None
    relayed: bool
    """Whether MPI messages between the clusters go over relays now."""
    relayed_since: Timestamp | None
    """Time since which nodes of the clusters have not reached each other directly; null if the configuration demands
    relays, or if they do."""
    relayed_reason: str
    """Why messages go over relays, and by the word of which cluster; empty if they do not."""
    direct_retry_at: Timestamp | None
    """Time from which the next job tries direct connections first again."""


class NetworkView(Output):
    """Every link of the grid once: ``one`` <= ``other``."""

    clusters: list[str]
    links: list[LinkView]
    stale_after: float
    """Seconds after which a measurement counts as stale."""


class RequestedLinkView(Output):
    """A link to measure; ``reason`` says why it is not measured, and is empty if it is."""

    one: str = Field(validation_alias=AliasPath("pair", 0))
    other: str = Field(validation_alias=AliasPath("pair", 1))
    job: int | None
    reason: str


class StartedMeasurements(Output):
    """The measurements that were started; their results are the entries of the links' histories after ``since``."""

    since: Timestamp
    links: list[RequestedLinkView]


_Measurement = view_model("_Measurement", Measurement, "", without={"one", "other", "back"})


class MeasurementView(_Measurement):  # type: ignore[misc, valid-type]
    """A measurement in a link's history; ``error`` of a ping-pong means that the nodes cannot reach each other."""

    source: str = Field(validation_alias="one")
    """The source of a transfer, or the first cluster of a ping-pong."""
    bandwidth_back: float | None = Field(validation_alias="back")
    """Bytes per second from the other cluster to ``source``, if it was measured separately."""


class LinkHistory(Output):
    """The measurements of a link, newest first."""

    one: str
    other: str
    measurements: list[MeasurementView]


def network_router(network: Network) -> APIRouter:
    """Return the routes that show and measure the network links of clusters."""
    router = api_router("network", "/network")

    @router.get("", response_model=NetworkView)
    async def show_network() -> Any:
        """Show every link of the grid, between two clusters or within one, with its newest measurement."""
        records = network.list_links()
        return {
            "clusters": [record.pair[0] for record in records if record.pair[0] == record.pair[1]],
            "links": [_link_view(record) for record in records],
            "stale_after": network.stale_after,
        }

    @router.post("/measure", status_code=202, response_model=StartedMeasurements)
    async def measure_network(order: MeasureOrder | None = None) -> Any:
        """Measure links by jobs of low priority, and return those that are measured. In the first seconds after the
        daemon's start the response waits for the agents to connect."""
        await network.wait_for_agents()
        order, since = order or MeasureOrder(), network.current_time()
        for index, names in enumerate(order.pairs or ()):
            if len(names) != 2:
                hint = "give two names, the same twice for the network within a cluster"
                reject(f"pairs[{index}]", list(names), f"has {len(names)} clusters, not two", hint)
        pairs = None if order.pairs is None else [(first, second) for first, second in order.pairs]
        return {"since": since, "links": network.measure_links(order.clusters, pairs)}

    @router.get("/{one}/{other}/history", response_model=LinkHistory)
    async def show_link_history(one: Name, other: Name, limit: Limit = 20) -> Any:
        """List the measurements between two clusters, or within one, newest first."""
        measurements = await network.read_history(one, other, limit)
        first, second = pair_of(one, other)
        return {"one": first, "other": second, "measurements": measurements}

    return router


def _link_view(link: LinkRecord) -> dict[str, Any]:
    """Return the fields of a link with its newest measurement."""
    measured = link.measurements
    return {
        "one": link.pair[0],
        "other": link.pair[1],
        "state": link.state,
        "latency": link.link.latency,
        "bandwidth": link.link.bandwidth,
        "bandwidth_back": measured.link_back.bandwidth,
        "kind": measured.newest.kind if measured.newest and not measured.unreachable else None,
        "at": measured.newest.at if measured.newest and not measured.unreachable else None,
        "tried_at": measured.tried_at,
        "error": measured.error,
        "under_way": link.under_way,
        "relayed": link.is_relayed,
        "relayed_since": link.relayed.since if link.relayed else None,
        "relayed_reason": link.relayed.reason if link.relayed else "",
        "direct_retry_at": link.relayed.retry_at if link.relayed else None,
    }
