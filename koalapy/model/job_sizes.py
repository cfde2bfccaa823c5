"""What a resource manager gives to a job: sizes by partition, and no reserved nodes. Sizes are in nodes."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from annotated_types import Interval

from koalapy.model.bounds import MAX_NODES, Label, Nodes, Seconds
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list, format_nodes, format_time, format_utc

Size = Annotated[int, Interval(ge=1, le=MAX_NODES)]


@dataclass(frozen=True, slots=True)
class JobSizes:
    """A range of sizes that jobs may have in a partition."""

    least: Size = 1
    most: Size = MAX_NODES
    partition: Label = ""
    """Empty: in each partition that jobs get without naming one."""


MAX_TIME = 1e10


@dataclass(frozen=True, slots=True)
class NodeReservation:
    """Nodes that the resource manager reserves for other jobs or for maintenance; times in seconds since the epoch."""

    name: Label
    nodes: Nodes
    idle: Nodes
    """Those that count as idle now. Jobs that would run beyond the begin do not get them."""
    begins: Seconds
    ends: Seconds = MAX_TIME
    default_walltime: Seconds = MAX_TIME
    """Seconds that the resource manager gives to jobs without a walltime."""

    @property
    def is_drain(self) -> bool:
        """Return whether it is a planned drain, which is of all nodes and has no name."""
        return not self.name

    def bars(self, walltime: float | None, now: float, delay: float = 0.0) -> bool:
        """Return whether a job that starts ``delay`` seconds from now, and is placed now, would run between begin and
        end."""
        return self.last_start(walltime) < now + delay and now < self.ends

    def last_start(self, walltime: float | None) -> float:
        """Return the last time at which a job may start that is to end before the begin."""
        lasts = (self.default_walltime if walltime is None else walltime) + 60  # it may count whole minutes
        return self.begins - lasts

    def describe(self, now: float) -> str:
        """Return its nodes and times as text: ``3 nodes reserved from 08:00 to 10:00 UTC``; empty if it is over."""
        ends = "" if self.ends >= MAX_TIME else format_utc(self.ends, now)
        if self.begins > now:
            begins = format_time(self.begins, now) if ends else format_utc(self.begins, now)
            when = f" from {begins}" + (f" to {ends}" if ends else "")
        else:
            when = f" until {ends}" if ends else ""
        subject = "a planned drain" if self.is_drain else f"{format_nodes(self.nodes)} reserved"
        return f"{subject}{when}" if self.ends > now else ""


def count_peak(uses: Iterable[tuple[float, float, int]]) -> int:
    """Return the most nodes in use at one time; ``uses``: begin, end and nodes, all of which overlap some time span.

    It is the least that these reservations can keep from a job: those at one time have different nodes, and those at
    different times may have the same nodes. Reports do not name nodes, so the true number is not known. With the sum, a
    row of weekly reservations would keep nodes idle for good that it never uses. If they do have different nodes, the
    resource manager lets the job wait or rejects it, and after that try it is placed elsewhere.
    """
    in_use = peak = 0
    changes = ((time, nodes) for begin, end, count in uses for time, nodes in ((begin, count), (end, -count)))
    for _, nodes in sorted(changes):  # at equal times, ends come first
        in_use += nodes
        peak = max(peak, in_use)
    return peak


SizeRanges = tuple[JobSizes, ...]
"""Ranges of which a size must be in one; empty: each size is accepted."""


class BarredSizes(NamedTuple):
    """Sizes that a cluster has rejected for a job."""

    cluster: ClusterName
    least: int = 1
    most: int = MAX_NODES


Barred = frozenset[BarredSizes]
NOTHING_BARRED: Barred = frozenset()


def is_barred(barred: Barred, cluster: ClusterName, size: int) -> bool:
    """Return whether a cluster has rejected a job of this size."""
    return any(entry.cluster == cluster and entry.least <= size <= entry.most for entry in barred)


def accepts_size(ranges: SizeRanges, size: int) -> bool:
    return not ranges or any(sizes.least <= size <= sizes.most for sizes in ranges)


def select_partition(ranges: SizeRanges, partition: str) -> SizeRanges:
    """Return the ranges of a partition; of all partitions if it is empty."""
    return tuple(sizes for sizes in ranges if sizes.partition in ("", partition)) if partition else ranges


def limit_sizes(ranges: SizeRanges, minimum: int, maximum: int) -> SizeRanges:
    """Return the parts of the ranges, one of which has all sizes if there are none, within two bounds."""
    parts = (replace(r, least=max(r.least, minimum), most=min(r.most, maximum)) for r in ranges or (JobSizes(),))
    return tuple(part for part in parts if part.least <= part.most)


def exclude_sizes(ranges: SizeRanges, minimum: int, maximum: int) -> SizeRanges:
    """Return the parts of the ranges, one of which has all sizes if there are none, outside of two bounds."""
    below = limit_sizes(ranges, 1, minimum - 1) if minimum > 1 else ()
    return (*below, *(limit_sizes(ranges, maximum + 1, MAX_NODES) if maximum < MAX_NODES else ()))


def describe_sizes(cluster: ClusterName, ranges: Collection[JobSizes]) -> str:
    """Return the accepted sizes as text: ``west gives a job at least 2 nodes``."""
    texts = dict.fromkeys(_describe_range(sizes.least, sizes.most) for sizes in sorted(ranges, key=lambda r: r.least))
    return f"{cluster} gives a job {format_list(list(texts), separator=' or ')}"


def _describe_range(minimum: int, maximum: int) -> str:
    if minimum == maximum:
        return format_nodes(minimum)
    if maximum == MAX_NODES:
        return f"at least {format_nodes(minimum)}"
    return f"at most {format_nodes(maximum)}" if minimum == 1 else f"{minimum} to {format_nodes(maximum)}"
