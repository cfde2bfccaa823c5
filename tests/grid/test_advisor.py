"""The advisor learns which of two applications bears to be co-allocated: on embedded clusters, where wave is a program
that tells by itself over how many clusters it runs, and on the testbed, where a link is slow and the programs are real.
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
from tests.grid.slow_links import narrowed
from tests.grid.testbed import Testbed

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

ROUNDS = 10
"""In each of them both applications run twice: in one cluster, and over two."""
ROUNDS_ON_TESTBED = int(os.environ.get("KOALA_TEST_ADVISOR_ROUNDS", "4"))
"""Real programs take their time."""
SLOW = "160kbit"
"""Of the testbed's slow link: wave exchanges a few bytes at each of its steps, prime a few in all."""

WAVE = ["--points", "300", "--steps", "4000", "--tolerance", "1"]
"""Little to work out between two messages."""


def sleeps(alone: float, together: float) -> list[str]:
    """A program that runs for another time when its own component is not the whole job."""
    return ["sh", "-c", f"test $KOALA_COMPONENT_NODES = $KOALA_NODES && exec sleep {alone}; exec sleep {together}"]


@dataclass
class Play:
    """Two clusters with a slow link between them; jobs of ``size`` nodes fit in one, or are split as ``parts``."""

    pair: tuple[str, str]
    size: int
    parts: tuple[int, int]
    programs: dict[str, list[str]]
    launcher: str
    rounds: int = ROUNDS
    others: dict[str, int] = field(default_factory=dict)
    """Clusters that are not to take part when there is a choice, and their nodes."""
    ident: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def name(self, program: str) -> str:
        """No other run of this test is to be learned from."""
        return f"{program}-{self.ident}"

    def submit(self, grid: Grid, program: str, request: dict[str, Any], **more: Any) -> int:
        application = self.name(program)
        return grid.submit(request, *self.programs[program], launcher=self.launcher, application=application, **more)

    def advised(self, grid: Grid, program: str) -> int:
        return self.submit(grid, program, {"type": "flexible", "total_size": self.size}, policy="auto")

    @property
    def over_both(self) -> dict[str, Any]:
        parts = zip(self.parts, self.pair, strict=True)
        return {"type": "fixed", "components": [{"size": size, "cluster": name} for size, name in parts]}


# Wave waits no more once the blockers have run for longer than it would over both: that is to take long.
EMBEDDED = Play(("north", "south"), 4, (2, 2), {"wave": sleeps(0.3, 4.0), "prime": sleeps(0.3, 0.3)}, "processes")
TESTBED = Play(
    ("north", "east"),
    3,
    (2, 1),
    {
        "wave": ["python", "-m", "koalapy.apps.wave", *WAVE, "--no-where"],
        "prime": ["python", "-m", "koalapy.apps.prime", "--limit", str(10**8), "--no-where"],
    },
    "openmpi",
    ROUNDS_ON_TESTBED,
    {"south": 2},
)


@pytest.fixture(params=GRID_KINDS)
def play(request: pytest.FixtureRequest) -> Iterator[tuple[Grid, Play]]:
    if request.param == "embedded":
        grid: EmbeddedGrid = request.getfixturevalue("make_grid")()
        yield grid, EMBEDDED
        return
    testbed: Testbed = request.getfixturevalue("testbed")
    with ExitStack() as stack:
        stack.callback(testbed.wait_until_idle)
        stack.callback(testbed.cancel_all_jobs)
        stack.enter_context(narrowed(testbed, *TESTBED.pair, SLOW))
        yield testbed, TESTBED


def clusters_of(grid: Grid, ident: int, deadline: float = 120.0) -> set[str]:
    job = grid.wait_for_end(ident, deadline)
    assert job["state"] == "succeeded", (job["reason"], grid.read_output(ident)[-2000:])
    return {component["cluster"] for component in job["components"]}


@pytest.mark.timeout(900)
def test_after_twenty_runs_of_each_prime_is_co_allocated_and_wave_kept_in_one_cluster(play: tuple[Grid, Play]) -> None:
    grid, plan = play
    for _ in range(plan.rounds):
        for ident in [plan.advised(grid, program) for program in plan.programs]:
            assert len(clusters_of(grid, ident)) == 1, "one cluster has room"
        for program in plan.programs:
            assert clusters_of(grid, plan.submit(grid, program, plan.over_both)) == set(plan.pair)
    gate = grid.make_gate()
    for name, size in {**dict.fromkeys(plan.pair, 1), **plan.others}.items():
        blocker = {"type": "fixed", "components": [{"size": size, "cluster": name}]}
        grid.wait_for_state(grid.submit(blocker, *gate.hold), "running")
    try:
        wave, prime = plan.advised(grid, "wave"), plan.advised(grid, "prime")
        assert clusters_of(grid, prime) == set(plan.pair)
        waiting = grid.get_job(wave)
        assert waiting["state"] == "queued"
        assert f"waits for {plan.size} nodes in one cluster" in waiting["reason"]
        assert f", from {plan.rounds} runs) on 2 clusters now is" in waiting["reason"]
        assert "1 more idle node in" in grid.run_koala("explain", str(wave)).stdout
    finally:
        gate.open()
    assert len(clusters_of(grid, wave)) == 1
    check_what_is_told(grid, plan, prime)
    if isinstance(grid, EmbeddedGrid):
        before = verdicts(grid, plan)
        grid.kill_daemon()
        grid.start()
        assert verdicts(grid, plan) == before, "what was learned outlives the daemon"


def verdicts(grid: Grid, plan: Play) -> dict[str, tuple[str, int]]:
    """What is decided for each of the applications, and after how many runs on two clusters."""
    known = {told["application"]: told for told in grid.http.get("/api/v1/advisor").json()["applications"]}
    return {
        program: (told["verdict"], told["runs_on_several"])
        for program in plan.programs
        if (told := known[plan.name(program)])
    }


def check_what_is_told(grid: Grid, plan: Play, prime: int) -> None:
    assert verdicts(grid, plan) == {"wave": ("one cluster", plan.rounds), "prime": ("co-allocated", plan.rounds + 1)}
    table = grid.run_koala("advisor").stdout
    assert any(plan.name("wave") in line and line.endswith("one cluster") for line in table.splitlines())
    record = grid.http.get("/api/v1/advisor/record", params={"application": plan.name("prime")}).json()["record"]
    assert len(record) == plan.rounds + 1, "what the user has fixed is no advice"
    (given,) = [line for line in record if line["job"] == prime]
    assert given["clusters"] == 2
    assert {1, 2} <= {len(option["clusters"]) for option in given["options"]}
    assert given["predicted"] > 0
    assert given["error"] == pytest.approx(given["predicted"] / given["actual"] - 1)
    shown = grid.run_koala("advisor", "record", "--application", plan.name("prime"), "--limit", "1").stdout
    assert f"\n{prime} " in shown
