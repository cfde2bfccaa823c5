"""What comes of the advisor's decisions for everybody: response times in the virtual world, with nothing declared.

``python -m tests.benchmarks.coallocation`` does the same at length.
"""

from math import exp
from random import Random

import pytest

from koalapy.model.advice import Run, Size
from koalapy.policies.knowledge import HOPELESS, SURE
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.advisor.knowledge import runs_between
from tests.benchmarks.coallocation import BAR, compare

BOTH = ("north", "south")


@pytest.mark.parametrize(("ccr", "kinds"), [(0.1, 1), (1.0, 1), (1.0, 10)])
def test_not_knowing_costs_hardly_anything(ccr: float, kinds: int) -> None:
    """While others wait an unknown application is only tried: else those of the first hour hold everybody up."""
    found = compare(ccr, 0.9, (1, 2), 250, kinds=kinds)
    assert found.ratio <= BAR, found


@pytest.mark.parametrize("scatter", [0.5, 1.0, 1.5])
def test_no_application_is_locked_out_for_good(scatter: float) -> None:
    """Of those that are as fast on several clusters as on one, with four runs on each to begin with."""
    locked_out = 0
    for seed in range(10):
        draws, experience = Random(seed), Experience()
        for number in range(8 + 600):
            probability = experience.slowdowns("wave").harmless_probability(BOTH)
            is_tried = experience.single_cluster_runs("wave") >= runs_between(probability, loaded=True)
            together = number % 2 if number < 8 else is_tried or probability >= SURE
            seconds = 100.0 * exp(draws.gauss(0.0, scatter))
            experience.add(Run("wave", Size(4), BOTH if together else BOTH[:1], seconds))
        locked_out += experience.slowdowns("wave").harmless_probability(BOTH) <= HOPELESS
    assert locked_out == 0
