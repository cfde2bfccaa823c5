"""Replacement of an agent's token while the daemon and jobs of other clusters run."""

import json
from collections.abc import Callable

import httpx2
import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

OLD, NEW = "5d1c9e0f7a6b4832915f0c7e6d3b2a48", "0a2b9f6c1d7e48530b4f9ce2d8a6171f"


def cluster_settings(token: str) -> str:
    return json.dumps({"north": {"kind": "local", "nodes": 4}, "south": {"kind": "local", "nodes": 4, "token": token}})


@pytest.mark.grid
def test_agent_with_replaced_token_is_rejected(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid(KOALA_CLUSTERS=cluster_settings(OLD))
    gate = grid.make_gate()
    job = grid.submit({"type": "fixed", "components": [{"size": 1, "cluster": "north"}]}, *gate.hold)
    grid.wait_for_state(job, "running")

    def status(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx2.get(f"{grid.url}/api/v1/agents/south/connect", headers=headers, trust_env=False).status_code

    assert (status(OLD), status(NEW)) == (204, 401)
    assert grid.run_koala("token", "revoke", "--all").returncode == 0
    grid.stop_daemon()
    grid._extra_environment["KOALA_CLUSTERS"] = cluster_settings(NEW)
    grid.start()
    assert (status(OLD), status(NEW)) == (401, 204)
    wait_until(lambda: grid.get_job(job)["state"] == "running", "the job to run on")
    gate.open()
    assert grid.wait_for_end(job)["state"] == "succeeded"
