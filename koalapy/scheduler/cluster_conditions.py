"""The conditions of a cluster: contact, errors, limits, doubted nodes, claim statistics, and use of its uplink."""

from collections.abc import Callable
from dataclasses import dataclass, field

from koalapy.model.job import Token
from koalapy.model.node_requirement import ANY_NODE, NodeFilter
from koalapy.model.request import Request
from koalapy.model.wording import format_nodes, format_time

HALF_LIFE = 3600.0
"""Seconds after which a claim counts half: the load by local users changes during the day."""
ASSUMED_START = 0.5
"""Seconds from the submission of a runner until its nodes have reported, without measurements."""


@dataclass(slots=True)
class DecayingSum:
    """A sum in which each amount counts half as much after each ``HALF_LIFE``."""

    _sum: float = 0.0
    _at: float = 0.0

    def add(self, amount: float, now: float) -> None:
        if now < self._at:  # decay the amount to the time of the sum
            self._sum += amount * _decay_factor(self._at - now)
        else:
            self._sum, self._at = self.at(now) + amount, now

    def at(self, now: float) -> float:
        return self._sum * _decay_factor(now - self._at) if now > self._at else self._sum


def _decay_factor(seconds: float) -> float:
    return float(2.0 ** -min(seconds / HALF_LIFE, 1000.0))


@dataclass(slots=True)
class ClaimEvidence:
    """Decaying statistics of the claims on one cluster. Each daemon run starts with empty statistics."""

    consecutive_failures: int = 0
    """Failed claims in a row for nodes that were reported idle. Each doubles the pause of a doubt."""
    _started: DecayingSum = field(default_factory=DecayingSum)
    _waited: DecayingSum = field(default_factory=DecayingSum)
    """Seconds from submission until the last node had reported, of the started runners."""
    _failed: DecayingSum = field(default_factory=DecayingSum)

    def record_started(self, waited: float, now: float) -> None:
        """Count a runner that got its nodes ``waited`` seconds after its submission."""
        self._started.add(1.0, now)
        self._waited.add(max(0.0, waited), now)

    def record_failed(self, now: float) -> None:
        """Count a runner that failed before all its nodes had reported."""
        self._failed.add(1.0, now)

    def claims(self, now: float) -> float:
        """Return the decayed number of claims."""
        return self._started.at(now) + self._failed.at(now)

    def failed_fraction(self, now: float) -> float:
        """Return the decayed fraction of claims that failed; 0 without claims."""
        claims = self.claims(now)
        return self._failed.at(now) / claims if claims else 0.0

    def mean_wait(self, now: float) -> float:
        """Return the mean seconds from a runner's submission until its nodes have reported."""
        started = self._started.at(now)
        return self._waited.at(now) / started if started > 0 else ASSUMED_START


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of a cluster's resource manager: it accepts no component of ``size`` nodes or more before ``until``."""

    size: int
    until: float
    reason: str

    def __str__(self) -> str:
        until = format_time(self.until, self.until, exact=True)
        return f"takes nothing of {format_nodes(self.size)} or more until {until}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Doubt:
    """Nodes that a cluster reports idle and that do not count, since a claim for ``size`` of them failed."""

    nodes: int
    """Number of nodes reported as idle that do not count."""
    size: int
    since: float
    until: float
    is_tried: bool = False
    """Whether the pause is over. The nodes then count for one claim at a time, until a claim of that size succeeds."""
    filter: NodeFilter = ANY_NODE
    """Which nodes the claim was for."""
    reason: str = ""
    """Why the resource manager did not start the claim, if it said that."""

    def __str__(self) -> str:
        until = format_time(self.until, self.until, exact=True)
        again = ", tried by one claim at a time" if self.is_tried else f" until {until}"
        claimed = f"{format_nodes(self.size)} {self.filter}".rstrip()
        reason = f": {self.reason}" if self.reason else ""
        return f"has {format_nodes(self.nodes, 'idle')} in doubt{again}: a claim for {claimed} was in vain{reason}"


JobKind = tuple[str, str, Request]
"""Owner, application and request of a job."""

MAX_WORDINGS = 20
"""Maximum number of different rejection messages stored per cluster."""


@dataclass(slots=True)
class UnknownRefusals:
    """The unrecognized messages with which a resource manager rejected jobs since it last accepted one."""

    _by_words: dict[str, JobKind | None] = field(default_factory=dict)
    """The kind of the jobs rejected with each message; None if there were several kinds."""

    def add(self, message: str, kind: JobKind) -> bool:
        """Store a rejection; return whether jobs of several kinds were rejected with the same message."""
        first = self._by_words.pop(message, kind)
        self._by_words[message] = first if first == kind else None
        if len(self._by_words) > MAX_WORDINGS:
            del self._by_words[next(iter(self._by_words))]
        return self._by_words[message] is None

    def clear(self) -> None:
        """Forget all messages, as the resource manager accepts jobs again."""
        self._by_words.clear()


@dataclass(slots=True)
class UplinkUse:
    """The capacity of a cluster's uplink, and the bandwidth that components there use."""

    bandwidth: float | None = None
    """The configured capacity in bytes per second; None if it follows from measured links."""
    on_change: Callable[[], None] = lambda: None
    """Called when the used bandwidth changes."""
    _demands: dict[Token, float] = field(default_factory=dict)

    @property
    def consumed(self) -> float:
        """Return the used bandwidth in bytes per second, as far as components declare theirs."""
        return sum(self._demands.values())

    def add_demand(self, token: Token, demand: float) -> None:
        """Add the demand of a component in bytes per second; 0 means unknown."""
        if demand:
            self._demands[token] = demand
            self.on_change()

    def remove_demand(self, token: Token) -> bool:
        """Remove the demand of a component; return whether that frees bandwidth."""
        ended = bool(self._demands.pop(token, 0.0))
        if ended:
            self.on_change()
        return ended


@dataclass(slots=True)
class ContactStatus:
    """The connection of a cluster's agent, and the age of its last message."""

    connected: bool = False
    """Whether its agent is connected and has reported what runs there."""
    has_agent: bool = False
    """Whether its agent is connected, even if its resource manager has not answered it yet."""
    losses: int = 0
    """Number of lost connections in this daemon run."""
    last_heard: float | None = None
    silent_since: float | None = None
    """The time of its last message, moved on by the time in which the daemon itself was suspended."""
    check_at: float | None = None
    """When the consequences of its silence are checked next."""
    lost_by: float | None = None
    """When its last component has certainly ended, if it stays silent. Infinite if no time is known for one; None while
    connected or without components."""
    silence_ignored_until: float = float("-inf")
    """Silence before this time has no consequences."""
    disconnected_because: str = "its agent has not connected yet"
    agent_failed: str = ""
    """Why the agent that the daemon runs for it does not run; empty if it does, or if there is no such agent."""
    confirmed_at: float = float("-inf")
    """Everything that the cluster knew at this time has been reported."""
    confirmation_requested: bool = False
    """Whether a confirmation was requested and has not been answered yet."""
    unconfirmed_since: float | None = None
    """When the open request was first sent, over all connections; moved on by the daemon's suspension."""


LAST_ERROR = ", the last: "


@dataclass(slots=True)
class HealthStatus:
    """How far a cluster may be used: its errors in a row, its probation, its limit and the doubt of its idle nodes."""

    errors: int = 0
    unusable: bool = False
    note: str = ""
    """Why the cluster is unusable, with the last error, which may name a job or its files."""
    trials: int = 0
    """Failed probations since it became unusable. Each doubles the next pause."""
    probation: bool = False
    """Whether the unusable cluster is being tried again."""
    probation_at: float | None = None
    """When the next trial may start."""
    trial_components: set[Token] = field(default_factory=set)
    """Components placed there as trials during probation."""
    limit: Limit | None = None
    limits: int = 0
    """Limits reported in a row since it last accepted a component. Each doubles the next pause."""
    limit_lifted_at: float = float("-inf")
    """When the pause after a limit last ended."""
    unknown_refusals: UnknownRefusals = field(default_factory=UnknownRefusals)
    doubt: Doubt | None = None
    evidence: ClaimEvidence = field(default_factory=ClaimEvidence)
    """Statistics of claims."""
    proofs: set[Token] = field(default_factory=set)
    """Running claims for nodes that are tried again after a doubt."""

    def clear(self) -> None:
        """Make the cluster usable without limit or doubt. Statistics of claims stay."""
        self.errors, self.unusable, self.note = 0, False, ""
        self.trials, self.probation, self.probation_at = 0, False, None
        self.limit, self.limits, self.doubt = None, 0, None
        self.unknown_refusals.clear()
        self.evidence.consecutive_failures = 0

    @property
    def summary(self) -> str:
        """Return why the cluster is unusable, as all users may know it."""
        return self.note.partition(LAST_ERROR)[0]

    @property
    def last_error(self) -> str:
        return self.note.partition(LAST_ERROR)[2]
