"""The simulated grid, and a simulated cluster: its resource manager, nodes, and the agent that reports them.

The resource manager is strict: no job overtakes the first one in its queue, whether of a local user or of the
scheduler.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from koalapy.model.cluster import ClusterPair, Link
from koalapy.model.errors import UsageError
from koalapy.model.job import ComponentState, JobId, Token
from koalapy.model.job_sizes import NodeReservation, SizeRanges
from koalapy.model.profile import ClusterProfile
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, ReportedState
from koalapy.model.request import ClusterName
from koalapy.scheduler.events import Event, InventoryReceived, Reported
from koalapy.simulation.jobs import LocalUser


@dataclass(slots=True, eq=False)
class Runner:
    """A component that was submitted to the resource manager, until it returns its nodes."""

    job: JobId
    token: Token
    size: int
    since: float | None = None
    """Time at which it received its nodes; None while it waits."""
    exit_code: int | None = None
    """Exit code to report when its program ends; None if another component reports it."""
    is_over: bool = False
    shares: bool = False
    """Whether it had parts of nodes when the simulation began."""

    @property
    def has_nodes(self) -> bool:
        return self.since is not None


Allocated = Callable[["Site", "Runner | LocalUser"], None]


class Site:
    """A cluster with its agent. Most methods return the report that the agent sends."""

    def __init__(self, name: ClusterName, nodes: int, allocated: Allocated) -> None:
        """Create a cluster with idle nodes.

        ``allocated`` is called with each component or local user that receives nodes, at that time. It must set the
        ``since`` of a component.
        """
        self.name, self.nodes, self.idle, self.background = name, nodes, nodes, 0
        self.down = self._overlap = 0
        self._reservations: tuple[NodeReservation, ...] = ()
        self._job_sizes: SizeRanges = ()
        self.tells_nodes = False
        """Whether the agent must report the number of idle nodes.

        Without local users the scheduler derives it from the reports of components.
        """
        self.runners: dict[Token, Runner] = {}
        self._allocated = allocated
        self._queue: deque[Runner | LocalUser] = deque()
        self._hosts: dict[int, tuple[str, ...]] = {}
        """Host names by number of nodes. The choice of nodes has no effect in a simulation."""
        self._existing: list[ComponentStatus] = []
        """Statuses of components that existed before the agent connects."""

    @property
    def used(self) -> int:
        """Return the number of nodes that jobs or local users have now."""
        return self.nodes - self._overlap - self.idle

    # Local users

    def add_local_user(self, user: LocalUser) -> None:
        self.tells_nodes = True
        self._queue.append(user)
        self._allocate_nodes()

    def remove_local_user(self, user: LocalUser) -> None:
        self.idle += user.nodes
        self.background -= user.nodes
        self._allocate_nodes()

    # Components

    def submit(self, runner: Runner) -> Event | None:
        """Queue a component and return the agent's report.

        Return None if the component gets its nodes at once, since further reports follow.
        """
        self.runners[runner.token] = runner
        self._queue.append(runner)
        self._allocate_nodes()
        if runner.has_nodes:
            return None
        return Reported(self.name, ComponentStatus(runner.token, ComponentState.WAITING, lrm_job="1"))

    def claimed_report(self, runner: Runner) -> Event:
        """Return the report that a component is claimed, since all its runners have reported."""
        return Reported(
            self.name, ComponentStatus(runner.token, ComponentState.CLAIMED, self._host_names(runner.size), "1")
        )

    def running_report(self, runner: Runner, exit_code: int | None) -> Event:
        """Return the report that the program has started; set the exit code with which it will end."""
        runner.exit_code = exit_code
        return Reported(self.name, ComponentStatus(runner.token, ComponentState.RUNNING, lrm_job="1"))

    def end_component(self, runner: Runner, error: str = "") -> Event:
        """End a component, free its nodes and return the report. An ``error`` is a fault of the cluster."""
        runner.is_over = True
        del self.runners[runner.token]
        if runner.has_nodes:
            shared_nodes = min(runner.size, self._overlap) if runner.shares else 0  # others keep these nodes
            self._overlap -= shared_nodes
            self.nodes -= shared_nodes
            self.idle += runner.size - shared_nodes
        else:
            self._queue.remove(runner)
        self._allocate_nodes()
        status = ComponentStatus(
            runner.token, ComponentState.ENDED, (), "1", runner.exit_code, error=error, infrastructure=bool(error)
        )
        return Reported(self.name, status)

    def stop_component(self, token: Token) -> Event:
        """Stop a component and return the report; an unknown component is reported as ended."""
        runner = self.runners.get(token)
        if runner is None:
            return Reported(self.name, ComponentStatus(token, ComponentState.ENDED, (), "1"))
        runner.exit_code = None
        return self.end_component(runner)

    def node_report(self) -> Event:
        """Return the report of the cluster's nodes."""
        holding = frozenset(token for token, runner in self.runners.items() if runner.has_nodes)
        return self._create_report(self.idle, holding)

    def _create_report(self, idle: int, holding: frozenset[Token] = frozenset()) -> Event:
        report = ClusterReport(
            self.nodes,
            max(idle, 0),
            self.background,
            self.down,
            holding,
            job_sizes=self._job_sizes,
            reservations=self._reservations,
        )
        return Reported(self.name, report)

    def take_up(
        self,
        background: int,
        down: int,
        overlap: int = 0,
        reservations: tuple[NodeReservation, ...] = (),
        job_sizes: SizeRanges = (),
    ) -> None:
        """Set the nodes that local users keep for the whole simulation, and the nodes that are down.

        ``overlap``: by how much the sizes of existing components exceed the nodes that they share. As many more nodes
        exist until such components end, so that each counts whole nodes.
        """
        self.nodes += overlap
        self.idle += overlap
        self._overlap, self.tells_nodes = overlap, self.tells_nodes or overlap > 0
        self._reservations, self._job_sizes = reservations, job_sizes
        self.background += background
        self.down = down
        self.idle -= background + down

    def take_up_runner(self, runner: Runner, since: float | None, *, runs: bool) -> None:
        """Add a component that existed before. ``since``: the time at which it received nodes, None if it waits."""
        runner.shares = runner.shares and since is not None
        self.runners[runner.token] = runner
        if since is None:
            self._queue.append(runner)
        else:
            runner.since = since
            self.idle -= runner.size
        self._existing.append(self._component_status(runner, runs=runs))

    def connect(self) -> list[Event]:
        """Return the agent's first messages.

        They count the nodes of components as idle, as before their allocation, since the status of each component
        reports its nodes.
        """
        inventory = InventoryReceived(self.name, Inventory(tuple(self._existing)))
        self._existing = []
        self._allocate_nodes()
        return [inventory, self._create_report(self.nodes - self.background - self.down)]

    def _allocate_nodes(self) -> None:
        """Give idle nodes to the queued components and local users in the order of their arrival.

        The first that does not fit delays all others, as there is no backfilling.
        """
        queue = self._queue
        while queue:
            first = queue[0]
            size = first.size if isinstance(first, Runner) else first.nodes
            if size > self.idle:
                return
            queue.popleft()
            self.idle -= size
            if not isinstance(first, Runner):
                self.background += size
            self._allocated(self, first)

    def _component_status(self, runner: Runner, *, runs: bool) -> ComponentStatus:
        if runner.since is None:
            return ComponentStatus(runner.token, ComponentState.WAITING, lrm_job="1")
        state: ReportedState = ComponentState.RUNNING if runs else ComponentState.CLAIMED
        return ComponentStatus(runner.token, state, self._host_names(runner.size), "1")

    def _host_names(self, nodes: int) -> tuple[str, ...]:
        hosts = self._hosts.get(nodes)
        if hosts is None:
            hosts = self._hosts[nodes] = tuple(f"{self.name}-{number}" for number in range(nodes))
        return hosts


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """A simulated cluster with ``nodes`` nodes; ``speed`` is relative to 1."""

    nodes: int
    speed: float = 1.0
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    failures: float | None = None
    """Probability that the start of a component fails on this cluster; None: that of the grid."""
    startup: float | None = None
    """Start-up time of components on this cluster in seconds; None: that of the grid."""

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for a value outside its bounds."""
        _check_value("nodes", self.nodes, self.nodes >= 1, "at least 1")
        _check_value("speed", self.speed, isfinite(self.speed) and self.speed > 0, "more than 0")
        if self.failures is not None:
            _check_value("failures", self.failures, 0 <= self.failures < 1, "at least 0 and below 1")
        if self.startup is not None:
            _check_value("startup", self.startup, isfinite(self.startup) and self.startup >= 0, "at least 0")


@dataclass(frozen=True)
class SimulatedGrid:
    """Clusters, links, and failure and delay parameters. Times are in seconds."""

    clusters: Mapping[ClusterName, SimulatedCluster]
    links: Mapping[ClusterPair, Link] = field(default_factory=dict)
    startup: float = 0.0
    """Seconds from the time at which a component has its nodes until all its runners have reported."""
    failures: float = 0.0
    """Probability that the start of a component fails by a fault of its cluster."""
    look_every: float = 0.0
    """Interval at which agents report their clusters, in addition to reports when a component changes.

    Until the next report, changes by local users are invisible to the scheduler. 0: they are reported at once.
    """

    def __post_init__(self) -> None:
        _check_value("clusters", len(self.clusters), bool(self.clusters), "at least one")
        _check_value("startup", self.startup, isfinite(self.startup) and self.startup >= 0, "at least 0")
        _check_value("failures", self.failures, 0 <= self.failures < 1, "at least 0 and below 1")
        _check_value("look_every", self.look_every, isfinite(self.look_every) and self.look_every >= 0, "at least 0")

    @property
    def nodes(self) -> int:
        """Return the number of nodes of all clusters."""
        return sum(cluster.nodes for cluster in self.clusters.values())

    @property
    def speeds(self) -> dict[ClusterName, float]:
        return {name: cluster.speed for name, cluster in self.clusters.items()}


def _check_value(name: str, value: float, holds: bool, requirement: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value}, but must be {requirement}", field=name, value=value)
