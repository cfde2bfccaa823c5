"""Who claimed to be a node's runner and is not: noted here, and told to the daemon, whose people look into it."""

import asyncio
from typing import Literal

import structlog

from koalapy.agent.components.component import Component, lrm_name
from koalapy.agent.core.reporter import Reporter
from koalapy.protocol.messages import Impostor

log = structlog.get_logger()

MIN_INTERVAL = 60.0
"""Seconds between two words to the daemon about one component: who tries often is told of with the number of tries."""
How = Literal["forged", "second"]


class Impostors:
    """Tells of each at once, and of the next ones of the same component after a while, together."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._seen: dict[str, Impostor | None] = {}
        """By the name of the component, what is still to be told, while nothing is to be told at once."""

    def seen(self, component: Component, node: int, how: How, address: str, lrm_job: str = "") -> None:
        waiting = self._seen.get(component.name)
        times = waiting.times + 1 if waiting is not None else 1
        impostor = Impostor(
            token=component.token, node=node, how=how, address=address, lrm_job=lrm_job, times=min(times, 10**9)
        )
        if component.name in self._seen:
            self._seen[component.name] = impostor
        else:
            self._tell(component.name, impostor)

    def _tell(self, name: str, impostor: Impostor | None) -> None:
        if impostor is None:
            self._seen.pop(name, None)
            return
        self._seen[name] = None
        log.warning("somebody claims to be a runner", action="impostor", **impostor.model_dump(exclude={"type"}))
        if name == lrm_name(self._reporter.instance, impostor.token):
            self._reporter.uplink.put(impostor)
        asyncio.get_running_loop().call_later(MIN_INTERVAL, lambda: self._tell(name, self._seen.get(name)))
