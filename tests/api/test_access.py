"""Who may do what: every route as everybody, others' jobs, and what is whose."""

import json
import re
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
from koalapy.daemon.jobs.jobs import JobRecord
from koalapy.model.field import describe_fields
from koalapy.model.identity import HighPriority, Identity, Role
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile
from koalapy.model.users import Accounts, User, Users
from koalapy.scheduler.rules import Rules
from koalapy.validation.permissions import SubmissionRules
from tests.daemon.archives import GOOD, archive_of
from tests.daemon.sites import Sites, sha
from tests.model.specs import values
from tests.serving import AGENT_TOKENS, NO_PAGE, URL, serving

Json = dict[str, Any]
DOC = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
PEOPLE = {
    "ada": Identity("ada", Role.USER, "a test"),
    "bob": Identity("bob", Role.USER, "a test"),
    "director": Identity("director", Role.OPERATOR, "a test"),
    "root": Identity("root", Role.ADMIN, "a test"),
}
TOKENS = {f"the-token-of-{name}": who for name, who in PEOPLE.items()}
WHO = ["nobody", "agent", *PEOPLE]
MAY = {
    "public": set(WHO),
    "agents": {"agent"},
    "user": {"ada", "bob", "director", "root"},
    "owner": {"ada", "director", "root"},
    "operator": {"director", "root"},
    "admin": {"root"},
}
"""Who may do what the page says is for whom; the job is ada's."""
SECRET = "sesame"
"""In whatever ada says of her job that is nobody else's business."""
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
    "add_replica": {"name": "m", "cluster": "north", "path": "/m"},
    "start_background": {"nodes": 1, "seconds": 1},
}
QUERIES = {"remove_replicas": {"name": "m"}}


class Api:
    """A daemon, asked as one of several people."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._asked = 0
        self.app: FastAPI = http._transport.app  # type: ignore[attr-defined]

    def operations(self) -> Iterator[tuple[str, str, str]]:
        """Every route there is: its operation (or name), method and path."""
        for route in _routes(self.app):
            for method in sorted(route.methods):
                yield getattr(route, "operation_id", None) or route.name, method, route.path

    async def ask(self, who: str, method: str, path: str, **more: Any) -> httpx2.Response:
        token = {"nobody": None, "agent": AGENT_TOKENS["north"]}.get(who, f"the-token-of-{who}")
        headers = {**NO_PAGE, **more.pop("headers", {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        # From an address of its own each time: who shows many tokens that nobody has is sent away.
        self._asked += 1
        transport = httpx2.ASGITransport(self.app, client=(f"192.0.2.{self._asked % 250}", 1))
        async with httpx2.AsyncClient(transport=transport, base_url=URL) as http:
            return await http.request(method, path, headers=headers, **more)

    async def submit(self, who: str, **changes: Any) -> Json:
        answer = await self.ask(who, "POST", "/api/v1/jobs", json=BODY | changes)
        assert answer.status_code == 201, answer.text
        found: Json = answer.json()
        return found


def _routes(app: FastAPI) -> Iterator[Any]:
    """Those of HTTP, as they are effective."""
    for route in app.routes:
        included = getattr(route, "effective_route_contexts", None)
        for each in included() if included else [route]:
            if getattr(each, "methods", None):
                yield each


@asynccontextmanager
async def opened(path: Path, **more: Any) -> AsyncIterator[Api]:
    sites = Sites({("north", "/m"): b"mesh"})
    async with serving(path / "koala.db", [], Rules(), sites, people=TOKENS, of_clusters=True, **more) as http:
        yield Api(http)


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with opened(tmp_path) as found:
        yield found


# Every route as everybody


def test_the_page_tells_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", DOC, re.MULTILINE)
    assert dict(rows) == {operation: str(least) for operation, least in ACCESS.items()}
    assert len(rows) == len(ACCESS)


@pytest.mark.evidence("U1", "C3")
@pytest.mark.parametrize("who", WHO)
async def test_each_route_lets_in_whom_the_page_says(api: Api, who: str) -> None:
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", DOC, re.MULTILINE))
    await api.submit("ada")
    assert (await api.ask("ada", "POST", "/api/v1/jobs/1/cancel")).status_code == 200
    assert (await api.ask("ada", "POST", "/api/v1/bundles", content=BUNDLE)).status_code == 201
    asked = 0
    for operation, method, path in api.operations():
        url = path.format(
            job=1, name="north", one="north", other="south", cluster="north", bundle=sha(BUNDLE), token="1.1.0"
        )
        is_agents = path.startswith("/api/v1/agents/")
        for_whom = "agents" if is_agents else told.get(operation, "admin")
        more = {"json": BODIES.get(operation)} if method in ("POST", "PUT") else {}
        answer = await api.ask(who, method, url, params=QUERIES.get(operation), **more)
        where = f"{who} {method} {url}: {answer.status_code} {answer.text[:300]}"
        if who in MAY[for_whom]:
            forbidden = operation in ("start_background", "stop_background")  # by the daemon's own setting
            assert answer.status_code != 401, where
            assert answer.status_code != 403 or forbidden, where
            assert answer.status_code < 500, where
        else:
            refused = 403 if who in PEOPLE and not is_agents else 401
            assert answer.status_code == refused, where
            assert answer.headers["content-type"] == "application/problem+json", where
            assert SECRET not in answer.text, where
        asked += 1
    assert asked >= 40


@pytest.mark.evidence("C3")
async def test_a_route_that_is_not_in_the_table_is_for_administrators_only(api: Api) -> None:
    @api.app.get("/api/v1/new")
    async def new() -> Json:
        return {}

    found = {who: (await api.ask(who, "GET", "/api/v1/new")).status_code for who in WHO}
    assert found == {"nobody": 401, "agent": 401, "ada": 403, "bob": 403, "director": 403, "root": 200}


async def test_every_route_is_in_the_table(api: Api) -> None:
    there = {operation for operation, _, path in api.operations() if access_of(path, operation) != "agents"}
    assert there <= ACCESS.keys()


# Others' jobs


@pytest.mark.evidence("U1")
async def test_of_others_jobs_users_see_load_and_queue_and_nothing_of_what_runs(api: Api) -> None:
    job = await api.submit("ada", walltime=60)
    for path in ("/api/v1/jobs", "/api/v1/jobs/1", "/api/v1/jobs/1?wait=0.01"):
        answer = await api.ask("bob", "GET", path)
        assert answer.status_code == 200
        assert SECRET not in answer.text, path
        assert "ada" not in answer.text, path
        seen = answer.json()
        seen = seen["jobs"][0] if "jobs" in seen else seen
        assert seen["redacted"]
        told = ("id", "state", "request", "priority", "home_site", "walltime", "submitted_at")
        assert {name: seen[name] for name in told} == {name: job[name] for name in told}
    for who in ("ada", "director", "root"):
        whole = (await api.ask(who, "GET", "/api/v1/jobs/1")).json()
        assert (whole["owner"], whole["redacted"], whole["command"]) == ("ada", False, BODY["command"])
        assert whole["timeline"][0]["actor"] == "ada"


PLAIN = JobSpec(FlexibleRequest(1), ("true",))


@pytest.mark.parametrize("name", [name for name, each in describe_fields(JobSpec).items() if name != "request"])
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_field_of_a_job_is_hidden_from_others_unless_it_is_listed(name: str, data: Any) -> None:
    spec = replace(PLAIN, **{name: data.draw(values(describe_fields(JobSpec)[name].type))})
    if name == "owner" and spec.owner == "bob":
        return
    changed = _seen(spec) != _seen(PLAIN)
    assert not changed or name in PUBLIC_FIELDS[JobSpec]


def test_nothing_of_an_attempt_is_told_but_where_and_how_large() -> None:
    own = ComponentRequest(2, "north", (SECRET,), (("A", SECRET),), SECRET, (InputFile(SECRET),))
    part = Component(
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
    attempt = Attempt(1, (part,), 100.0, exit_code=77, end_reason=SECRET, nonce=SECRET)
    spec = replace(PLAIN, request=FixedRequest((own,)))
    job = Job(1, spec, 99.0, JobState.RUNNING, SECRET, 1, attempt, exit_code=77)
    seen = as_json(view_for(PEOPLE["bob"], JobRecord(job, SECRET)))
    assert SECRET not in json.dumps(seen)
    assert "77" not in json.dumps(seen)
    assert [(c["cluster"], c["size"], c["state"]) for c in seen["components"]] == [("north", 2, "running")]
    assert seen["request"] == {"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}


def _seen(spec: JobSpec) -> Json:
    found: Json = as_json(view_for(PEOPLE["bob"], JobRecord(Job(1, spec, 0.0), "why")))
    return found


def test_the_daemons_own_jobs_are_nobodys_whatever_they_are_called() -> None:
    called = Identity("koala", Role.USER, "a test")
    spec = replace(PLAIN, owner="koala", internal=True)
    assert as_json(view_for(called, JobRecord(Job(1, spec, 0.0), "")))["redacted"]


async def test_names_of_others_are_not_found_by_asking_or_counting(api: Api) -> None:
    await api.submit("ada")
    await api.submit("bob", name="mine")

    async def ids(who: str, **query: Any) -> list[int]:
        answer = await api.ask(who, "GET", "/api/v1/jobs", params=query)
        assert answer.status_code == 200, answer.text
        return [job["id"] for job in answer.json()["jobs"]]

    assert await ids("bob") == [2, 1]
    assert await ids("bob", name=BODY["name"]) == []
    assert await ids("bob", name="mine") == await ids("bob", mine=True) == await ids("bob", owner="bob") == [2]
    assert await ids("director", name=BODY["name"]) == await ids("director", owner="ada") == [1]
    refused = await api.ask("bob", "GET", "/api/v1/jobs", params={"owner": "ada"})
    there_is_none = await api.ask("bob", "GET", "/api/v1/jobs", params={"owner": "eve"})
    assert [answer.status_code for answer in (refused, there_is_none)] == [403, 403]
    assert refused.json()["field"] == "owner"


@pytest.mark.parametrize("ident", ["1", "01", "+1", "1.0", "%201", "1%20", "1_", "0_1", "1e0", "１"])
async def test_no_way_to_write_a_number_leads_to_anothers_output(api: Api, ident: str) -> None:
    await api.submit("ada")
    answer = await api.ask("bob", "GET", f"/api/v1/jobs/{ident}/logs")
    assert answer.status_code in (403, 404, 422), answer.text


@pytest.mark.evidence("U1")
async def test_of_many_jobs_each_is_cancelled_by_who_may(api: Api) -> None:
    await api.submit("ada")
    await api.submit("bob")
    done = (await api.ask("bob", "POST", "/api/v1/jobs/cancel", json={"jobs": [1, 2, 3]})).json()["jobs"]
    assert [one["problem"] and one["problem"]["status"] for one in done] == [403, None, 404]
    assert (await api.ask("ada", "GET", "/api/v1/jobs/1")).json()["state"] == "queued"
    over = (await api.ask("ada", "POST", "/api/v1/jobs/cancel", json={"jobs": [2]})).json()["jobs"]
    assert over[0]["problem"]["status"] == 403
    assert over[0]["state"] is None


@pytest.mark.parametrize(("action", "more"), [("hold", {}), ("release", {}), ("priority", {"priority": "low"})])
async def test_of_many_jobs_each_is_changed_by_who_may(api: Api, action: str, more: Json) -> None:
    await api.submit("ada")
    await api.submit("bob")
    order = {"jobs": [2, 1, 3, 2], **more}
    answer = await api.ask("bob", "POST", f"/api/v1/jobs/{action}", json=order)
    done = answer.json()["jobs"]
    assert [(one["job"], one["problem"] and one["problem"]["status"]) for one in done] == [
        (2, None),
        (1, 403),
        (3, 404),
    ]
    assert (await api.ask("ada", "GET", "/api/v1/jobs/1")).json()["timeline"][1:] == []
    again = await api.ask("director", "POST", f"/api/v1/jobs/{action}", json=order)
    assert [one["problem"] and one["problem"]["status"] for one in again.json()["jobs"]] == [None, None, 404]


async def test_jobs_that_wait_are_given_another_priority(api: Api) -> None:
    for _ in range(2):
        await api.submit("ada")
    await api.ask("ada", "POST", "/api/v1/jobs/cancel", json={"jobs": [2]})
    order = {"jobs": [1, 2], "priority": "high", "reason": "a deadline"}
    first, second = (await api.ask("director", "POST", "/api/v1/jobs/priority", json=order)).json()["jobs"]
    assert first == {"job": 1, "state": "queued", "priority": "high", "problem": None}
    assert (second["priority"], second["problem"]["status"]) == (None, 409)
    shown = (await api.ask("ada", "GET", "/api/v1/jobs/1")).json()
    assert shown["priority"] == "high"
    last = shown["timeline"][-1]
    assert (last["event"], last["actor"], last["reason"]) == ("priority", "director", "low to high: a deadline")
    assert "a deadline" in str((await api.ask("ada", "GET", "/api/v1/jobs/1/explain")).json()["reasons"])


async def test_set_priority_high_by_user_returns_403(tmp_path: Path) -> None:
    async with opened(tmp_path) as api:
        await api.submit("ada")
        order = {"jobs": [1], "priority": "high"}
        refused = await api.ask("ada", "POST", "/api/v1/jobs/priority", json=order)
        assert (refused.status_code, refused.json()["field"]) == (403, "priority")
        assert (await api.ask("ada", "GET", "/api/v1/jobs/1")).json()["priority"] == "low"
        await api.ask("director", "POST", "/api/v1/jobs/priority", json=order)
        assert (await api.ask("ada", "GET", "/api/v1/jobs/1")).json()["priority"] == "high"
        lower = await api.ask("ada", "POST", "/api/v1/jobs/priority", json=order | {"priority": "low"})
        assert lower.json()["jobs"][0]["priority"] == "low"


# In whose name


@pytest.mark.evidence("U2")
async def test_a_job_is_whose_who_submits_it_and_operators_submit_for_others(api: Api) -> None:
    assert (await api.submit("ada"))["owner"] == "ada"
    assert (await api.submit("ada", owner="ada"))["owner"] == "ada"
    for path in ("/api/v1/jobs", "/api/v1/explain"):
        answer = await api.ask("ada", "POST", path, json=BODY | {"owner": "root"})
        assert (answer.status_code, answer.json()["field"]) == (403, "owner")
        assert "leave it out" in answer.json()["hint"]
    assert (await api.submit("director", owner="ada"))["owner"] == "ada"
    shown = (await api.ask("ada", "GET", "/api/v1/jobs/3")).json()
    assert shown["timeline"][0]["actor"] == "director"


async def test_submit_for_administrator_by_operator_returns_403(tmp_path: Path) -> None:
    """Such a job would run as the administrator's account, and find the administrator's credentials there."""
    roles = {"chief": Role.ADMIN, "other": Role.OPERATOR}
    rules = SubmissionRules(role_of=lambda user: roles.get(user, Role.USER))
    async with opened(tmp_path, submission_rules=rules) as api:
        for path in ("/api/v1/jobs", "/api/v1/explain"):
            refused = await api.ask("director", "POST", path, json=BODY | {"owner": "chief"})
            assert (refused.status_code, refused.json()["field"]) == (403, "owner")
            assert refused.json()["detail"] == "owner is chief, whose role is admin or may be, and yours is operator"
        assert (await api.submit("director", owner="other"))["owner"] == "other"
        assert (await api.submit("root", owner="chief"))["owner"] == "chief"


async def test_a_job_is_of_its_owners_site_unless_another_of_theirs_is_said(tmp_path: Path) -> None:
    users = Users({"ada": User({"north": "ada", "south": "al"}, home="south"), "director": User(role=Role.OPERATOR)})
    async with opened(tmp_path, accounts=Accounts(users)) as api:
        homes = [(await api.submit("ada", **said))["home_site"] for said in ({}, {"home_site": "north"})]
        assert homes == ["south", "north"]
        assert (await api.submit("bob"))["home_site"] == ""
        assert (await api.submit("director", owner="ada"))["home_site"] == "south"
        for path in ("/api/v1/jobs", "/api/v1/explain"):
            unknown = await api.ask("bob", "POST", path, json=BODY | {"home_site": "west"})
            assert (unknown.status_code, unknown.json()["field"]) == (403, "home_site")
            assert "users.bob.home" in unknown.json()["hint"]
            known = await api.ask("bob", "POST", path, json=BODY | {"home_site": "north"})
            assert (known.status_code, known.json()["field"]) == (403, "home_site"), "bob is no user of north"
            forbidden = await api.ask("ada", "POST", path, json=BODY | {"home_site": "west"})
            assert (forbidden.status_code, forbidden.json()["field"]) == (403, "home_site")


async def test_a_submission_is_known_again_though_its_site_is_not_the_one_of_before(tmp_path: Path) -> None:
    people = {name: Identity("ada", Role.USER, f"ada on {name}", site=name) for name in ("north", "south")}
    async with serving(tmp_path / "koala.db", [], Rules(), people=people) as http:
        for site, status in (("north", 201), ("south", 200)):
            shown = {"Idempotency-Key": "one", "Authorization": f"Bearer {site}"}
            answer = await http.post("/api/v1/jobs", headers=shown, json=BODY)
            assert (answer.status_code, answer.json()["id"], answer.json()["home_site"]) == (status, 1, "north")


async def test_submit_for_name_of_daemon_by_another_administrator_returns_403(tmp_path: Path) -> None:
    async with opened(tmp_path, submission_rules=SubmissionRules(reserved={"koala"})) as api:
        for who in ("director", "root"):
            refused = await api.ask(who, "POST", "/api/v1/jobs", json=BODY | {"owner": "koala"})
            assert (refused.status_code, refused.json()["field"]) == (403, "owner")
            assert "leave it out" in refused.json()["hint"]


async def test_submit_with_high_priority_by_user_returns_403(tmp_path: Path) -> None:
    async with opened(tmp_path) as api:
        for path in ("/api/v1/jobs", "/api/v1/explain", "/api/v1/forecast"):
            answer = await api.ask("ada", "POST", path, json=BODY | {"priority": "high"})
            assert (answer.status_code, answer.json()["field"]) == (403, "priority")
            assert "priority low" in answer.json()["hint"]
            assert "high_priority" in answer.json()["hint"]
        assert (await api.submit("ada", priority="low"))["priority"] == "low"
        assert (await api.submit("director", priority="high", owner="ada"))["priority"] == "high"


@pytest.mark.parametrize(
    "allowed", [HighPriority(Role.USER), HighPriority(users=["ada"]), HighPriority(groups=["urgent"])]
)
async def test_submit_with_high_priority_by_allowed_user_is_accepted(tmp_path: Path, allowed: HighPriority) -> None:
    people = {"the-token-of-ada": Identity("ada", Role.USER, "a test", ("urgent",))}
    rules = SubmissionRules(allowed)
    async with serving(tmp_path / "koala.db", [], Rules(), people=people, submission_rules=rules) as http:
        shown = {"Authorization": "Bearer the-token-of-ada"}
        answer = await http.post("/api/v1/jobs", headers=shown, json=BODY | {"priority": "high"})
        assert answer.status_code == 201
        raised = await http.post("/api/v1/jobs/priority", headers=shown, json={"jobs": [1], "priority": "high"})
        assert raised.status_code == 200


@pytest.mark.evidence("U2")
async def test_what_was_done_names_who_did_it(api: Api) -> None:
    await api.submit("ada")
    for who, action in (("ada", "hold"), ("director", "release"), ("root", "cancel")):
        assert (await api.ask(who, "POST", f"/api/v1/jobs/1/{action}")).status_code == 200
    shown = (await api.ask("ada", "GET", "/api/v1/jobs/1")).json()
    lines = [(line["event"], line["actor"], line["reason"]) for line in shown["timeline"]]
    assert lines == [
        ("submitted", "ada", ""),
        ("held", "ada", "held by ada"),
        ("released", "director", ""),
        ("cancelled", "root", "cancelled by root"),
    ]
    assert shown["reason"] == "cancelled by root"


@pytest.mark.evidence("U3")
async def test_an_idempotency_key_is_its_users_own(api: Api) -> None:
    key = {"Idempotency-Key": "the same"}
    found = [await api.ask(who, "POST", "/api/v1/jobs", json=BODY, headers=key) for who in ("ada", "bob", "ada", "bob")]
    assert [(answer.status_code, answer.json()["id"]) for answer in found] == [(201, 1), (201, 2), (200, 1), (200, 2)]


# Whose files


@pytest.mark.evidence("U3")
async def test_to_know_a_bundles_digest_is_not_to_have_it(api: Api) -> None:
    assert (await api.ask("ada", "POST", "/api/v1/bundles", content=BUNDLE)).status_code == 201
    path, body = f"/api/v1/bundles/{sha(BUNDLE)}", BODY | {"bundle": sha(BUNDLE)}
    none = await api.ask("bob", "GET", f"/api/v1/bundles/{'0' * 64}")
    found = await api.ask("bob", "GET", path)
    assert found.status_code == none.status_code == 404
    assert found.json()["detail"].replace(sha(BUNDLE), "0" * 64) == none.json()["detail"]
    assert (await api.ask("bob", "HEAD", path)).status_code == 404
    for submitting in ("/api/v1/jobs", "/api/v1/explain"):
        refused = await api.ask("bob", "POST", submitting, json=body)
        assert (refused.status_code, refused.json()["field"]) == (422, "bundle")
    for who in ("ada", "director"):
        assert (await api.ask(who, "GET", path)).status_code == 200
        assert (await api.ask(who, "POST", "/api/v1/jobs", json=body)).status_code == 201
    # Who has the files himself learns nothing by sending them.
    sent = [await api.ask("bob", "POST", "/api/v1/bundles", content=BUNDLE) for _ in range(2)]
    assert [answer.status_code for answer in sent] == [201, 200]
    assert (await api.ask("bob", "POST", "/api/v1/jobs", json=body)).status_code == 201


async def test_what_applications_others_run_is_not_told(api: Api) -> None:
    async def names(who: str) -> list[str]:
        answer = await api.ask(who, "GET", "/api/v1/advisor")
        return [found["application"] for found in answer.json()["applications"]]

    assert await names("bob") == []
    assert await names("director") == ["wave"]
    await api.submit("bob", application="wave")
    assert await names("bob") == ["wave"]
    assert await names("ada") == []
    assert (await api.ask("bob", "GET", "/api/v1/advisor/record")).json() == {"record": [], "coverage": []}
