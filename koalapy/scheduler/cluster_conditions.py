"""What may be the matter with a cluster: out of reach, failed too often, full, not believed; and its uplink."""

from collections.abc import Callable
from dataclasses import dataclass, field

from koalapy.model.job import Token
from koalapy.model.request import Request
from koalapy.model.wording import format_nodes, format_time

HALF_LIFE = 3600.0
"""Seconds after which a claim weighs half as much: local users of the afternoon are not those of the morning."""
ASSUMED_START = 0.5
"""Seconds from the submission of a runner until its nodes have reported, where nothing is known."""


@dataclass(slots=True)
class DecayingSum:
    """A sum of which each part weighs half as much after each ``HALF_LIFE``."""

    _sum: float = 0.0
    _at: float = 0.0

    def add(self, amount: float, now: float) -> None:
        if now < self._at:  # it is as old as that by now
            self._sum += amount * _left(self._at - now)
        else:
            self._sum, self._at = self.at(now) + amount, now

    def at(self, now: float) -> float:
        return self._sum * _left(now - self._at) if now > self._at else self._sum


def _left(seconds: float) -> float:
    return float(2.0 ** -min(seconds / HALF_LIFE, 1000.0))


@dataclass(slots=True)
class ClaimEvidence:
    """How the runners on one cluster fared lately; a new daemon learns it anew by a few claims."""

    consecutive_failures: int = 0
    """Claims in a row that got nothing though the cluster reported the nodes: each lengthens the pause of a doubt."""
    _started: DecayingSum = field(default_factory=DecayingSum)
    _waited: DecayingSum = field(default_factory=DecayingSum)
    """Seconds from submission until the last node had reported, of the runners that started."""
    _failed: DecayingSum = field(default_factory=DecayingSum)

    def record_started(self, waited: float, now: float) -> None:
        """Count a runner that got its nodes after so many seconds."""
        self._started.add(1.0, now)
        self._waited.add(max(0.0, waited), now)

    def record_failed(self, now: float) -> None:
        """Count a runner that was overtaken, or broke, before all its nodes had reported."""
        self._failed.add(1.0, now)

    def claims(self, now: float) -> float:
        """Return how many runners were counted, as far as that has not faded."""
        return self._started.at(now) + self._failed.at(now)

    def failed_fraction(self, now: float) -> float:
        """Return the fraction of these that did not start; 0 where there are none."""
        claims = self.claims(now)
        return self._failed.at(now) / claims if claims else 0.0

    def mean_wait(self, now: float) -> float:
        """Return the mean seconds from submission until the nodes of a runner have reported."""
        started = self._started.at(now)
        return self._waited.at(now) / started if started > 0 else ASSUMED_START


@dataclass(frozen=True, slots=True)
class Limit:
    """A cluster's resource manager takes no component of ``size`` nodes or more until a moment, for a reason."""

    size: int
    until: float
    reason: str

    def __str__(self) -> str:
        until = format_time(self.until, self.until, exact=True)
        return f"takes nothing of {format_nodes(self.size)} or more until {until}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Doubt:
    """A cluster says that nodes are idle, and a claim for ``size`` nodes that it should have had was in vain."""

    nodes: int
    """So many of those that it says are idle do not count."""
    size: int
    since: float
    until: float
    is_tried: bool = False
    """Whether that is over, and they count for one claim at a time, until one of that size holds."""
    node_class: str = ""
    """The class of these nodes, if the claim asked for one."""

    def __str__(self) -> str:
        until = format_time(self.until, self.until, exact=True)
        again = ", tried by one claim at a time" if self.is_tried else f" until {until}"
        of_class = f" of the class {self.node_class}" if self.node_class else ""
        claimed = f"{format_nodes(self.size)}{of_class}"
        return f"has {format_nodes(self.nodes, 'idle')} in doubt{again}: a claim for {claimed} was in vain"


JobKind = tuple[str, str, Request]
"""Owner, application and request of a job."""

MAX_WORDINGS = 20
"""Refusals in different words that are remembered of a cluster."""


@dataclass(slots=True)
class UnknownRefusals:
    """The unknown words in which a resource manager has refused jobs since it last took one."""

    _by_words: dict[str, JobKind | None] = field(default_factory=dict)
    """The kind of the jobs that were refused in these words; None where there were several kinds."""

    def add(self, words: str, kind: JobKind) -> bool:
        """Remember a refusal; return whether jobs of several kinds were refused in the same words."""
        first = self._by_words.pop(words, kind)
        self._by_words[words] = first if first == kind else None
        if len(self._by_words) > MAX_WORDINGS:
            del self._by_words[next(iter(self._by_words))]
        return self._by_words[words] is None

    def clear(self) -> None:
        """Forget all of them: the resource manager takes jobs."""
        self._by_words.clear()


@dataclass(slots=True)
class UplinkUse:
    """A cluster's link to all others, and what those who run there exchange over it."""

    bandwidth: float | None = None
    """Bytes per second that it carries, as configured; None: as links were measured."""
    on_change: Callable[[], None] = lambda: None
    """Is told when more or less is exchanged."""
    _demands: dict[Token, float] = field(default_factory=dict)

    @property
    def consumed(self) -> float:
        """Bytes per second, as far as it is known what components exchange."""
        return sum(self._demands.values())

    def add_demand(self, token: Token, demand: float) -> None:
        """A component begins to exchange so many bytes per second; 0 is not known."""
        if demand:
            self._demands[token] = demand
            self.on_change()

    def remove_demand(self, token: Token) -> bool:
        """A component exchanges nothing any more; whether there is more left for others."""
        ended = bool(self._demands.pop(token, 0.0))
        if ended:
            self.on_change()
        return ended


@dataclass(slots=True)
class ContactStatus:
    """Whether a cluster is heard of, and how old what it said is."""

    connected: bool = False
    """Whether its agent is connected and has told what runs there."""
    has_agent: bool = False
    """Whether its agent is connected; until its resource manager answers it cannot tell what runs there."""
    losses: int = 0
    """How often it was lost since the daemon began."""
    last_heard: float | None = None
    silent_since: float | None = None
    """When it was last heard of, moved on by what we slept since: then nobody listened."""
    check_at: float | None = None
    """When it is looked at what follows from its silence."""
    lost_by: float | None = None
    """When the last of its components is certainly over, if it stays silent; infinite where no time says that of one,
    None while it is in reach or nothing of ours may run there."""
    silence_ignored_until: float = float("-inf")
    """Before then its silence means nothing."""
    disconnected_because: str = "its agent has not connected yet"
    agent_failed: str = ""
    """Why the agent that the daemon runs for it does not run; empty when it does, or the daemon runs none."""
    confirmed_at: float = float("-inf")
    """All that was known there at this time has been told."""
    confirmation_requested: bool = False
    """Whether it was asked to confirm that, and has not answered yet."""
    unconfirmed_since: float | None = None
    """Since when, on whatever connections; moved on by what we slept."""


@dataclass(slots=True)
class HealthStatus:
    """How often a cluster has failed in a row, and what follows from that."""

    errors: int = 0
    unusable: bool = False
    note: str = ""
    """Why it is unusable."""
    trials: int = 0
    """Probations that failed since it became unusable: each makes the next pause longer."""
    probation: bool = False
    """Whether the unusable cluster is being tried again."""
    probation_at: float | None = None
    """When the next trial may start."""
