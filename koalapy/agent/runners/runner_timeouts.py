"""Runners that should be heard of and are not: those that never connect, and those whose nodes are gone."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from koalapy.agent.components.component import Component

SLEEP_SLICE = 0.5
"""Seconds."""
HANG_UP_TIMEOUT = 10.0
"""Seconds without a word: a node that died says nothing more, and does not hang up either."""

Spawn = Callable[[Coroutine[None, None, None]], None]


async def sleep_awake(seconds: float) -> None:
    """Wait until so many seconds have passed while this process ran: what came while it was stopped is read first."""
    loop = asyncio.get_running_loop()
    left = seconds
    while left > 0:
        pause, began = min(SLEEP_SLICE, left), loop.time()
        await asyncio.sleep(pause)
        if loop.time() - began < pause + SLEEP_SLICE:
            left -= pause


class ConnectTimeouts:
    """Gives runners that run a while to connect; one that stays silent is its site's fault, as a rule its network's."""

    def __init__(
        self, address: Callable[[], str], spawn: Spawn, failed: Callable[[Component], None], timeout_s: float
    ) -> None:
        """``address`` says where runners are to find the agent."""
        self._address, self._spawn, self._failed, self._timeout_s = address, spawn, failed, timeout_s
        self._awaited: set[str] = set()

    def runs(self, component: Component, nodes: Sequence[str]) -> None:
        """Its job runs, on the nodes of these names."""
        if not component.all_connected_once and component.name not in self._awaited:
            self._awaited.add(component.name)
            self._spawn(self._await(component, nodes))

    async def _await(self, component: Component, nodes: Sequence[str]) -> None:
        await sleep_awake(self._timeout_s)
        self._awaited.discard(component.name)
        if component.ended or component.stop is not None or component.all_connected_once:
            return
        heard = {node.name for node in component.nodes if node.phase}
        where = next((name for name in nodes if name not in heard), "a node")
        component.fail(f"the runner on {where} runs but never connected to the agent at {self._address()}")
        self._failed(component)


class HangUpTimeouts:
    """Gives runners whose nodes the resource manager has back a while for their last words; then its word counts."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._awaited: set[str] = set()

    def ended(self, component: Component) -> None:
        """Its job has ended."""
        if component.runners and component.name not in self._awaited:
            self._awaited.add(component.name)
            component.send({"t": "stop"})  # its nodes are others' now
            self._spawn(self._await(component))

    async def _await(self, component: Component) -> None:
        before = -1
        while component.runners and before != (before := sum(runner.arrived for runner in component.runners)):
            await sleep_awake(HANG_UP_TIMEOUT)
        for runner in component.runners:
            runner.close()
        self._awaited.discard(component.name)
