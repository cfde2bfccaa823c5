"""Let jobs use relayed links: tell the hub and the agents which attempts may open streams (docs/adr/0034)."""

import asyncio
import hmac
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from itertools import combinations
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.parser import text_string_to_metric_families

from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.observability.instruments import Instruments
from koalapy.model.cluster import ClusterPair, LinkPath, LinkUse, pair_of
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_spec import Launcher
from koalapy.model.request import ClusterName
from koalapy.protocol.messages import PlanNode, PlanRelay, RelayLost, RelayState
from koalapy.relay.attempts import AttemptPlan, derive_head_key
from koalapy.relay.client import RelayClient, log_rejection
from koalapy.runner.relay_links import FIRST_PORT, LAST_PORT, count_ports, node_ports
from koalapy.scheduler.events import RelayChanged
from koalapy.scheduler.ledger import live
from koalapy.system.event_loop import BackgroundTasks
from koalapy.system.tls import pinned_context

log = structlog.get_logger()

MAX_ATTEMPT_STREAMS = 2**31 - 1
LAYOUTS = 4
"""Alternative layouts of ports, since programs of other jobs may use some."""


@dataclass(frozen=True, slots=True)
class JobRelay:
    """The relayed links of an attempt, for its runners and for the heads of its clusters."""

    plan: PlanRelay
    attempt: AttemptPlan | None
    """None: it is not sent to the relays, so that a job that needs relayed links fails."""

    def head_entry(self, cluster: ClusterName) -> dict[str, Any] | None:
        return None if self.attempt is None else self.attempt.head_entry(cluster)


def attempt_name(job: Job) -> str:
    """Return the name of a job's attempt at the relays."""
    attempt = live(job)
    return f"{job.id}.{attempt.generation}" + (f".{attempt.nonce}" if attempt.nonce else "")


def choose_bases(name: str, slots: Sequence[int]) -> list[int]:
    """Return the first ports of an attempt's layouts; none if it needs more ports than there are.

    The name of the attempt determines them, so they need not be stored.
    """
    choices = LAST_PORT - FIRST_PORT + 2 - count_ports(slots)
    if choices <= 0:
        return []
    numbers = (sha256(f"{name} {layout}".encode()).digest() for layout in range(LAYOUTS))
    return list(dict.fromkeys(FIRST_PORT + int.from_bytes(number[:8], "big") % choices for number in numbers))


class Relays:
    """The daemon's side of relayed links. Without the hub's control socket jobs use none."""

    def __init__(
        self,
        control: str | None,
        uses: Mapping[ClusterPair, LinkUse],
        secret: bytes,
        nodes_of: Callable[[Job], Sequence[PlanNode]],
        send: Callable[[ClusterName, RelayLost], object] = lambda *_: None,
        find_paths: Callable[[Job], Mapping[ClusterPair, LinkPath]] = lambda _: {},
        report: Callable[[RelayChanged], object] = lambda _: None,
        audit: Audit | None = None,
        instruments: Instruments | None = None,
        *,
        may_log: Callable[[ClusterName], bool],
    ) -> None:
        """``uses``: the configured path of messages by pair of clusters. ``secret``: from which keys of attempts are
        derived. ``nodes_of``: returns the nodes of a job's attempt in the order of its plan. ``send``: sends a message
        to a cluster's agent. ``find_paths``: returns the paths of a job's messages that the scheduler has assumed.
        ``report``: reports to the scheduler that the relay of a site has changed. ``may_log``: returns whether a log
        line about a cluster's agent is within its budget."""
        self._report, self._audit, self._instruments, self._may_log = report, audit, instruments, may_log
        self._send, self._control, self._uses, self._secret, self._nodes_of = send, control, uses, secret, nodes_of
        self._find_paths = find_paths
        self._states: dict[ClusterName, RelayState] = {}
        self._entries: dict[JobId, tuple[str, dict[str, Any]]] = {}
        """Name and the hub's entry of each live attempt."""
        self._keys: dict[ClusterName, str] = {}
        self._client = None if control is None else RelayClient(Path(control), self._hub_state, self._on_event)
        self._tasks = BackgroundTasks()

    @property
    def is_configured(self) -> bool:
        return self._client is not None

    @property
    def hub_problem(self) -> str:
        """Return why the hub cannot be used; empty if it can be, or is not configured."""
        if self._client is None or self._client.connected.is_set():
            return ""
        return f"the daemon cannot reach the hub at {self._control}"

    def state_of(self, cluster: ClusterName) -> RelayState | None:
        """Return the last state that a connected agent has reported; None if its site allows no relayed links."""
        return self._states.get(cluster)

    def site_problems(self) -> dict[ClusterName, str]:
        """Return why relayed links of sites cannot be used now, by cluster, where an agent has reported a reason."""
        return {cluster: state.error for cluster, state in sorted(self._states.items()) if not state.ready}

    def set_state(self, cluster: ClusterName, state: RelayState | None) -> None:
        """Record whether a site can be reached by relays; None: its agent has connected anew and reported nothing."""
        former = self._states.pop(cluster, None)
        if state is not None:
            if former is None or state.certificate != former.certificate:
                state = _check_certificate(state)
            self._states[cluster] = state
        if (current := state or former) is not None:
            self._report(RelayChanged(cluster, self.is_ready(cluster), current.relayed_only))
        is_news = state is not None and (former is None or former.ready != state.ready)
        if state is not None and is_news and self._may_log(cluster):
            log.info(
                "the relay of a site has changed",
                action="relay-site",
                cluster=cluster,
                ready=state.ready,
                error=state.error,
            )

    def is_ready(self, cluster: ClusterName) -> bool:
        """Return whether streams can be opened to and from a cluster now."""
        state = self._states.get(cluster)
        return state is not None and state.ready and self._client is not None and self._client.connected.is_set()

    def use_of(self, pair: ClusterPair) -> LinkUse:
        """Return the path of messages that configuration and sites demand between two clusters.

        A site that demands relayed links prevails.
        """
        if any((state := self._states.get(name)) and state.relayed_only for name in pair):
            return LinkUse.RELAYED
        return self._uses.get(pair, LinkUse.ANY)

    def _use_of_job(self, job: Job, pair: ClusterPair, path: LinkPath | None) -> LinkUse:
        """Return the path of a job's messages between two clusters. ``path``: that which the scheduler has assumed."""
        uses = self.use_of(pair), job.spec.links
        if use := next((use for use in (LinkUse.RELAYED, LinkUse.DIRECT) if use in uses), None):
            return use
        by_path = {LinkPath.RELAYED: LinkUse.RELAYED, LinkPath.NONE: LinkUse.RELAYED, LinkPath.DIRECT: LinkUse.DIRECT}
        return LinkUse.ANY if path is None else by_path.get(path, LinkUse.ANY)

    def plan_job(self, job: Job, nodes: Sequence[PlanNode]) -> JobRelay | None:
        """Return the relayed links that a job may use, and let the hub know; None if it may use none."""
        names = sorted({node["cluster"] for node in nodes})
        if len(names) == 1:
            return None
        # Programs of the other launcher cannot be relayed, but must not be direct where a site forbids it. For them it
        # does not matter whether nodes reach each other.
        can_relay = self._client is not None and job.spec.launcher is Launcher.OPENMPI
        pairs: list[tuple[str, str, Any]] = []
        paths = self._find_paths(job) if can_relay else {}
        for pair in combinations(names, 2):
            use = self._use_of_job(job, pair_of(*pair), paths.get(pair))
            if use is LinkUse.RELAYED or (can_relay and use is LinkUse.ANY and all(map(self.is_ready, pair))):
                pairs.append((*pair, use.value))
        if not pairs:
            return None
        required = {cluster for *pair, how in pairs if how == LinkUse.RELAYED.value for cluster in pair}
        can_relay = can_relay and all(map(self.is_ready, required))
        name = attempt_name(job)
        bases = choose_bases(name, _slots(nodes)) if can_relay else []
        attempt = self._plan_attempt(name, bases, nodes)
        if attempt is not None and self._client is not None:
            entry = attempt.hub_entry()
            self._entries[job.id] = name, entry
            self._tasks.spawn(log_rejection(self._client.add(entry)))
        return JobRelay(PlanRelay(attempt=name, pairs=pairs, bases=bases), attempt)

    def note_job(self, job: Job, _previous: JobState | None) -> None:
        """Remove an attempt from the hub once it is over, or another has followed it."""
        entry = self._entries.get(job.id)
        if entry is not None and (job.state.is_final or job.attempt is None or entry[0] != attempt_name(job)):
            del self._entries[job.id]
            if self._client is not None:
                self._tasks.spawn(log_rejection(self._client.remove(entry[0])))

    async def run(self, tokens: Mapping[ClusterName, str], jobs: Callable[[], Sequence[Job]]) -> None:
        """Stay connected with the hub until cancelled. ``tokens``: of the agents. ``jobs``: the unfinished ones."""
        if self._client is None:
            return
        for cluster, token in tokens.items():
            self._keys[cluster] = (await asyncio.to_thread(derive_head_key, token, cluster)).hex()
        for job in jobs():
            if job.attempt is not None and job.attempt.barrier_at is not None:
                nodes, name = self._nodes_of(job), attempt_name(job)
                attempt = self._plan_attempt(name, choose_bases(name, _slots(nodes)), nodes)
                if attempt is not None and len({node["cluster"] for node in nodes}) > 1:
                    self._entries.setdefault(job.id, (name, attempt.hub_entry()))
        try:
            await self._client.keep_connected()
        finally:
            self._tasks.cancel()

    async def read_hub_metrics(self) -> dict[str, float]:
        """Return the hub's metrics that have no labels, by name; none without a hub."""
        text = "" if self._client is None else await self._client.metrics()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return {sample.name: sample.value for sample in samples if not sample.labels}

    def _plan_attempt(self, name: str, bases: Sequence[int], nodes: Sequence[PlanNode]) -> AttemptPlan | None:
        """Return an attempt for the relays; None without a layout of its ports."""
        if not bases:
            return None
        slots = _slots(nodes)
        layouts = [node_ports(base, slots) for base in bases]
        key = hmac.new(self._secret, name.encode(), sha256).digest()
        plans = [(node["cluster"], [layout[index] for layout in layouts]) for index, node in enumerate(nodes)]
        heads = {node["cluster"]: self._describe_head(node["cluster"]) for node in nodes}
        return AttemptPlan(name, key, plans, heads, _max_streams(nodes))

    def _describe_head(self, cluster: ClusterName) -> dict[str, Any]:
        """Return how the heads of other clusters know the head of a cluster, and where they reach it."""
        state = self._states.get(cluster)
        if state is None:
            return {}
        certificate = {} if state.certificate is None else {"certificate": state.certificate}
        address = {"host": state.host, "port": state.port} if _is_reachable(state.host, state.port) else {}
        return {**certificate, **address}

    def _hub_state(self) -> dict[str, Any]:
        return {"heads": self._keys, "attempts": [entry for _, entry in self._entries.values()]}

    def _on_event(self, event: dict[str, Any]) -> None:
        """Act on an event of the hub.

        The head of a lost site may tell its agent nothing, and that of another site sees only its streams end.
        """
        match event["t"]:
            case "state" | "away" as kind:
                for cluster, state in self._states.items():
                    self._report(RelayChanged(cluster, state.ready and kind == "state", state.relayed_only))
            case "lost":
                self._report_loss(str(event["attempt"]), str(event["why"]))
            case "removed":
                moved = {(source, target): count for source, target, count in event["bytes"]}
                self._record_traffic(event["attempt"], event["streams"], moved)

    def _record_traffic(self, attempt: str, streams: int, moved: Mapping[ClusterPair, int]) -> None:
        """Count and log what an ended attempt has sent through the hub.

        ``moved``: bytes by the clusters of the sending and the receiving node.
        """
        log.info(
            "an attempt has ended at the hub",
            action="relay-attempt-over",
            attempt=attempt,
            streams=streams,
            moved=moved,
        )
        if self._instruments is not None:
            self._instruments.relayed.update(moved)
        if self._audit is not None and streams:
            sizes = [f"{source} to {target} {size}" for (source, target), size in sorted(moved.items())]
            detail = f"attempt {attempt}: {streams} streams; bytes: {', '.join(sizes) or 'none'}"
            target = f"job {attempt.partition('.')[0]}"
            self._tasks.spawn(self._audit.record("relay-traffic", None, origin="hub", target=target, detail=detail))

    def _report_loss(self, attempt: str, reason: str) -> None:
        """Let all agents of an attempt know that it has lost streams."""
        for name, entry in self._entries.values():
            if name == attempt:
                for cluster in {node["cluster"] for node in entry["nodes"]} & self._states.keys():
                    self._send(cluster, RelayLost(attempt=attempt, reason=reason))


def _is_reachable(host: str, port: int) -> bool:
    """Return whether heads of other sites may connect to an address that an agent reports: never to their own."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    special = address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified
    return port > 0 and not special


def _check_certificate(state: RelayState) -> RelayState:
    """Return the state, or one that is not ready if other heads could not read its certificate."""
    if state.certificate is not None:
        try:
            if state.certificate.count("-----BEGIN") > 1:
                raise ValueError("it holds several")  # it takes long to read many
            pinned_context(state.certificate)
        except (ssl.SSLError, ValueError) as error:
            reason = f"the certificate of its relay cannot be read: {error}"
            return state.model_copy(update={"ready": False, "error": reason, "certificate": None})
    return state


def _max_streams(nodes: Sequence[PlanNode]) -> int:
    """Return the most streams that an attempt may have: two for each pair of ranks, which may connect to each other at
    the same time, and for each node."""
    ranks: Counter[ClusterName] = Counter()
    for node in nodes:
        ranks[node["cluster"]] += node["slots"]
    return min(MAX_ATTEMPT_STREAMS, 2 * (len(nodes) + sum(ranks[a] * ranks[b] for a, b in combinations(ranks, 2))))


def _slots(nodes: Sequence[PlanNode]) -> list[int]:
    return [node["slots"] for node in nodes]
