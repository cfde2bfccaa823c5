"""What the API tells of the advisor."""

import httpx2
import pytest

from koalapy.api.advisor import advisor_router
from koalapy.api.advisor_schemas import AdvisorRecord
from koalapy.api.app import create_app
from koalapy.model.advice import Advised, Option
from koalapy.service.advisor import Verdict, verdict_on
from tests.api.conftest import TOKEN, URL, Open
from tests.cli.memory import MemoryService
from tests.cli.memory_advisor import MemoryAdvisor

WAVE = {
    "application": "wave", "clusters": 2, "slowdown": pytest.approx(1.15), "runs_on_several": 0,
    "verdict": "co-allocated",
    "runs": [{"nodes": 4, "processes_per_node": None, "clusters": 1, "runs": 1, "seconds": 10.0, "slowdown": None}],
}  # fmt: skip


async def test_every_application_is_told_with_what_is_decided_for_it(open_api: Open) -> None:
    assert (await (await open_api()).get("/api/v1/advisor")).json() == {"applications": [WAVE]}


@pytest.mark.parametrize(
    ("path", "field"),
    [("/advisor?application=x", "application"), ("/advisor/record?limit=0", "limit"),
     ("/advisor/record?limit=x", "limit"), ("/advisor/record?aplication=x", "aplication")],
)  # fmt: skip
async def test_a_strange_question_is_refused_by_its_field(open_api: Open, path: str, field: str) -> None:
    answer = await (await open_api()).get(f"/api/v1{path}")
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    assert answer.json()["hint"]


async def test_the_record_tells_what_was_compared_and_how_far_off_the_prediction_was() -> None:
    memory = MemoryAdvisor()
    options = (Option(("north", "south"), 1.5, 0.0, 2.0, 15.0), Option(("north",), 1.0, None, 0.0, 10.0))
    memory.advised = [
        Advised(9, 1, 1000.0, "wave", 2, options, "why", 15.0, None), Advised(8, 1, 1000.0, "wave", 2, options, "why"),
        Advised(7, 2, 1000.0, "wave", 2, options, "why", 15.0, 20.0),
    ]  # fmt: skip
    app = create_app(MemoryService(), [TOKEN], [advisor_router(memory.advisor)])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL, headers=headers) as client:
        answer = await client.get("/api/v1/advisor/record", params={"application": "wave", "limit": 3})
    found = AdvisorRecord.model_validate_json(answer.content, strict=True).record
    assert [(given.job, given.generation, given.error) for given in found] == [
        (9, 1, None),
        (8, 1, None),
        (7, 2, -0.25),
    ]
    assert [option.response for option in found[0].options] == [17.0, None]
    assert found[0].at == "1970-01-01T00:16:40.000Z"


def test_the_verdict_follows_the_slowdown() -> None:
    assert verdict_on(1.25) is Verdict.CO_ALLOCATED
    assert verdict_on(1.3) is Verdict.BY_THE_WAIT
    assert verdict_on(1.4) is Verdict.ONE_CLUSTER
