"""Test predictions and reports for runs on slow links; the runs themselves need the testbed."""

import json
import subprocess
import sys

import pytest

from tests.experiments.lerida_2008_live import (
    COMMUNICATING,
    COMPUTING,
    PAGE,
    PROGRAM,
    RATE,
    STEPS,
    Point,
    foretold,
    measured,
    page,
    told_by,
)
from tests.needs import MPI, MPIRUN, needs


@pytest.mark.parametrize(
    ("placement", "slowdown"),
    [({"north": 2, "south": 2}, 2 / 3), ({"north": 3, "south": 2}, 3 / 4), ({"north": 3, "east": 3}, 3 / 5)],
)
@pytest.mark.parametrize("need", [1.0, 3.0])
def test_predicted_time_follows_the_equation_of_the_paper(
    placement: dict[str, int], slowdown: float, need: float
) -> None:
    """Check equation (4): a node's traffic to the other cluster divided by its bandwidth to that cluster."""
    matching = foretold(placement, need * RATE)
    assert matching.communication == pytest.approx(max(1.0, slowdown * need))
    share = COMMUNICATING / (COMPUTING + COMMUNICATING)
    assert matching.time == pytest.approx(1 - share + share * matching.communication)


def test_program_output_is_parsed() -> None:
    output = told_by('a warning\n{"lasted": 15.0, "exchanging": 12.0}\n')
    assert measured(output) == (12.0 / (STEPS * COMMUNICATING), 15.0 / (STEPS * (COMPUTING + COMMUNICATING)))
    with pytest.raises(ValueError, match="killed"):
        told_by("killed")


@pytest.mark.processes
@needs(MPI)
def test_paced_program_keeps_its_pace() -> None:
    flags = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
    command = [MPIRUN, *flags, "-np", "3", sys.executable, str(PROGRAM)]
    completed = subprocess.run([*command, "2", "0.01", "0.1", "1e6"], capture_output=True, text=True, check=True)
    output = told_by(completed.stdout)
    assert 0.2 <= output["exchanging"] <= output["lasted"]


def test_published_page_matches_its_results() -> None:
    results = json.loads(PAGE.with_suffix(".json").read_text())
    assert PAGE.read_text() == page(
        [Point(**point) for point in results["points"]], results["load"], results["processors"]
    )
