"""Requests generated from the OpenAPI document, sent by every role and without authentication.

No answer is a server error, undeclared, or beyond the permissions of the role.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from koalapy.api.access import ACCESS, access_of
from koalapy.config.settings import Settings
from koalapy.model.identity import Role
from koalapy.model.job import ComponentState
from koalapy.system.local_token import TOKEN_FILE
from tests.api.test_conformance import replace_unknown_values
from tests.daemon.archives import GOOD, archive_of
from tests.daemon.sites import sha256_hex
from tests.fuzz import attacked_grid
from tests.fuzz.campaign import Figures, run_campaign
from tests.fuzz.clusters import HonestAgent, connected_agent, wait_until
from tests.fuzz.daemon import WatchedDaemon, admin_client, running_daemon
from tests.serving import CSRF_HEADER

pytestmark = pytest.mark.processes

EXAMPLES = 60
SECRET = "sesame-4711"
"""A text in all private fields of ada's job."""
ADAS_JOB_ID, BOBS_JOB_ID = 1, 2
"""The jobs of ada and bob."""
ADAS_JOB = {
    **attacked_grid.job_on("north"),
    "command": ["run", SECRET],
    "environment": {"KEY": SECRET},
    "workdir": f"/home/{SECRET}",
    "output": f"/home/{SECRET}/out",
    "collect": [f"{SECRET}/*"],
    "name": f"{SECRET}-name",
}
BOBS_JOB = attacked_grid.job_on("east") | {"command": ["true"]}
ROLES = {"ada": Role.USER, "bob": Role.USER, "director": Role.OPERATOR, "chief": Role.ADMIN}
TOKENS = {who: f"the-token-of-{who}-for-tests" for who in ROLES}
ROLES_BY_RANK = [Role.USER, Role.OPERATOR, Role.ADMIN]
UNAUTHENTICATED = ("nobody", "agent")
CHECK_NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)
SKIPPED_OPERATIONS = {"follow_grid", "follow_job"}
"""Operations with endless answers."""
MAX_URL_LENGTH = 60_000
"""Characters of a URL that the HTTP parser accepts in any case."""
BUNDLE = archive_of(GOOD)
REJECTION_CODES = {401, 403, 404, 405, 421, 429}


class ServedDaemon:
    """A daemon in a thread with two honest clusters, a job of ada and a job of bob."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ready = threading.Event()
        self._failed: list[BaseException] = []
        self.url = ""
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(120)
        assert not self._failed, self._failed

    def own_token(self) -> str:
        return (self._directory / TOKEN_FILE).read_text().strip()

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        assert not self._failed, self._failed

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            self._failed.append(error)
            self._ready.set()

    async def _serve(self) -> None:
        tokens = [{"token": TOKENS[who], "user": who, "role": role} for who, role in ROLES.items()]
        values = attacked_grid.settings().model_dump() | {"tokens": tokens}
        settings = Settings.model_validate(values | {"clusters": attacked_grid.settings().clusters})
        async with running_daemon(settings, self._directory) as daemon, admin_client(daemon, self._directory) as user:
            north, east = HonestAgent("north"), HonestAgent("east")
            for agent in (north, east):
                agent.limits |= dict.fromkeys(range(3, 10**4), ComponentState.RUNNING)
            async with connected_agent(daemon, north), connected_agent(daemon, east):
                await wait_until(
                    daemon, lambda: all(daemon.queries.grid[name].nodes.reported for name in attacked_grid.HONEST)
                )
                await self._submit(daemon, user)
                listener = socket.create_server(("127.0.0.1", 0))
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                self._server = uvicorn.Server(uvicorn.Config(daemon.app, log_level="error", lifespan="off"))
                self._ready.set()
                await self._server.serve([listener])

    async def _submit(self, daemon: WatchedDaemon, user: Any) -> None:
        for who, job in (("ada", ADAS_JOB), ("bob", BOBS_JOB)):
            headers = {"Authorization": f"Bearer {TOKENS[who]}", **CSRF_HEADER}
            answer = await user.post("/api/v1/bundles", content=BUNDLE, headers=headers)
            assert answer.status_code in (200, 201), answer.text
            answer = await user.post("/api/v1/jobs", json=job, headers=headers)
            assert answer.status_code == 201, answer.text
        await wait_until(daemon, lambda: not daemon.queries.jobs())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDaemon]:
    daemon = ServedDaemon(tmp_path_factory.mktemp("roles"))
    daemon.start()
    yield daemon
    daemon.end()


def make_headers(user: str) -> dict[str, str]:
    token = {"agent": attacked_grid.TOKENS["north"], "nobody": ""}.get(user) or TOKENS.get(user, "")
    return {**CSRF_HEADER, **({"Authorization": f"Bearer {token}"} if token else {})}


def is_allowed(user: str, path: str, name: str, job: object) -> bool | None:
    """Return whether the access table allows an operation, or None if that depends on the request."""
    access = access_of(path, name)
    if access == "public":
        return True
    if user in UNAUTHENTICATED:
        return False
    role = ROLES[user]
    if isinstance(access, Role):
        return None if ROLES_BY_RANK.index(role) >= ROLES_BY_RANK.index(access) else False
    owner = {str(ADAS_JOB_ID): "ada", str(BOBS_JOB_ID): "bob"}.get(str(job))
    return None if role is not Role.USER or owner in (user, None) else False


def check_answer(user: str, operation: Any, case: Any, answer: Any) -> None:
    name = operation.definition.raw["operationId"]
    job = (case.path_parameters or {}).get("job")
    allowed = is_allowed(user, operation.path, name, job)
    if allowed is False:
        assert answer.status_code >= 400, f"{user} may not {name}, and got {answer.status_code}"
    if user in UNAUTHENTICATED and allowed is False:
        assert answer.status_code in REJECTION_CODES | {400, 408, 413, 422}, f"{user} got {answer.status_code}"
    text = answer.text or ""
    if user in (*UNAUTHENTICATED, "bob"):
        assert SECRET not in text, f"{user} received ada's data by {name}"
    for token in (*TOKENS.values(), *attacked_grid.TOKENS.values()):
        assert token not in text, f"{name} reveals a token"
    if name == "create_token" and answer.status_code < 300:
        token_fields = answer.json()
        assert ROLES_BY_RANK.index(Role(token_fields["role"])) <= ROLES_BY_RANK.index(ROLES[user]), (
            f"{user} created a token of a higher role: {token_fields['role']}"
        )


def insert_known_values(case: Any, draw: Any, user: str) -> None:
    """Insert existing names and ids where the schema cannot know them."""
    replace_unknown_values(case)
    path_parameters = case.path_parameters or {}
    if "job" in path_parameters:
        path_parameters["job"] = draw(st.sampled_from([ADAS_JOB_ID, BOBS_JOB_ID]))
    if "bundle" in path_parameters:
        path_parameters["bundle"] = sha256_hex(BUNDLE)
    if isinstance(case.body, dict) and "owner" in case.body:
        case.body["owner"] = draw(st.sampled_from(["ada", "bob", user]))


@st.composite
def requests(draw: st.DrawFn, operations: list[Any]) -> tuple[str, Any, Any]:
    user = draw(st.sampled_from([*UNAUTHENTICATED, *ROLES]))
    operation = draw(st.sampled_from(operations))
    sensible = draw(st.booleans())
    mode = GenerationMode.POSITIVE if sensible else GenerationMode.NEGATIVE
    if not (operation.body or operation.query or operation.path_parameters):
        mode = GenerationMode.POSITIVE  # these cannot be invalid
    case = draw(operation.as_strategy(generation_mode=mode))
    if sensible:
        insert_known_values(case, draw, user)
    return user, operation, case


def send_request(request: tuple[str, Any, Any], figures: Figures) -> None:
    user, operation, case = request
    answer = case.call(headers=make_headers(user), timeout=120)
    figures.counts["requests"] += 1
    figures.counts[f"as {user}"] += 1
    figures.counts["rate limited"] += answer.status_code == 429
    check_answer(user, operation, case, answer)
    checks = set(CHECK_NAMES)
    if operation.path.endswith("/readyz"):
        checks.remove("not_a_server_error")  # it answers 503, since an agent is not connected here
    if len(answer.request.url) > MAX_URL_LENGTH:
        checks -= {"content_type_conformance", "response_schema_conformance"}  # the HTTP parser rejects it as text
    excluded_checks = [CHECKS.get_one(name) for name in CHECKS.get_all_names() if name not in checks]
    case.validate_response(answer, excluded_checks=excluded_checks)


@pytest.mark.evidence("U17")
def test_api_answers_each_role_by_its_permissions(served: ServedDaemon) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", timeout=120)
    daemons_own = {"Authorization": f"Bearer {served.own_token()}"}
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [
        operation for operation in operations if operation.definition.raw["operationId"] not in SKIPPED_OPERATIONS
    ]
    assert len({operation.definition.raw["operationId"] for operation in operations} & ACCESS.keys()) > 30
    job_before = read_adas_job(schema, daemons_own)
    run_campaign("API roles", EXAMPLES, requests(operations), send_request)
    assert read_adas_job(schema, daemons_own) == job_before


def read_adas_job(schema: Any, daemons_own: dict[str, str]) -> Any:
    """Return ada's job, read with the daemon's token, which is exempt from rate limits."""
    case = schema["/api/v1/jobs/{job}"]["GET"].Case(path_parameters={"job": ADAS_JOB_ID})
    answer = case.call(headers=daemons_own, timeout=120)
    assert answer.status_code == 200
    return json.loads(answer.text)
