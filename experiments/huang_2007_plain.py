"""Apply the rules of huang-2007 in a plain loop, a hundred times as fast as the scheduler, to simulate the whole trace.

The results equal those of the scheduler (tests/experiments/test_huang_2007.py).
"""

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

from experiments.huang_2007_grid import PROCESSORS, Setting
from koalapy.model.request import ComponentRequest, NonFixedRequest
from koalapy.policies.adaptive import MAX_LOOK_AHEAD, count_startable
from koalapy.workload.swf import TraceJob

Waiting = list[tuple[int, int]]
"""Processors and number of each waiting job, narrowest first."""


def mean_response(jobs: Sequence[TraceJob], setting: Setting) -> float:
    """Return the mean response time in seconds of jobs in the order of submission, each on one site."""
    assert setting.sharing == "ordinary", "there is one queue"
    assert setting.p is None, "nobody is split"
    choice = _Choice(jobs, setting)
    free, waiting = list(PROCESSORS), Waiting()
    running: list[tuple[float, int, int, int]] = []
    total, coming = 0.0, 0
    while coming < len(jobs) or running:
        now = min(_next_moments(jobs, coming, running))
        while running and running[0][0] <= now:
            _, _, freed, processors = heapq.heappop(running)
            free[freed] += processors
        while coming < len(jobs) and jobs[coming].submitted <= now:
            insort(waiting, (jobs[coming].processors, coming))
            coming += 1
        while waiting and (site := choice.choose_site(waiting, free)) is not None:
            processors, number = waiting.pop(0)
            job = jobs[number]
            end = now + job.ran * setting.load[job.queue - 1] / setting.speed[site]
            free[site] -= processors
            total += end - job.submitted
            heapq.heappush(running, (end, number, site, processors))
    return total / len(jobs)


def _next_moments(
    jobs: Sequence[TraceJob], coming: int, running: Sequence[tuple[float, int, int, int]]
) -> Iterator[float]:
    """Yield the times of the next arrival and the next end."""
    if coming < len(jobs):
        yield jobs[coming].submitted
    if running:
        yield running[0][0]


class _Choice:
    """Choose the site on which the first waiting job is placed."""

    def __init__(self, jobs: Sequence[TraceJob], setting: Setting) -> None:
        speed = setting.speed
        self._jobs, self._policy, self._speed = jobs, setting.policy, speed
        self._candidates = [
            [site for site in range(len(speed)) if speed[site] >= setting.threshold * speed[home]]
            for home in range(len(speed))
        ]

    def choose_site(self, waiting: Waiting, free: list[int]) -> int | None:
        processors, number = waiting[0]
        candidates = self._candidates[self._jobs[number].queue - 1]
        room = [site for site in candidates if free[site] >= processors]
        if not room:
            return None
        fastest = max(room, key=lambda site: (self._speed[site], -site))
        tightest = min(room, key=lambda site: (free[site], site))
        if self._policy == "fastest-one" or fastest == tightest:
            return fastest
        if self._policy == "best-fit":
            return tightest
        assert self._policy == "adaptive", f"{self._policy} is not known here"
        if len(waiting) == 1:
            return fastest
        next_requests = [_build_request(size) for size, _ in islice(waiting, 1, MAX_LOOK_AHEAD + 1)]
        by_fastest, by_tightest = (
            count_startable(next_requests, _remaining_nodes(free, site, processors)) for site in (fastest, tightest)
        )
        return tightest if by_tightest > by_fastest else fastest


def _remaining_nodes(free: Sequence[int], site: int, processors: int) -> dict[str, int]:
    return {str(number): idle - processors * (number == site) for number, idle in enumerate(free)}


@cache
def _build_request(processors: int) -> NonFixedRequest:
    return NonFixedRequest((ComponentRequest(processors),))
