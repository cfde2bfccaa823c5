"""What users may have at most: refused with all there is to say, and shown with what is used of it."""

from typing import Any

import httpx2
import pytest

from koalapy.model.limits import Limits, LimitSettings, UserLimits
from tests.daemon.archives import GOOD, archive_of
from tests.serving import BUNDLE_LIMIT, Open

Json = dict[str, Any]
CONTACT = "write to grid@example.org"


def limits(default: UserLimits | None = None, **groups: UserLimits) -> Limits:
    return Limits(LimitSettings(default or UserLimits(), groups=groups), lambda _: ("physics",), CONTACT)


async def alice(api: httpx2.AsyncClient) -> dict[str, str]:
    made = (await api.post("/api/v1/tokens", json={"user": "alice", "role": "user"})).json()
    return {"Authorization": f"Bearer {made['token']}"}


@pytest.mark.evidence("M3")
async def test_a_submission_beyond_a_limit_is_refused_with_all_there_is_to_say(open_api: Open, body: Json) -> None:
    api = await open_api(limits=limits(UserLimits(queued_jobs=1, nodes=6)))
    never = await api.post("/api/v1/jobs", json=body | {"request": {"type": "flexible", "total_size": 7}})
    assert (never.status_code, never.json()["field"]) == (403, "limits.nodes")
    assert (await api.post("/api/v1/jobs", json=body)).status_code == 201
    for path in ("/api/v1/jobs", "/api/v1/explain"):
        refused = await api.post(path, json=body)
        told = refused.json()
        assert (refused.status_code, told["field"]) == (409, "limits.queued_jobs")
        assert told["value"] == {"limit": 1, "used": 1, "asked": 1}
        assert "the limit queued_jobs of ada is 1: 1 is in use and 1 more asked for" in told["detail"]
        assert told["hint"] == CONTACT
    assert len((await api.get("/api/v1/jobs")).json()["jobs"]) == 1


async def test_a_submission_that_is_repeated_with_its_key_is_the_first_one(open_api: Open, body: Json) -> None:
    api = await open_api(limits=limits(UserLimits(queued_jobs=1)))
    for status in (201, 200):
        answer = await api.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "k"})
        assert answer.status_code == status


async def test_limits_are_shown_with_what_is_used_of_them(open_api: Open, body: Json) -> None:
    own = UserLimits(queued_jobs=5, nodes=8, node_hours_per_day=1000, bundle_bytes=BUNDLE_LIMIT, requests_per_second=50)
    api = await open_api(limits=limits(own, physics=UserLimits(queued_jobs=9, result_bytes=10)))
    await api.post("/api/v1/jobs", json=body)
    size = len(archive_of(GOOD))
    await api.post("/api/v1/bundles", content=archive_of(GOOD))
    shown = (await api.get("/api/v1/limits")).json()
    assert (shown["user"], shown["contact"]) == ("ada", CONTACT)
    mine, ours = shown["scopes"]
    assert (mine["kind"], mine["name"], ours["kind"], ours["name"]) == ("user", "ada", "group", "physics")
    assert [(one["name"], one["used"], one["limit"]) for one in mine["limits"]] == [
        ("queued_jobs", 1, 5),
        ("nodes", 0, 8),
        ("node_hours_per_day", 0, 1000),
        ("bundle_bytes", size, BUNDLE_LIMIT),
        ("requests_per_second", None, 50),
    ]
    assert [(one["name"], one["used"]) for one in ours["limits"]] == [("queued_jobs", 1), ("result_bytes", 0)]


async def test_where_nothing_is_limited_that_is_shown(open_api: Open) -> None:
    assert (await (await open_api()).get("/api/v1/limits")).json() == {"user": "ada", "scopes": [], "contact": ""}


@pytest.mark.evidence("M6")
async def test_users_see_their_own_and_operators_everybody_s(open_api: Open) -> None:
    api = await open_api(limits=limits(UserLimits(nodes=1)))
    shown = await alice(api)
    assert (await api.get("/api/v1/limits", headers=shown)).json()["user"] == "alice"
    assert (await api.get("/api/v1/limits?user=alice", headers=shown)).status_code == 200
    refused = await api.get("/api/v1/limits?user=bob", headers=shown)
    assert (refused.status_code, refused.json()["field"]) == (403, "user")
    assert (await api.get("/api/v1/limits?user=bob")).json()["scopes"][0]["name"] == "bob"


async def test_more_bytes_than_one_may_have_are_refused(open_api: Open) -> None:
    api = await open_api(limits=limits(UserLimits(bundle_bytes=len(archive_of(GOOD)))))
    assert (await api.post("/api/v1/bundles", content=archive_of(GOOD))).status_code == 201
    assert (await api.post("/api/v1/bundles", content=archive_of(GOOD))).status_code == 200
    refused = await api.post("/api/v1/bundles", content=archive_of({"a": b"1"}))
    assert (refused.status_code, refused.json()["field"]) == (409, "limits.bundle_bytes")
