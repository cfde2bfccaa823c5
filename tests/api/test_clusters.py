"""Cluster actions of operators, and cluster metrics."""

import pytest

from tests.serving import Open


@pytest.mark.evidence("U2")
async def test_drain_records_operator_and_reason_until_resumed(open_api: Open) -> None:
    api = await open_api()
    assert (await api.get("/api/v1/clusters/north")).json()["drained"] is None
    answer = await api.post("/api/v1/clusters/north/drain", json={"reason": "new switches"})
    drained = answer.json()
    assert (answer.status_code, drained["state"], drained["reason"]) == (200, "drained", "by ada: new switches")
    assert drained["drained"]["by"] == "ada"
    assert drained["drained"]["at"].endswith("Z")
    changed = (await api.post("/api/v1/clusters/north/drain", json={"reason": "new cables"})).json()["drained"]
    assert (changed["by"], changed["reason"]) == ("ada", "new cables")
    again = changed
    assert (await api.get("/api/v1/clusters/north")).json()["drained"] == again
    assert (await api.get("/api/v1/clusters/south")).json()["drained"] is None
    resumed = await api.post("/api/v1/clusters/north/resume")
    assert (resumed.status_code, resumed.json()["drained"]) == (200, None)
    twice = await api.post("/api/v1/clusters/north/resume")
    assert (twice.status_code, twice.json()["detail"]) == (409, "cluster north is not drained")
    assert (twice.json()["field"], bool(twice.json()["hint"])) == ("cluster", True)


async def test_health_ignores_drained_clusters(open_api: Open) -> None:
    api = await open_api()
    await api.post("/api/v1/clusters/north/drain", json={"reason": "test"})
    assert (await api.get("/healthz")).json()["status"] == "degraded", "south is out of reach"
    await api.post("/api/v1/clusters/south/drain", json={"reason": "test"})
    assert (await api.get("/healthz")).json()["status"] == "ok"


async def test_cluster_out_of_reach_is_declared_lost(open_api: Open) -> None:
    api = await open_api()
    answer = await api.post("/api/v1/clusters/south/lost", json={"reason": "burned down"})
    assert (answer.status_code, answer.json()["state"]) == (200, "unreachable")
    unknown = await api.post("/api/v1/clusters/nroth/lost")
    assert (unknown.status_code, unknown.json()["hint"][:14]) == (404, "did you mean n")
