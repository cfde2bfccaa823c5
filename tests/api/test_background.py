"""REST routes of background load."""

from typing import Any

import httpx2
import pytest
import pytest_asyncio

from koalapy.api.clusters import BackgroundStarted, background_router
from koalapy.model.errors import ProblemCode, SiteRejected, SiteUnavailable
from koalapy.model.reports import ClusterReport
from tests.identities import administrators
from tests.serving import CSRF_HEADER, TOKEN, URL, Open, app_of, bare_application

Json = dict[str, Any]
PATH = "/api/v1/clusters/north/background"
ORDER = {"nodes": 1, "seconds": 5}


class AgentStub:
    """Records requests and starts every background job, or raises its fault."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Json]] = []
        self.fault: Exception | None = None

    async def ask_agent(self, cluster: str, kind: str, payload: dict[str, object], timeout: float = 30.0) -> Json:
        self.requests.append((cluster, kind, payload))
        if self.fault is not None:
            raise self.fault
        return {"stopped": 2} if kind == "background-stop" else {"name": "local-1", "lrm_job": "7"}


@pytest.fixture
def agent() -> AgentStub:
    return AgentStub()


@pytest_asyncio.fixture
async def api(open_api: Open, agent: AgentStub) -> httpx2.AsyncClient:
    """Return a client of a daemon that allows background load."""
    client: httpx2.AsyncClient = await open_api()
    app = app_of(client)
    app.include_router(background_router(app.state.jobs, agent, True))
    return client


async def test_background_load_is_started_and_stopped_by_agent(api: httpx2.AsyncClient, agent: AgentStub) -> None:
    started = await api.post(PATH, json={"nodes": 3, "seconds": "1m"})
    assert (started.status_code, started.json()) == (201, {"name": "local-1", "lrm_job": "7"})
    stopped = await api.delete(PATH)
    assert (stopped.status_code, stopped.json()) == (200, {"stopped": 2})
    assert agent.requests == [("north", "background", {"nodes": 3, "seconds": 60.0}), ("north", "background-stop", {})]
    BackgroundStarted.model_validate(started.json())


async def test_background_load_disabled_by_setting_returns_403(agent: AgentStub) -> None:
    app = bare_application(administrators(TOKEN), [background_router(None, agent, False)])  # type: ignore[arg-type]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL, headers=headers) as api:
        for answer in (await api.post(PATH, json=ORDER), await api.delete(PATH, headers=CSRF_HEADER)):
            problem = answer.json()
            assert (answer.status_code, problem["field"], problem["code"]) == (
                403,
                "background_load",
                ProblemCode.BACKGROUND_LOAD_DISABLED,
            )
            assert "background_load: true" in problem["hint"]
            assert answer.headers["content-type"] == "application/problem+json"
    assert agent.requests == []


async def test_start_background_with_invalid_field_returns_422(api: httpx2.AsyncClient, agent: AgentStub) -> None:
    wrong = {"nodes": (0, 5, True, 1.5, 2**40), "seconds": (0, -1, 601, "soon"), "second": (1,)}
    for field, values in wrong.items():
        for value in values:
            answer = await api.post(PATH, json=ORDER | {field: value})
            assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
            assert answer.json()["hint"]
    assert agent.requests == []


async def test_background_request_with_invalid_form_is_rejected(api: httpx2.AsyncClient) -> None:
    assert (await api.post(PATH, json={"nodes": 1})).json()["field"] == "seconds"
    assert (await api.post(PATH, content=b"{", headers={"content-type": "application/json"})).status_code == 400
    unknown = await api.post(PATH.replace("north", "nroth"), json=ORDER)
    assert (unknown.status_code, "north" in unknown.json()["hint"]) == (404, True)
    assert (await api.delete(PATH, params={"all": "yes"})).status_code == 422


@pytest.mark.parametrize(("fault", "status"), [(SiteUnavailable("no answer"), 503), (SiteRejected("not here"), 502)])
async def test_background_error_of_cluster_is_returned(
    api: httpx2.AsyncClient, agent: AgentStub, fault: Exception, status: int
) -> None:
    agent.fault = fault
    answer = await api.post(PATH, json=ORDER)
    assert (answer.status_code, answer.json()["detail"]) == (status, str(fault))


async def test_start_background_on_cluster_of_unknown_size_asks_agent(
    api: httpx2.AsyncClient, agent: AgentStub
) -> None:
    app_of(api).state.engine.queries.grid["north"].nodes.last_report = ClusterReport(0, 0)
    agent.fault = SiteUnavailable("north is out of reach")
    answer = await api.post(PATH, json=ORDER)
    assert (answer.status_code, answer.json()["detail"]) == (503, "north is out of reach")
    assert (await api.post(PATH, json=ORDER | {"nodes": 0})).json()["hint"] == "give 1 or more"
