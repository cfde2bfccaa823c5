"""Define what an opening of the barrier tells the nodes of a job: its plan, and its relayed links."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from koalapy.model.bounds import MAX_NODES, Count, Host, Name, Nodes, Number, Port, Seconds

MAX_RANGES = 100
"""Ranges of ports of one node."""


class PlanNode(TypedDict):
    """One node of the job; a plain dictionary, since there may be many thousands."""

    host: Host
    cluster: Name
    token: Name
    node: Nodes
    """Index of the node within its component."""
    slots: Count


class PlanContext(TypedDict):
    """One component's program. ``nodes`` are indices into the plan's nodes."""

    token: Name
    command: list[str]
    environment: dict[str, str]
    workdir: str | None
    workdir_optional: NotRequired[bool]
    """Whether the program may run in another folder if that one cannot be entered."""
    output: str | None
    """File for the output, in which ``%r`` is the rank and ``%%`` a percent sign."""
    error: NotRequired[str | None]
    """File for the error stream, which is kept apart then."""
    label: NotRequired[bool]
    """Whether lines begin with their rank. The error stream is kept apart then."""
    container: NotRequired[str | None]
    """Path of the container image that the program runs in."""
    nodes: Annotated[list[Nodes], Field(max_length=MAX_NODES)]


class LeaseWarning(TypedDict):
    """The signal to send when the lease is over, and the seconds of grace from then on."""

    signal: Name
    grace: Seconds


class PlanWarning(LeaseWarning):
    """The signal to send ``after`` seconds from the start, and the seconds of grace that remain then."""

    after: Seconds


class PlanRelay(TypedDict):
    """The relayed links that a job may use (docs/adr/0034-relayed-links.md)."""

    attempt: Name
    """Name of the attempt at the relays."""
    pairs: list[tuple[Name, Name, Literal["any", "relayed"]]]
    """Pairs of clusters, each sorted by name, that may be relayed. ``any``: only if their nodes do not reach each
    other directly. Other pairs are direct."""
    bases: list[int]
    """First ports of alternative layouts (``runner/relay_links.py``), to be tried in this order. Empty: relayed links
    cannot be used, so that a job that needs them fails."""


class RelayEntryNode(TypedDict):
    """A node of an attempt, and the ports that streams of other nodes may reach."""

    index: Nodes
    cluster: Name
    ports: Annotated[list[tuple[Port, Port]], Field(max_length=MAX_RANGES)]


class RelayEntry(TypedDict):
    """An attempt for the head of one cluster (``AttemptPlan.head_entry``)."""

    attempt: Name
    nodes: Annotated[list[RelayEntryNode], Field(max_length=MAX_NODES)]
    keys: dict[Name, Name]
    """In hex, by the other cluster."""
    peers: dict[Name, dict[str, Any]]
    streams: NotRequired[Count]


class OtherOpen(TypedDict):
    """The fields of an ``Open`` that differ between the components of an attempt on one cluster."""

    id: Number
    token: Name
    script: NotRequired[str]
