"""``koala explain`` and ``koala submit --dry-run``: their pages, and the offered command."""

import json
import shlex
from dataclasses import replace

import pytest

from koalapy.daemon.forecast.forecasts import IfSubmitted
from koalapy.model.cluster import ClusterState
from koalapy.model.command_line import command_for
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.placement import Change, ClusterFinding, Explanation, PastReason, PlacedComponent, Placement
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest
from koalapy.simulation.twin import Expected, Interval
from tests.cli.conftest import Koala, Server

BOTH = Placement((PlacedComponent(4, "north"), PlacedComponent(2, "south")), "north had the most idle nodes")
CHANGED = JobSpec(FlexibleRequest(6, max_components=2), ("program", "a b"), name="wide", priority=Priority.HIGH)
PRESENT = Job(1, replace(CHANGED, request=FlexibleRequest(6, max_components=1)), 0.0)
WAITS = Explanation(
    7,
    JobState.QUEUED,
    "needs 6 nodes on one cluster; 4 are idle on the largest",
    clusters=(
        ClusterFinding("north", ClusterState.USABLE, 8, 4, 4, 0, 0, reason="4 of 8 idle (our jobs have 4)", missing=2),
        ClusterFinding("south", ClusterState.DRAINED, 4, 4, 0, 0, 0, reason="drained since 14:02 by ops"),
    ),
    notes=("queued again at 14:02:10: preempted",),
    suffices=("2 more idle nodes in north",),
    position=3,
    ahead=2,
    tries=5,
    reasons=(PastReason(50520.0, "placed", "north had the most"), PastReason(50530.0, "requeued", "preempted")),
    smallest_change=Change("request.max_components", 2, "allow 2 components", CHANGED, BOTH, PRESENT),
)


def test_explain_prints_page_of_waiting_job(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "6", "--", "program")
    server.service.explanation = WAITS
    result = koala("explain", "1")
    assert (result.code, result.err) == (0, "")
    assert result.out == (
        "job 1 waits: needs 6 nodes on one cluster; 4 are idle on the largest\n"
        "\n"
        "CLUSTER  STATE    IDLE  LACKS  WHY\n"
        "north    usable   4/8   2      4 of 8 idle (our jobs have 4)\n"
        "south    drained  4/4   -      drained since 14:02 by ops\n"
        "\n"
        "    note  queued again at 14:02:10: preempted\n"
        "position  3, 2 before it in its queue\n"
        "   tries  5\n"
        "suffices  2 more idle nodes in north\n"
        "\n"
        "would start now: allow 2 components (north:4, south:2)\n"
        "  koala change 1 --max-components 2\n"
        "\n"
        "TIME (UTC)           EVENT     WHY\n"
        "1970-01-01 14:02:00  placed    north had the most\n"
        "1970-01-01 14:02:10  requeued  preempted\n"
    )


def test_explain_json_has_reasons_and_smallest_change(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "6", "--", "program")
    server.service.explanation = WAITS
    answer = json.loads(koala("explain", "1", "--json").out)
    assert (answer["job"], answer["state"], answer["position"], answer["tries"]) == (1, "queued", 3, 5)
    assert answer["clusters"][0]["missing"] == 2
    assert answer["reasons"][1] == {"at": "1970-01-01T14:02:10.000Z", "event": "requeued", "reason": "preempted"}
    change = answer["smallest_change"]
    assert (change["field"], change["value"], change["text"]) == ("request.max_components", 2, "allow 2 components")
    assert change["change"] == {"request": {"max_components": 2}}
    assert change["submission"] == {
        "request": {"type": "flexible", "total_size": 6, "max_components": 2},
        "command": ["program", "a b"],
        "name": "wide",
        "priority": "high",
    }


def test_dry_run_shows_placement_and_submits_nothing(koala: Koala, server: Server) -> None:
    result = koala("submit", "--flexible", "4", "--dry-run", "--", "program")
    assert result.code == 0
    assert result.out == "would be placed at once on north (4 nodes)\n\nstarts  at once\n"
    assert server.service.records == {}
    assert server.service.explained_spec is not None
    assert server.service.explained_spec.request == FlexibleRequest(4)
    answer = json.loads(koala("submit", "--flexible", "4", "--dry-run", "--json", "program").out)
    assert (answer["job"], answer["expected"]["at_once"]) == (None, True)


SPAN = Interval(60.0, 90.0, 300.0)


@pytest.mark.parametrize(
    ("forecast", "says"),
    [
        (
            IfSubmitted(False, Expected(9, JobState.QUEUED, SPAN, SPAN, SPAN, 0.0, "4 runs of wave")),
            "in 1:30 (1:00 to 5:00) (run time from 4 runs of wave)",
        ),
        (
            IfSubmitted(False, Expected(9, JobState.QUEUED, None, None, None, 1.0, "its walltime"), "it never started"),
            "not known: it never started",
        ),
        (IfSubmitted(False, reason="it takes longer than 10 s"), "not known: it takes longer than 10 s"),
    ],
)
def test_dry_run_shows_expected_start(koala: Koala, server: Server, forecast: IfSubmitted, says: str) -> None:
    server.service.forecast = forecast
    server.service.explanation = replace(WAITS, job=None, reasons=(), notes=())
    result = koala("submit", "--flexible", "6", "--dry-run", "--", "program")
    assert f"  starts  {says}\n" in result.out, result.err


def test_dry_run_of_waiting_job_offers_command(koala: Koala, server: Server) -> None:
    offer = Change("request.max_components", 2, "allow 2 components", CHANGED, BOTH)
    server.service.explanation = replace(WAITS, job=None, reasons=(), notes=(), smallest_change=offer)
    result = koala("submit", "--flexible", "6", "--dry-run", "--", "program")
    assert result.code == 0
    assert result.out.startswith("would wait: needs 6 nodes on one cluster;")
    assert "\n  koala submit --flexible 6 --max-components 2 " in result.out
    assert "tries" not in result.out


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(FlexibleRequest(6, 2, 3, ((4, 2), (3, 3))), ("program", "--x", "a 'b'"), walltime=90.0),
        JobSpec(NonFixedRequest((ComponentRequest(2), ComponentRequest(4))), ("p",), environment=(("A", "b c"),)),
        JobSpec(
            FixedRequest((ComponentRequest(2, "north"), ComponentRequest(4, "south"))),
            ("p",),
            coallocation=2,
            speed_ratio_min=0.5,
            retry_on_exit=(3, 4),
            max_restarts=0,
            launcher=Launcher.PROCESSES,
        ),
        JobSpec(FlexibleRequest(2), ("p",), policy="communication-aware", policy_options=(("metric", "bandwidth"),)),
    ],
)
def test_offered_command_submits_same_job(koala: Koala, server: Server, spec: JobSpec) -> None:
    spec = replace(spec, owner="ada", workdir="/work")
    placement = Placement((PlacedComponent(2, "north"),))
    change = Change("", None, "submit it again", spec, placement)
    server.service.explanation = replace(WAITS, job=None, smallest_change=change)
    page = koala("submit", "--flexible", "1", "--dry-run", "p").out
    command = next(line for line in page.splitlines() if line.startswith("  koala submit"))
    arguments = shlex.split(command)[1:]
    assert koala(arguments[0], "--dry-run", *arguments[1:]).code == 0
    assert server.service.explained_spec == spec


@pytest.mark.parametrize(
    "body",
    [
        {"request": {"type": "nonfixed", "components": [{"size": 1, "command": ["a"]}]}, "command": ["b"]},
        {"request": {"type": "flexible", "total_size": 1}, "command": ["sh", "-c", "a\nb"]},
    ],
)
def test_command_for_job_that_needs_file_is_none(body: dict[str, object]) -> None:
    assert command_for(body, "/") is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(1e9, "1000000000s"), (1234567.5, "1234567.5s"), (90.0, "90s"), (0.5, "0.5s")]
)
def test_command_for_job_has_exact_walltime(seconds: float, text: str) -> None:
    body = {"request": {"type": "flexible", "total_size": 1}, "command": ["true"], "walltime": seconds}
    assert f"--walltime {text} " in str(command_for(body, "/"))
