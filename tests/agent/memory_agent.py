"""An agent over a resource manager in memory, in the test's own process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from koalapy.agent.components.component import Component
from koalapy.agent.core.agent import run_agent
from koalapy.agent.core.lrm_monitor import LrmMonitor
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentSettings, AgentTimeouts
from koalapy.agent.lrm.port import Lrm
from koalapy.agent.lrm.script import OpenMpi
from koalapy.agent.runners.uplink import Uplink
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from tests.agent.conftest import FakeDaemon
from tests.virtual_time import VirtualClock, VirtualTimeLoop


def loop_clock() -> Clock:
    """Return the clock of the running loop."""
    loop = asyncio.get_running_loop()
    return VirtualClock(loop) if isinstance(loop, VirtualTimeLoop) else SYSTEM_CLOCK


def make_reporter(uplink: object, lrm: object = None, clock: Clock | None = None) -> tuple[Reporter, LrmMonitor]:
    """Return a reporter, and the monitor of a resource manager that is polled on request only."""
    live: dict[str, Component] = {}
    monitor = LrmMonitor(cast(Lrm, lrm), live, 1000.0, clock=clock or loop_clock())
    return Reporter(cast(Uplink, uplink), monitor, live), monitor


async def find_no_open_mpi(settings: AgentSettings, prefix: str | None) -> OpenMpi:
    """Return an Open MPI without running ``mpirun``."""
    return OpenMpi()


@asynccontextmanager
async def running_agent(
    lrm: object,
    daemon: FakeDaemon,
    directory: Path,
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[None]:
    """Run an agent, and check at the end that it is still running."""
    agent_settings = AgentSettings(
        "north", f"http://127.0.0.1:{daemon.port}", "s3cret", directory, **{"poll_interval": 1000.0, **settings}
    )
    agent = asyncio.create_task(
        run_agent(
            agent_settings,
            cast(Lrm, lrm),
            timeouts=timeouts,
            clock=clock or loop_clock(),
            find_open_mpi=find_no_open_mpi,
        )
    )
    try:
        yield
        assert not agent.done()
    finally:
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)


def reported_counts(daemon: FakeDaemon) -> tuple[int, int, str]:
    """Return all nodes, idle nodes and the problem of the last report."""
    report = daemon.report()
    return (report["total"], report["idle"], report["problem"]) if report else (-1, -1, "")
