"""The advisor learns which of two applications may be co-allocated.

On embedded clusters, ``wave`` is a program that sleeps longer on two clusters. On the testbed, the programs are real
and a link is slow.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.grid.conftest import GRID_KINDS
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import Grid
from tests.grid.slow_links import limited_link
from tests.grid.testbed import Testbed

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

ROUND_COUNT = 10
"""Rounds, in each of which both applications run in one cluster and over two."""
TESTBED_ROUND_COUNT = int(os.environ.get("KOALA_TEST_ADVISOR_ROUNDS", "4"))
"""Rounds on the testbed, where programs run longer."""
SLOW_RATE = "160kbit"
"""Rate of the testbed's slow link. ``wave`` exchanges a few bytes at each step, ``prime`` a few in all."""

WAVE_OPTIONS = ["--points", "300", "--steps", "4000", "--tolerance", "1"]
"""Options by which ``wave`` computes little between two messages."""


def sleep_command(alone: float, together: float) -> list[str]:
    """Return a command that sleeps for ``alone`` seconds in one cluster and for ``together`` seconds in several."""
    return ["sh", "-c", f"test $KOALA_COMPONENT_NODES = $KOALA_NODES && exec sleep {alone}; exec sleep {together}"]


@dataclass
class Setup:
    """Two clusters with a slow link between them; jobs of ``size`` nodes fit in one, or are split as ``parts``."""

    pair: tuple[str, str]
    size: int
    parts: tuple[int, int]
    programs: dict[str, list[str]]
    launcher: str
    rounds: int = ROUND_COUNT
    other_clusters: dict[str, int] = field(default_factory=dict)
    """Nodes to block, by cluster, so that a flexible job does not use these clusters."""
    ident: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def name(self, program: str) -> str:
        """Return an application name of this run, since the advisor must not learn from other runs."""
        return f"{program}-{self.ident}"

    def submit(self, grid: Grid, program: str, request: dict[str, Any], **fields: Any) -> int:
        application = self.name(program)
        return grid.submit(request, *self.programs[program], launcher=self.launcher, application=application, **fields)

    def submit_with_advice(self, grid: Grid, program: str) -> int:
        return self.submit(grid, program, {"type": "flexible", "total_size": self.size}, policy="auto")

    @property
    def split_request(self) -> dict[str, Any]:
        parts = zip(self.parts, self.pair, strict=True)
        return {"type": "fixed", "components": [{"size": size, "cluster": name} for size, name in parts]}


# ``wave`` must sleep long on two clusters: it stops waiting when the blockers have run for longer than that.
EMBEDDED = Setup(
    ("north", "south"), 4, (2, 2), {"wave": sleep_command(0.3, 4.0), "prime": sleep_command(0.3, 0.3)}, "processes"
)
TESTBED = Setup(
    ("north", "east"),
    3,
    (2, 1),
    {
        "wave": ["python", "-m", "koalapy.apps.wave", *WAVE_OPTIONS, "--no-where"],
        "prime": ["python", "-m", "koalapy.apps.prime", "--limit", str(10**8), "--no-where"],
    },
    "openmpi",
    TESTBED_ROUND_COUNT,
    {"south": 2},
)


@pytest.fixture(params=GRID_KINDS)
def setup(request: pytest.FixtureRequest) -> Iterator[tuple[Grid, Setup]]:
    if request.param == "embedded":
        grid: EmbeddedGrid = request.getfixturevalue("make_grid")()
        yield grid, EMBEDDED
        return
    testbed: Testbed = request.getfixturevalue("testbed")
    with ExitStack() as stack:
        stack.callback(testbed.wait_until_idle)
        stack.callback(testbed.cancel_all_jobs)
        stack.enter_context(limited_link(testbed, *TESTBED.pair, SLOW_RATE))
        yield testbed, TESTBED


def wait_for_clusters(grid: Grid, ident: int, timeout_s: float = 120.0) -> set[str]:
    job = grid.wait_for_end(ident, timeout_s)
    assert job["state"] == "succeeded", (job["reason"], grid.read_output(ident)[-2000:])
    return {component["cluster"] for component in job["components"]}


@pytest.mark.timeout(900)
def test_advisor_co_allocates_prime_and_keeps_wave_in_one_cluster(setup: tuple[Grid, Setup]) -> None:
    grid, plan = setup
    for _ in range(plan.rounds):
        for ident in [plan.submit_with_advice(grid, program) for program in plan.programs]:
            assert len(wait_for_clusters(grid, ident)) == 1, "one cluster has room"
        for program in plan.programs:
            assert wait_for_clusters(grid, plan.submit(grid, program, plan.split_request)) == set(plan.pair)
    gate = grid.make_gate()
    for name, size in {**dict.fromkeys(plan.pair, 1), **plan.other_clusters}.items():
        blocker = {"type": "fixed", "components": [{"size": size, "cluster": name}]}
        grid.wait_for_state(grid.submit(blocker, *gate.hold), "running")
    try:
        wave, prime = plan.submit_with_advice(grid, "wave"), plan.submit_with_advice(grid, "prime")
        assert wait_for_clusters(grid, prime) == set(plan.pair)
        waiting = grid.get_job(wave)
        assert waiting["state"] == "queued"
        assert f"waits for {plan.size} nodes in one cluster" in waiting["reason"]
        assert f", from {plan.rounds} runs) on 2 clusters now is" in waiting["reason"]
        assert "1 more idle node in" in grid.run_koala("explain", str(wave)).stdout
    finally:
        gate.open()
    assert len(wait_for_clusters(grid, wave)) == 1
    check_reported_advice(grid, plan, prime)
    if isinstance(grid, EmbeddedGrid):
        learned_verdicts = read_verdicts(grid, plan)
        grid.kill_daemon()
        grid.start()
        assert read_verdicts(grid, plan) == learned_verdicts, "what was learned outlives the daemon"


def read_verdicts(grid: Grid, plan: Setup) -> dict[str, tuple[str, int]]:
    """Return the verdict and the number of runs on two clusters for each application."""
    applications = {
        application["application"]: application
        for application in grid.http.get("/api/v1/advisor").json()["applications"]
    }
    return {
        program: (application["verdict"], application["runs_on_several"])
        for program in plan.programs
        if (application := applications[plan.name(program)])
    }


def check_reported_advice(grid: Grid, plan: Setup, prime: int) -> None:
    assert read_verdicts(grid, plan) == {
        "wave": ("one cluster", plan.rounds),
        "prime": ("co-allocated", plan.rounds + 1),
    }
    table = grid.run_koala("advisor").stdout
    assert any(plan.name("wave") in line and line.endswith("one cluster") for line in table.splitlines())
    record = grid.http.get("/api/v1/advisor/record", params={"application": plan.name("prime")}).json()["record"]
    assert len(record) == plan.rounds + 1, "what the user has fixed is not an advice"
    (advice,) = [line for line in record if line["job"] == prime]
    assert advice["clusters"] == 2
    assert {1, 2} <= {len(option["clusters"]) for option in advice["options"]}
    assert advice["predicted"] > 0
    assert advice["error"] == pytest.approx(advice["predicted"] / advice["actual"] - 1)
    table_of_record = grid.run_koala("advisor", "record", "--application", plan.name("prime"), "--limit", "1").stdout
    assert f"\n{prime} " in table_of_record
