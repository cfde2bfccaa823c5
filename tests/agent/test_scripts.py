"""Jobs with scripts in an agent: the text goes to one node, and shared jobs need the site's consent."""

from dataclasses import replace
from typing import Any

import pytest

from tests.agent.conftest import FakeDaemon, Site

pytestmark = pytest.mark.processes

T = "7.1.0"
SCRIPT = '#!/bin/sh\necho "$0 on $KOALA_NODE of $KOALA_NODES in $KOALA_CLUSTER_LIST" | sed "s|.*/||"\nexit 3\n'


def make_open(daemon: FakeDaemon, *others: str, head: str = T, script: str = SCRIPT) -> dict[str, Any]:
    """Return the order to open component ``T`` on north, in a job with one node on each of the other clusters."""
    hosts = daemon.status(T)["hosts"]
    nodes = [{"host": host, "cluster": "north", "token": T, "node": i, "slots": 1} for i, host in enumerate(hosts)]
    tokens = {f"7.1.{i}": cluster for i, cluster in enumerate(others, 1)}
    nodes += [
        {"host": f"127.0.9.{i}", "cluster": cluster, "token": token, "node": 0, "slots": 1}
        for i, (token, cluster) in enumerate(tokens.items(), 1)
    ]
    program = {"command": ["job.sh"], "environment": {}, "workdir": None, "output": None}
    contexts = [
        {"token": token, **program, "nodes": [i for i, node in enumerate(nodes) if node["token"] == token]}
        for token in (T, *tokens)
    ]
    plan = {"job": 7, "generation": 1, "launcher": "openmpi", "head": head, "is_script": True, "script": script}
    return {"nodes": nodes, "contexts": contexts, **plan}


@pytest.mark.evidence("P7")
async def test_site_that_accepts_no_scripts_starts_no_shared_one(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "claimed")
    await daemon.send_command("open", T, **make_open(daemon, "south", head="7.1.1", script=""))
    end = await daemon.wait_for_state(T, "ended")
    assert end["infrastructure"]
    assert "this site accepts no scripts of other sites: set accepts_scripts" in end["error"]
    assert daemon.received("hello")[-1]["accepts_scripts"] is False


async def test_site_that_accepts_scripts_waits_for_the_head(site: Site, daemon: FakeDaemon) -> None:
    site.settings = replace(site.settings, accepts_scripts=True)
    await site.stop()
    await site.start()
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "claimed")
    await daemon.send_command("open", T, **make_open(daemon, "south", head="7.1.1", script=""))
    await daemon.wait_for_state(T, "running")
    await daemon.send_command("stop", T, reason="the script has ended")
    assert (await daemon.wait_for_state(T, "ended"))["error"] == ""
