"""What pictures and tables tell of a workload's report; functions of the report alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from koalapy.dashboard.pictures.cumulative import Spread
from koalapy.dashboard.pictures.nodes_over_time import Held
from koalapy.workload.measures import has_run

Json = Mapping[str, Any]
TIMES = {"wait_time": "wait", "queue_time": "queue", "execution_time": "execution", "response_time": "response"}
MAX_SPANS = 200
"""Of a curve."""
MAX_HELD = 80
"""Stretches of time in which means are told."""
MIN_TIME = 1e-6
"""Seconds: there is nothing to draw of less, and it cannot be parted."""
ALL = "all"


@dataclass(frozen=True, slots=True)
class ClusterUse:
    """Of a cluster, or of all (``all``); shares are of the whole run, null where nothing is known."""

    name: str
    nodes: int
    jobs: float | None
    local: float | None
    over_time: Sequence[Held]


def spreads_of(jobs: Sequence[Json]) -> list[Spread]:
    """The times of the jobs that ran to an end of their own."""
    ran = [job for job in jobs if has_run(dict(job))]
    found = []
    for name, told in TIMES.items():
        ordered = sorted(max(0.0, job[name]) for job in ran if job[name] is not None)
        few = len(ordered) <= MAX_SPANS
        spans = ordered if few else [ordered[(i + 1) * len(ordered) // MAX_SPANS - 1] for i in range(MAX_SPANS)]
        found.append(Spread(told, len(ordered), spans))
    return found


def uses_of(report: Json, most: int) -> list[ClusterUse]:
    """All clusters together, and each of the first so many."""
    at, clusters, used = report["samples"]["at"], report["samples"]["clusters"], report["utilisation"]
    told = [(ALL, list(clusters.values()), used["all"])]
    told += [(name, [clusters[name]] if name in clusters else [], one) for name, one in used["clusters"].items()]
    return [
        ClusterUse(name, one["nodes"], one["ours"], one["background"], held(at, columns))
        for name, columns, one in told[: most + 1]
    ]


def held(at: Sequence[float], clusters: Sequence[Json]) -> list[Held]:
    """Means of what clusters had together; each look holds until the next one."""
    if len(at) < 2 or at[-1] - at[0] < MIN_TIME or not clusters:
        return []
    width = (at[-1] - at[0]) / min(MAX_HELD, len(at) - 1)
    looks = [
        tuple(sum(one[name][i] for one in clusters) for name in ("total", "used", "background")) for i in range(len(at))
    ]
    count = min(MAX_HELD, len(at) - 1)
    sums = [[0.0, 0.0, 0.0] for _ in range(count)]
    for index, look in enumerate(looks[:-1]):
        start, end = at[index] - at[0], at[index + 1] - at[0]
        place = min(count - 1, int(start / width))
        while start < end:
            until = end if place >= count - 1 else min(end, (place + 1) * width)
            for column, value in enumerate(look):
                sums[place][column] += value * max(0.0, until - start)
            start, place = until, min(count - 1, place + 1)
    return [
        Held(at[0] + i * width, at[0] + (i + 1) * width, *(round(total / width, 3) for total in sums[i]))
        for i in range(count)
    ]
