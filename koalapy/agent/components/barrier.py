"""The agent's side of the conversation with runners: hello, barrier, output, end, and relays between runners."""

import asyncio
import base64
import contextlib
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.components.relays import RelayedLinks
from koalapy.agent.components.streams import Streams
from koalapy.agent.core.leases import Leases
from koalapy.agent.core.lrm_jobs import LrmJobs, sleep_awake
from koalapy.agent.core.lrm_monitor import LrmMonitor
from koalapy.agent.core.reporter import RECORD_LOST, Reporter
from koalapy.agent.core.spool import format_write_error
from koalapy.agent.runners.runners import RunnerConnection, RunnerSecrets, lrm_name
from koalapy.model.job import is_same_attempt, is_token
from koalapy.protocol.messages import RejectedRunner, Relay, RelayFailed
from koalapy.runner.session import Session, make_nonce
from koalapy.runner.settings import RELAY_LOSS_GRACE
from koalapy.system.event_loop import BackgroundTasks

log = structlog.get_logger()

MIN_INTERVAL = 60.0
"""Minimum seconds between two reports about one component; each report holds the number of attempts since."""
How = Literal["forged", "second"]
RECONNECT_TIMEOUT = 5.0
"""Seconds without a connection after which a runner counts as lost."""
PROGRAM_PHASES = ("opened", "running")
"""Phases of a runner that has received its plan, until its program has ended."""
OPEN_BATCH_SIZE = 64
"""Runners that are started before others are processed: a plan of a thousand nodes is 100 kB for each."""
WRITE_POLL_INTERVAL = 0.5
"""Seconds between two checks whether a result was written, which the agent retries regularly."""
RETURN_TIMEOUT = 15.0
"""Seconds that runners have to reconnect to a restarted agent."""


@dataclass(eq=False, slots=True)
class RejectedRunners:
    """Reports rejected runners: the first of a component at once, later ones together after ``MIN_INTERVAL``."""

    _reporter: Reporter
    _pending_reports: dict[str, RejectedRunner | None] = field(default_factory=dict)
    """Reports to send at the end of the interval, by component name; None if there is none."""

    def report_rejection(self, component: Component, node: int, how: How, address: str, lrm_job: str = "") -> None:
        """Report a connection that posed as a node's runner at once, or count it for the end of ``MIN_INTERVAL``."""
        waiting = self._pending_reports.get(component.name)
        times = waiting.times + 1 if waiting is not None else 1
        impostor = RejectedRunner(
            token=component.token, node=node, how=how, address=address, lrm_job=lrm_job, times=min(times, 10**9)
        )
        if component.name in self._pending_reports:
            self._pending_reports[component.name] = impostor
        else:
            self._log_rejection(component.name, impostor)

    def _log_rejection(self, name: str, impostor: RejectedRunner | None) -> None:
        """Log a report, send it to the daemon, and check after ``MIN_INTERVAL`` for a next one. Without one, stop."""
        if impostor is None:
            self._pending_reports.pop(name, None)
            return
        self._pending_reports[name] = None
        log.warning(
            "rejected a connection that claims to be a runner",
            action="impostor",
            **impostor.model_dump(exclude={"type"}),
        )
        if name == lrm_name(self._reporter.instance, impostor.token):
            self._reporter.uplink.send_soon(impostor)
        asyncio.get_running_loop().call_later(
            MIN_INTERVAL, lambda: self._log_rejection(name, self._pending_reports.get(name))
        )


@dataclass(eq=False, slots=True)
class Barrier:
    """Holds runners until all have connected and the daemon opens the component, and handles their messages.

    To open a component is to send its runners the plan: the command that each one starts.
    """

    _reporter: Reporter
    _jobs: LrmJobs
    _monitor: LrmMonitor
    _secrets: RunnerSecrets
    _impostors: RejectedRunners
    _leases: Leases
    _streams: Streams
    _relays: RelayedLinks
    _absent: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)
    """Nodes with absent runners that still have time to reconnect."""
    _output_failed: set[str] = field(default_factory=set)
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)

    def __post_init__(self) -> None:
        self._relays.on_lost = self.fail_relayed

    def open_component(self, component: Component, plan: dict[str, Any]) -> None:
        """Start the program on all runners of a component; absent runners receive the plan when they reconnect."""
        component.record_opening(plan)
        self._tasks.spawn(self._send_plan(component, plan))

    async def _send_plan(self, component: Component, plan: dict[str, Any]) -> None:
        """Send the plan to all waiting runners once it is on the disk, and the site's relay knows of the attempt.

        Fail the component if the plan cannot be written.
        """
        try:
            await component.folder.wait_synced()  # else a program could run that the journal does not record
        except OSError as error:
            self.fail_component(component, format_write_error(component.folder.path, error))
            return
        fields = await self._relays.head_fields(plan)
        await self._relays.add_attempt(component, plan)
        if component.plan not in (None, plan) or component.stop is not None or component.ended:
            return
        component.plan = plan | fields
        for index, node in enumerate(component.nodes):
            if node.runner is not None and node.phase == "waiting":
                node.runner.send_line(component.open_line_for(index))
            if index % OPEN_BATCH_SIZE == OPEN_BATCH_SIZE - 1:
                await asyncio.sleep(0)

    def fail_component(self, component: Component, error: str) -> None:
        """Fail a component because of an error on this site, and end it."""
        component.fail(error)
        self._reporter.publish_status(component)
        self._jobs.end_component(component)

    def fail_relayed(self, component: Component, reason: str, is_own_fault: bool) -> None:
        """Fail a component that has lost relayed links, unless its program ends with 0 soon.

        ``is_own_fault``: a relay of this site was lost.
        """
        if component.may_fail:
            component.relay_lost = not is_own_fault
        component.send_to_runners({"t": "relay_lost", "why": reason})
        runs = any(node.phase == "running" for node in component.nodes)
        self._tasks.spawn(self._fail_after(2 * RELAY_LOSS_GRACE if runs else 0.0, component, reason))

    async def _fail_after(self, seconds: float, component: Component, reason: str) -> None:
        """Fail a component after a time, unless it has ended."""
        await asyncio.sleep(seconds)
        if not component.ended:
            self.fail_component(component, reason)

    def deliver_relay(self, message: Relay) -> None:
        """Deliver a relay, a message of a runner on another cluster, to a runner here."""
        self._deliver(self._reporter.instance, message, elsewhere=False)

    def report_undelivered(self, message: RelayFailed) -> None:
        """Report to the runner that sent a relay why the daemon could not deliver it."""
        payload = {"op": "undelivered", "reason": message.reason}
        self._tell(self._reporter.find_component(message.token), message.node, payload)

    def await_return(self, component: Component) -> None:
        """Fail a started component if runners do not reconnect within ``RETURN_TIMEOUT`` after an agent's restart."""
        for index in range(component.size):
            self._expect(component, index, RETURN_TIMEOUT)

    async def wait_for_returns(self) -> None:
        """Wait until every absent runner has reconnected, or its time to do so is over."""
        if self._absent:
            await asyncio.wait(list(self._absent.values()))

    # What runners say

    def create_challenge(self, runner: RunnerConnection, hello: dict[str, Any]) -> tuple[Session, str] | None:
        name, index = hello["component"], hello["node"]
        component = self._reporter.components.get(name)
        if component is not None and index >= component.size:
            log.warning("rejected a runner of an unknown node", action="runner-refused", component=name, node=index)
            return None
        secret = self._secrets.secret_of(name, index)
        if secret is None:  # it reconnects, after the resource manager has sent the key
            return None
        runner.component, runner.node = name, index
        nonces = hello["nonce"], make_nonce()
        return Session(secret, name, index, nonces, is_agent=True), nonces[1]

    def on_forgery(self, runner: RunnerConnection) -> None:
        if component := self._reporter.components.get(runner.component):
            self._impostors.report_rejection(component, runner.node, "forged", runner.address)

    def admit_runner(self, runner: RunnerConnection, message: dict[str, Any]) -> bool:
        component = self._reporter.components.get(runner.component)
        if component is None:
            self._refuse_unrecorded(runner)
            return False
        index = runner.node
        node, lrm_job, life = component.nodes[index], message["lrm_job"], sha256(message["life"].encode()).hexdigest()
        if node.life not in ("", life):
            self._impostors.report_rejection(component, index, "second", runner.address, lrm_job)
            runner.send_message({"t": "refused"})
            self._monitor.request_poll()
            return False
        node.lrm_job, node.life = lrm_job, life
        component.note_survival()
        earlier, node.runner, node.exit = node.runner, runner, None
        if awaited := self._absent.pop((component.name, index), None):
            awaited.cancel()
        if earlier is not None:
            earlier.close()
        node.host, node.name = message["host"], message["name"]
        node.phase = node.phase if node.phase == "ended" else message["phase"]
        node.warned |= message["warned"]
        node.has_streams = message["streams"]
        received = component.output.accept_stream(index, message["start"])
        welcome = {"t": "welcome", "lease": component.lease, "output": received}
        runner.send_message({**welcome, "number": message["renew"], "silence": self._leases.silence_for(component)})
        if component.stop is not None or component.error:
            runner.send_message(component.stop_message)
        elif component.plan is None and node.phase in PROGRAM_PHASES:
            self._reporter.lost_records.record_loss(component.token, "its program runs, but its record has no plan")
            self.fail_component(component, RECORD_LOST)
        elif component.plan is not None and node.phase == "waiting":
            if component.plan.get("relay_entry") and "relay_head" not in component.plan:
                self._tasks.spawn(self._send_plan(component, component.plan))  # an earlier agent did not send it
            else:
                runner.send_line(component.open_line_for(index))
        self._reporter.publish_status(component)
        return True

    def _refuse_unrecorded(self, runner: RunnerConnection) -> None:
        """Reject an authenticated runner of a component without a record; the runner then ends."""
        log.warning(
            "rejected a runner without a component",
            action="runner-refused",
            component=runner.component,
            node=runner.node,
        )
        if is_token(token := runner.component.rpartition("-")[2]):
            self._reporter.lost_records.record_loss(token, f"the runner of node {runner.node} is connected")
        runner.send_message({"t": "refused"})
        self._monitor.request_poll()

    def receive_message(self, runner: RunnerConnection, message: dict[str, Any]) -> None:
        component = self._reporter.components.get(runner.component)
        if component is None:
            runner.close()
            return
        match message["t"]:
            case "out":
                received = component.output.add_bytes(runner.node, message["offset"], base64.b64decode(message["data"]))
                runner.send_message({"t": "output", "offset": received})
                self._reporter.publish_output(component)
                self._note_output_error(component)
            case "running":
                component.nodes[runner.node].phase = "running"
                self._reporter.publish_status(component)
            case "warned":
                component.nodes[runner.node].warned = True
                self._reporter.publish_status(component)
            case "ending":
                component.nodes[runner.node].has_program_ended = True
                self._reporter.publish_status(component)
            case "renew":
                silence = self._leases.silence_for(component)
                runner.send_message({"t": "lease", "number": message["number"], "silence": silence})
            case "stream":
                self._streams.receive_from_runner(runner, message["message"])
            case "relay_used":
                relay = (component.plan or {}).get("relay") or {}
                offered = {(first, second) for first, second, _ in relay.get("pairs", ())}
                component.relayed = tuple(sorted(offered.intersection(message["pairs"])))
                if (unreached := message["unreached"]) is not None:
                    component.unreached = tuple(sorted(offered.intersection(unreached)))
                self._reporter.publish_status(component)
            case "relay":
                self._pass_on(component, runner, message)
            case "exit":
                self._record_exit(component, runner, message)

    def on_disconnect(self, runner: RunnerConnection) -> None:
        self._streams.on_runner_lost(runner)
        component = self._reporter.components.get(runner.component)
        if component is None or component.nodes[runner.node].runner is not runner:
            return
        component.nodes[runner.node].runner = None
        if component.ended:
            return
        if component.nodes[runner.node].result is None:
            self._expect(component, runner.node, RECONNECT_TIMEOUT)
        if not component.runners:
            self._monitor.request_poll()

    def retry_output(self) -> None:
        """Retry to store output after the disk was full, and acknowledge it to the runners that wait for that."""
        for name in list(self._output_failed):
            component = self._reporter.components.get(name)
            if component is None:
                self._output_failed.discard(name)
                continue
            for index, node in enumerate(component.nodes):
                received = component.output.retry_write(index)
                if node.runner is not None:
                    node.runner.send_message({"t": "output", "offset": received})
                    if node.exit is not None and node.result is None:
                        self._record_exit(component, node.runner, node.exit)
            self._reporter.publish_output(component)
            self._note_output_error(component)

    def _note_output_error(self, component: Component) -> None:
        """Log the first failed write of a component's output, and the first success after it."""
        reason = component.output.error
        if reason and component.name not in self._output_failed:
            log.error("cannot store output", action="output-not-kept", token=component.token, reason=reason)
            self._output_failed.add(component.name)
        elif not reason and component.name in self._output_failed:
            log.info("storing output again", action="output-kept-again", token=component.token)
            self._output_failed.discard(component.name)

    def _record_exit(self, component: Component, runner: RunnerConnection, message: dict[str, Any]) -> None:
        """Record a node's result when its output is stored, and stop the other nodes if the program is over."""
        node = component.nodes[runner.node]
        node.exit, node.has_program_ended = message, True
        if not component.output.finish_node(runner.node):
            self._note_output_error(component)
            self._reporter.publish_status(component)
            return  # the runner resends its output until it is stored
        result = {k: message[k] for k in ("code", "error", "infrastructure", "stopped", "warned", "usage")}
        written = component.output.kept_bytes(runner.node)
        component.record_result(runner.node, {**result, "host": node.host, "name": node.name, "output": written})
        self._tasks.spawn(self._let_go(component, runner))
        self._reporter.publish_output(component)
        self._reporter.publish_status(component)
        if component.infrastructure:
            self._jobs.end_component(component)
        elif component.is_leader and runner.node == 0:
            for runner_connection in component.runners:
                if runner_connection is not runner:
                    runner_connection.send_message({"t": "stop"})

    async def _let_go(self, component: Component, runner: RunnerConnection) -> None:
        """Acknowledge a runner's exit, so that it ends, once its result is on the disk for the next agent."""
        while component.folder.has_unwritten:  # noqa: ASYNC110
            await asyncio.sleep(WRITE_POLL_INTERVAL)
        with contextlib.suppress(OSError):
            await component.folder.wait_synced()
        runner.send_message({"t": "exit_ack"})

    def _pass_on(self, component: Component, runner: RunnerConnection, message: dict[str, Any]) -> None:
        """Deliver a message from one runner to another of the same job, here or through the daemon."""
        relay = Relay(
            token=message["token"],
            node=message["node"],
            payload=message["payload"],
            sender=component.token,
            sender_node=runner.node,
        )
        unknown = self._reporter.find_component(relay.token, component.instance) is None
        elsewhere = unknown and component.instance == self._reporter.instance
        self._deliver(component.instance, relay, elsewhere=elsewhere)

    def _deliver(self, instance: str, message: Relay, *, elsewhere: bool) -> None:
        """Send a relay to its runner, if that belongs to the same daemon and to the sender's attempt."""
        component = self._reporter.find_component(message.token, instance)
        node = component.nodes[message.node] if component and 0 <= message.node < component.size else None
        if not is_same_attempt(message.sender, message.token):
            log.warning(
                "rejected a relay to another attempt",
                action="relay-refused",
                sender=message.sender,
                token=message.token,
            )
            self._report_undelivered(instance, message, "the receiver belongs to another attempt")
        elif elsewhere:
            if not self._reporter.uplink.offer_message(message, message.sender):
                self._report_undelivered(instance, message, "the daemon does not read what it is sent")
        elif node is None or node.runner is None:
            has_ended = node is None or node.result is not None
            reason = f"node {message.node} of {message.token} has no runner"
            self._report_undelivered(instance, message, reason, has_ended=has_ended)
        else:
            node.runner.send_message(
                {"t": "relay", "sender": message.sender, "sender_node": message.sender_node, "payload": message.payload}
            )

    def _report_undelivered(self, instance: str, message: Relay, reason: str, *, has_ended: bool = False) -> None:
        """Report to the sender of a relay, here or through the daemon, why it was not delivered.

        ``has_ended``: the program has ended on the receiver's node, so that the receiver will not return.
        """
        payload = {"op": "undelivered", "reason": reason, "ended": has_ended}
        if (sender := self._reporter.find_component(message.sender, instance)) is not None:
            self._tell(sender, message.sender_node, payload)
        elif instance == self._reporter.instance:
            back = Relay(
                token=message.sender,
                node=message.sender_node,
                payload=payload,
                sender=message.token,
                sender_node=message.node,
            )
            self._reporter.uplink.offer_message(back, back.sender)

    @staticmethod
    def _tell(component: Component | None, node: int, payload: dict[str, Any]) -> None:
        """Send a runner a relay from the agent itself, which has no sender. Do nothing if it is not connected."""
        if component is not None and 0 <= node < component.size and (runner := component.nodes[node].runner):
            runner.send_message({"t": "relay", "sender": "", "sender_node": 0, "payload": payload})

    def _expect(self, component: Component, index: int, within: float) -> None:
        """Start the time in seconds that an absent runner has to reconnect, unless it is running already."""
        key = component.name, index
        component.nodes[index].is_awaited = True
        if key not in self._absent:
            self._absent[key] = asyncio.create_task(self._await_reconnection(component, index, within))

    async def _await_reconnection(self, component: Component, index: int, within: float) -> None:
        """Fail and end the component if a node's runner is absent after ``within`` seconds and left no result."""
        await sleep_awake(within)
        self._absent.pop((component.name, index), None)
        node = component.nodes[index]
        node.is_awaited = False
        component.collect_results()  # its secret may have been unknown when the folder was loaded
        self._reporter.publish_output(component)
        if node.runner is None and node.result is None and not component.ended:
            component.fail(f"the runner on {node.name or f'node {index}'} lost its connection and did not reconnect")
            self._reporter.publish_status(component)
            self._jobs.end_component(component)
