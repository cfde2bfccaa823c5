"""REST routes of the advisor."""

from math import log

import httpx2
import pytest

from koalapy.api.forecasts import AdvisorRecord, AdvisorView, advisor_router
from koalapy.daemon.forecast.advisor import Verdict, verdict_on
from koalapy.model.advice import AdvisedPlacement, Option, Run, Size
from koalapy.policies.knowledge import LogNormal, Slowdowns
from tests.cli.memory_advisor import MemoryAdvisor
from tests.identities import administrators
from tests.serving import TOKEN, URL, Open, bare_application

WAVE = {
    "application": "wave",
    "clusters": 2,
    "slowdown": pytest.approx(1.15),
    "slowdown_between": [1.0, pytest.approx(2.4, rel=0.1)],
    "runs_on_several": 0,
    "killed_on_several": 0,
    "verdict": "not known yet",
    "runs": [
        {
            "nodes": 4,
            "processes_per_node": None,
            "clusters": 1,
            "where": [],
            "runs": 1,
            "killed": 0,
            "seconds": pytest.approx(10.0),
            "seconds_between": [pytest.approx(6.6, rel=0.1), pytest.approx(15, rel=0.1)],
            "slowdown": None,
            "slowdown_between": None,
        }
    ],
}


async def test_advisor_lists_applications_with_verdicts(open_api: Open) -> None:
    assert (await (await open_api()).get("/api/v1/advisor")).json() == {"applications": [WAVE]}


async def test_advisor_record_shows_options_and_prediction_error() -> None:
    memory = MemoryAdvisor()
    options = (Option(("north", "south"), 1.5, 0.0, 2.0, 15.0), Option(("north",), 1.0, None, 0.0, 10.0))
    memory.advised = [
        AdvisedPlacement(9, 1, 1000.0, "wave", 2, options, "why", 15.0, None),
        AdvisedPlacement(8, 1, 1000.0, "wave", 2, options, "why"),
        AdvisedPlacement(7, 2, 1000.0, "wave", 2, options, "why", 15.0, 20.0),
    ]
    app = bare_application(administrators(TOKEN), [advisor_router(memory.advisor)])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL, headers=headers) as client:
        answer = await client.get("/api/v1/advisor/record", params={"application": "wave", "limit": 3})
    placements = AdvisorRecord.model_validate_json(answer.content, strict=True).record
    assert [(placement.job, placement.generation, placement.error) for placement in placements] == [
        (9, 1, None),
        (8, 1, None),
        (7, 2, -0.25),
    ]
    assert [option.response for option in placements[0].options] == [17.0, None]
    assert placements[0].at == "1970-01-01T00:16:40.000Z"


@pytest.mark.parametrize(
    ("slowdown", "deviation", "verdict"),
    [
        (1.0, 0.05, Verdict.CO_ALLOCATED),
        (1.24, 0.05, Verdict.CO_ALLOCATED),
        (1.3, 0.05, Verdict.BY_THE_WAIT),
        (1.4, 0.05, Verdict.NOT_KNOWN),
        (1.24, 0.5, Verdict.NOT_KNOWN),
        (2.0, 0.5, Verdict.NOT_KNOWN),
        (2.0, 0.05, Verdict.ONE_CLUSTER),
    ],
)
def test_verdict_follows_slowdown_and_its_uncertainty(slowdown: float, deviation: float, verdict: Verdict) -> None:
    assert verdict_on(Slowdowns(LogNormal(log(slowdown), deviation)), ()) is verdict


async def test_advisor_counts_killed_runs() -> None:
    memory = MemoryAdvisor()
    for _ in range(4):
        memory.experience.add(Run("wave", Size(4), ("north",), 10.0))
        memory.experience.add(Run("wave", Size(4), ("north", "south"), 20.0, killed=True))
    app = bare_application(administrators(TOKEN), [advisor_router(memory.advisor)])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL, headers=headers) as client:
        answer = await client.get("/api/v1/advisor")
    (wave,) = AdvisorView.model_validate_json(answer.content, strict=True).applications
    assert (wave.runs_on_several, wave.killed_on_several, wave.verdict) == (4, 4, "one cluster")
    assert [(runs.where, runs.runs, runs.killed) for runs in wave.runs] == [([], 4, 0), (["north", "south"], 4, 4)]
    assert wave.slowdown_between[0] < wave.slowdown < wave.slowdown_between[1]
