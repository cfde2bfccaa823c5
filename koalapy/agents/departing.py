"""Runners whose nodes the resource manager has back, and whose connections are open all the same."""

from collections.abc import Callable, Coroutine

from koalapy.agents.component import Component
from koalapy.agents.patience import listened

HANG_UP_TIMEOUT = 10.0
"""Seconds without a word: a node that died says nothing more, and does not hang up either."""


class Departing:
    """Gives such runners a while for their last words; then the resource manager's word counts."""

    def __init__(self, spawn: Callable[[Coroutine[None, None, None]], None]) -> None:
        self._spawn = spawn
        self._awaited: set[str] = set()

    def ended(self, component: Component) -> None:
        """Its job has ended."""
        if component.connected and component.name not in self._awaited:
            self._awaited.add(component.name)
            for node in component.connected:
                if node.runner is not None:
                    node.runner.send({"t": "stop"})  # its nodes are others' now
            self._spawn(self._await(component))

    async def _await(self, component: Component) -> None:
        before = -1
        while component.connected and before != (before := _heard(component)):
            await listened(HANG_UP_TIMEOUT)
        for node in component.connected:
            if node.runner is not None:
                node.runner.close()
        self._awaited.discard(component.name)


def _heard(component: Component) -> int:
    """Bytes from those that are there."""
    return sum(node.runner.arrived for node in component.connected if node.runner is not None)
