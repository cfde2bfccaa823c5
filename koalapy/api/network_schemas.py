"""What goes over the wire of the network between clusters."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from koalapy.api.fields import Input, Output, Text
from koalapy.model.measurement import MeasurementKind
from koalapy.service.links import LinkState

MOST = 10_000
"""Clusters or pairs in one order."""


Pair = Annotated[list[Text], Field(json_schema_extra={"minItems": 2, "maxItems": 2})]


SOME = {"minItems": 1}
BOTH: dict[str, Any] = {
    "properties": {name: {"type": "array"} for name in ("clusters", "pairs")},
    "required": ["clusters", "pairs"],
}


class MeasureOrder(Input):
    """Which links to measure: all among these clusters, or these pairs, or when neither is given all there are."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"not": BOTH})

    clusters: Annotated[list[Text], Field(max_length=MOST, json_schema_extra=SOME)] | None = None
    pairs: Annotated[list[Pair], Field(max_length=MOST, json_schema_extra=SOME)] | None = None
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
    """Whence the newest of it is; null where nothing was measured."""
    at: str | None
    """When that was measured."""
    tried_at: str | None
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


class AskedView(Output):
    """A link to be measured; ``reason`` says why it is not, and is empty when it is under way."""

    one: str
    other: str
    job: int | None
    reason: str


class MeasuringView(Output):
    """What is under way; what is found stands in the links' history, later than ``since``."""

    since: str
    links: list[AskedView]


class MeasurementView(Output):
    """One line of a link's history; ``error`` of a ping-pong: the nodes could not reach each other."""

    kind: MeasurementKind
    at: str
    source: str
    """Whence a transfer came; of a ping-pong the first of the two."""
    latency: float | None
    bandwidth: float | None
    """From there."""
    bandwidth_back: float | None
    """The other way, where it was told apart."""
    job: int | None
    error: str


class LinkHistory(Output):
    """Newest first."""

    one: str
    other: str
    measurements: list[MeasurementView]
