"""The pages of the network: every link as a heat map, and one link's history."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Annotated
from urllib.parse import quote

from fastapi import Query

from koalapy.api.network import Name
from koalapy.daemon.network.links import LinkState
from koalapy.daemon.network.network import LinkRecord, Network
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard, SentForm
from koalapy.dashboard.pictures import Point
from koalapy.model.cluster import pair_of
from koalapy.model.measurement import Measurement, MeasurementKind
from koalapy.model.request import ClusterName

STEPS = 5
"""Shades of the heat map."""
Limit = Annotated[int, Query(ge=1, le=1000, description="how many measurements at most")]


@dataclass(frozen=True, slots=True)
class Way:
    """From one cluster to another, or within one; seconds and bytes per second."""

    source: ClusterName
    target: ClusterName
    state: LinkState
    bandwidth: float | None
    latency: float | None
    step: int
    """How good its bandwidth is among those of this grid, from 1 to ``STEPS``; 0 where it is not known."""
    under_way: bool
    """Whether it is being measured, or waits for that."""


@dataclass(frozen=True, slots=True)
class NetworkView:
    """All ways, by source and target."""

    clusters: Sequence[ClusterName]
    rows: Sequence[Sequence[Way]]
    stale_after: float
    """Seconds after which a measurement counts as stale."""
    notes: Sequence[tuple[ClusterName, ClusterName, str]]
    """What there is to be said of single links."""


@dataclass(frozen=True, slots=True)
class LinkView:
    """One link and what was measured of it, newest first."""

    one: ClusterName
    other: ClusterName
    there: Way
    back: Way
    why_not: str
    """Why it is not measured though that was asked for; empty elsewhere."""
    job: int | None
    """Which measures it now."""
    error: str
    measurements: Sequence[Measurement]
    bandwidth: Sequence[Point]
    """The same for the picture, oldest first; bytes per second."""
    latency: Sequence[Point]
    """Seconds."""


def ways(records: Sequence[LinkRecord]) -> Mapping[tuple[ClusterName, ClusterName], Way]:
    """Both ways of every link, each with its shade: by equal ratios between the slowest and the fastest."""
    found = {}
    for record in records:
        one, other = record.pair
        found[one, other] = (record, record.link)
        found[other, one] = (record, record.link if one == other else record.known.link_back)
    known = [link.bandwidth for _, link in found.values() if link.bandwidth]
    low, high = min(known, default=1.0), max(known, default=1.0)
    return {
        pair: Way(
            *pair,
            state=record.state,
            bandwidth=link.bandwidth,
            latency=link.latency,
            step=step_of(link.bandwidth, low, high),
            under_way=record.under_way is not None,
        )
        for pair, (record, link) in found.items()
    }


def step_of(bandwidth: float | None, low: float, high: float) -> int:
    """Of ``STEPS``, which go over a factor of ten at least: where all are much alike, they look so."""
    if not bandwidth:
        return 0
    span = max(log(high) - log(low), log(10))
    share = 1 - (log(high) - log(bandwidth)) / span
    return min(STEPS, 1 + int(share * STEPS))


def notes_of(records: Sequence[LinkRecord]) -> list[tuple[ClusterName, ClusterName, str]]:
    notes = []
    for record in records:
        if record.under_way is not None:
            job = record.under_way.job
            notes.append((*record.pair, "waits to be measured" if job is None else f"is being measured by job {job}"))
        if record.known.error:
            what = "unreachable" if record.state is LinkState.UNREACHABLE else "the last try came to nothing"
            notes.append((*record.pair, f"{what}: {record.known.error}"))
    return notes


def add_network(dashboard: Dashboard, services: Services) -> None:
    network = services.network

    @dashboard.page("/network", "network.html", operation="show_network", title="Network", key="l")
    async def matrix() -> NetworkView:
        records = network.links()
        names = [record.pair[0] for record in records if record.pair[0] == record.pair[1]]
        all_ways = ways(records)
        rows = [[all_ways[source, target] for target in names] for source in names]
        return NetworkView(names, rows, network.stale_after, notes_of(records))

    @dashboard.page("/network/{one}/{other}", "link.html", operation="show_link_history", title="A link")
    async def link(one: Name, other: Name, limit: Limit = 100) -> LinkView:
        return await link_view(network, one, other, limit)

    @dashboard.action("/network/measure", operation="measure_network")
    async def measure(form: SentForm) -> str:
        """All links, or the one that is named."""
        await network.wait_for_agents()
        one, other = form.get("one"), form.get("other")
        if one or other:
            network.measure(pairs=[(one, other)])
            return f"/network/{quote(one, safe='')}/{quote(other, safe='')}"
        network.measure()
        return "/network"


async def link_view(network: Network, one: ClusterName, other: ClusterName, limit: int) -> LinkView:
    found = await network.history(one, other, limit)
    one, other = pair_of(one, other)
    records = network.links()
    record = next(each for each in records if each.pair == (one, other))
    all_ways = ways(records)
    told = [each for each in reversed(found) if each.kind is not MeasurementKind.INCONCLUSIVE]
    return LinkView(
        one=one,
        other=other,
        there=all_ways[one, other],
        back=all_ways[other, one],
        why_not=network.rejection_reason((one, other)),
        job=record.under_way.job if record.under_way else None,
        error=record.known.error,
        measurements=found,
        bandwidth=[Point(each.at, each.bandwidth) for each in told if each.bandwidth is not None],
        latency=[Point(each.at, each.latency) for each in told if each.latency is not None],
    )
