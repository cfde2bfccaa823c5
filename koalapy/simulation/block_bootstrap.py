"""Between which bounds the mean of what comes in time lies, where what comes in one day hangs together.

Whole days are drawn anew, or hours where there are few days: what is drawn one by one would seem far surer than it is.
"""

from collections import defaultdict
from collections.abc import Sequence
from random import Random

MIN_VALUES = 10
"""Of fewer no bounds are told: nothing can be said of what other days would have brought."""
MIN_BLOCKS = 10
MAX_BLOCKS = 500
SPANS = (86400.0, 3600.0)
"""Seconds of a block, the longest first of which there are enough."""
RESAMPLES = 1000
LEVEL = 0.95


def mean_bounds(values: Sequence[tuple[float, float]], seed: str) -> tuple[float, float] | None:
    """Of values with their moments, between which bounds their mean lies at 95 %; None where there are too few."""
    if len(values) < MIN_VALUES:
        return None
    blocks = [(len(block), sum(block)) for block in _blocks(values)]
    draw = Random(seed)
    means = []
    for _ in range(RESAMPLES):
        drawn = draw.choices(blocks, k=len(blocks))
        means.append(sum(total for _, total in drawn) / sum(count for count, _ in drawn))
    means.sort()
    tail = round(RESAMPLES * (1 - LEVEL) / 2)
    return means[tail], means[-1 - tail]


def _blocks(values: Sequence[tuple[float, float]]) -> list[list[float]]:
    for span in SPANS:
        blocks: dict[int, list[float]] = defaultdict(list)
        for at, value in values:
            blocks[int(at // span)].append(value)
        if len(blocks) >= MIN_BLOCKS:
            return list(blocks.values())
    in_order = [value for _, value in sorted(values)]
    size = -(-len(in_order) // MAX_BLOCKS)
    return [in_order[start : start + size] for start in range(0, len(in_order), size)]
