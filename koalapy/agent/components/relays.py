"""Let the programs of this cluster use relayed links: report their nodes to the head, the agent's relay."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.runners.runners import RunnerSecrets
from koalapy.model.cluster import pair_of
from koalapy.protocol.messages import RelayLost, RelayState
from koalapy.relay.attempts import Attempt, Limits, add_node_keys, derive_head_key
from koalapy.relay.client import RelayClient, RelayRejected, log_rejection
from koalapy.runner.relay_protocol import derive_node_key
from koalapy.runner.relay_streams import resolve_host
from koalapy.system.event_loop import BackgroundTasks

log = structlog.get_logger()

AWAY = "the agent cannot reach the relay of its site"
HEAD_TIMEOUT_S = 20.0
"""Time for which the start of a job waits for a connection with the head."""
NO_RELAY = "the site demands relayed links (relayed_only), and has no relay"


class RelayedLinks:
    """The agent's side of relayed links. Without the head's control socket programs use none."""

    def __init__(self, settings: AgentSettings, reporter: Reporter, secrets: RunnerSecrets) -> None:
        self._settings, self._reporter, self._secrets = settings, reporter, secrets
        reporter.on_ended.append(self.forget_ended)
        self.on_lost: Callable[[Component, str, bool], None] | None = None
        """Fails a component that has lost relayed links, with the reason, and whether its site is at fault."""
        self._key = ""
        self._client = (
            None if settings.relay is None else RelayClient(Path(settings.relay), self._state, self._on_event)
        )
        self._hub_problem = NO_RELAY if settings.relay is None else AWAY
        self._head: dict[str, Any] = {}
        """The head's description of itself."""
        self._attempts: dict[str, tuple[Component, dict[str, Any]]] = {}
        """By name of an attempt that the head must know: a component with its plan."""
        self._transfer_host = ""
        """The IP address of this host for other sites; empty if it is not known."""
        self._reported: RelayState | None = None
        self._is_understood = False
        self._tasks = BackgroundTasks()

    async def run(self) -> None:
        """Stay connected with the head until cancelled."""
        if self._client is None:
            return
        settings = self._settings
        self._key = (await asyncio.to_thread(derive_head_key, settings.token, settings.cluster)).hex()
        with suppress(OSError):
            self._transfer_host = (await asyncio.to_thread(resolve_host, settings.transfer_address, 0))[0]
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
        if not self._is_understood or (self._client is None and not self._settings.relayed_only):
            return
        ready = self._client is not None and self._client.connected.is_set() and not self._hub_problem
        host, port = self._head.get("listen_for_heads") or ("", 0)
        host = self._transfer_host if port and _is_wildcard(host) else host
        state = RelayState(
            ready=ready,
            error="" if ready else self._hub_problem or AWAY,
            certificate=self._head.get("certificate") or None,
            host=host,
            port=port if host else 0,
            relayed_only=self._settings.relayed_only,
        )
        if state != self._reported:
            self._reported = state
            self._reporter.uplink.send_soon(state)

    def find_refusal(self, plan: dict[str, Any]) -> str:
        """Return why the site may not start a plan: not all its links to others are relayed. Empty if it may."""
        if not self._settings.relayed_only:
            return ""
        own_cluster = self._settings.cluster
        pairs = (plan.get("relay") or {}).get("pairs", ())
        relayed = {pair_of(first, second) for first, second, how in pairs if how == "relayed"}
        other_clusters = sorted({node["cluster"] for node in plan["nodes"]} - {own_cluster})
        direct = [cluster for cluster in other_clusters if pair_of(own_cluster, cluster) not in relayed]
        if not direct:
            return ""
        return (
            f"this site demands relayed links (relayed_only), and the daemon plans none to {', '.join(direct)}: "
            "a daemon of this version that is connected to the hub does"
        )

    async def head_fields(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Return the field of a plan that tells its runners where they reach the head; none if they cannot.

        An agent that has just started waits until it is connected with the head, at most for ``HEAD_TIMEOUT_S``.
        """
        if self._client is None or plan.get("relay_entry") is None:
            return {}
        if not self._head:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEAD_TIMEOUT_S):
                    await self._client.connected.wait()
        if (address := self._head.get("listen")) is None:
            return {}
        host, port = address
        return {"relay_head": [self._settings.runner_host if _is_wildcard(host) else host, port]}

    async def add_attempt(self, component: Component, plan: dict[str, Any]) -> None:
        """Tell the head of a component's attempt before its runners get their plan."""
        name = _attempt_of(plan)
        if self._client is None or not name:
            return
        if name in self._attempts or not self._check_entry(plan):
            return
        self._attempts[name] = component, plan
        try:
            await self._client.add(self._make_entry(component, plan))
        except (RelayRejected, ValueError) as error:
            log.error("the relay has rejected an attempt", action="relay-rejected", reason=str(error))

    def restore_component(self, component: Component) -> None:
        """Store the attempt of a component of an earlier agent, to report it to a new head."""
        if component.plan is not None and (name := _attempt_of(component.plan)) and self._check_entry(component.plan):
            self._attempts[name] = component, component.plan

    @staticmethod
    def _check_entry(plan: dict[str, Any]) -> bool:
        """Return whether the head would accept an entry. An invalid one would make it reject those of all jobs."""
        try:
            Attempt(plan["relay_entry"], Limits(), 0.0)
        except ValueError as error:
            log.error("the relay has rejected an attempt", action="relay-rejected", reason=str(error))
            return False
        return True

    def forget_ended(self, _: Component) -> None:
        """Remove the attempts without a live component from the head."""
        if not self._attempts or self._client is None:
            return
        live = {_attempt_of(component.plan) for component in self._reporter.live.values()}
        opening = {name for name, (component, _) in self._attempts.items() if component.plan is None}
        live |= {name for name in opening if not self._attempts[name][0].ended}
        for name in self._attempts.keys() - live:
            del self._attempts[name]
            self._tasks.spawn(log_rejection(self._client.remove(name)))

    def on_lost_elsewhere(self, message: RelayLost) -> None:
        """Fail the components of an attempt that has lost streams at the hub."""
        self._lose_attempt(message.attempt, message.reason, is_own_fault=False)

    def _lose_attempt(self, attempt: str, reason: str, *, is_own_fault: bool) -> None:
        for component in list(self._reporter.live.values()):
            if _attempt_of(component.plan) == attempt and self.on_lost is not None:
                self.on_lost(component, reason, is_own_fault)

    def _name_node(self, attempt: str, index: int, reason: str) -> str:
        """Return why a node's relay is lost, with the name of the node in place of its index in the plan."""
        if attempt not in self._attempts:
            return reason
        instance, node = self._attempts[attempt][0].instance, self._attempts[attempt][1]["nodes"][index]
        component = self._reporter.find_component(node["token"], instance)
        name = component.nodes[node["node"]].name if component is not None else ""
        return reason.replace(f"node {index}", f"node {name or node['host']}", 1)

    def _make_entry(self, component: Component, plan: dict[str, Any]) -> dict[str, Any]:
        """Return the head's entry of an attempt, with the keys of all nodes of this cluster.

        Raise ``ValueError`` while the resource manager's key is not known.
        """
        entry: dict[str, Any] = plan["relay_entry"]
        keys = {}
        for index, node in enumerate(plan["nodes"]):
            if node["cluster"] == self._settings.cluster:
                secret = self._secrets.secret_of_token(component.instance, node["token"], node["node"])
                if secret is None:
                    raise ValueError("the resource manager has not sent the key of the runners yet")
                keys[index] = derive_node_key(secret, str(entry["attempt"]))
        return add_node_keys(entry, keys)

    def _state(self) -> dict[str, Any]:
        return {"key": self._key, "attempts": [self._make_entry(*attempt) for attempt in self._attempts.values()]}

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
                reason, is_own_fault = str(event["why"]), event["via"][0] != "hub"
                if event["via"][0] == "node":
                    reason = self._name_node(event["attempt"], int(event["via"][2]), reason)
                self._lose_attempt(event["attempt"], reason, is_own_fault=is_own_fault)
            case "removed":
                fields = {name: value for name, value in event.items() if name != "t"}
                log.info("an attempt has ended at the relay", action="relay-attempt-over", **fields)


def _attempt_of(plan: dict[str, Any] | None) -> str:
    """Return the name of a plan's attempt at the relays; empty if it may not use them."""
    entry = (plan or {}).get("relay_entry")
    return "" if entry is None else str(entry["attempt"])


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::", "")
