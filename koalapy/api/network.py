"""The routes of the network: what is known of the links, and having them measured."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import AliasPath, ConfigDict, Field

from koalapy.api.fields import Cluster, Input, Output, Text, Timestamp
from koalapy.api.routes import api_router
from koalapy.daemon.network.links import LinkState
from koalapy.daemon.network.network import LinkRecord, Network
from koalapy.model.cluster import ClusterPair, pair_of
from koalapy.model.errors import UsageError
from koalapy.model.measurement import MeasurementKind

Name = Annotated[Cluster, Path(description="a cluster's name")]
Limit = Annotated[int, Query(ge=1, le=1000, description="how many lines at most")]


MAX_ORDERED = 10_000
"""Clusters or pairs in one order."""


TwoNames = Annotated[list[Text], Field(json_schema_extra={"minItems": 2, "maxItems": 2})]


SOME = {"minItems": 1}
BOTH: dict[str, Any] = {
    "properties": {name: {"type": "array"} for name in ("clusters", "pairs")},
    "required": ["clusters", "pairs"],
}


class MeasureOrder(Input):
    """Which links to measure: all among these clusters, or these pairs, or when neither is given all there are."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"not": BOTH})

    clusters: Annotated[list[Text], Field(max_length=MAX_ORDERED, json_schema_extra=SOME)] | None = None
    pairs: Annotated[list[TwoNames], Field(max_length=MAX_ORDERED, json_schema_extra=SOME)] | None = None
    """Two names each, the same twice for the network within a cluster."""


class UnderWayView(Output):
    """A measurement that is not over; its job is null while it waits for its turn."""

    job: int | None


class LinkView(Output):
    """What is known of the network between two clusters, or within one (``one`` = ``other``), and used by policies."""

    one: str
    other: str
    state: LinkState
    latency: float | None
    """Seconds for 64 KB."""
    bandwidth: float | None
    """Bytes per second, from ``one`` to ``other``."""
    bandwidth_back: float | None
    """From ``other`` to ``one``."""
    kind: MeasurementKind | None
    """How the newest of it is known; null where nothing was measured."""
    at: Timestamp | None
    """When that was measured."""
    tried_at: Timestamp | None
    """When a ping-pong was last tried, whatever came of it."""
    error: str
    """Why the nodes do not reach each other, or why the last try came to nothing."""
    under_way: UnderWayView | None


class NetworkView(Output):
    """Every link of the grid once: ``one`` <= ``other``."""

    clusters: list[str]
    links: list[LinkView]
    stale_after: float
    """Seconds after which a measurement counts as stale."""


class RequestedLinkView(Output):
    """A link to be measured; ``reason`` says why it is not, and is empty when it is under way."""

    one: str = Field(validation_alias=AliasPath("pair", 0))
    other: str = Field(validation_alias=AliasPath("pair", 1))
    job: int | None
    reason: str


class StartedMeasurements(Output):
    """What is under way; what is found stands in the links' history, later than ``since``."""

    since: Timestamp
    links: list[RequestedLinkView]


class MeasurementView(Output):
    """One line of a link's history; ``error`` of a ping-pong: the nodes could not reach each other."""

    kind: MeasurementKind
    at: Timestamp
    source: str = Field(validation_alias="one")
    """Where a transfer came from; of a ping-pong the first of the two."""
    latency: float | None
    bandwidth: float | None
    """From there."""
    bandwidth_back: float | None = Field(validation_alias="back")
    """The other way, where it was told apart."""
    job: int | None
    error: str


class LinkHistory(Output):
    """Newest first."""

    one: str
    other: str
    measurements: list[MeasurementView]


def network_router(network: Network) -> APIRouter:
    router = api_router("network", "/network")

    @router.get("", response_model=NetworkView)
    async def show_network() -> Any:
        """Every link of the grid, between two clusters or within one, and how it is known."""
        links = network.links()
        return {
            "clusters": [link.pair[0] for link in links if link.pair[0] == link.pair[1]],
            "links": [_link_view(link) for link in links],
            "stale_after": network.stale_after,
        }

    @router.post("/measure", status_code=202, response_model=StartedMeasurements)
    async def measure_network(order: MeasureOrder | None = None) -> Any:
        """Have links measured, by jobs of low priority, and tell what is under way: at once, but in the first seconds
        after the daemon's start once the agents have connected."""
        await network.agents_had_their_chance()
        given, since = order or MeasureOrder(), network.now()
        asked = network.measure(given.clusters, None if given.pairs is None else _pairs(given.pairs))
        return {"since": since, "links": asked}

    @router.get("/{one}/{other}/history", response_model=LinkHistory)
    async def show_link_history(one: Name, other: Name, limit: Limit = 20) -> Any:
        """What was measured between two clusters, or within one, newest first."""
        found = await network.history(one, other, limit)
        first, second = pair_of(one, other)
        return {"one": first, "other": second, "measurements": found}

    return router


def _pairs(given: Sequence[Sequence[str]]) -> list[ClusterPair]:
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
        "at": known.newest.at if known.newest and not known.unreachable else None,
        "tried_at": known.tried_at,
        "error": known.error,
        "under_way": link.under_way,
    }
