"""Limits of users: their usage, and rejections beyond them."""

from typing import Any

import httpx2
import pytest

from koalapy.model.limits import Charge, FairShareSettings, Limits, LimitSettings, UserLimits
from koalapy.scheduler.fair_share import FairShares
from tests.daemon.archives import GOOD, archive_of
from tests.serving import BUNDLE_LIMIT, Open

Json = dict[str, Any]
CONTACT = "write to grid@example.org"


def make_limits(default: UserLimits | None = None, **groups: UserLimits) -> Limits:
    return Limits(LimitSettings(default or UserLimits(), groups=groups), lambda _: ("physics",), CONTACT)


async def headers_of_alice(api: httpx2.AsyncClient) -> dict[str, str]:
    token = (await api.post("/api/v1/tokens", json={"user": "alice", "role": "user"})).json()
    return {"Authorization": f"Bearer {token['token']}"}


@pytest.mark.evidence("M3")
async def test_submit_beyond_limit_returns_field_usage_and_contact(open_api: Open, body: Json) -> None:
    api = await open_api(limits=make_limits(UserLimits(queued_jobs=1, nodes=6)))
    too_large = await api.post("/api/v1/jobs", json=body | {"request": {"type": "flexible", "total_size": 7}})
    assert (too_large.status_code, too_large.json()["field"]) == (403, "limits.nodes")
    assert (await api.post("/api/v1/jobs", json=body)).status_code == 201
    for path in ("/api/v1/jobs", "/api/v1/explain"):
        answer = await api.post(path, json=body)
        problem = answer.json()
        assert (answer.status_code, problem["field"]) == (409, "limits.queued_jobs")
        assert problem["value"] == {"limit": 1, "used": 1, "asked": 1}
        assert "the limit queued_jobs of ada is 1: 1 is in use and 1 more asked for" in problem["detail"]
        assert problem["hint"] == CONTACT
    assert len((await api.get("/api/v1/jobs")).json()["jobs"]) == 1


async def test_repeated_submission_with_key_bypasses_limit(open_api: Open, body: Json) -> None:
    api = await open_api(limits=make_limits(UserLimits(queued_jobs=1)))
    for status in (201, 200):
        answer = await api.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "k"})
        assert answer.status_code == status


async def test_limits_are_listed_with_usage(open_api: Open, body: Json) -> None:
    default = UserLimits(
        queued_jobs=5, nodes=8, node_hours_per_day=1000, bundle_bytes=BUNDLE_LIMIT, requests_per_second=50
    )
    api = await open_api(limits=make_limits(default, physics=UserLimits(queued_jobs=9, result_bytes=10)))
    await api.post("/api/v1/jobs", json=body)
    size = len(archive_of(GOOD))
    await api.post("/api/v1/bundles", content=archive_of(GOOD))
    report = (await api.get("/api/v1/limits")).json()
    assert (report["user"], report["contact"]) == ("ada", CONTACT)
    mine, ours = report["scopes"]
    assert (mine["kind"], mine["name"], ours["kind"], ours["name"]) == ("user", "ada", "group", "physics")
    assert [(limit["name"], limit["used"], limit["limit"]) for limit in mine["limits"]] == [
        ("queued_jobs", 1, 5),
        ("nodes", 0, 8),
        ("node_hours_per_day", 0, 1000),
        ("bundle_bytes", size, BUNDLE_LIMIT),
        ("requests_per_second", None, 50),
    ]
    assert [(limit["name"], limit["used"]) for limit in ours["limits"]] == [("queued_jobs", 1), ("result_bytes", 0)]


async def test_limits_without_settings_are_empty(open_api: Open) -> None:
    assert (await (await open_api()).get("/api/v1/limits")).json() == {"user": "ada", "scopes": [], "contact": ""}


@pytest.mark.evidence("M6")
async def test_limits_of_other_users_are_for_operators(open_api: Open) -> None:
    api = await open_api(limits=make_limits(UserLimits(nodes=1)))
    headers = await headers_of_alice(api)
    assert (await api.get("/api/v1/limits", headers=headers)).json()["user"] == "alice"
    assert (await api.get("/api/v1/limits?user=alice", headers=headers)).status_code == 200
    answer = await api.get("/api/v1/limits?user=bob", headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (403, "user")
    assert (await api.get("/api/v1/limits?user=bob")).json()["scopes"][0]["name"] == "bob"


async def test_upload_beyond_bundle_bytes_returns_409(open_api: Open) -> None:
    api = await open_api(limits=make_limits(UserLimits(bundle_bytes=len(archive_of(GOOD)))))
    assert (await api.post("/api/v1/bundles", content=archive_of(GOOD))).status_code == 201
    assert (await api.post("/api/v1/bundles", content=archive_of(GOOD))).status_code == 200
    answer = await api.post("/api/v1/bundles", content=archive_of({"a": b"1"}))
    assert (answer.status_code, answer.json()["field"]) == (409, "limits.bundle_bytes")


async def test_shares_of_other_users_are_for_operators(open_api: Open) -> None:
    settings = FairShareSettings(users={"alice": 3.0}, groups={"physics": 2.0})
    groups_of = {"ada": ("physics",)}
    past = [Charge(user, 7200.0, 0.0) for user in ("ada", "alice", "bob")]
    api = await open_api(shares=FairShares(settings, lambda user: groups_of.get(user, ()), past))
    shares = (await api.get("/api/v1/limits/shares")).json()["shares"]
    assert {(line["group"], line["user"], line["weight"]) for line in shares} == {
        ("physics", "", 2.0),
        ("physics", "ada", 1.0),
        ("", "alice", 3.0),
        ("", "bob", 1.0),
    }
    mine = await api.get("/api/v1/limits/shares", headers=await headers_of_alice(api))
    assert {line["user"] for line in mine.json()["shares"]} == {"", "alice"}


async def test_set_weight_replaces_configured_one_and_says_so(open_api: Open) -> None:
    past = [Charge(user, 7200.0, 0.0) for user in ("ada", "alice")]
    api = await open_api(shares=FairShares(FairShareSettings(users={"alice": 3.0}), past=past))

    async def weights() -> dict[str, tuple[float, str]]:
        shares = (await api.get("/api/v1/limits/shares")).json()["shares"]
        return {s["user"]: (s["weight"], s["set_weight"]["reason"] if s["set_weight"] else "") for s in shares}

    for user, weight in (("alice", 5.0), ("new", 2.0)):
        order = {"weight": weight, "reason": "a deadline"}
        assert (await api.post(f"/api/v1/limits/shares/{user}", json=order)).status_code == 200
    assert await weights() == {"ada": (1.0, ""), "alice": (5.0, "a deadline"), "new": (2.0, "a deadline")}
    entry = (await api.get("/api/v1/audit?action=set_weight")).json()["entries"][0]
    assert (entry["target"], entry["detail"]) == ("user alice", "weight 5: a deadline")
    await api.post("/api/v1/limits/shares/alice", json={"weight": None, "reason": "it has passed"})
    assert (await weights())["alice"] == (3.0, "")
    order = {"weight": 9.0, "reason": "more for me"}
    answer = await api.post("/api/v1/limits/shares/alice", json=order, headers=await headers_of_alice(api))
    assert answer.status_code == 403


async def test_set_weight_without_fair_share_returns_409(open_api: Open) -> None:
    answer = await (await open_api()).post("/api/v1/limits/shares/ada", json={"weight": 2, "reason": "x"})
    assert (answer.status_code, answer.json()["hint"].partition(" ")[2]) == (
        409,
        "rules.queue_order to fair-share in the daemon's configuration",
    )


async def test_shares_without_fair_share_are_empty(open_api: Open) -> None:
    assert (await (await open_api()).get("/api/v1/limits/shares")).json() == {"shares": []}
