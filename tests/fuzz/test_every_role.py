"""Requests made from the API's own document, asked by each who may come in, and who may not: no error of the daemon's,
no answer that is not declared, and none that is not theirs."""

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
from koalapy.system.local_token import TOKEN_FILE
from tests.api.test_conformance import replace_unknown_values
from tests.daemon.archives import GOOD, archive_of
from tests.daemon.sites import sha
from tests.fuzz import attacked
from tests.fuzz.campaign import Figures, play
from tests.fuzz.clusters import Honest, connected, when
from tests.fuzz.daemon import Watched, administrator, serving
from tests.serving import CSRF_HEADER

pytestmark = pytest.mark.processes

EXAMPLES = 60
SECRET = "sesame-4711"
"""Stands wherever ada says what is nobody else's business."""
ADAS, BOBS = 1, 2
"""Their jobs."""
HERS = {
    **attacked.on("north"),
    "command": ["run", SECRET],
    "environment": {"KEY": SECRET},
    "workdir": f"/home/{SECRET}",
    "output": f"/home/{SECRET}/out",
    "collect": [f"{SECRET}/*"],
    "name": f"{SECRET}-name",
}
HIS = attacked.on("east") | {"command": ["true"]}
ROLES = {"ada": Role.USER, "bob": Role.USER, "director": Role.OPERATOR, "chief": Role.ADMIN}
TOKENS = {who: f"the-token-of-{who}-for-tests" for who in ROLES}
RANKS = [Role.USER, Role.OPERATOR, Role.ADMIN]
STRANGERS = ("nobody", "agent")
LOOKED_AT = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)
UNDONE = {"follow_grid", "follow_job"}
"""What goes on until a job is over is asked of none that is not, and what never ends of nobody."""
BUNDLE = archive_of(GOOD)
TURNED_AWAY = {401, 403, 404, 405, 421, 429}


class Served:
    """A daemon with two honest clusters on a port of its own, in a thread, with a job of ada's and one of bob's."""

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
        except BaseException as error:  # noqa: BLE001 - told where it is waited for
            self._failed.append(error)
            self._ready.set()

    async def _serve(self) -> None:
        people = [{"token": TOKENS[who], "user": who, "role": role} for who, role in ROLES.items()]
        told = attacked.settings().model_dump() | {"tokens": people}
        settings = Settings.model_validate(told | {"clusters": attacked.settings().clusters})
        async with serving(settings, self._directory) as daemon, administrator(daemon, self._directory) as user:
            north, east = Honest("north"), Honest("east")
            for agent in (north, east):
                agent.limits |= dict.fromkeys(range(3, 10**4), attacked.ComponentState.RUNNING)
            async with connected(daemon, north), connected(daemon, east):
                await when(daemon, lambda: all(daemon.queries.grid[name].reported for name in attacked.HONEST))
                await self._submit(daemon, user)
                listener = socket.create_server(("127.0.0.1", 0))
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                self._server = uvicorn.Server(uvicorn.Config(daemon.app, log_level="error", lifespan="off"))
                self._ready.set()
                await self._server.serve([listener])

    async def _submit(self, daemon: Watched, user: Any) -> None:
        for who, job in (("ada", HERS), ("bob", HIS)):
            headers = {"Authorization": f"Bearer {TOKENS[who]}", **CSRF_HEADER}
            answer = await user.post("/api/v1/bundles", content=BUNDLE, headers=headers)
            assert answer.status_code in (200, 201), answer.text
            answer = await user.post("/api/v1/jobs", json=job, headers=headers)
            assert answer.status_code == 201, answer.text
        await when(daemon, lambda: not daemon.queries.jobs())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("roles"))
    made.start()
    yield made
    made.end()


def headers_of(who: str) -> dict[str, str]:
    shown = {"agent": attacked.TOKENS["north"], "nobody": ""}.get(who) or TOKENS.get(who, "")
    return {**CSRF_HEADER, **({"Authorization": f"Bearer {shown}"} if shown else {})}


def may(who: str, path: str, name: str, job: object) -> bool | None:
    """Whether somebody may do something, by the table; None where what is asked for says so."""
    access = access_of(path, name)
    if access == "public":
        return True
    if who in STRANGERS:
        return False
    role = ROLES[who]
    if isinstance(access, Role):
        return None if RANKS.index(role) >= RANKS.index(access) else False
    owner = {str(ADAS): "ada", str(BOBS): "bob"}.get(str(job))
    return None if role is not Role.USER or owner in (who, None) else False


def check(who: str, operation: Any, case: Any, answer: Any) -> None:
    name = operation.definition.raw["operationId"]
    job = (case.path_parameters or {}).get("job")
    allowed = may(who, operation.path, name, job)
    if allowed is False:
        assert answer.status_code >= 400, f"{who} may not {name}, and got {answer.status_code}"
    if who in STRANGERS and allowed is False:
        assert answer.status_code in TURNED_AWAY | {400, 408, 413, 422}, f"{who} got {answer.status_code}"
    text = answer.text or ""
    if who in (*STRANGERS, "bob"):
        assert SECRET not in text, f"{who} was told of what is ada's by {name}"
    for token in (*TOKENS.values(), *attacked.TOKENS.values()):
        assert token not in text, f"{name} tells a token"
    if name == "create_token" and answer.status_code < 300:
        made = answer.json()
        assert RANKS.index(Role(made["role"])) <= RANKS.index(ROLES[who]), (
            f"{who} made a token that may do more: {made['role']}"
        )


def acceptable(case: Any, draw: Any, who: str) -> None:
    """Names in place of what no schema can know."""
    replace_unknown_values(case)
    where = case.path_parameters or {}
    if "job" in where:
        where["job"] = draw(st.sampled_from([ADAS, BOBS]))
    if "bundle" in where:
        where["bundle"] = sha(BUNDLE)
    if isinstance(case.body, dict) and "owner" in case.body:
        case.body["owner"] = draw(st.sampled_from(["ada", "bob", who]))


@st.composite
def requests(draw: st.DrawFn, operations: list[Any]) -> tuple[str, Any, Any]:
    who = draw(st.sampled_from([*STRANGERS, *ROLES]))
    operation = draw(st.sampled_from(operations))
    sensible = draw(st.booleans())
    mode = GenerationMode.POSITIVE if sensible else GenerationMode.NEGATIVE
    if not (operation.body or operation.query or operation.path_parameters):
        mode = GenerationMode.POSITIVE  # nothing can be wrong with these
    case = draw(operation.as_strategy(generation_mode=mode))
    if sensible:
        acceptable(case, draw, who)
    return who, operation, case


def ask(drawn: tuple[str, Any, Any], figures: Figures) -> None:
    who, operation, case = drawn
    answer = case.call(headers=headers_of(who), timeout=120)
    figures.counts["requests"] += 1
    figures.counts[f"as {who}"] += 1
    figures.counts["told to wait"] += answer.status_code == 429
    check(who, operation, case, answer)
    looked_at = set(LOOKED_AT)
    if operation.path.endswith("/readyz"):
        looked_at.remove("not_a_server_error")  # 503 is its way to say no: a cluster's agent is away here
    unlooked = [CHECKS.get_one(name) for name in CHECKS.get_all_names() if name not in looked_at]
    case.validate_response(answer, excluded_checks=unlooked)


@pytest.mark.evidence("U17")
def test_every_role_gets_what_it_may(served: Served) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", timeout=120)
    daemons_own = {"Authorization": f"Bearer {served.own_token()}"}
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [one for one in operations if one.definition.raw["operationId"] not in UNDONE]
    assert len({one.definition.raw["operationId"] for one in operations} & ACCESS.keys()) > 30
    before = hers(schema, daemons_own)
    play("every role against the API", EXAMPLES, requests(operations), ask)
    assert hers(schema, daemons_own) == before


def hers(schema: Any, daemons_own: dict[str, str]) -> Any:
    """Ada's job; it is over, and nobody changes it any more. The daemon's own token waits for nobody who guesses."""
    case = schema["/api/v1/jobs/{job}"]["GET"].Case(path_parameters={"job": ADAS})
    answer = case.call(headers=daemons_own, timeout=120)
    assert answer.status_code == 200
    return json.loads(answer.text)
