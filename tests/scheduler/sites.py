"""In-memory clusters: local users, a resource manager with a queue, runners, and an agent that reports them."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from koalapy.model.job import ComponentState, Token
from koalapy.model.job_sizes import JobSizes, NodeReservation
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, StageFault, StageState, StageStatus
from koalapy.runner.runner import WALLTIME_CODE
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
"""Bytes of every stage; transferred bytes are percents."""


Relayed = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Ack:
    """An agent's acknowledgement of a command."""

    ident: int


@dataclass(frozen=True)
class Confirm:
    """The daemon's request to confirm that the agent has reported everything up to a time."""

    as_of: float


Message = Reported | ClusterConfirmed | InventoryReceived | Ack


@dataclass
class Runner:
    """The agent's record of one component."""

    token: Token
    size: int
    phase: str = "waiting"
    stopped: bool = False
    exit_code: int | None = None
    error: str = ""
    refused: str = ""
    refused_sizes: str = ""
    exceeded: Literal["", "memory"] = ""
    starting: float = 0.0
    """Maximum boot time of its nodes in seconds; 0 when they are up."""
    warned: bool = False
    lease: float | None = None
    launched_at: float | None = None
    is_killed: bool = False
    """Whether its runners have ended its program, even if the agent is not informed."""
    relayed: Relayed = ()
    """The pairs of clusters that its program's messages pass by relays."""

    @property
    def ended(self) -> bool:
        return self.phase == "ended"


class Site:
    """One cluster and its agent. All delays are controlled by the caller.

    ``stream`` holds the agent's messages and ``inbox`` its commands, in order, until the caller takes them.
    The resource manager starts requests strictly in queue order.
    """

    def __init__(self, name: str, total: int, size_of: Callable[[Token], int], clock: Callable[[], float]) -> None:
        self.name = name
        self.total = total
        self.down = 0
        self.problem = ""
        """Error of the resource manager; while set, reports repeat it."""
        self.connected = False
        self.stream: deque[Message] = deque()
        self.inbox: deque[tuple[int, Command | Confirm]] = deque()
        self.runners: dict[Token, Runner] = {}
        self.queue: list[str] = []
        self.held: dict[str, int] = {}
        """Node counts by holder: a component's token or a local user."""
        self.local_users: dict[str, int] = {}
        self.stages: dict[Token, StageStatus] = {}
        """Stages that are running or finished, by component."""
        self.staging: list[Token] = []
        """New stages for which the world has not scheduled a transfer."""
        self.claimed: set[Token] = set()
        """Every component that was ever claimed."""
        self.allocated: list[Token] = []
        self.opened: list[Token] = []
        """Components that received nodes, or passed the barrier, and that the world has not processed."""
        self.missing_programs: frozenset[str] = frozenset()
        """Programs that are not installed on the cluster."""
        self.rejection_fault: Callable[[int], str] = lambda size: ""
        self.find_relayed: Callable[[Token], Relayed] = lambda token: ()
        """Returns which pairs of clusters are joined by relays when a component's program starts."""
        """Return the fault of a rejected component of this size, or an empty string to accept it."""
        self.rejection_message: Callable[[int], str] = lambda size: f"not {size} nodes"
        """Return the resource manager's message for a rejection of this size."""
        self.rejected_sizes = ""
        """Which sizes its rejections concern: ``few``, ``many``, or empty."""
        self.job_sizes: tuple[JobSizes, ...] = ()
        """The sizes that it reports to accept."""
        self.reservations: tuple[NodeReservation, ...] = ()
        self._size_of, self._clock = size_of, clock
        self.lease_of: Callable[[Token], float | None] = lambda token: None
        """Return the lease of a component from its submission."""
        self.stuck_components: set[Token] = set()
        """Components that keep their nodes after a stop."""
        self.supports_warnings = True
        self.enforces_walltime = True
        """Whether runners end programs at their walltime when the daemon does not."""
        self.graces: list[tuple[Token, float]] = []
        """Warned programs with their grace in seconds that the world has not processed."""
        self.is_black_hole = False
        """Whether it reports idle nodes but starts no component."""
        self.delays_delivery = False
        """Whether output delivery lasts until ``finish_delivery`` is called."""
        self.exits: dict[Token, tuple[float, int]] = {}
        """Actual exit time and exit code of each program."""
        self._has_news = True
        self._local_users = 0
        self.last_report: ClusterReport | None = None

    # The resource manager

    @property
    def idle(self) -> int:
        return self.total - self.down - sum(self.held.values())

    def add_local_user(self, size: int) -> str:
        """Submit nodes for a local user and return the name for ``remove_local_user``."""
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
        """Set idle nodes down."""
        self.down += min(nodes, self.idle)
        self._has_news = True

    def repair_nodes(self) -> None:
        """Set all nodes up."""
        self.down = 0
        self._allocate()

    def set_missing_programs(self, *programs: str) -> None:
        self.missing_programs, self._has_news = frozenset(programs), True

    def set_problem(self, problem: str) -> None:
        """Set the resource manager's error, or clear it with an empty string."""
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

    def end_black_hole(self) -> None:
        self.is_black_hole = False
        self._allocate()

    def _free(self, name: str) -> None:
        self.held.pop(name, None)
        if name in self.queue:
            self.queue.remove(name)
        self._allocate()

    # Runners and programs

    def startable(self) -> list[Token]:
        """Return the components that have nodes but no report of their runners."""
        return [t for t, r in self.runners.items() if r.phase == "waiting" and t in self.held and not r.stopped]

    def live_programs(self) -> list[Token]:
        """Return the components with a running program."""
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
        """Report an infrastructure error. ``end_component`` releases the nodes."""
        runner = self.runners[token]
        if not runner.stopped and not runner.error:
            runner.error = error
            self.report_component(token)

    def exceed_memory_limit(self, token: Token) -> None:
        """End a component at its memory limit, which is reported even if it was being stopped."""
        runner = self.runners[token]
        runner.exceeded, runner.error = "memory", "memory limit exceeded"
        runner.exit_code = runner.exit_code or 137
        self.end_component(token)

    def end_component(self, token: Token) -> None:
        """Return the component's nodes to the resource manager, unless they are stuck."""
        if self.runners[token].phase in ("delivering", "ended") or token in self.stuck_components:
            return
        if self.runners[token].size % 2:
            self._enter(token, "delivering")  # its output is not yet at the daemon
        if not (self.delays_delivery and self.runners[token].phase == "delivering"):
            self._enter(token, "ended")
        self._free(token)

    def boot_component(self, token: Token, seconds: float) -> None:
        """Report that a component's nodes boot for at most so many seconds; 0 means that they are up."""
        self.runners[token].starting = seconds
        self.report_component(token)

    def release_stuck_nodes(self) -> None:
        """End all stopped components that kept their nodes."""
        stuck, self.stuck_components = self.stuck_components, set()
        for token in stuck & self.runners.keys():
            if self.runners[token].stopped:
                self.end_component(token)

    def finish_delivery(self, token: Token) -> None:
        """End a component after its output has reached the daemon."""
        if self.runners[token].phase == "delivering":
            self._enter(token, "ended")

    def lose_component(self, token: Token) -> None:
        """Delete a component without any report."""
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
                self._send(ClusterConfirmed(self.name, as_of))
                return
            case SubmitComponent(token=token):
                self._submit(token)
            case OpenBarrier(token=token):
                if (runner := self.runners.get(token)) and runner.phase == "claimed" and not runner.stopped:
                    runner.launched_at, runner.relayed = self._clock(), self.find_relayed(token)
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
                self._send(Reported(self.name, self.stages[token]))
            case UnstageComponent(token=token):
                self.stages.pop(token, None)
        self._send(Ack(ident))

    def update_stage(
        self, token: Token, staged: int, error: str = "", fault: StageFault = "site", file: str = ""
    ) -> None:
        """Set the transferred bytes of a stage, or its failure."""
        if self.stages[token].state == "running":
            state: StageState = "failed" if error else "done" if staged == STAGE_SIZE else "running"
            self.stages[token] = StageStatus(token, state, STAGE_SIZE, staged, error, fault, self.name, file)
            self._send(Reported(self.name, self.stages[token]))

    def _submit(self, token: Token) -> None:
        if token not in self.runners:
            runner = self.runners[token] = Runner(token, self._size_of(token), lease=self.lease_of(token))
            if fault := self.rejection_fault(runner.size):
                runner.phase, runner.error = "ended", self.rejection_message(runner.size)
                runner.refused, runner.refused_sizes = "" if fault == "site" else fault, self.rejected_sizes
                self.report_component(token)
                return
            self.queue.append(token)
            self._allocate()
        self.report_component(token)

    def _may_warn(self, token: Token) -> bool:
        runner = self.runners.get(token)
        return self.supports_warnings and runner is not None and runner.phase == "running" and not runner.stopped

    def warn(self, token: Token) -> None:
        """Send the warning signal to the program."""
        self.runners[token].warned = True
        self.report_component(token)

    def expire_lease(self, token: Token) -> None:
        """End a component because its lease has expired."""
        self.runners[token].is_killed = True
        self.fail_component(token, "its lease is over")
        self.end_component(token)

    def expire_walltime(self, token: Token) -> None:
        """End a component after its runners have counted its walltime down, without the daemon."""
        if not self.enforces_walltime:
            return
        self.runners[token].is_killed = True
        if self.runners[token].exit_code is None:
            self.exit_program(token, WALLTIME_CODE)
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
        """Send the component's status, which may be repeated at any time."""
        self._send(Reported(self.name, self._status(self.runners[token])))

    def current_report(self) -> ClusterReport:
        """Return a report of the cluster's current state."""
        ours = {name: size for name, size in self.held.items() if name in self.runners}
        background = sum(size for name, size in self.held.items() if name in self.local_users)
        return ClusterReport(
            self.total,
            self.idle,
            background,
            self.down,
            frozenset(ours),
            self.problem,
            lacks=self.missing_programs,
            job_sizes=self.job_sizes,
            reservations=self.reservations,
        )

    def send_report(self, report: ClusterReport | None = None) -> None:
        """Send a given report, or the current one if something changed."""
        if report is None and not self._has_news:
            return
        self.last_report, self._has_news = report or self.current_report(), report is not None
        self._send(Reported(self.name, self.last_report))

    def connect(self) -> None:
        self.connected = True
        runners = tuple(self._status(runner) for runner in self.runners.values())
        self._send(InventoryReceived(self.name, Inventory(runners, stages=tuple(self.stages.values()))))
        self.send_report(self.current_report())

    def disconnect(self) -> None:
        """Disconnect and drop all messages in transit."""
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
            runner.refused_sizes,  # type: ignore[arg-type]
            exceeded=runner.exceeded,
            starting=runner.starting if runner.phase == "waiting" else 0.0,
            warned=runner.warned,
            lease=runner.lease,
            relayed=runner.relayed,
        )

    def _send(self, message: Message) -> None:
        if self.connected:
            self.stream.append(message)
