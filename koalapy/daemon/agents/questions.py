"""Questions to agents: those of the daemon, and those between agents, which it forwards."""

import asyncio
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Component, Job, JobId
from koalapy.model.reports import MAX_LISTED_NODES, ListedNode, NodeList
from koalapy.model.request import ClusterName
from koalapy.protocol.messages import Answer, Ask
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.queries import Queries
from koalapy.validation.permissions import may_see_all_of

log = structlog.get_logger()

ANSWER_TIMEOUT = 30.0
"""Timeout of a question in seconds."""
BETWEEN_AGENTS = frozenset({"stat", "export", "unexport"})
"""Questions that agents may ask each other, all about replicas. Only the daemon may ask others."""
ABOUT_REPLICAS = frozenset({"stat", "export"})
MAX_FORWARDED = 1000
"""Questions of one agent to others that are forwarded without an answer; it repeats a question after a loss."""
Send = Callable[[ClusterName, Ask | Answer], bool]
"""Sends a message to a cluster's agent; returns False if it is not connected."""
IsReplicaNeeded = Callable[[ClusterName, ClusterName, str], bool]
"""Returns whether a job on the first cluster needs the replica at a path of the second."""


class Questions:
    """The open questions. None is stored: without an answer the asking side repeats it."""

    def __init__(
        self, send: Send, is_replica_needed: IsReplicaNeeded, may_log: Callable[[ClusterName], bool] = lambda _: True
    ) -> None:
        """``may_log``: returns whether a log line about a cluster's agent is within its budget."""
        self._send, self._is_replica_needed, self._may_log = send, is_replica_needed, may_log
        self._forwarded: defaultdict[ClusterName, OrderedDict[tuple[ClusterName, str], None]] = defaultdict(OrderedDict)
        """The open questions of each agent to another one: the other cluster and the identifier."""
        self._open: dict[str, tuple[ClusterName, asyncio.Future[Answer]]] = {}

    async def ask_agent(
        self, cluster: ClusterName, kind: str, payload: Mapping[str, object], timeout: float = ANSWER_TIMEOUT
    ) -> dict[str, Any]:
        """Ask a cluster's agent and return the payload of its answer.

        Raise ``SiteUnavailable`` if the cluster is unreachable or does not answer within ``timeout`` seconds, and
        ``SiteRejected`` with the agent's ``fault`` if it rejects the question.
        """
        ident = uuid.uuid4().hex
        answer_future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[ident] = cluster, answer_future
        try:
            if not self._send(cluster, Ask(ident=ident, what=kind, payload=dict(payload))):
                raise SiteUnavailable(f"{cluster} is out of reach", hint="try again when its agent is connected")
            async with asyncio.timeout(timeout):
                answer = await answer_future
        except TimeoutError:
            raise SiteUnavailable(f"{cluster} has not answered for {timeout:g} s", hint="try again") from None
        finally:
            del self._open[ident]
        if answer.fault is SiteFault.LOST:
            raise SiteUnavailable(f"{cluster} was lost before it answered", hint="try again when it is back")
        if answer.error:
            raise SiteRejected(answer.error, fault=answer.fault or SiteFault.REFUSED)
        return dict(answer.payload)

    def forward_question(self, cluster: ClusterName, message: Ask) -> None:
        """Forward the question of an agent to another agent, or answer with the reason for rejecting it."""
        if message.what not in BETWEEN_AGENTS:
            self._reject_question(cluster, message, f"agents do not ask each other for {message.what!r}")
            return
        path = message.payload.get("path")
        if message.what in ABOUT_REPLICAS and not self._is_replica_needed(cluster, message.cluster, str(path)):
            if self._may_log(cluster):
                text = "an agent asks for what none of its jobs is to have"
                log.warning(text, action="agent-oversteps", cluster=cluster)
            self._reject_question(cluster, message, f"no job on {cluster} is to have that from {message.cluster}")
            return
        forwarded = message.model_copy(update={"cluster": cluster})
        if not self._send(message.cluster, forwarded):
            self._reject_question(cluster, message, f"{message.cluster} is out of reach", SiteFault.UNAVAILABLE)
            return
        questions = self._forwarded[cluster]
        questions[message.cluster, message.ident] = None
        if len(questions) > MAX_FORWARDED:
            questions.popitem(last=False)

    def _reject_question(
        self, cluster: ClusterName, question: Ask, error: str, fault: SiteFault = SiteFault.REFUSED
    ) -> None:
        """Answer the agent that asked with an error."""
        self._send(cluster, Answer(ident=question.ident, error=error, fault=fault, cluster=question.cluster))

    def deliver_answer(self, cluster: ClusterName, message: Answer) -> None:
        """Deliver the answer of an agent to the daemon's task or to the asking agent."""
        if message.cluster:
            questions = self._forwarded.get(message.cluster)
            if questions is not None and (cluster, message.ident) in questions:
                del questions[cluster, message.ident]
                self._send(message.cluster, message.model_copy(update={"cluster": cluster}))
            return
        asked_cluster, waiting = self._open.get(message.ident, ("", None))
        if waiting is not None and asked_cluster == cluster and not waiting.done():
            waiting.set_result(message)

    def fail_questions(self, cluster: ClusterName) -> None:
        """Fail the open questions to an agent after the end of its connection."""
        for asked_cluster, waiting in self._open.values():
            if asked_cluster == cluster and not waiting.done():
                waiting.set_result(Answer(ident="", fault=SiteFault.LOST))


NODES_LIFETIME_S = 5.0
"""Time for which a list of nodes is used, so that many viewers ask an agent once."""
NODES_WAIT_S = 1.0
"""Time for which a viewer waits for the answer of an agent; a late one serves the next viewer."""
_NODE_LIST = TypeAdapter(NodeList)


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """The nodes of a cluster one by one."""

    nodes: tuple[ListedNode, ...] = ()
    known_at: float | None = None
    """When its resource manager reported them, in seconds since the epoch; None if it did not."""
    problem: str = ""
    """Why the agent did not answer the last question."""


class NodeLists:
    """The nodes of clusters one by one, requested from an agent when a viewer wants them, at most every few seconds."""

    def __init__(self, questions: Questions, clock: Callable[[], float]) -> None:
        self._questions, self._clock = questions, clock
        self._known: dict[ClusterName, KnownNodes] = {}
        self._asking: dict[ClusterName, tuple[float, asyncio.Task[None]]] = {}

    async def list_nodes(self, cluster: ClusterName) -> KnownNodes:
        """Return the nodes of a cluster as last known; wait shortly for its agent if that is too long ago."""
        now = asyncio.get_running_loop().time()
        asked_at, task = self._asking.get(cluster, (0.0, None))
        if task is None or (task.done() and now - asked_at > NODES_LIFETIME_S):
            task = asyncio.create_task(self._ask(cluster))
            self._asking[cluster] = now, task
        if not task.done():
            await asyncio.wait((task,), timeout=NODES_WAIT_S)
        return self._known.get(cluster, KnownNodes(problem="its agent has not answered yet"))

    async def _ask(self, cluster: ClusterName) -> None:
        """Ask an agent, and store its answer or the reason why there is none."""
        try:
            payload = await self._questions.ask_agent(cluster, "nodes", {})
            answer = _NODE_LIST.validate_python(payload)
        except (SiteError, ValidationError) as error:
            problem = error.message if isinstance(error, SiteError) else "its agent's answer is not valid"
            previous = self._known.get(cluster, KnownNodes())
            self._known[cluster] = KnownNodes(previous.nodes, previous.known_at, problem)
        else:
            self._known[cluster] = KnownNodes(answer.nodes, self._clock() - answer.age)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node of a cluster, with the component that has it."""

    name: str
    """A number for callers who may not see the job."""
    state: str
    """The state of its component, or that of the node: ``idle``, ``local``, ``down``, or ``held`` by another daemon."""
    node_class: str
    job: JobId | None = None
    owner: str = ""
    """Empty if the caller may not see it."""
    rank: int | None = None
    since: float | None = None
    """When the component got the node."""
    memory: int | None = None
    """Bytes; None if unknown."""
    cores: int | None = None
    features: Sequence[str] = ()
    reason: str = ""
    """The resource manager's words on its state."""


async def list_visible_nodes(
    lists: NodeLists, queries: Queries, name: ClusterName, caller: Identity
) -> tuple[list[NodeRow], KnownNodes]:
    """Return the nodes that a caller may see, and what the resource manager has listed.

    Operators see all nodes that the resource manager lists, other users only those of components. They see neither the
    names of nodes nor the owner of a job that they may not see in full.
    """
    listing = await lists.list_nodes(name) if caller.has_role(Role.OPERATOR) else KnownNodes()
    return _join_nodes(queries.grid[name], listing, queries, caller), listing


def _join_nodes(cluster: ClusterStatus, known: KnownNodes, queries: Queries, caller: Identity) -> list[NodeRow]:
    """Return the first ``MAX_LISTED_NODES`` that a resource manager has listed or components have."""
    classes = {node_class.name: node_class for node_class in cluster.nodes.node_classes}
    # Without names of classes, a single class applies to all nodes.
    only_class = cluster.nodes.node_classes[0] if len(cluster.nodes.node_classes) == 1 else None

    def make_row(name: str, state: str, class_name: str, reason: str, holder: tuple[Job, Component] | None) -> NodeRow:
        node_class = classes.get(class_name, only_class)
        job, component = holder or (None, None)
        return NodeRow(
            name,
            state if component is None else component.state,
            class_name or ("" if node_class is None else node_class.name),
            None if job is None else job.id,
            job.spec.owner if job is not None and may_see_all_of(caller, job) else "",
            None if component is None else component.rank,
            None if component is None else component.claimed_at,
            None if node_class is None else node_class.memory,
            None if node_class is None else node_class.cores,
            () if node_class is None else node_class.features,
            reason,
        )

    # A list may be older than the components, which are the ones that count.
    live = {token: match for token in cluster.nodes.live if (match := queries.find(token)) is not None}
    rows = [make_row(node.name, node.state, node.node_class, node.reason, live.get(node.token)) for node in known.nodes]
    listed = {node.token for node in known.nodes}
    for token, (job, component) in live.items():
        if token in listed:
            continue
        for index, host in enumerate(component.hosts[:MAX_LISTED_NODES]):
            name = host if may_see_all_of(caller, job) else f"node {index + 1}"
            rows.append(make_row(name, component.state, component.node_class, "", (job, component)))
        if len(rows) >= MAX_LISTED_NODES:
            break
    return rows[:MAX_LISTED_NODES]
