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


async def test_planned_drain_is_listed_and_withdrawn(open_api: Open) -> None:
    api = await open_api()
    order = {"reason": "new disks; ask ada, ext. 7", "begin": "now+1h", "end": "now+3h"}
    cluster = (await api.post("/api/v1/clusters/north/drain", json=order)).json()
    (planned,) = cluster["planned_drains"]
    assert (cluster["drained"], planned["by"], planned["reason"]) == (None, "ada", order["reason"])
    assert planned["begins_at"] < planned["ends_at"]
    calendar = await api.get("/api/v1/drains.ics")
    assert calendar.headers["content-type"].startswith("text/calendar")
    lines = calendar.text.replace("\r\n ", "").split("\r\n")
    assert "SUMMARY:north is drained by ada: new disks\\; ask ada\\, ext. 7" in lines
    assert f"DTSTART:{planned['begins_at'][:19].replace('-', '').replace(':', '')}Z" in lines
    assert all(len(line.encode()) <= 75 for line in calendar.text.split("\r\n"))
    refused = await api.post("/api/v1/clusters/north/resume")
    assert (refused.status_code, refused.json()["hint"][-9:]) == (409, "--planned")
    resumed = await api.post("/api/v1/clusters/north/resume", json={"planned": True})
    assert (resumed.status_code, resumed.json()["planned_drains"]) == (200, [])


async def test_one_planned_drain_is_withdrawn_by_its_begin(open_api: Open) -> None:
    api, path = await open_api(), "/api/v1/clusters/north"
    for begin in ("now+30h", "now+50h"):
        cluster = (await api.post(f"{path}/drain", json={"reason": "new disks", "begin": begin})).json()
    first, second = (drain["begins_at"] for drain in cluster["planned_drains"])
    unknown = await api.post(f"{path}/resume", json={"begin": "now+40h"})
    assert (unknown.status_code, unknown.json()["field"]) == (409, "begin")
    assert unknown.json()["hint"].startswith(f"its planned drains begin at {first[:16].replace('T', ' ')} UTC, ")
    resumed = await api.post(f"{path}/resume", json={"begin": f"{first[:16]}Z"})
    assert [drain["begins_at"] for drain in resumed.json()["planned_drains"]] == [second]


async def test_exactly_one_of_several_drains_of_a_minute_is_withdrawn(open_api: Open) -> None:
    api, path = await open_api(), "/api/v1/clusters/north"
    for second, reason in ((10, "new disks"), (40, "new switch"), (40, "new roof")):
        order = {"reason": reason, "begin": f"2027-03-01T08:00:{second}Z"}
        cluster = (await api.post(f"{path}/drain", json=order)).json()
    unclear = await api.post(f"{path}/resume", json={"begin": "2027-03-01T08:00Z"})
    assert (unclear.status_code, unclear.json()["field"]) == (409, "ordered")
    assert "by ada: new disks, " in unclear.json()["hint"]
    await api.post(f"{path}/resume", json={"begin": "2027-03-01T08:00:10Z"})
    ordered = cluster["planned_drains"][1]["at"]
    for planned in (False, True):
        alone = await api.post(f"{path}/resume", json={"planned": planned, "ordered": ordered})
        assert (alone.status_code, alone.json()["field"]) == (422, "ordered")
    resumed = await api.post(f"{path}/resume", json={"begin": "2027-03-01T08:00:40Z", "ordered": ordered})
    assert len(resumed.json()["planned_drains"]) == 1


@pytest.mark.parametrize(
    ("order", "field"),
    [
        ({"begin": "now+2h", "end": "now+1h"}, "end"),
        ({"end": "now"}, "end"),
        ({"begin": "now+10000h"}, "begin"),
        ({"begin": "whenever"}, "begin"),
        ({"begin": "2025-01-01T08:00"}, "begin"),
        ({"begin": "now+1h", "reason": " "}, "reason"),
    ],
)
async def test_drain_with_impossible_times_is_rejected(open_api: Open, order: dict[str, str], field: str) -> None:
    api = await open_api()
    answer = await api.post("/api/v1/clusters/north/drain", json={"reason": "disks"} | order)
    assert (answer.status_code, answer.json()["field"], bool(answer.json()["hint"])) == (422, field, True)
    assert (await api.get("/api/v1/clusters/north")).json()["planned_drains"] == []


async def test_planned_drains_of_a_cluster_are_limited(open_api: Open) -> None:
    api = await open_api()
    order = {"reason": "disks", "begin": "now+1h", "end": "now+3h"}
    codes = [(await api.post("/api/v1/clusters/north/drain", json=order)).status_code for _ in range(21)]
    assert codes == [200] * 20 + [409]


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


async def test_preview_of_planned_drain_takes_points_in_time(open_api: Open) -> None:
    api, path = await open_api(), "/api/v1/clusters/north/drain"
    preview = await api.get(path, params={"simulate": "false", "begin": "now+1h", "end": "now+2h"})
    assert (preview.status_code, preview.json()["running"], preview.json()["delayed"]) == (200, [], None)
    assert preview.json()["begins_at"] < preview.json()["ends_at"]
    impossible = {"begin": "2020-01-01", "end": "now-1h"}
    for field in ("begin", "end"):
        for value in ("whenever", impossible[field]):
            refused = await api.get(path, params={"simulate": "false", field: value})
            assert (refused.status_code, refused.json()["field"]) == (422, field)
