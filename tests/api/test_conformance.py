"""What the OpenAPI document says is what holds, whatever is sent: requests made from it by schemathesis.

What is as it says must be accepted, but for what no schema can know; what is not must be refused; and each answer has a
status, a type and a form that are declared, and is no error of the daemon's.
"""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup
from schemathesis.core.parameters import ParameterLocation

from koalapy.api.clusters import background_router
from koalapy.model.cluster import check_cluster
from koalapy.ports import ClusterRecord
from koalapy.scheduler.rules import Rules
from tests.daemon.archives import GOOD, archive_of
from tests.daemon.sites import Sites
from tests.serving import NO_PAGE, TOKEN, serving

EXAMPLES = {"submit_job": 15, "explain_submission": 8}
FEW = 3
"""Examples of an operation that is not among these."""
HEADERS = {"Authorization": f"Bearer {TOKEN}", **NO_PAGE}
BODY = {"request": {"type": "flexible", "total_size": 2}, "command": ["true"]}
LEFT_OUT = ("ignored_auth", "missing_required_header")
"""Checks that would send requests of their own: tokens have tests of theirs."""
NOT_READY = {"ready": "not_a_server_error", "api_ready": "not_a_server_error"}
"""Operations that say by 503 that agents are away, which is so here, and the check that takes it for a mistake."""
REJECTION = "negative_data_rejection"
SENSE = re.compile(
    "|".join(
        [
            # what there is
            "there is no such cluster",
            "replica catalogue does not know",
            "there is no bundle",
            "there is no report",
            "policy is .*",
            "no policy",
            # what else is said
            "samples has|samples.at goes back",
            "command is empty",
            "more than the total_size",
            "sums to",
            "but max_components is",
            "but min_component_size is",
            "which is partitioned|is partitioned, but",
            "which is no file name",
            "would make .* in the component's folder",
            "policy_options",
            # what is too much here
            "but the whole grid has",
            "never fit",
            "but no cluster has more",
            "has 4 nodes",
            "have room",
            "fit in none of the ways",
            "than max_components_per_job",
            "but that many clusters have",
            "with at least that many have",
            "too many for that",
            "but the empty grid has room",
        ]
    )
)
"""Why something may be refused that is as the document says: no schema can know it."""

schemathesis.openapi.format("one-line", st.text("abcäßж漢 .-_/", min_size=1, max_size=20).map(str.strip).filter(bool))
schemathesis.openapi.format("duration-of-job", st.sampled_from(["90", "90s", "5m", "1h30m", "1:30:00", "2-12:00:00"]))
schemathesis.openapi.format("duration-of-load", st.sampled_from(["90", "90s", "5m"]))
schemathesis.openapi.format("file-pattern", st.sampled_from(["a", "out/*.csv", "**/*.log"]))
schemathesis.openapi.media_type("application/x-tar", st.sampled_from([archive_of(GOOD), archive_of({"a": b"1"})]))


class Grid:
    """What the routes of background load ask, answered as by a cluster of four nodes."""

    def get_cluster(self, name: str) -> ClusterRecord:
        check_cluster(name, ["north"])
        return ClusterRecord("north", "local", "usable", 4, 4, 0, 0, 0, 0, "", None, 1, 1.0)

    async def ask(self, cluster: str, what: str, payload: dict[str, object], timeout: float = 0.0) -> dict[str, Any]:
        return {"stopped": 1} if what == "background-stop" else {"name": "koala-load", "lrm_job": "1"}


class Served:
    """A daemon without agents on a port of its own, in a thread, with one job that is over and one that waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ready = threading.Event()
        self.url = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _serve(self) -> None:
        sites = Sites({("north", "/m"): b"mesh"})
        async with serving(self._path, [TOKEN], Rules(), sites) as api:
            api.headers.update(HEADERS)
            for _ in range(2):
                assert (await api.post("/api/v1/jobs", json=BODY)).status_code == 201
            assert (await api.post("/api/v1/jobs/1/cancel")).status_code == 200
            replica = {"name": "m", "cluster": "north", "path": "/m"}
            assert (await api.post("/api/v1/replicas", json=replica)).status_code == 201
            app: Any = api._transport.app  # type: ignore[attr-defined]
            app.include_router(background_router(Grid(), Grid(), allowed=True))  # type: ignore[arg-type]
            listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
            self._ready.set()
            await self._server.serve([listener])


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    served = Served(tmp_path_factory.mktemp("conformance") / "koala.db")
    served.start()
    yield schemathesis.openapi.from_url(f"{served.url}/openapi.json", timeout=120)
    served.end()


def made_acceptable(case: Any) -> None:
    """Names in place of what no schema can know, and jobs that are over, so that nobody waits for them."""
    where = case.path_parameters or {}
    where |= {name: "north" for name in ("name", "one", "other") if name in where}
    where |= {"job": 1} if "job" in where else {}
    if case.query and "cluster" in case.query:
        case.query["cluster"] = "north"
    if isinstance(case.body, dict):
        case.body |= {name: value for name, value in (("path", "/m"), ("nodes", 2)) if name in case.body}
        request = case.body.get("request", {})
        for one in (case.body, *request.get("components", ())):
            if "cluster" in one:
                one["cluster"] = "north"


def has_wrong_headers(case: Any) -> bool:
    """Whose place ours take, so that the rest may be right: tokens and hosts have tests of their own."""
    wrong = {where for where, how in case.meta.components.items() if how.mode is GenerationMode.NEGATIVE}
    return not wrong.isdisjoint({ParameterLocation.HEADER, ParameterLocation.COOKIE})


def play(operation: Any, mode: GenerationMode, times: int) -> int:
    """Send what was made for an operation, and hold each answer against the document; how much was sent."""
    sent = 0
    name = operation.definition.raw["operationId"]
    excluded = [CHECKS.get_one(check) for check in (*LEFT_OUT, *filter(None, [NOT_READY.get(name)]))]

    @settings(
        max_examples=times * EXAMPLES.get(name, FEW),
        deadline=None,
        derandomize=times == 1,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal sent
        case.headers = None
        if mode is GenerationMode.POSITIVE:
            made_acceptable(case)
        answer = case.call(headers=HEADERS, timeout=120)
        sent += 1
        if mode is GenerationMode.POSITIVE and answer.status_code == 422 and SENSE.search(answer.json()["detail"]):
            return
        rejected = mode is GenerationMode.NEGATIVE and not has_wrong_headers(case)
        case.validate_response(answer, excluded_checks=excluded if rejected else [*excluded, CHECKS.get_one(REJECTION)])

    send()
    return sent


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["as told", "otherwise"])
@pytest.mark.parametrize(
    "times", [pytest.param(1, marks=pytest.mark.processes), pytest.param(30, marks=pytest.mark.nightly)]
)
def test_every_operation_does_what_the_document_says(schema: Any, mode: GenerationMode, times: int) -> None:
    operations = [found.ok() for found in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:  # with some, nothing can be wrong
        operations = [one for one in operations if one.body or one.query or one.path_parameters]
    assert len(operations) > 25
    wrong: list[str] = []
    for operation in operations:
        try:
            assert play(operation, mode, times)
        except (Exception, FailureGroup) as error:  # noqa: BLE001 - all that is wrong is told together
            wrong.append(f"{operation.label}: {error}")
    assert not wrong, "\n\n".join(wrong)
