"""The route that changes a waiting job in its place, and the bodies of offered changes."""

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from koalapy.api.job_changes import JobPatch, change_between
from koalapy.model.cluster import LinkUse
from koalapy.model.identity import Identity, Role
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.limits import UserLimits
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.policies.registry import DEFAULTS
from tests.api.test_access import MINIMAL_SPEC, Api, open_access_api
from tests.api.test_access import api as api
from tests.api.test_limits import make_limits
from tests.serving import Open, app_of

Json = dict[str, Any]
JOB = "/api/v1/jobs/1"


async def test_change_of_waiting_job_keeps_number_time_and_dependents(open_api: Open, body: Json) -> None:
    http = await open_api()
    before = (await http.post("/api/v1/jobs", json=body)).json()
    await http.post("/api/v1/jobs", json=body | {"after": ["1"]})
    answer = await http.patch(JOB, json={"request": {"total_size": 3}, "reason": "enough"})
    assert answer.status_code == 200, answer.text
    job = (await http.get(JOB)).json()
    assert job["request"] == before["request"] | {"total_size": 3}
    assert [job[name] for name in ("id", "submitted_at", "placement_tries")] == [
        before[name] for name in ("id", "submitted_at", "placement_tries")
    ]
    assert [dependent["job"] for dependent in job["dependents"]] == [2]
    entry = job["timeline"][-1]
    assert (entry["event"], entry["reason"]) == ("changed", "request flexible 6 to flexible 3: enough")
    (entry,) = (await http.get("/api/v1/audit", params={"action": "change_job"})).json()["entries"]
    assert (entry["target"], entry["outcome"]) == ("job 1", "done")
    assert "flexible 6 to flexible 3: enough" in entry["detail"]


async def test_change_is_stored(open_api: Open, body: Json) -> None:
    http = await open_api()
    await http.post("/api/v1/jobs", json=body)
    await http.patch(JOB, json={"request": {"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}})
    await http.patch(JOB, json={"priority": "high", "coallocation": 1})
    await http.post("/api/v1/jobs/1/cancel")
    job = (await http.get(JOB)).json()  # an ended job is read from the database
    assert job["request"] == {"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}
    assert (job["priority"], job["coallocation"], job["policy"]) == ("high", "never", DEFAULTS["fixed"])


async def test_concurrent_changes_of_different_fields_are_all_made(open_api: Open, body: Json) -> None:
    http = await open_api()
    await http.post("/api/v1/jobs", json=body)
    changes = [
        {"request": {"total_size": 4}},
        {"priority": "high"},
        {"request": {"max_components": 2}},
        {"links": "any"},
    ]
    answers = await asyncio.gather(*(http.patch(JOB, json=change) for change in changes))
    assert [answer.status_code for answer in answers] == [200] * 4
    job = (await http.get(JOB)).json()
    assert (job["priority"], job["request"]["total_size"], job["request"]["max_components"]) == ("high", 4, 2)


async def test_change_of_ended_job_returns_409(open_api: Open, body: Json) -> None:
    http = await open_api()
    await http.post("/api/v1/jobs", json=body)
    await http.post("/api/v1/jobs/1/cancel")
    answer = await http.patch(JOB, json={"priority": "high"})
    assert (answer.status_code, answer.json()["detail"]) == (409, "job 1 is already cancelled")
    assert (await http.patch("/api/v1/jobs/7", json={})).status_code == 404


async def test_change_of_job_of_daemon_returns_409(open_api: Open) -> None:
    http = await open_api()
    spec, director = replace(MINIMAL_SPEC, internal=True), Identity("director", Role.ADMIN, "test token")
    await app_of(http).state.jobs.submit(spec, director)
    order = {"jobs": [1], "priority": "high", "reason": "a deadline"}
    (result,) = (await http.post("/api/v1/jobs/priority", json=order)).json()["jobs"]
    change = await http.patch(JOB, json={"priority": "high", "reason": "a deadline"})
    assert (result["problem"]["status"], change.status_code) == (409, 409)
    assert result["problem"]["detail"] == change.json()["detail"]
    assert (await http.get(JOB)).json()["priority"] == "low"


async def test_change_of_array_changes_its_waiting_tasks(open_api: Open, body: Json) -> None:
    http = await open_api()
    await http.post("/api/v1/jobs", json=body | {"array": "1-3"})
    answer = await http.patch("/api/v1/jobs/2", json={"request": {"total_size": 2}})
    assert (answer.status_code, answer.json()["detail"]) == (409, "job 2 is queued: it was not started")
    assert "koala change 1" in answer.json()["hint"]
    assert (await http.patch(JOB, json={"request": {"total_size": 2}})).status_code == 200
    assert (await http.get("/api/v1/jobs/2")).json()["request"]["total_size"] == 2


async def test_explain_change_changes_nothing(open_api: Open, body: Json) -> None:
    http = await open_api()
    await http.post("/api/v1/jobs", json=body)
    before = (await http.get(JOB)).json()
    explanation = (await http.post(f"{JOB}/explain", json={"request": {"total_size": 2}})).json()
    assert (explanation["job"], explanation["state"], explanation["position"]) == (1, "queued", 1)
    assert (await http.get(JOB)).json() == before
    assert (await http.get("/api/v1/audit", params={"action": "explain_change"})).json()["entries"] == []


async def test_change_by_other_user_returns_403_and_by_operator_needs_reason(api: Api) -> None:
    await api.submit_as("ada")
    change: Json = {"request": {"total_size": 2}}
    assert (await api.send_as("bob", "PATCH", JOB, json=change)).status_code == 403
    answer = await api.send_as("director", "PATCH", JOB, json=change)
    assert (answer.status_code, answer.json()["field"]) == (422, "reason")
    assert (await api.send_as("director", "PATCH", JOB, json=change | {"reason": "space"})).status_code == 200
    assert (await api.send_as("ada", "PATCH", JOB, json={})).status_code == 200


async def test_change_to_high_priority_follows_rules_of_submission(tmp_path: Any) -> None:
    async with open_access_api(tmp_path) as api:
        await api.submit_as("ada")
        answer = await api.send_as("ada", "PATCH", JOB, json={"priority": "high"})
        assert (answer.status_code, answer.json()["field"]) == (403, "priority")
        order = {"priority": "high", "reason": "a deadline"}
        assert (await api.send_as("director", "PATCH", JOB, json=order)).status_code == 200
        smaller, larger = ({"request": {"total_size": size}} for size in (2, 4))
        assert (await api.send_as("ada", "PATCH", JOB, json=smaller)).status_code == 200
        answer = await api.send_as("ada", "PATCH", JOB, json=larger)
        assert (answer.status_code, answer.json()["field"]) == (403, "priority"), "it was allowed for the smaller job"


async def test_change_within_limits_of_owner_does_not_count_job_twice(open_api: Open, body: Json) -> None:
    http = await open_api(limits=make_limits(UserLimits(queued_jobs=1, nodes=6)))
    await http.post("/api/v1/jobs", json=body)
    assert (await http.patch(JOB, json={"request": {"total_size": 5}})).status_code == 200
    answer = await http.patch(JOB, json={"request": {"total_size": 7}})
    assert answer.status_code in (403, 409, 422, 429), answer.text
    assert (await http.get(JOB)).json()["request"]["total_size"] == 5


sizes = st.integers(1, 9)
names = st.sampled_from(["north", "south"])
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(
        FlexibleRequest, sizes, sizes, st.none() | sizes, st.lists(st.tuples(sizes, sizes), max_size=2).map(tuple)
    ),
    st.lists(st.builds(ComponentRequest, sizes, names), min_size=1, max_size=3).map(tuple).map(FixedRequest),
    st.lists(st.builds(ComponentRequest, sizes), min_size=1, max_size=3).map(tuple).map(NonFixedRequest),
)
specs = st.builds(
    JobSpec,
    requests,
    st.just(("program",)),
    policy=st.sampled_from(["", "best-fit"]),
    coallocation=st.none() | st.integers(1, 3),
    speed_ratio_min=st.none() | st.sampled_from([0.5, 1.0]),
    priority=st.sampled_from(Priority),
    processes_per_node=st.none() | st.integers(1, 4),
    links=st.sampled_from(LinkUse),
).map(lambda spec: spec if spec.policy else spec.with_fields(policy=DEFAULTS[spec.request.type]))


@given(specs, specs)
def test_change_between_specifications_makes_one_the_other(old: JobSpec, new: JobSpec) -> None:
    assert JobPatch.model_validate(change_between(old, new)).apply_to(old) == new
    assert change_between(old, old) == {}


def test_change_keeps_settings_of_components_by_index() -> None:
    components = (ComponentRequest(2, "north", command=("first",)), ComponentRequest(3, "south"))
    spec = JobSpec(FixedRequest(components), ("program",), policy=DEFAULTS["fixed"])
    sizes = [{"size": 1, "cluster": "south"}, {"size": 4, "cluster": "north"}]
    changed = JobPatch.model_validate({"request": {"components": sizes}}).apply_to(spec)
    assert changed.request == FixedRequest(
        (ComponentRequest(1, "south", command=("first",)), ComponentRequest(4, "north"))
    )
