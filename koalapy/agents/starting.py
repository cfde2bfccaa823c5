"""Runners that run, as the resource manager says, and should be heard of soon."""

from collections.abc import Callable, Coroutine, Sequence

from koalapy.agents.component import Component
from koalapy.agents.patience import listened

CONNECT_TIMEOUT = 60.0
"""Seconds that runners have to connect once the resource manager says that they run."""


class Starting:
    """Gives runners a while; one that stays silent is its site's fault, as a rule that of its network."""

    def __init__(
        self,
        address: Callable[[], str],
        spawn: Callable[[Coroutine[None, None, None]], None],
        failed: Callable[[Component], None],
    ) -> None:
        """``address`` says where runners are to find the agent."""
        self._address, self._spawn, self._failed = address, spawn, failed
        self._awaited: set[str] = set()

    def runs(self, component: Component, nodes: Sequence[str]) -> None:
        """Its job runs, on the nodes of these names."""
        if _silent(component) and component.name not in self._awaited:
            self._awaited.add(component.name)
            self._spawn(self._await(component, nodes))

    async def _await(self, component: Component, nodes: Sequence[str]) -> None:
        await listened(CONNECT_TIMEOUT)
        self._awaited.discard(component.name)
        if component.ended or component.stop is not None or not _silent(component):
            return
        heard = {node.name for node in component.nodes if node.phase}
        where = next((name for name in nodes if name not in heard), "a node")
        component.fail(f"the runner on {where} runs but never connected to the agent at {self._address()}")
        self._failed(component)


def _silent(component: Component) -> bool:
    return not all(node.phase for node in component.nodes)
