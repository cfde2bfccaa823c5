"""One virtual cluster: its resource manager, who has its nodes, and the agent that tells of them.

The resource manager is strict: nothing overtakes the first in its queue, be it of a local user or ours.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from koalapy.model.job import ComponentState, JobId, Token
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, ReportedState
from koalapy.model.request import ClusterName
from koalapy.scheduler.events import Event, InventoryReceived, Reported
from koalapy.simulation.jobs import LocalUser


@dataclass(slots=True, eq=False)
class Runner:
    """A component that was handed to the resource manager, until its nodes are given back."""

    job: JobId
    token: Token
    size: int
    since: float | None = None
    """When it got its nodes."""
    exit_code: int | None = None
    """What it tells when its program has ended: of an Open MPI job that is the head's business."""
    is_over: bool = False

    @property
    def has_nodes(self) -> bool:
        return self.since is not None


Allocated = Callable[["Site", "Runner | LocalUser"], None]


class Site:
    """A cluster with its agent. What the agent says comes back from each call, or stands in ``said``."""

    def __init__(self, name: ClusterName, nodes: int, allocated: Allocated) -> None:
        """``allocated`` is told of everybody who gets nodes, at that moment, and notes it in a runner's ``since``."""
        self.name, self.nodes, self.idle, self.background = name, nodes, nodes, 0
        self.down = 0
        self.tells_nodes = False
        """Whether its agent has to tell how many nodes are idle: not where nobody else has been, for that follows from
        what it says of our components."""
        self.runners: dict[Token, Runner] = {}
        self._allocated = allocated
        self._queue: deque[Runner | LocalUser] = deque()
        self._hosts: dict[int, tuple[str, ...]] = {}
        """Of components of a size: which nodes they have matters to nobody here."""
        self._found: list[ComponentStatus] = []
        """What its agent says of components that were here before it connects."""

    # Local users

    def comes(self, user: LocalUser) -> None:
        self.tells_nodes = True
        self._queue.append(user)
        self._allocate()

    def leaves(self, user: LocalUser) -> None:
        self.idle += user.nodes
        self.background -= user.nodes
        self._allocate()

    # Components

    def submit(self, runner: Runner) -> Event | None:
        """What its agent says of it, unless it has its nodes at once: then more is told in a moment."""
        self.runners[runner.token] = runner
        self._queue.append(runner)
        self._allocate()
        if runner.has_nodes:
            return None
        return Reported(self.name, ComponentStatus(runner.token, ComponentState.WAITING, lrm_job="1"))

    def reports(self, runner: Runner) -> Event:
        """All its runners have."""
        return Reported(self.name, ComponentStatus(runner.token, ComponentState.CLAIMED, self._some(runner.size), "1"))

    def runs(self, runner: Runner, exit_code: int | None) -> Event:
        """Its program has begun, and will end with that."""
        runner.exit_code = exit_code
        return Reported(self.name, ComponentStatus(runner.token, ComponentState.RUNNING, lrm_job="1"))

    def ends(self, runner: Runner, error: str = "") -> Event:
        """Its program has ended, or it was stopped; with an error it was the cluster's fault."""
        runner.is_over = True
        del self.runners[runner.token]
        if runner.has_nodes:
            self.idle += runner.size
        else:
            self._queue.remove(runner)
        self._allocate()
        status = ComponentStatus(
            runner.token, ComponentState.ENDED, (), "1", runner.exit_code, error=error, infrastructure=bool(error)
        )
        return Reported(self.name, status)

    def stopped(self, token: Token) -> Event:
        """It was stopped; also one of which nothing is known has ended."""
        runner = self.runners.get(token)
        if runner is None:
            return Reported(self.name, ComponentStatus(token, ComponentState.ENDED, (), "1"))
        runner.exit_code = None
        return self.ends(runner)

    def report(self) -> Event:
        """The cluster as it is now."""
        holding = frozenset(token for token, runner in self.runners.items() if runner.has_nodes)
        return Reported(
            self.name, ClusterReport(self.nodes, max(self.idle, 0), self.background, self.down, holding=holding)
        )

    def take_up(self, background: int, down: int) -> None:
        """So many of its nodes local users have, who do not leave; and so many are out of order."""
        self.background += background
        self.down = down
        self.idle -= background + down

    def take_up_runner(self, runner: Runner, since: float | None, *, runs: bool) -> None:
        """A component that was here before; ``since`` when it has had its nodes, None while it waits for them."""
        self.runners[runner.token] = runner
        if since is None:
            self._queue.append(runner)
        else:
            runner.since = since
            self.idle -= runner.size
        self._found.append(self._status(runner, runs=runs))

    def connect(self) -> list[Event]:
        """What its agent says first of all. The nodes of our components it counts as idle, as it would have before they
        got them: what these have is told by what is said of each."""
        inventory = InventoryReceived(self.name, Inventory(tuple(self._found)))
        self._found = []
        self._allocate()
        idle = max(self.nodes - self.background - self.down, 0)
        return [inventory, Reported(self.name, ClusterReport(self.nodes, idle, self.background, self.down))]

    def _allocate(self) -> None:
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

    def _status(self, runner: Runner, *, runs: bool) -> ComponentStatus:
        if runner.since is None:
            return ComponentStatus(runner.token, ComponentState.WAITING, lrm_job="1")
        state: ReportedState = ComponentState.RUNNING if runs else ComponentState.CLAIMED
        return ComponentStatus(runner.token, state, self._some(runner.size), "1")

    def _some(self, nodes: int) -> tuple[str, ...]:
        hosts = self._hosts.get(nodes)
        if hosts is None:
            hosts = self._hosts[nodes] = tuple(f"{self.name}-{number}" for number in range(nodes))
        return hosts
