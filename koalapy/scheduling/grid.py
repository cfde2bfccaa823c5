"""What is known of each cluster: what it reported, what was promised since, how often it failed."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from koalapy.model.cluster import ClusterPair, ClusterState, ClusterView, Drain, GridView, Link
from koalapy.model.disk import Disk
from koalapy.model.job import Token
from koalapy.model.profile import ClusterProfile
from koalapy.model.reports import ClusterReport
from koalapy.model.request import ClusterName
from koalapy.model.wording import clock, listed, nodes


@dataclass(frozen=True, slots=True)
class Limit:
    """A cluster's resource manager takes no component of ``size`` nodes or more until a moment, for a reason."""

    size: int
    until: float
    reason: str

    def __str__(self) -> str:
        until = clock(self.until, self.until, exact=True)
        return f"takes nothing of {nodes(self.size)} or more until {until}: {self.reason}"


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

    def __str__(self) -> str:
        until = clock(self.until, self.until, exact=True)
        again = ", tried by one claim at a time" if self.is_tried else f" until {until}"
        return f"has {nodes(self.nodes, 'idle')} in doubt{again}: a claim for {nodes(self.size)} was in vain"


class ClusterStatus:
    """One cluster. Nodes are counted; which ones a component gets is the cluster's own business."""

    def __init__(self, name: ClusterName, speed: float = 1.0, profile: ClusterProfile | None = None) -> None:
        self.name = name
        self.speed = speed
        self.profile = profile or ClusterProfile()
        self.total = 0
        self.background = 0
        self.down = 0
        self.connected = False
        self.last_heard: float | None = None
        self.silent_since: float | None = None
        """When it was last heard of, moved on by what we slept since: then nobody listened."""
        self.silence_ignored_until = float("-inf")
        """Before then its silence means nothing."""
        self.over: set[Token] = set()
        """Components whose program has ended, as was told before its exit code."""
        self.confirmed_at = float("-inf")
        """All that was known there at this time has been told."""
        self.confirmation_requested = False
        """Whether it was asked to confirm that, and has not answered yet."""
        self.unconfirmed_since: float | None = None
        """Since when, on whatever connections; moved on by what we slept."""
        self.disconnected_because = "its agent has not connected yet"
        self.agent_failed = ""
        """Why the agent that the daemon runs for it does not run; empty when it does, or the daemon runs none."""
        self.errors = 0
        self.unusable = False
        self.probation = False
        """Whether the unusable cluster is being tried again."""
        self.probation_at: float | None = None
        """When the next trial may begin."""
        self.trials = 0
        """Probations that failed since it became unusable: each makes the next pause longer."""
        self.drained: Drain | None = None
        self.note = ""
        self.problem = ""
        """Why nothing can be started there, by what its agent knows of its resource manager; empty when it can."""
        self.notices: tuple[str, ...] = ()
        """What its agent tells people beside that."""
        self.lacks: frozenset[str] = frozenset()
        """Programs that are missing there."""
        self.disks: tuple[Disk, ...] = ()
        """Where its agent writes."""
        self.limit: Limit | None = None
        self.limits = 0
        """How often it has told of a limit since it last took a component: each makes the next pause longer."""
        self.doubt: Doubt | None = None
        self.doubts = 0
        """How many claims in a row were in vain though it said that it had the nodes: each makes the pause longer."""
        self.live: dict[Token, int] = {}
        """Size in nodes of each component that may hold nodes here."""
        self.delivering: set[Token] = set()
        """Components that have given back their nodes here and still send what they have."""
        self.capacity_gained = False
        """Whether nodes became available here since the grid was last asked."""
        self.departs = False
        """Whether more nodes will be available than was expected when the grid was last asked."""
        self.reported = False
        """Whether it has told its nodes since the daemon began."""
        self._idle = 0
        self._holding: frozenset[Token] = frozenset()
        self._promised = 0
        self._leaving: dict[Token, int] = {}
        self._promised_of: dict[Token, frozenset[Token]] = {}
        """The components that were leaving when others were promised nodes that were not idle: theirs."""
        self._trials: set[Token] = set()
        self._proofs: set[Token] = set()
        """Claims that are under way for nodes that count again after a doubt."""

    def report(self, report: ClusterReport) -> None:
        """Take in what its agent says of its nodes."""
        self.capacity_gained |= bool(self.lacks - report.lacks)
        self.lacks, self.disks = report.lacks, report.disks
        before, expected = (self.available if not self.problem or report.problem else 0), self.expected
        self.problem, self.notices = report.problem, report.notices
        if report.problem and not report.total:
            return  # its agent is new and has not seen its nodes yet: what was known of them stands
        # No node is two things, whatever an agent says.
        self.total, self._idle = report.total, min(report.idle, report.total)
        self.down = min(report.down, self.total - self._idle)
        self.background = min(report.background, self.total - self._idle - self.down)
        self.reported = True
        if self.doubt is not None and self._idle < self.doubt.nodes:
            # Somebody has taken some of them: these were there.
            self.doubt = replace(self.doubt, nodes=self._idle) if self._idle else None
        self._holding = holding = report.holding
        self._promised = sum(size for token, size in self.live.items() if token not in holding)
        for token in [token for token in self._leaving if token not in self.live and token not in holding]:
            del self._leaving[token]
        self.capacity_gained |= self.available > before
        self.departs |= self.expected > expected

    def promise(self, token: Token, size: int) -> None:
        """Nodes are given to a component; they stop being available now, not when the cluster says so."""
        if size > self.idle:
            self._promised_of[token] = frozenset(self._leaving)
        self.live[token] = size
        if token not in self._holding:
            self._promised += size
        if self.probation:
            self._trials.add(token)
        if self.doubt is not None and self.doubt.is_tried:
            self._proofs.add(token)

    def shown(self, token: Token) -> None:
        """A claim has shown what it could, or never will: the next may."""
        if token in self._proofs:
            self._proofs.remove(token)
            self.capacity_gained |= not self._proofs

    def forget_trials(self) -> None:
        """What was tried here before is no trial of what comes next, however long it goes on."""
        self._trials.clear()

    def leave(self, token: Token) -> None:
        """The component was told to end: its nodes will be free soon."""
        if token in self.live:
            self.departs |= token not in self._leaving
            self._leaving[token] = self.live[token]

    @property
    def awaited(self) -> list[Token]:
        """Components of which something is to be heard."""
        return [*self.live, *self.delivering]

    def deliver(self, token: Token) -> None:
        """The component has given back its nodes, and has not ended."""
        self.release(token)
        self.delivering.add(token)

    def release(self, token: Token) -> None:
        """The component has ended; nodes that the last report counted as its own stay unavailable until the next."""
        before, expected = self.available, self.expected
        self.delivering.discard(token)
        size = self.live.pop(token, 0)
        self._promised_of.pop(token, None)
        self.over.discard(token)
        if token not in self._holding:
            self._promised -= size
            self._leaving.pop(token, None)
        elif size:
            self._leaving[token] = size
        if token in self._trials:
            self._trials.remove(token)
            self.capacity_gained |= not self._trials
        self.shown(token)
        self.capacity_gained |= self.available > before
        self.departs |= self.expected > expected

    # Nodes

    def holds(self, token: Token) -> bool:
        """Whether its last report says that a component has its nodes."""
        return token in self._holding

    @property
    def available(self) -> int:
        """Nodes that may be promised now: idle as reported, less those promised to components that the report does not
        yet count and those in doubt, and within what the resource manager takes of us.
        """
        free = self._idle - self._promised  # asked of every cluster in each scan
        if self.doubt is not None:
            free -= self.doubted
        return max(0, self._within_limit(free))

    @property
    def trusted_available(self) -> int:
        """The same, if nothing of what it says were in doubt."""
        return self._within_limit(self.idle)

    @property
    def without_ours(self) -> int:
        """Nodes that could be promised if no component of ours had any."""
        return self._within_limit(self.total - self.background - self.down - self.doubted)

    def _within_limit(self, count: int) -> int:
        """As many of these nodes as the resource manager takes of us."""
        return count if self.limit is None else min(count, self.limit.size - 1)

    @property
    def idle(self) -> int:
        """The same as available, whatever we doubt and whatever limits the resource manager has for us."""
        return max(0, self._idle - self._promised)

    @property
    def surplus(self) -> int:
        """Nodes beyond those that are promised or in doubt; below 0 when there are too few for these."""
        return self._idle - self._promised - self.doubted

    @property
    def doubted(self) -> int:
        """Nodes that are said to be idle and do not count now."""
        if self.doubt is None or (self.doubt.is_tried and not self._proofs):
            return 0
        return self.doubt.nodes

    @property
    def said_for_new_claims(self) -> int:
        """Nodes that it says are idle, whatever is to be thought of that, beyond those promised to who still waits."""
        waiting = (size for t, size in self.live.items() if t not in self._holding and t not in self._leaving)
        return self._idle - sum(waiting)

    def largest_queued(self, token: Token, size: int) -> int:
        """The nodes of a component of ``size``, or of the largest that was promised some before it and has none: where
        the queue is strict, it was held up by that one."""
        for other, its in self.live.items():
            if other == token:
                break
            if other not in self._holding:
                size = max(size, its)
        return size

    def count_on_none_of(self, token: Token) -> None:
        """The nodes that a component was promised of others never came: nobody is promised them any more."""
        for other in self._promised_of.pop(token, ()):
            self._leaving.pop(other, None)

    @property
    def leaving(self) -> int:
        """Nodes of components that are ending, or have ended since the last report."""
        return sum(self._leaving.values())

    def still_to_leave(self, token: Token) -> int:
        """Nodes that a component was promised of others that were leaving, and that these have not given back yet."""
        return sum(self._leaving.get(other, 0) for other in self._promised_of.get(token, ()))

    @property
    def expected(self) -> int:
        """Nodes available once all that is ending has ended; below 0 when more is promised than that."""
        return self._idle - self._promised + self.leaving - self.doubted

    @property
    def reported_idle(self) -> int:
        return self._idle

    @property
    def used(self) -> int:
        """Nodes that are neither idle, nor local users', nor down: what components of ours have, were promised and
        will get, or what the resource manager has not let go of. A component that waits behind local users has none.
        """
        if not self.reported:
            return sum(self.live.values())
        return self.total - self.background - self.down - self.idle

    # Whether it may be used

    @property
    def is_open(self) -> bool:
        """Whether components may be placed here now; on probation only while none is being tried."""
        state = self.state
        return state is ClusterState.USABLE or (state is ClusterState.PROBATION and not self._trials)

    @property
    def state(self) -> ClusterState:
        if self.drained is not None:
            return ClusterState.DRAINED
        if not self.connected:
            return ClusterState.UNREACHABLE
        if self.unusable and not self.probation:
            return ClusterState.UNUSABLE
        if self.problem:
            return ClusterState.UNREACHABLE
        return ClusterState.PROBATION if self.unusable else ClusterState.USABLE

    @property
    def why(self) -> str:
        """Why nothing is placed here, in the words an operator would use; empty when usable."""
        if self.drained is not None:
            by = f"by {self.drained.by}" if self.drained.by else "by an operator"
            return f"{by}: {self.drained.reason}" if self.drained.reason else by
        if not self.connected:
            return self.problem or self.agent_failed or self.disconnected_because
        if self.unusable and not self.probation:
            return self.note
        if self.problem:
            return self.problem
        return f"on probation, one component at a time; {self.note}" if self.unusable else ""

    @property
    def moves_files(self) -> bool:
        return "rsync" not in self.lacks

    @property
    def said(self) -> str:
        """Everything that an operator should know of it in one line; empty when all is well."""
        lacks = f"has no {listed(sorted(self.lacks))}: no files come there from other clusters, and none go"
        held_back = [str(each) for each in (self.limit, self.doubt) if each is not None]
        return "; ".join(filter(None, (self.why, *held_back, lacks if self.lacks else "", *self.notices)))

    def view(self, idle: int) -> ClusterView:
        """What policies see, with so many idle nodes: a cluster on probation is usable or not, as it may be tried."""
        state = self.state
        if state is ClusterState.PROBATION:
            state = ClusterState.UNUSABLE if self._trials else ClusterState.USABLE
        note = "" if state is ClusterState.USABLE else self.why
        return ClusterView(self.name, self.total, idle, state, self.speed, note)


Links = Mapping[ClusterPair, Link]


class GridStatus:
    """All clusters by name, and the links between them."""

    def __init__(self, clusters: Iterable[ClusterStatus], links: Links | None = None) -> None:
        self._clusters = {cluster.name: cluster for cluster in sorted(clusters, key=lambda b: b.name)}
        self._links = dict(links or {})
        self._replicas: dict[str, tuple[ClusterName, ...]] = {}
        self.files_gone = 0
        """How many files were said to be nowhere since such files were last forgotten."""
        self.capacity_gained = False
        """Whether a link or a replica became known that may open a way for a job."""

    def __getitem__(self, name: ClusterName) -> ClusterStatus:
        return self._clusters[name]

    def __contains__(self, name: object) -> bool:
        return name in self._clusters

    def clusters(self) -> list[ClusterStatus]:
        return list(self._clusters.values())

    @property
    def is_all_on_trial(self) -> bool:
        """Whether no cluster is trusted: then trials may have more than one component, lest wide jobs wait for ever."""
        return not any(cluster.state is ClusterState.USABLE for cluster in self._clusters.values())

    def take_capacity_gained(self) -> bool:
        """Whether there may be more room anywhere than when this was last asked."""
        grown = [cluster for cluster in self._clusters.values() if cluster.capacity_gained]
        for cluster in grown:
            cluster.capacity_gained = False
        learned, self.capacity_gained = self.capacity_gained, False
        return bool(grown) or learned

    def take_departures(self) -> bool:
        """Whether there may be more room soon than was expected when this was last asked."""
        departing = [cluster for cluster in self._clusters.values() if cluster.departs]
        for cluster in departing:
            cluster.departs = False
        return bool(departing)

    def view(self, idle: Callable[[ClusterStatus], int] | None = None) -> GridView:
        """The grid as policies see it; ``idle`` says how many nodes of a cluster count, by default the available."""
        if idle is None:
            clusters = tuple(cluster.view(cluster.available) for cluster in self._clusters.values())
        else:
            clusters = tuple(cluster.view(max(0, idle(cluster))) for cluster in self._clusters.values())
        cut_off = frozenset(cluster.name for cluster in self._clusters.values() if not cluster.moves_files)
        return GridView(clusters, self._links, replicas=self._replicas, cut_off=cut_off)

    # What is known beside the clusters; views of before keep what they were made of

    def link(self, one: ClusterName, other: ClusterName) -> Link:
        """What is known of the network from one cluster to another, or within one; the way back where that is all."""
        return self._links.get((one, other)) or self._links.get((other, one)) or Link()

    def set_link(self, one: ClusterName, other: ClusterName, link: Link) -> None:
        """Take in a measurement of one way; what it does not say stays as it was, but of an unreachable link nothing
        does, either way."""
        self.capacity_gained = True
        if link.unreachable:
            self._links = self._links | {(one, other): link, (other, one): link}
            return
        before, links = self.link(one, other), dict(self._links)
        latency = before.latency if link.latency is None else link.latency
        bandwidth = before.bandwidth if link.bandwidth is None else link.bandwidth
        links[one, other] = Link(latency, bandwidth)
        if (back := links.get((other, one))) is not None and back.unreachable:
            del links[other, one]
        self._links = links

    def set_replicas(self, sites: Mapping[str, tuple[ClusterName, ...]]) -> None:
        """Take in where logical files are from now on; nowhere is also an answer."""
        self._replicas = {**self._replicas, **sites}
        self.capacity_gained |= any(sites.values())
        self.files_gone += sum(not each for each in sites.values())

    def forget_files(self, wanted: Collection[str]) -> None:
        """Files that are nowhere, but those that somebody wants, who is to know that."""
        self.files_gone = 0
        self._replicas = {name: sites for name, sites in self._replicas.items() if sites or name in wanted}
