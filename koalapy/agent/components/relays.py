"""Let the programs of this cluster use relayed links: tell the head, the relay beside the agent, of their nodes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.runners.runners import RunnerSecrets
from koalapy.protocol.messages import RelayState
from koalapy.relay.client import RelayClient, RelayRejected
from koalapy.relay.entries import add_node_keys, derive_head_key
from koalapy.runner.relay_protocol import derive_node_key
from koalapy.system.event_loop import BackgroundTasks

log = structlog.get_logger()

AWAY = "the agent cannot reach the relay of its site"


class RelayedLinks:
    """The agent's side of relayed links. Without the head's control socket programs use none."""

    def __init__(
        self,
        settings: AgentSettings,
        reporter: Reporter,
        secrets: RunnerSecrets,
        on_lost: Callable[[Component, str, bool], None],
    ) -> None:
        """``on_lost`` fails a component that has lost relayed links, with the reason, and whether its site is at
        fault."""
        self._settings, self._reporter, self._secrets, self._on_lost = settings, reporter, secrets, on_lost
        self._key = ""
        self._client = (
            None if settings.relay is None else RelayClient(Path(settings.relay), self._state, self._on_event)
        )
        self._hub_problem = AWAY
        self._head: dict[str, Any] = {}
        """The head's description of itself."""
        self._attempts: dict[str, Component] = {}
        """A component of each attempt that the head knows, by the attempt's name."""
        self._reported: RelayState | None = None
        self._is_understood = False
        self._tasks = BackgroundTasks()

    async def run(self) -> None:
        """Stay connected with the head until cancelled."""
        if self._client is None:
            return
        settings = self._settings
        self._key = (await asyncio.to_thread(derive_head_key, settings.token, settings.cluster)).hex()
        try:
            await self._client.keep_connected()
        finally:
            self._tasks.cancel()

    def on_welcome(self, *, is_understood: bool) -> None:
        """Report the state of the relay to a daemon that has just accepted this agent, if it understands it."""
        self._is_understood, self._reported = is_understood, None
        self.report()

    def report(self) -> None:
        """Report the state of the relay to the daemon if it has changed."""
        if self._client is None or not self._is_understood:
            return
        ready = self._client.connected.is_set() and not self._hub_problem
        address = self._head.get("listen_for_heads")
        host = address and (self._settings.transfer_address if _is_wildcard(address[0]) else address[0])
        state = RelayState(
            ready=ready,
            error="" if ready else self._hub_problem or AWAY,
            certificate=self._head.get("certificate") or None,
            host=host or "",
            port=address[1] if address else 0,
            relayed_only=self._settings.relayed_only,
        )
        if state != self._reported:
            self._reported = state
            self._reporter.uplink.send_soon(state)

    async def open_component(self, component: Component) -> None:
        """Tell the head of a component's attempt before its runners get their plan."""
        name = attempt_of(component)
        if self._client is None or not name:
            return
        component.relay_head = self._head_address()
        if name not in self._attempts:
            self._attempts[name] = component
            try:
                await self._client.add(self._make_entry(component))
            except (RelayRejected, ValueError) as error:
                log.error("the relay has rejected an attempt", action="relay-rejected", reason=str(error))

    def restore_component(self, component: Component) -> None:
        """Remember the attempt of a component of an earlier agent, which a new head must be told."""
        if self._client is not None and (name := attempt_of(component)):
            self._attempts[name] = component

    def forget_ended(self) -> None:
        """Remove the attempts without a live component from the head."""
        if not self._attempts or self._client is None:
            return
        live = {name for component in self._reporter.live.values() if (name := attempt_of(component))}
        for name in self._attempts.keys() - live:
            del self._attempts[name]
            self._tasks.spawn(self._client.remove(name))

    def _make_entry(self, component: Component) -> dict[str, Any]:
        """Return the head's entry of an attempt, with the keys of all nodes of this cluster.

        Raise ``ValueError`` while the resource manager's key is not known.
        """
        assert component.plan is not None
        entry: dict[str, Any] = component.plan["relay_entry"]
        keys = {}
        for index, node in enumerate(component.plan["nodes"]):
            if node["cluster"] == self._settings.cluster:
                secret = self._secrets.secret_of_token(component.instance, node["token"], node["node"])
                if secret is None:
                    raise ValueError("the resource manager has not sent the key of the runners yet")
                keys[index] = derive_node_key(secret, str(entry["attempt"]))
        return add_node_keys(entry, keys)

    def _head_address(self) -> list[Any] | None:
        """Return where nodes reach the head; None while it is away."""
        address = self._head.get("listen")
        if address is None:
            return None
        host, port = address
        return [self._settings.runner_host if _is_wildcard(host) else host, port]

    def _state(self) -> dict[str, Any]:
        return {"key": self._key, "attempts": [self._make_entry(each) for each in self._attempts.values()]}

    def _on_event(self, event: dict[str, Any]) -> None:
        match event["t"]:
            case "state":
                self._head = event
                self._hub_problem = "" if event["hub_connected"] else "the relay of the site cannot reach the hub"
                asyncio.get_running_loop().call_soon(self.report)  # once the client counts as connected
            case "away":
                self._hub_problem = AWAY
                self.report()
            case "hub":
                why = event.get("why", "")
                self._hub_problem = "" if event["connected"] else f"the relay of the site cannot reach the hub: {why}"
                self.report()
            case "lost":
                for component in list(self._reporter.live.values()):
                    if attempt_of(component) == event["attempt"]:
                        self._on_lost(component, str(event["why"]), not event["by_hub"])
            case "removed":
                fields = {name: value for name, value in event.items() if name != "t"}
                log.info("an attempt has ended at the relay", action="relay-attempt-over", **fields)


def attempt_of(component: Component) -> str:
    """Return the name of a component's attempt at the relays; empty if it may not use them."""
    entry = (component.plan or {}).get("relay_entry")
    return "" if entry is None else str(entry["attempt"])


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::", "")
