"""Clusters in memory: local users, a resource manager with its queue, runners, and an agent that tells of them."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from koalapy.model.job import ComponentState, Token
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, StageFault, StageState, StageStatus
from koalapy.scheduler.effects import (
    Command,
    ForgetComponent,
    OpenBarrier,
    StageComponent,
    StopComponent,
    SubmitComponent,
    UnstageComponent,
)
from koalapy.scheduler.events import ClusterConfirmed, InventoryReceived, Reported

STAGE_SIZE = 100
"""Bytes of every stage, so that they are its percentage."""


@dataclass(frozen=True)
class Ack:
    """The agent has noted a command."""

    ident: int


@dataclass(frozen=True)
class Confirm:
    """The daemon wants to know whether all has been told that was known at that time."""

    as_of: float


Told = Reported | ClusterConfirmed | InventoryReceived | Ack


@dataclass
class Runner:
    """What the agent knows of one component."""

    token: Token
    size: int
    phase: str = "waiting"
    stopped: bool = False
    exit_code: int | None = None
    error: str = ""
    refused: str = ""
    exceeded: Literal["", "memory"] = ""
    starting: float = 0.0
    """Not 0 while its nodes have to boot: how long that takes at most."""
    warned: bool = False
    lease: float | None = None
    is_killed: bool = False
    """Whether its runners have ended its program, whoever knows it."""

    @property
    def ended(self) -> bool:
        return self.phase == "ended"


class Site:
    """One cluster: what an agent would know and do, with every delay in the hands of whoever drives it.

    What the agent tells stands in ``stream`` and what it was told in ``inbox``, each in order, until taken from there.
    The resource manager is strict: nothing overtakes the first in its queue.
    """

    def __init__(self, name: str, total: int, size_of: Callable[[Token], int], clock: Callable[[], float]) -> None:
        self.name = name
        self.total = total
        self.down = 0
        self.problem = ""
        """Why nothing can be asked of its resource manager; what was known of its nodes is told again."""
        self.connected = False
        self.stream: deque[Told] = deque()
        self.inbox: deque[tuple[int, Command | Confirm]] = deque()
        self.runners: dict[Token, Runner] = {}
        self.queue: list[str] = []
        self.held: dict[str, int] = {}
        """Nodes by the name of who has them: a component's token, or a local user."""
        self.local_users: dict[str, int] = {}
        self.stages: dict[Token, StageStatus] = {}
        """Files on their way to components, or there."""
        self.staging: list[Token] = []
        """Stages that were ordered, and of which the world has not taken note."""
        self.claimed: set[Token] = set()
        """Every component that ever had all of its nodes."""
        self.allocated: list[Token] = []
        self.opened: list[Token] = []
        """Components that were given nodes, or let go at the barrier, and of which the world has not taken note."""
        self.missing_programs: frozenset[str] = frozenset()
        """Programs that are missing there."""
        self.rejection_fault: Callable[[int], str] = lambda size: ""
        """What the refusal of a component of so many nodes concerns; empty when it is taken."""
        self.rejection_message: Callable[[int], str] = lambda size: f"not {size} nodes"
        """What the resource manager says when it refuses so many nodes."""
        self._size_of, self._clock = size_of, clock
        self.lease_of: Callable[[Token], float | None] = lambda token: None
        """The lease of a component, as its submission says."""
        self.stuck_components: set[Token] = set()
        """Components whose nodes the resource manager does not give back."""
        self.supports_warnings = True
        self.graces: list[tuple[Token, float]] = []
        """Programs that were warned, and for how long they may go on, of which the world has not taken note."""
        self.is_black_hole = False
        """Whether it says that its nodes are idle, and gives none to components."""
        self.delays_delivery = False
        """Whether output is on its way until somebody says that it is there (``delivered``)."""
        self.exits: dict[Token, tuple[float, int]] = {}
        """When each program exited, and with what: the truth, whoever knows it."""
        self._has_news = True
        self._local_users = 0
        self.last_report: ClusterReport | None = None

    # The resource manager

    @property
    def idle(self) -> int:
        return self.total - self.down - sum(self.held.values())

    def add_local_user(self, size: int) -> str:
        """A local user goes straight to the resource manager; the answer is for ``local_user_leaves``."""
        self._local_users += 1
        name = f"user-{self._local_users}"
        self.local_users[name] = size
        self.queue.append(name)
        self._allocate()
        return name

    def remove_local_user(self, name: str) -> None:
        del self.local_users[name]
        self._free(name)

    def _size(self, name: str) -> int:
        return self.local_users[name] if name in self.local_users else self.runners[name].size

    def add_nodes(self, nodes: int) -> None:
        self.total += nodes
        self._allocate()

    def break_nodes(self, nodes: int) -> None:
        """So many idle nodes are down, beside those that are already."""
        self.down += min(nodes, self.idle)
        self._has_news = True

    def repair_nodes(self) -> None:
        """No node is down any more."""
        self.down = 0
        self._allocate()

    def set_missing_programs(self, *programs: str) -> None:
        self.missing_programs, self._has_news = frozenset(programs), True

    def set_problem(self, problem: str) -> None:
        """Or none any more, with an empty text."""
        self.problem, self._has_news = problem, True

    def _allocate(self) -> None:
        self._has_news = True
        while name := self._next_to_start():
            self.queue.remove(name)
            self.held[name] = self._size(name)
            if name in self.runners:
                self.allocated.append(name)
        assert self.idle >= 0

    def _next_to_start(self) -> str | None:
        first = next((name for name in self.queue if name in self.local_users or not self.is_black_hole), None)
        return first if first is not None and self._size(first) <= self.idle else None

    def mend(self) -> None:
        """It is no black hole any more."""
        self.is_black_hole = False
        self._allocate()

    def _free(self, name: str) -> None:
        self.held.pop(name, None)
        if name in self.queue:
            self.queue.remove(name)
        self._allocate()

    # Runners and programs

    def startable(self) -> list[Token]:
        """Components that have their nodes, and whose runners have not reported yet."""
        return [t for t, r in self.runners.items() if r.phase == "waiting" and t in self.held and not r.stopped]

    def live_programs(self) -> list[Token]:
        """Return the components whose program runs."""
        return [token for token in self.in_phase("running") if not self.runners[token].is_killed]

    def in_phase(self, *phases: str) -> list[Token]:
        return [token for token, runner in self.runners.items() if runner.phase in phases]

    def report_claimed(self, token: Token) -> None:
        assert token in self.held
        self.claimed.add(token)
        self._enter(token, "claimed")

    def exit_program(self, token: Token, code: int) -> None:
        self.runners[token].exit_code = code
        self.exits[token] = self._clock(), code
        self.report_component(token)

    def fail_component(self, token: Token, error: str) -> None:
        """The infrastructure breaks; the nodes come back separately."""
        runner = self.runners[token]
        if not runner.stopped and not runner.error:
            runner.error = error
            self.report_component(token)

    def exceed_memory_limit(self, token: Token) -> None:
        """The resource manager ends a component at its memory limit; it is told even of one that was to stop."""
        runner = self.runners[token]
        runner.exceeded, runner.error = "memory", "memory limit exceeded"
        runner.exit_code = runner.exit_code or 137
        self.end_component(token)

    def end_component(self, token: Token) -> None:
        """The resource manager has the nodes back."""
        if self.runners[token].phase in ("delivering", "ended") or token in self.stuck_components:
            return
        if self.runners[token].size % 2:
            self._enter(token, "delivering")  # there is output that the daemon does not have
        if not (self.delays_delivery and self.runners[token].phase == "delivering"):
            self._enter(token, "ended")
        self._free(token)

    def boot_component(self, token: Token, seconds: float) -> None:
        """The nodes of a component, which are its own, are being started; with no seconds they are up."""
        self.runners[token].starting = seconds
        self.report_component(token)

    def release_stuck_nodes(self) -> None:
        """Of all nodes that it did not give back."""
        stuck, self.stuck_components = self.stuck_components, set()
        for token in stuck & self.runners.keys():
            if self.runners[token].stopped:
                self.end_component(token)

    def finish_delivery(self, token: Token) -> None:
        """The daemon has all of its output."""
        if self.runners[token].phase == "delivering":
            self._enter(token, "ended")

    def lose_component(self, token: Token) -> None:
        """Resource manager and agent lose every trace of a component without a word."""
        del self.runners[token]
        self.exits.pop(token, None)
        self._free(token)

    def _enter(self, token: Token, phase: str) -> None:
        self.runners[token].phase = phase
        self.report_component(token)

    # The agent

    def carry_out(self, ident: int, command: Command | Confirm) -> None:
        match command:
            case Confirm(as_of=as_of):
                self._say(ClusterConfirmed(self.name, as_of))
                return
            case SubmitComponent(token=token):
                self._submit(token)
            case OpenBarrier(token=token):
                if (runner := self.runners.get(token)) and runner.phase == "claimed" and not runner.stopped:
                    self._enter(token, "running")
                    self.opened.append(token)
            case StopComponent(token=token, warning=warning) if warning is not None and self._may_warn(token):
                self.graces.append((token, warning.grace))
                self.warn(token)
            case StopComponent(token=token):
                self._stop(token)
            case ForgetComponent(token=token):
                if (runner := self.runners.get(token)) and runner.ended:
                    del self.runners[token]
            case StageComponent(token=token):
                if token not in self.stages:
                    self.stages[token] = StageStatus(token, "running", STAGE_SIZE)
                    self.staging.append(token)
                self._say(Reported(self.name, self.stages[token]))
            case UnstageComponent(token=token):
                self.stages.pop(token, None)
        self._say(Ack(ident))

    def update_stage(
        self, token: Token, staged: int, error: str = "", fault: StageFault = "site", file: str = ""
    ) -> None:
        """So many bytes of a stage are there, or it has failed."""
        if self.stages[token].state == "running":
            state: StageState = "failed" if error else "done" if staged == STAGE_SIZE else "running"
            self.stages[token] = StageStatus(token, state, STAGE_SIZE, staged, error, fault, self.name, file)
            self._say(Reported(self.name, self.stages[token]))

    def _submit(self, token: Token) -> None:
        if token not in self.runners:
            runner = self.runners[token] = Runner(token, self._size_of(token), lease=self.lease_of(token))
            if fault := self.rejection_fault(runner.size):
                runner.phase, runner.error = "ended", self.rejection_message(runner.size)
                runner.refused = "" if fault == "site" else fault
                self.report_component(token)
                return
            self.queue.append(token)
            self._allocate()
        self.report_component(token)

    def _may_warn(self, token: Token) -> bool:
        runner = self.runners.get(token)
        return self.supports_warnings and runner is not None and runner.phase == "running" and not runner.stopped

    def warn(self, token: Token) -> None:
        """Its program gets its signal."""
        self.runners[token].warned = True
        self.report_component(token)

    def expire_lease(self, token: Token) -> None:
        """Its runners end it, because the daemon has been silent for too long."""
        self.runners[token].is_killed = True
        self.fail_component(token, "its lease is over")
        self.end_component(token)

    def end_grace(self, token: Token) -> None:
        if token in self.runners and not self.runners[token].stopped:
            self._stop(token)

    def _stop(self, token: Token) -> None:
        runner = self.runners.setdefault(token, Runner(token, 0))
        first, runner.stopped = not runner.stopped, True
        if first and runner.phase not in ("delivering", "ended"):
            self.end_component(token)
        else:
            self.report_component(token)

    def report_component(self, token: Token) -> None:
        """Say all that is known of a component; may be said again at any time."""
        self._say(Reported(self.name, self._status(self.runners[token])))

    def current_report(self) -> ClusterReport:
        """The cluster as it is now; what is told of it may arrive when it is no longer so."""
        ours = {name: size for name, size in self.held.items() if name in self.runners}
        background = sum(size for name, size in self.held.items() if name in self.local_users)
        return ClusterReport(
            self.total, self.idle, background, self.down, frozenset(ours), self.problem, lacks=self.missing_programs
        )

    def send_report(self, seen: ClusterReport | None = None) -> None:
        """Tell what was seen, or what is to be seen now if that may be news."""
        if seen is None and not self._has_news:
            return
        self.last_report, self._has_news = seen or self.current_report(), seen is not None
        self._say(Reported(self.name, self.last_report))

    def connect(self) -> None:
        self.connected = True
        runners = tuple(self._status(runner) for runner in self.runners.values())
        self._say(InventoryReceived(self.name, Inventory(runners, stages=tuple(self.stages.values()))))
        self.send_report(self.current_report())

    def disconnect(self) -> None:
        """Whatever is on its way is lost."""
        self.connected = False
        self.stream.clear()
        self.inbox.clear()

    def _status(self, runner: Runner) -> ComponentStatus:
        hosts: Iterable[str] = ()
        if runner.token in self.claimed:
            hosts = (f"{self.name}-{n}" for n in range(runner.size))
        return ComponentStatus(
            runner.token,
            ComponentState(runner.phase),
            tuple(hosts),
            f"lrm-{runner.token}",
            runner.exit_code,
            runner.error,
            bool(runner.error) and not (runner.refused or runner.exceeded),
            runner.refused,
            exceeded=runner.exceeded,
            starting=runner.starting if runner.phase == "waiting" else 0.0,
            warned=runner.warned,
            lease=runner.lease,
        )

    def _say(self, message: Told) -> None:
        if self.connected:
            self.stream.append(message)
