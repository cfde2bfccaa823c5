"""REST routes of replicas, bundles and results, and their error messages."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from koalapy.api.job_views import JobSubmission
from tests.daemon.archives import BAD_ARCHIVES, GOOD, archive_of, yield_pieces
from tests.daemon.sites import Sites, sha256_hex
from tests.serving import BUNDLE_LIMIT, Open

Json = dict[str, Any]
ARCHIVE = archive_of(GOOD)
NORTH = {"Authorization": "Bearer north's"}
SOUTH = {"Authorization": "Bearer south's"}


async def add_replica(api: httpx2.AsyncClient, name: str, cluster: str, path: str) -> httpx2.Response:
    return await api.post("/api/v1/replicas", json={"name": name, "cluster": cluster, "path": path})


@pytest.fixture
def sites() -> Sites:
    mesh = {(cluster, "/m"): b"mesh" for cluster in ("north", "south")}
    return Sites(mesh | {("north", "/f"): {"a": b"1", "b": b"22"}})


# Replicas


async def test_add_replica_returns_its_entry(open_api: Open, sites: Sites) -> None:
    api = await open_api(sites=sites)
    answer = await add_replica(api, "climate/m", "north", "/m")
    replica = answer.json()
    assert answer.status_code == 201
    assert {name: replica[name] for name in ("name", "cluster", "path", "size", "checksum", "parts", "state")} == {
        "name": "climate/m",
        "cluster": "north",
        "path": "/m",
        "size": 4,
        "checksum": sha256_hex(b"mesh"),
        "parts": None,
        "state": "good",
    }
    assert (await add_replica(api, "f", "north", "/f")).json()["parts"] == 2
    page = (await api.get("/api/v1/replicas", params={"name": "climate/m"})).json()
    assert page == {"replicas": [replica], "next": None}


NAMES = [
    "climate/2026/m",
    "-rf",
    "a b",
    "ünïcode/ä",
    "a/../b",
    "%2e%2e",
    "a?b=c",
    "a:as=b",
    "a:partitioned",
    "..a",
    "'; drop table replicas; --",
]


@pytest.mark.parametrize("name", NAMES)
async def test_replica_with_unusual_name_is_usable(open_api: Open, sites: Sites, name: str) -> None:
    api = await open_api(sites=sites)
    assert (await add_replica(api, name, "north", "/m")).status_code == 201
    assert [r["name"] for r in (await api.get("/api/v1/replicas", params={"name": name})).json()["replicas"]] == [name]
    verified = await api.post("/api/v1/replicas/verify", json={"name": name, "cluster": "north"})
    assert [(r["state"], r["problem"]) for r in verified.json()["replicas"]] == [("good", "")]
    deleted = await api.delete("/api/v1/replicas", params={"name": name})
    assert [r["name"] for r in deleted.json()["replicas"]] == [name]
    assert (await api.get("/api/v1/replicas")).json() == {"replicas": [], "next": None}


async def test_list_replicas_returns_pages(open_api: Open, sites: Sites) -> None:
    api = await open_api(sites=sites)
    expected = [(name, cluster) for name in sorted([*NAMES, "m"]) for cluster in ("north", "south")]
    for name, cluster in reversed(expected):
        await add_replica(api, name, cluster, "/m")
    for limit in (1, 2, 3, len(expected), 1000):
        replicas, path = [], f"/api/v1/replicas?limit={limit}"
        while path:
            page = (await api.get(path)).json()
            assert len(page["replicas"]) == limit or page["next"] is None
            replicas += [(r["name"], r["cluster"]) for r in page["replicas"]]
            path = page["next"]
        assert replicas == expected
    first = (await api.get("/api/v1/replicas?name=m&limit=1")).json()
    assert [r["cluster"] for r in first["replicas"]] == ["north"]
    second = (await api.get(first["next"])).json()
    assert ([r["cluster"] for r in second["replicas"]], second["next"]) == (["south"], None)


async def test_replica_pages_tolerate_changes_between_requests(open_api: Open, sites: Sites) -> None:
    api = await open_api(sites=sites)
    for name in "bdf":
        await add_replica(api, name, "north", "/m")
    first = (await api.get("/api/v1/replicas?limit=2")).json()
    await api.delete("/api/v1/replicas?name=d")
    for name in "aceg":
        await add_replica(api, name, "north", "/m")
    second = (await api.get(first["next"])).json()
    assert [r["name"] for r in second["replicas"]] == ["e", "f"]
    assert [r["name"] for r in (await api.get(second["next"])).json()["replicas"]] == ["g"]


async def test_add_replica_on_unreachable_cluster_returns_503(open_api: Open, sites: Sites) -> None:
    sites.away = {"north"}
    answer = await add_replica(await open_api(sites=sites), "m", "north", "/m")
    assert (answer.status_code, answer.json()["detail"]) == (503, "north is out of reach")


# Submissions

PAIR = {"type": "nonfixed", "components": [{"size": 1}, {"size": 1}]}
SIX = {"type": "flexible", "total_size": 6}


@pytest.mark.parametrize("request_", [PAIR, SIX])
async def test_job_with_files_can_be_resubmitted_from_view(open_api: Open, sites: Sites, request_: Json) -> None:
    api = await open_api(sites=sites)
    await add_replica(api, "climate/m", "north", "/m")
    await add_replica(api, "f", "north", "/f")
    bundle = (await api.post("/api/v1/bundles", content=ARCHIVE)).json()["id"]
    inputs: list[Json] = [{"file": "climate/m", "as": "mesh"}]
    inputs += [{"file": "f", "distribution": "partitioned"}] if request_ is PAIR else []
    files = {"inputs": inputs, "bundle": bundle, "collect": ["out/*"], "communication": 0.25}
    files |= {"per_node_bandwidth": 25e6}
    body = {"request": request_, "command": ["python", "-m", "wave"], **files}
    body |= {"walltime": "1h30m", "environment": {"A": "b"}}
    first = (await api.post("/api/v1/jobs", json=body)).json()
    assert first["walltime"] == 5400
    assert first["application"] == "wave"
    if request_ is PAIR:
        assert [c["inputs"][1] for c in first["request"]["components"]] == [
            {"file": "f", "part": "a", "as": "f"},
            {"file": "f", "part": "b", "as": "f"},
        ]
    submission = {name: first[name] for name in JobSubmission.model_fields}
    second = await api.post("/api/v1/jobs", json=submission)
    assert second.status_code == 201, second.text
    assert {name: second.json()[name] for name in submission} == submission


async def test_idempotency_key_survives_removed_replica(open_api: Open, sites: Sites) -> None:
    api = await open_api(sites=sites)
    await add_replica(api, "m", "north", "/m")
    body = {"request": SIX, "command": ["true"], "inputs": [{"file": "m"}]}
    key = {"Idempotency-Key": "k"}
    assert (await api.post("/api/v1/jobs", json=body, headers=key)).status_code == 201
    await api.delete("/api/v1/replicas", params={"name": "m"})
    repeated = await api.post("/api/v1/jobs", json=body, headers=key)
    assert (repeated.status_code, repeated.json()["id"]) == (200, 1)


# Bundles


async def test_bundle_is_uploaded_once(open_api: Open) -> None:
    api = await open_api()
    path = f"/api/v1/bundles/{sha256_hex(ARCHIVE)}"
    missing = await api.get(path)
    assert (missing.status_code, missing.json()["field"]) == (404, "bundle")
    expected = {"id": sha256_hex(ARCHIVE), "size": len(ARCHIVE), "files": 3}
    for status in (201, 200):
        answer = await api.post("/api/v1/bundles", content=yield_pieces(ARCHIVE))
        assert (answer.status_code, answer.json()) == (status, expected)
    assert (await api.get(path)).json() == expected
    assert (await api.head(path)).status_code == 200


@pytest.mark.evidence("U5")
async def test_upload_invalid_bundle_returns_422_and_stores_nothing(open_api: Open, tmp_path: Path) -> None:
    api = await open_api()
    for problem, body in BAD_ARCHIVES.items():
        answer = await api.post("/api/v1/bundles", content=body)
        assert (answer.status_code, answer.json()["field"]) == (422, "body"), problem
        assert answer.json()["hint"]
    assert list((tmp_path / "bundles").iterdir()) == []


async def test_bundle_with_name_not_utf8_is_rejected(open_api: Open) -> None:
    api = await open_api()
    for body in (archive_of(GOOD | {"data/caf\udce9": b""}), archive_of({"d\udcff": None} | GOOD)):
        answer = await api.post("/api/v1/bundles", content=body)
        assert (answer.status_code, answer.json()["field"]) == (422, "body")
        assert "is no UTF-8" in answer.json()["detail"]
        assert "rename" in answer.json()["hint"]


async def test_bundle_of_undeclared_size_is_limited(open_api: Open) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65536
            yield bytes(65536)

    answer = await (await open_api()).post("/api/v1/bundles", content=endless())
    assert (answer.status_code, answer.json()["field"]) == (413, "body")
    assert sent < 3 * BUNDLE_LIMIT


async def test_upload_bundle_beyond_quota_returns_507(open_api: Open) -> None:
    api = await open_api()
    large = [archive_of({name: bytes(BUNDLE_LIMIT - 20_000)}) for name in "abc"]
    answers = [await api.post("/api/v1/bundles", content=yield_pieces(data, 100_000)) for data in large]
    assert [answer.status_code for answer in answers] == [201, 201, 507]
    problem = answers[-1].json()
    assert (problem["title"], problem["field"]) == ("Insufficient Storage", "body")
    assert "bundles_quota is 4.19 MB" in problem["detail"]
    assert "operator to raise bundles_quota" in problem["hint"]
    assert (await api.post("/api/v1/bundles", content=large[0])).status_code == 507, "an upload reserves space again"
    assert (await api.get(f"/api/v1/bundles/{sha256_hex(large[0])}")).status_code == 200


async def test_stalled_bundle_upload_returns_408(open_api: Open) -> None:
    async def stalls() -> AsyncIterator[bytes]:
        yield ARCHIVE[:1000]
        await asyncio.Event().wait()

    answer = await (await open_api()).post("/api/v1/bundles", content=stalls())
    assert (answer.status_code, answer.json()["field"], answer.json()["hint"]) == (408, "body", "send it again")


# Routes of agents


async def test_agent_resumes_bundle_download(open_api: Open) -> None:
    api = await open_api(tokens=["secret"])
    await api.post("/api/v1/bundles", content=ARCHIVE, headers={"Authorization": "Bearer secret"})
    path = f"/api/v1/agents/north/bundles/{sha256_hex(ARCHIVE)}"
    assert (await api.get(path, headers=NORTH)).content == ARCHIVE
    remaining = await api.get(path, headers=NORTH | {"Range": "bytes=1000-"})
    assert (remaining.status_code, remaining.content) == (206, ARCHIVE[1000:])
    past_end = await api.get(path, headers=NORTH | {"Range": f"bytes={len(ARCHIVE)}-"})
    assert past_end.status_code == 416
    other_cluster = await api.get(path.replace("north", "south"), headers=SOUTH)
    assert other_cluster.status_code == 404, "no job of that cluster has this bundle"
    missing = await api.get("/api/v1/agents/north/bundles/..%2F..%2Fkoala.db", headers=NORTH)
    assert missing.status_code == 404


@pytest.mark.evidence("G3", "C5")
@pytest.mark.parametrize(
    ("cluster", "headers", "status"),
    [("north", {}, 401), ("north", SOUTH, 401), ("west", NORTH, 401), ("nowhere", NORTH, 404)],
)
async def test_agent_routes_require_token_of_cluster(open_api: Open, cluster: str, headers: Json, status: int) -> None:
    api = await open_api()
    await api.post("/api/v1/bundles", content=ARCHIVE)
    path = f"/api/v1/agents/{cluster}"
    assert (await api.get(f"{path}/bundles/{sha256_hex(ARCHIVE)}", headers=headers)).status_code == status
    assert (await api.put(f"{path}/results/1.1.0", headers=headers, content=ARCHIVE)).status_code == status


async def test_results_of_unknown_component_are_rejected(open_api: Open, body: Json) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body | {"collect": ["*"]})
    for token in ("1.1.0", "9.1.0", "x", "..%2F1", f"{10**20}.1.0", f"1.{10**20}.0"):
        answer = await api.put(f"/api/v1/agents/north/results/{token}", headers=NORTH, content=ARCHIVE)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    waiting = await api.get("/api/v1/jobs/1/results")
    assert waiting.status_code == 404
    assert waiting.json()["detail"] == "job 1 is queued: its files come when it ends"
