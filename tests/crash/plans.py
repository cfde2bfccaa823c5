"""Choose at which times of each point a process is killed."""

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

from tests.crash.interposer import Crash, Point

RISKY_EFFECTS = frozenset({"fsync", "rename", "send", "fork", "spawn", "kill"})
"""Effects that hand something over or make it durable: they are interrupted more often."""
QUANTILES = (0.25, 0.5, 0.75)
FREQUENT = 20
"""A risky point that is reached so often is interrupted at more times."""


def choose_crashes(points: Counter[Point]) -> Iterator[Crash]:
    """Yield one crash of each point, those of risky effects first, then a second one of each, and so on."""
    ordered = sorted(points.items(), key=lambda item: (item[0].effect not in RISKY_EFFECTS, item[0]))
    for crashes in zip_longest(*(choose_crashes_of(point, count) for point, count in ordered)):
        yield from filter(None, crashes)


def choose_crashes_of(point: Point, count: int) -> Iterator[Crash]:
    """Yield the first time before and after the effect; for more times also one in the middle, before and after."""
    yield Crash(point, "before", 1)
    yield Crash(point, "after", 1)
    middle = 1 + count // 2
    if count > 1:
        yield Crash(point, "before", middle)
    if point.effect in RISKY_EFFECTS and count > 1:
        yield Crash(point, "after", middle)
    if point.effect in RISKY_EFFECTS and count >= FREQUENT:
        for quantile in QUANTILES:
            if (number := int(quantile * count)) != middle:
                yield Crash(point, "after" if number % 2 else "before", number)
