"""Access control: every route with every role, jobs of other users, and ownership."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koalapy.api.access import ACCESS, access_of
from koalapy.api.fields import as_json
from koalapy.api.job_views import PUBLIC_FIELDS, view_for
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.model.field import describe_fields
from koalapy.model.identity import Identity, Permission, Role
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile
from koalapy.model.users import Accounts, User, Users
from koalapy.scheduler.rules import Rules
from koalapy.validation.permissions import SubmissionRules
from tests.daemon.archives import GOOD, archive_of
from tests.daemon.sites import Sites, sha256_hex
from tests.model.specs import values_of
from tests.serving import AGENT_TOKENS, CSRF_HEADER, URL, app_of, serving

Json = dict[str, Any]
IDENTITIES = {
    "ada": Identity("ada", Role.USER, "test token"),
    "bob": Identity("bob", Role.USER, "test token"),
    "director": Identity("director", Role.OPERATOR, "test token"),
    "root": Identity("root", Role.ADMIN, "test token"),
}
TOKENS = {f"the-token-of-{name}": identity for name, identity in IDENTITIES.items()}
CALLERS = ["anonymous", "agent", *IDENTITIES]
ALLOWED_CALLERS = {
    "public": set(CALLERS),
    "agents": {"agent"},
    "user": {"ada", "bob", "director", "root"},
    "owner": {"ada", "director", "root"},
    "operator": {"director", "root"},
    "admin": {"root"},
}
"""Callers that each access level admits; the job belongs to ada."""
SECRET = "sesame"
"""Part of every field of ada's job that other users must not see."""
BODY = {
    "request": {"type": "flexible", "total_size": 3},
    "command": ["run", SECRET],
    "name": f"{SECRET}-name",
    "environment": {f"KEY_{SECRET}": SECRET},
    "workdir": f"/home/{SECRET}",
    "output": f"/home/{SECRET}/out",
    "collect": [f"{SECRET}/*"],
    "application": f"{SECRET}-app",
}
BUNDLE = archive_of(GOOD)
BODIES: dict[str, Any] = {
    "submit_job": BODY,
    "explain_submission": BODY,
    "cancel_jobs": {"jobs": [1]},
    "hold_jobs": {"jobs": [1]},
    "release_jobs": {"jobs": [1]},
    "set_priority": {"jobs": [1], "priority": "low"},
    "set_weight": {"weight": 2, "reason": "more work"},
    "change_job": {},
    "explain_change": {},
    "add_replica": {"name": "m", "cluster": "north", "path": "/m"},
    "start_background": {"nodes": 1, "seconds": 1},
}
QUERIES = {"remove_replicas": {"name": "m"}}


class Api:
    """A client of the daemon that sends requests as one of several users."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._request_count = 0
        self.app: FastAPI = app_of(http)

    def list_operations(self) -> Iterator[tuple[str, str, str]]:
        """Yield the operation ID (or name), method and path of every route."""
        for route in iterate_routes(self.app):
            for method in sorted(route.methods):
                yield getattr(route, "operation_id", None) or route.name, method, route.path

    async def send_as(self, user: str, method: str, path: str, **arguments: Any) -> httpx2.Response:
        token = {"anonymous": None, "agent": AGENT_TOKENS["north"]}.get(user, f"the-token-of-{user}")
        headers = {
            **CSRF_HEADER,
            **arguments.pop("headers", {}),
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        # Each request comes from another address: many rejected tokens from one address are rate limited.
        self._request_count += 1
        transport = httpx2.ASGITransport(self.app, client=(f"192.0.2.{self._request_count % 250}", 1))
        async with httpx2.AsyncClient(transport=transport, base_url=URL) as http:
            return await http.request(method, path, headers=headers, **arguments)

    async def submit_as(self, user: str, **changes: Any) -> Json:
        answer = await self.send_as(user, "POST", "/api/v1/jobs", json=BODY | changes)
        assert answer.status_code == 201, answer.text
        job: Json = answer.json()
        return job


def iterate_routes(app: FastAPI) -> Iterator[Any]:
    """Yield the effective HTTP routes."""
    for route in app.routes:
        included = getattr(route, "effective_route_contexts", None)
        for effective_route in included() if included else [route]:
            if getattr(effective_route, "methods", None):
                yield effective_route


@asynccontextmanager
async def open_access_api(path: Path, **options: Any) -> AsyncIterator[Api]:
    sites = Sites({("north", "/m"): b"mesh"})
    async with serving(path / "koala.db", [], Rules(), sites, users=TOKENS, has_agent_routes=True, **options) as http:
        yield Api(http)


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_access_api(tmp_path) as access_api:
        yield access_api


# Every route with every role


def test_access_table_grants_only_the_intended_rights() -> None:
    """Compare the table with literal sets, so that a single edit cannot make an operation more accessible."""
    operations: dict[str, set[str]] = {}
    for operation, access in ACCESS.items():
        operations.setdefault(str(access), set()).add(operation)
    assert operations.pop("public") == {"health", "ready", "live", "openapi", "docs", "scrape_openly"} | {
        "dashboard_login",
        "dashboard_file",
    }
    assert operations.pop("admin") == {"list_audit", "verify_audit"}
    assert operations.pop("operator") == {
        "add_replica",
        "ask_what_if",
        "clear_cluster",
        "declare_cluster_lost",
        "drain_cluster",
        "mark_alert",
        "unmark_alert",
        "export_record",
        "measure_network",
        "preview_drain",
        "remove_replicas",
        "resume_cluster",
        "set_weight",
        "start_background",
        "stop_background",
        "test_notification",
        "verify_replicas",
    }
    assert operations.pop("owner") == {
        "cancel_job",
        "change_job",
        "explain_change",
        "explain_job",
        "fetch_results",
        "follow_job",
        "follow_output",
        "foretell_job",
        "hold_job",
        "list_attempts",
        "open_terminal",
        "read_logs",
        "release_job",
        "send_input",
        "show_timeline",
    }
    assert operations.keys() == {"user"}


@pytest.mark.evidence("U1", "C3")
@pytest.mark.parametrize("caller", CALLERS)
async def test_route_admits_only_callers_of_its_access_table(api: Api, caller: str) -> None:
    await api.submit_as("ada")
    assert (await api.send_as("ada", "POST", "/api/v1/jobs/1/cancel")).status_code == 200
    assert (await api.send_as("ada", "POST", "/api/v1/bundles", content=BUNDLE)).status_code == 201
    checked_routes = 0
    for operation, method, path in api.list_operations():
        url = path.format(
            job=1,
            user="ada",
            name="north",
            one="north",
            other="south",
            cluster="north",
            bundle=sha256_hex(BUNDLE),
            token="1.1.0",
        )
        is_agent_route = path.startswith("/api/v1/agents/")
        access_level = "agents" if is_agent_route else str(ACCESS.get(operation, Role.ADMIN))
        body = {"json": BODIES.get(operation)} if method in ("POST", "PUT") else {}
        answer = await api.send_as(caller, method, url, params=QUERIES.get(operation), **body)
        message = f"{caller} {method} {url}: {answer.status_code} {answer.text[:300]}"
        if caller in ALLOWED_CALLERS[access_level]:
            forbidden = operation in ("start_background", "stop_background")  # by the daemon's own setting
            assert answer.status_code != 401, message
            assert answer.status_code != 403 or forbidden, message
            assert answer.status_code < 500, message
        else:
            expected_status = 403 if caller in IDENTITIES and not is_agent_route else 401
            assert answer.status_code == expected_status, message
            assert answer.headers["content-type"] == "application/problem+json", message
            assert SECRET not in answer.text, message
        checked_routes += 1
    assert checked_routes >= 40


@pytest.mark.evidence("C3")
async def test_unlisted_route_is_for_administrators_only(api: Api) -> None:
    @api.app.get("/api/v1/new")
    async def new() -> Json:
        return {}

    statuses = {caller: (await api.send_as(caller, "GET", "/api/v1/new")).status_code for caller in CALLERS}
    assert statuses == {"anonymous": 401, "agent": 401, "ada": 403, "bob": 403, "director": 403, "root": 200}


async def test_every_route_is_in_access_table(api: Api) -> None:
    operations = {operation for operation, _, path in api.list_operations() if access_of(path, operation) != "agents"}
    assert operations <= ACCESS.keys()


# Jobs of other users


@pytest.mark.evidence("U1")
async def test_job_of_other_user_is_redacted(api: Api) -> None:
    job = await api.submit_as("ada", walltime=60)
    for path in ("/api/v1/jobs", "/api/v1/jobs/1", "/api/v1/jobs/1?wait=0.01"):
        answer = await api.send_as("bob", "GET", path)
        assert answer.status_code == 200
        assert SECRET not in answer.text, path
        assert "ada" not in answer.text, path
        view = answer.json()
        view = view["jobs"][0] if "jobs" in view else view
        assert view["redacted"]
        public_fields = ("id", "state", "request", "priority", "home_site", "walltime", "submitted_at")
        assert {name: view[name] for name in public_fields} == {name: job[name] for name in public_fields}
    for user in ("ada", "director", "root"):
        full_view = (await api.send_as(user, "GET", "/api/v1/jobs/1")).json()
        assert (full_view["owner"], full_view["redacted"], full_view["command"]) == ("ada", False, BODY["command"])
        assert full_view["timeline"][0]["actor"] == "ada"


MINIMAL_SPEC = JobSpec(FlexibleRequest(1), ("true",))


@pytest.mark.parametrize("name", [name for name, each in describe_fields(JobSpec).items() if name != "request"])
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_spec_field_not_public_is_hidden_from_other_users(name: str, data: Any) -> None:
    spec = replace(MINIMAL_SPEC, **{name: data.draw(values_of(describe_fields(JobSpec)[name].type))})
    if name == "owner" and spec.owner == "bob":
        return
    changed = view_as_bob(spec) != view_as_bob(MINIMAL_SPEC)
    assert not changed or name in PUBLIC_FIELDS[JobSpec]


def test_view_of_attempt_hides_all_but_cluster_and_size() -> None:
    request = ComponentRequest(2, "north", (SECRET,), (("A", SECRET),), SECRET, (InputFile(SECRET),))
    component = Component(
        0,
        "north",
        2,
        ComponentState.RUNNING,
        hosts=(SECRET,),
        lrm_job=SECRET,
        exit_code=77,
        error=SECRET,
        sources=(SECRET,),
        stage_size=77777,
    )
    attempt = Attempt(1, (component,), 100.0, exit_code=77, end_reason=SECRET, nonce=SECRET)
    spec = replace(MINIMAL_SPEC, request=FixedRequest((request,)))
    job = Job(1, spec, 99.0, JobState.RUNNING, SECRET, 1, attempt, exit_code=77)
    view = as_json(view_for(IDENTITIES["bob"], JobRecord(job, SECRET)))
    assert SECRET not in json.dumps(view)
    assert "77" not in json.dumps(view)
    assert [(c["cluster"], c["size"], c["state"]) for c in view["components"]] == [("north", 2, "running")]
    assert view["request"] == {"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}


def view_as_bob(spec: JobSpec) -> Json:
    view: Json = as_json(view_for(IDENTITIES["bob"], JobRecord(Job(1, spec, 0.0), "why")))
    return view


def test_job_of_daemon_is_redacted_for_its_namesake() -> None:
    user = Identity("koala", Role.USER, "test token")
    spec = replace(MINIMAL_SPEC, owner="koala", internal=True)
    assert as_json(view_for(user, JobRecord(Job(1, spec, 0.0), "")))["redacted"]


async def test_list_jobs_by_name_of_other_user_finds_nothing(api: Api) -> None:
    await api.submit_as("ada")
    await api.submit_as("bob", name="mine")

    async def list_ids(user: str, **query: Any) -> list[int]:
        answer = await api.send_as(user, "GET", "/api/v1/jobs", params=query)
        assert answer.status_code == 200, answer.text
        return [job["id"] for job in answer.json()["jobs"]]

    assert await list_ids("bob") == [2, 1]
    assert await list_ids("bob", name=BODY["name"]) == []
    assert (
        await list_ids("bob", name="mine")
        == await list_ids("bob", mine=True)
        == await list_ids("bob", owner="bob")
        == [2]
    )
    assert await list_ids("director", name=BODY["name"]) == await list_ids("director", owner="ada") == [1]
    forbidden = await api.send_as("bob", "GET", "/api/v1/jobs", params={"owner": "ada"})
    unknown_owner = await api.send_as("bob", "GET", "/api/v1/jobs", params={"owner": "eve"})
    assert [answer.status_code for answer in (forbidden, unknown_owner)] == [403, 403]
    assert forbidden.json()["field"] == "owner"
    for path in ("/api/v1/jobs", "/api/v1/history"):
        contradiction = await api.send_as("director", "GET", path, params={"owner": "ada", "mine": True})
        assert (contradiction.status_code, contradiction.json()["field"]) == (422, "owner"), path


@pytest.mark.parametrize("ident", ["1", "01", "+1", "1.0", "%201", "1%20", "1_", "0_1", "1e0", "１"])
async def test_logs_by_odd_job_number_are_rejected(api: Api, ident: str) -> None:
    await api.submit_as("ada")
    answer = await api.send_as("bob", "GET", f"/api/v1/jobs/{ident}/logs")
    assert answer.status_code in (403, 404, 422), answer.text


@pytest.mark.evidence("U1")
@pytest.mark.parametrize(
    ("action", "fields"), [("cancel", {}), ("hold", {}), ("release", {}), ("priority", {"priority": "low"})]
)
async def test_change_jobs_without_permission_is_rejected_per_job(api: Api, action: str, fields: Json) -> None:
    await api.submit_as("ada")
    await api.submit_as("bob")
    path, order = f"/api/v1/jobs/{action}", {"jobs": [2, 1, 3, 2], **fields}
    results = (await api.send_as("bob", "POST", path, json=order)).json()["jobs"]
    statuses = [(result["job"], result["problem"] and result["problem"]["status"]) for result in results]
    assert statuses == [(2, None), (1, 403), (3, 404)]
    assert results[1]["state"] is None
    job = (await api.send_as("ada", "GET", "/api/v1/jobs/1")).json()
    assert (job["state"], job["timeline"][1:]) == ("queued", [])
    if action in ("cancel", "hold"):
        order["reason"] = "test"
    results = (await api.send_as("director", "POST", path, json=order)).json()["jobs"]
    assert [result["problem"] and result["problem"]["status"] for result in results] == [None, None, 404]


async def test_set_priority_changes_waiting_jobs_only(api: Api) -> None:
    for _ in range(2):
        await api.submit_as("ada")
    await api.send_as("ada", "POST", "/api/v1/jobs/cancel", json={"jobs": [2]})
    order = {"jobs": [1, 2], "priority": "high", "reason": "a deadline"}
    first, second = (await api.send_as("director", "POST", "/api/v1/jobs/priority", json=order)).json()["jobs"]
    assert first == {"job": 1, "state": "queued", "priority": "high", "problem": None}
    assert (second["priority"], second["problem"]["status"]) == (None, 409)
    job = (await api.send_as("ada", "GET", "/api/v1/jobs/1")).json()
    assert job["priority"] == "high"
    entry = job["timeline"][-1]
    assert (entry["event"], entry["actor"], entry["reason"]) == (
        "changed",
        "director",
        "priority low to high: a deadline",
    )
    assert "a deadline" in str((await api.send_as("ada", "GET", "/api/v1/jobs/1/explain")).json()["reasons"])


async def test_set_priority_high_by_user_returns_403(tmp_path: Path) -> None:
    async with open_access_api(tmp_path) as api:
        await api.submit_as("ada")
        order = {"jobs": [1], "priority": "high"}
        answer = await api.send_as("ada", "POST", "/api/v1/jobs/priority", json=order)
        assert (answer.status_code, answer.json()["field"]) == (403, "priority")
        assert (await api.send_as("ada", "GET", "/api/v1/jobs/1")).json()["priority"] == "low"
        await api.send_as("director", "POST", "/api/v1/jobs/priority", json=order)
        assert (await api.send_as("ada", "GET", "/api/v1/jobs/1")).json()["priority"] == "high"
        lower = await api.send_as("ada", "POST", "/api/v1/jobs/priority", json=order | {"priority": "low"})
        assert lower.json()["jobs"][0]["priority"] == "low"


# Owners of jobs


@pytest_asyncio.fixture
async def strict_api(tmp_path: Path) -> AsyncIterator[Api]:
    """Yield an API with users that have homes, and a chief that is an administrator."""
    users = Users({"ada": User({"north": "ada", "south": "al"}, home="south"), "director": User(role=Role.OPERATOR)})
    roles = {"chief": Role.ADMIN, "other": Role.OPERATOR}
    rules = SubmissionRules(role_of=lambda user: roles.get(user, Role.USER), reserved={"koala"})
    async with open_access_api(tmp_path, accounts=Accounts(users), submission_rules=rules) as access_api:
        yield access_api


FORBIDDEN_SUBMISSIONS = [
    ("ada", {"owner": "root"}, "leave it out"),
    # Such a job would run in the administrator's account and could read the administrator's credentials.
    ("director", {"owner": "chief"}, "owner is chief, whose role is admin or may be, and yours is operator"),
    ("director", {"owner": "koala"}, "leave it out"),
    ("root", {"owner": "koala"}, "leave it out"),
    ("bob", {"home_site": "west"}, "users.bob.home"),
    ("bob", {"home_site": "north"}, "bob"),  # bob is not a user of north
    ("ada", {"home_site": "west"}, "ada"),
    ("ada", {"priority": "high"}, "priority low"),
    ("ada", {"priority": "high"}, "high_priority"),
]


@pytest.mark.evidence("U2")
async def test_submission_beyond_permissions_returns_403(strict_api: Api) -> None:
    for user, fields, said in FORBIDDEN_SUBMISSIONS:
        for path in ("/api/v1/jobs", "/api/v1/explain", "/api/v1/forecast"):
            answer = await strict_api.send_as(user, "POST", path, json=BODY | fields)
            problem = answer.json()
            assert (answer.status_code, [problem["field"]]) == (403, list(fields)), (user, fields, path)
            assert said in f"{problem['detail']} {problem['hint']}", (user, fields, path)


@pytest.mark.evidence("U2")
async def test_submission_within_permissions_has_owner_home_and_priority(strict_api: Api) -> None:
    names = ("owner", "home_site", "priority")
    for user, fields, expected in (
        ("ada", {}, ("ada", "south", "low")),
        ("ada", {"owner": "ada", "home_site": "north", "priority": "low"}, ("ada", "north", "low")),
        ("bob", {}, ("bob", "", "low")),
        ("director", {"owner": "ada", "priority": "high"}, ("ada", "south", "high")),
        ("director", {"owner": "other"}, ("other", "", "low")),
        ("root", {"owner": "chief"}, ("chief", "", "low")),
    ):
        job = await strict_api.submit_as(user, **fields)
        assert tuple(job[name] for name in names) == expected
        timeline = (await strict_api.send_as("root", "GET", f"/api/v1/jobs/{job['id']}/timeline")).json()["timeline"]
        assert timeline[0]["actor"] == user


async def test_submit_with_key_from_other_site_returns_same_job(tmp_path: Path) -> None:
    people = {name: Identity("ada", Role.USER, f"ada on {name}", site=name) for name in ("north", "south")}
    async with serving(tmp_path / "koala.db", [], Rules(), users=people) as http:
        for site, status in (("north", 201), ("south", 200)):
            headers = {"Idempotency-Key": "one", "Authorization": f"Bearer {site}"}
            answer = await http.post("/api/v1/jobs", headers=headers, json=BODY)
            assert (answer.status_code, answer.json()["id"], answer.json()["home_site"]) == (status, 1, "north")


@pytest.mark.parametrize("allowed", [Permission(Role.USER), Permission(users=["ada"]), Permission(groups=["urgent"])])
async def test_submit_with_high_priority_by_allowed_user_is_accepted(tmp_path: Path, allowed: Permission) -> None:
    people = {"the-token-of-ada": Identity("ada", Role.USER, "test token", ("urgent",))}
    rules = SubmissionRules(allowed)
    async with serving(tmp_path / "koala.db", [], Rules(), users=people, submission_rules=rules) as http:
        headers = {"Authorization": "Bearer the-token-of-ada"}
        answer = await http.post("/api/v1/jobs", headers=headers, json=BODY | {"priority": "high"})
        assert answer.status_code == 201
        changed = await http.post("/api/v1/jobs/priority", headers=headers, json={"jobs": [1], "priority": "high"})
        assert changed.status_code == 200


@pytest.mark.evidence("U2")
async def test_timeline_names_actor_of_each_change(api: Api) -> None:
    await api.submit_as("ada")
    for user, action, body in (
        ("ada", "hold", None),
        ("director", "release", None),
        ("root", "cancel", {"reason": "x"}),
    ):
        assert (await api.send_as(user, "POST", f"/api/v1/jobs/1/{action}", json=body)).status_code == 200
    job = (await api.send_as("ada", "GET", "/api/v1/jobs/1")).json()
    lines = [(line["event"], line["actor"], line["reason"]) for line in job["timeline"]]
    assert lines == [
        ("submitted", "ada", ""),
        ("held", "ada", "held by ada"),
        ("released", "director", ""),
        ("cancelled", "root", "x"),
    ]
    assert job["reason"] == "x"


@pytest.mark.parametrize("action", ["cancel", "hold"])
async def test_action_on_job_of_other_user_without_reason_returns_422(api: Api, action: str) -> None:
    for _ in range(2):
        await api.submit_as("ada")
    await api.submit_as("director")
    for path, body in (
        (f"1/{action}", None),
        (f"1/{action}", {"reason": ""}),
        (f"1/{action}", {"reason": "  "}),
        (action, {"jobs": [3, 1]}),
        (action, {"jobs": [3, 1], "reason": " "}),
    ):
        answer = await api.send_as("director", "POST", f"/api/v1/jobs/{path}", json=body)
        problem = answer.json()
        assert (answer.status_code, problem["field"]) == (422, "reason"), problem
        assert "job 1 is ada's" in problem["detail"]
    jobs = (await api.send_as("root", "GET", "/api/v1/jobs")).json()["jobs"]
    assert {job["state"] for job in jobs} == {"queued"}, "own jobs of a rejected request are not changed either"
    assert (await api.send_as("director", "POST", f"/api/v1/jobs/3/{action}")).status_code == 200
    assert (await api.send_as("ada", "POST", f"/api/v1/jobs/{action}", json={"jobs": [2, 3]})).status_code == 200
    answer = await api.send_as(
        "director", "POST", f"/api/v1/jobs/{action}", json={"jobs": [1], "reason": "<b>full</b>"}
    )
    assert answer.status_code == 200
    job = (await api.send_as("ada", "GET", "/api/v1/jobs/1")).json()
    assert (job["reason"], job["timeline"][-1]["actor"]) == ("<b>full</b>", "director")


@pytest.mark.evidence("U3")
async def test_idempotency_key_is_separate_per_user(api: Api) -> None:
    key = {"Idempotency-Key": "the same"}
    answers = [
        await api.send_as(user, "POST", "/api/v1/jobs", json=BODY, headers=key) for user in ("ada", "bob", "ada", "bob")
    ]
    assert [(answer.status_code, answer.json()["id"]) for answer in answers] == [(201, 1), (201, 2), (200, 1), (200, 2)]


# Owners of files


@pytest.mark.evidence("U3")
async def test_bundle_of_other_user_is_not_found_by_digest(api: Api) -> None:
    assert (await api.send_as("ada", "POST", "/api/v1/bundles", content=BUNDLE)).status_code == 201
    path, body = f"/api/v1/bundles/{sha256_hex(BUNDLE)}", BODY | {"bundle": sha256_hex(BUNDLE)}
    missing = await api.send_as("bob", "GET", f"/api/v1/bundles/{'0' * 64}")
    foreign = await api.send_as("bob", "GET", path)
    assert foreign.status_code == missing.status_code == 404
    assert foreign.json()["detail"].replace(sha256_hex(BUNDLE), "0" * 64) == missing.json()["detail"]
    assert (await api.send_as("bob", "HEAD", path)).status_code == 404
    for submitting in ("/api/v1/jobs", "/api/v1/explain"):
        refused = await api.send_as("bob", "POST", submitting, json=body)
        assert (refused.status_code, refused.json()["field"]) == (422, "bundle")
    for user in ("ada", "director"):
        assert (await api.send_as(user, "GET", path)).status_code == 200
        assert (await api.send_as(user, "POST", "/api/v1/jobs", json=body)).status_code == 201
    # Uploading the same files reveals no bundle of another user.
    uploads = [await api.send_as("bob", "POST", "/api/v1/bundles", content=BUNDLE) for _ in range(2)]
    assert [answer.status_code for answer in uploads] == [201, 200]
    assert (await api.send_as("bob", "POST", "/api/v1/jobs", json=body)).status_code == 201


async def test_advisor_hides_applications_of_other_users(api: Api) -> None:
    async def list_applications(user: str) -> list[str]:
        answer = await api.send_as(user, "GET", "/api/v1/advisor")
        return [entry["application"] for entry in answer.json()["applications"]]

    assert await list_applications("bob") == []
    assert await list_applications("director") == ["wave"]
    await api.submit_as("bob", application="wave")
    assert await list_applications("bob") == ["wave"]
    assert await list_applications("ada") == []
    assert (await api.send_as("bob", "GET", "/api/v1/advisor/record")).json() == {"record": []}
