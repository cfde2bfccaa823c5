"""Response times of all jobs under the advisor's decisions, without declared slowdowns.

``python -m tests.benchmarks.coallocation`` runs the complete comparison.
"""

from math import exp
from random import Random

import pytest

from koalapy.model.advice import Run, Size
from koalapy.policies.knowledge import HOPELESS, SURE
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.advisor.knowledge import runs_between
from tests.benchmarks.coallocation import MAX_RATIO, compare

BOTH = ("north", "south")


@pytest.mark.parametrize(("ccr", "kinds"), [(0.1, 1), (1.0, 1), (1.0, 10)])
def test_advisor_unknown_slowdowns_hardly_increase_response_time(ccr: float, kinds: int) -> None:
    """While other jobs wait, an unknown application is only sampled."""
    comparison = compare(ccr, 0.9, (1, 2), 250, kinds=kinds)
    assert comparison.ratio <= MAX_RATIO, comparison


@pytest.mark.parametrize("scatter", [0.5, 1.0, 1.5])
def test_advisor_harmless_application_is_always_retried(scatter: float) -> None:
    """The application is as fast on several clusters as on one, with four initial runs on each."""
    locked_out = 0
    for seed in range(10):
        draws, experience = Random(seed), Experience()
        for number in range(8 + 600):
            probability = experience.slowdowns("wave").harmless_probability(BOTH)
            is_tried = experience.single_cluster_runs("wave") >= runs_between(probability, loaded=True)
            is_coallocated = number % 2 if number < 8 else is_tried or probability >= SURE
            run_time_s = 100.0 * exp(draws.gauss(0.0, scatter))
            experience.add(Run("wave", Size(4), BOTH if is_coallocated else BOTH[:1], run_time_s))
        locked_out += experience.slowdowns("wave").harmless_probability(BOTH) <= HOPELESS
    assert locked_out == 0
