"""Agents of embedded clusters: children of the daemon, started again when they die."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

log = structlog.get_logger()

RESTART_PAUSE = 0.5
STOP_GRACE = 5.0


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """How one embedded agent is started; the daemon's URL is added to ``command``."""

    cluster: str
    command: Sequence[str]
    environment: Mapping[str, str]


class EmbeddedAgents:
    """Keeps one agent process running for each embedded cluster."""

    def __init__(self, processes: Sequence[AgentProcess]) -> None:
        self._processes = processes
        self._keepers: list[asyncio.Task[None]] = []

    def start(self, url: str) -> None:
        self._keepers = [asyncio.create_task(_keep(process, url)) for process in self._processes]

    async def stop(self) -> None:
        """End the agents; what runs in their clusters goes on."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)


async def _keep(process: AgentProcess, url: str) -> None:
    while True:
        child = await asyncio.create_subprocess_exec(
            *process.command, "--url", url,
            stdin=asyncio.subprocess.DEVNULL, env=dict(process.environment), start_new_session=True,
        )  # fmt: skip
        try:
            code = await child.wait()
        except asyncio.CancelledError:
            await _end(child)
            raise
        log.warning("an agent ended", action="restart", cluster=process.cluster, code=code)
        await asyncio.sleep(RESTART_PAUSE)


async def _end(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE):
            await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
