"""Run one node's part of a component: report to the agent, wait at the barrier, start the program, end its processes.

The barrier holds the program until all nodes of the job have reported. A runner is started for every node of every job,
so this package imports little and only from the standard library. It is started as ``python -I -S runner.py node``, or
by calling ``main`` in a fork of a process that has imported it.
"""

from __future__ import annotations

import base64
import gc
import os
import signal
import sys
from traceback import print_exc

if not __package__:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from koalapy.runner.connections import MAX_LAG, Loop, encode
from koalapy.runner.folders import make_folder, remove_stale_folders, remove_tree, replace_file
from koalapy.runner.lease import RunnerLease, boot_time
from koalapy.runner.link import Link
from koalapy.runner.openmpi import Follower
from koalapy.runner.plan import Plan, Role, enter_workdir, folder_fault
from koalapy.runner.process_launcher import make_role
from koalapy.runner.processes import Processes, UsageMeter, check_node, forbid_dumps, require_program
from koalapy.runner.program_output import Output, ProgramOutput
from koalapy.runner.rank_processors import check_processors
from koalapy.runner.session import seal_file
from koalapy.runner.settings import RELAY_LOSS_GRACE, Failure, SecretGone, Settings
from koalapy.runner.streams import Streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from koalapy.runner.exec_guard import ExecGuard
    from koalapy.runner.relay_child import RelayChild
    from koalapy.runner.relay_links import Pair

PROGRAM_GRACE = 1.0
STOP_GRACE = 2.0
RECONNECTS_PER_TIMEOUT = 4
"""Times to connect again while waiting for a silent agent."""
RENEWAL_TIMEOUT = 5.0
"""Seconds to halt a program whose lease ended while this process was stopped, for the agent to renew the lease."""
RENEWAL_INTERVAL = 0.5
"""Seconds between two requests to renew the lease of a halted program."""
WALLTIME_CODE = 128 + signal.SIGTERM
"""Exit code of a program that is ended at its walltime."""
EARLY_LIMIT = 1024 * 1024
"""Bytes of relays that are kept until the plan is known."""
MAX_HOSTS = 128 * 1024 - len("KOALA_HOSTS=") - 1
"""Maximum length of the addresses of all nodes: Linux passes no longer variable to a program."""
MAX_PRINTED_RELAYS = 10
"""Invalid relays that are printed: they may come from another site, and the log is on this one's disk."""
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which resource managers end a runner; Grid Engine's qrsh passes SIGHUP on to a job's other nodes."""


class Runner:
    """The process that runs one node's part of one component."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = boot_time) -> None:
        """``clock`` counts leases and walltimes, also while this process is stopped or the machine suspended."""
        self.settings = settings
        self.loop = Loop()
        self._clock = clock
        self._halted_until: float | None = None
        """Time by ``clock`` until which the program is halted for its lease to be renewed; None if it is not halted."""
        self._lease_is_over = False
        self._lease_grace_ends = float("inf")
        """Time by ``clock`` at which the grace after the end of the lease is over."""
        self._walltime_ends: float | None = None
        self._plan: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self._phase = "waiting"
        self._run_id = os.urandom(16).hex()
        """Distinguishes this process from another one with the same secret."""
        self.processes = Processes()
        self._usage = UsageMeter(self.loop, self.processes)
        self._output = Output(f"{settings.spool}/output.{settings.node}", settings.secret)
        self._program_output = ProgramOutput(self.loop, settings.name, self._keep_output)
        self._folder, self._mark = "", -1
        """The program's folder below the node's temporary folder, and the descriptor of its locked mark."""
        self._role: Role | None = None
        self._relay: RelayChild | None = None
        """This node's relay, if the program has relayed links."""
        self.relayed_before: tuple[set[Pair], int] = (set(), 0)
        """Pairs of clusters that need relays for programs of this job, and the layout of their ports."""
        self._relayed_pairs: set[Pair] = set()
        """Pairs of clusters that programs of this job use relays for: these, or all with them."""
        self._early: list[dict[str, Any]] = []
        """Relays that arrived before the plan, which names the job's nodes; senders repeat dropped ones."""
        self._early_size = self._invalid_relays = 0
        self._result: dict[str, Any] | None = None
        self._relay_loss, self._exit_sent = "", False
        self._warning: dict[str, Any] | None = None
        """Warning before the end of the walltime: signal, seconds after the start, and seconds of grace."""
        self._kill_at = 0.0
        self._warned, self._grace_over = False, 0.0
        """Whether the program was warned that it will be stopped, and the end of its grace by the loop's time."""
        self._delivery_timeout: float | None = None
        """Seconds to wait for the agent to take the result; None: ``agent_timeout``."""
        self._status: int | None = None
        self._link = Link(self.loop, settings, self._describe_runner, self._receive_message)
        self._lease = RunnerLease(settings, self.loop, self._link.send, clock)
        self._streams = Streams(self.loop, self.processes, self._link.send, settings.name)
        self._link.on_disconnect = self._streams.on_disconnect

    def run(self) -> int:
        """Serve the agent until it acknowledges the result, and return 0; return 1 if delivery is given up."""
        self._watch_signals()
        self._program_output.resume()
        if self.settings.lrm_pipe >= 0:
            self.loop.watch(self.settings.lrm_pipe, self._lrm_ended)
        self._note_agent()
        if self.settings.problem:
            self.conclude(None, self.settings.problem, infrastructure=True)
        self._link.connect()
        while self._status is None:
            try:
                self.loop.turn()
                self._check_lease()
                self._check_walltime()
            except Exception as error:  # noqa: BLE001 the agent must receive any error
                self._report_failure(error)
        self._link.close()
        return self._status

    def _report_failure(self, error: Exception) -> None:
        """End the program and report an error. After the program has ended, re-raise unexpected errors."""
        if isinstance(error, Failure):
            self.conclude(error.code, error.message, infrastructure=error.code is None)
        elif self._result is not None:
            raise error
        else:
            print_exc()
            text = str(error) if isinstance(error, OSError) else repr(error)
            if isinstance(error, OSError) and error.filename:
                text = f"{error.filename}: {error.strerror}"
            self.conclude(None, f"the runner on {self.settings.name} failed: {text}", infrastructure=True)

    def spawn(
        self,
        command: list[str],
        environment: dict[str, str] | None = None,
        guard: ExecGuard | None = None,
        *,
        is_program: bool = False,
        outputs: tuple[int, int] | None = None,
    ) -> int:
        """Start a command and return its process id. Raise ``Failure``.

        ``is_program``: it reads clients' input. ``outputs``: descriptors for its output and errors; None: both are
        output of the job.
        """
        program = require_program(command[0], self.environment)
        argv, environment = [program, *command[1:]], self.environment if environment is None else environment
        self._usage.start()
        stdin = self._streams.input.reading if is_program and self._streams.input is not None else None
        output, errors = outputs or (self._program_output.writing, self._program_output.error_writing)
        try:
            if guard is not None:
                return self.processes.start_guarded(argv, environment, output, guard, errors)
            return self.processes.start(argv, environment, output, stdin, errors)
        except OSError as error:
            hosts = environment.get("KOALA_HOSTS", "")
            is_too_long = len(hosts) > MAX_HOSTS
            hint = f": ask for fewer nodes, KOALA_HOSTS lists all {hosts.count(',') + 1}" if is_too_long else ""
            raise Failure(f"cannot run {command[0]}: {error.strerror}{hint}", 126) from error

    def make_input(self, path: str = "") -> None:
        """Prepare the program's standard input, as a FIFO if a path is given. Raise ``OSError``."""
        self._streams.make_input(path)

    def make_folder(self) -> str:
        """Create a folder for this run below ``TMPDIR``, and remove those of killed runners. Raise ``Failure``."""
        base = self.environment.get("TMPDIR", "/tmp")
        remove_stale_folders(base)
        try:
            self._folder, self._mark = make_folder(base, self.settings.token, self.settings.node)
        except OSError as error:
            text = f"cannot make a folder in {base} on {self.settings.name}: {error.strerror}"
            raise Failure(text, folder_fault(self)) from error
        return self._folder

    def report_running(self) -> None:
        """Report once to the agent that the program runs, and start the timers of its warning and its walltime."""
        if self._phase == "opened":
            self._phase = "running"
            if self._streams.input is not None:
                self._streams.input.close_reading()
            self._link.send({"t": "running"})
            if warning := self._warning:
                delay, name, grace = warning["after"], warning["signal"], warning["grace"]
                self.loop.set_alarm("warning", delay, lambda: self._warn_program(name, grace))
            if walltime := self._plan.get("walltime"):
                self._walltime_ends = self._clock() + walltime
                self.loop.set_alarm("walltime", walltime, self._check_walltime)

    def relay(self, token: str, node: int, payload: dict[str, Any]) -> None:
        """Send a message to another node of the job by way of the agents. It may get lost."""
        self._link.send({"t": "relay", "token": token, "node": node, "payload": payload})

    def start_relay(self, plan: Plan, on_start: Callable[[bool, str], None]) -> None:
        """Start this node's relay unless it runs, and call ``on_start`` once it is ready or its ports are taken.

        Raise ``Failure`` if it cannot be used.
        """
        from koalapy.runner.relay_child import RelayChild  # few jobs need it

        if self._relay is None or not self._relay.serves(plan):
            if self._relay is not None and self._relay.is_ready and plan.lane is not None:
                raise Failure("the programs of the script that run at once need relays with different ports: wait")
            if self._relay is not None:
                self._relay.finish()
            self._relay = RelayChild(self.loop, self.processes, self.settings, plan, self._lose_relay)
        self._relay.wait(on_start)

    def report_relayed(self, pairs: Collection[Pair], unreached: Collection[Pair], layout: int) -> None:
        """Report to the agent which pairs of clusters use relays, and remember it for later programs of a script.

        ``unreached``: those that need them.
        """
        self.relayed_before = self.relayed_before[0] | set(unreached), layout
        self._relayed_pairs |= set(pairs)
        self._send_relayed()

    def _send_relayed(self) -> None:
        unreached = sorted(self.relayed_before[0])
        self._link.send({"t": "relay_used", "pairs": sorted(self._relayed_pairs), "unreached": unreached})

    def _lose_relay(self, reason: str) -> None:
        """End the program, since its relay is lost, unless it ends with 0 within ``RELAY_LOSS_GRACE``."""
        self._relay_loss, grace = self._relay_loss or f"a relayed link is lost: {reason}", RELAY_LOSS_GRACE
        self.loop.set_alarm("relay loss", grace if self._phase == "running" else 0.0, lambda: self.conclude(None))

    def conclude_part(self) -> None:
        """End this node's part of a program whose end the head node knows; after the loss of a relay, wait for that.

        The program may have succeeded before the loss. If not, ``RELAY_LOSS_GRACE`` ends this part with an error.
        """
        if not self._relay_loss:
            self.conclude(None)

    def conclude(
        self, code: int | None, error: str = "", *, infrastructure: bool = False, stopped: bool = False
    ) -> None:
        """End the remaining processes of the program, then report the result. Later calls have no effect."""
        if self._result is not None:
            return
        if self._relay_loss and code != 0 and not stopped:
            code, error, infrastructure = None, self._relay_loss, True
        how = {"code": code, "error": error, "infrastructure": infrastructure, "stopped": stopped}
        self._result = {**how, "warned": self._warned}
        self._phase = "ending"
        self._streams.close("the job's program has ended")
        if self._role is not None:
            self._role.close()
        if self._relay is not None:
            self._relay.finish()
        self._grace_over = 0.0 if stopped or infrastructure else self._grace_over
        self._kill_at = max(self.loop.time(), self._grace_over) + (STOP_GRACE if stopped else PROGRAM_GRACE)
        if self._halted_until is not None and not stopped:
            self._kill_at = 0.0  # the next attempt may have begun: kill it at once
        self._end_processes()
        if not self._exit_sent:
            self._report_ending()

    def _report_ending(self) -> None:
        """Report that the program has ended, before its result."""
        if self._link.welcomed:  # without a connection, the next hello says it
            self._link.send({"t": "ending"})

    def _stop_program(self, message: dict[str, Any]) -> None:
        """Stop the program as the agent orders, after a warning and time to finish (grace) if the order has them."""
        if "signal" in message and self._phase == "running":
            self._warn_program(message["signal"], message["grace"])
        grace = min(self._grace_over - self.loop.time(), message.get("grace", 0.0))
        if grace > 0:
            self.loop.set_alarm("grace", grace, self._stop_now)
        else:
            self._stop_now()

    def _stop_now(self) -> None:
        self._grace_over, self._kill_at = 0.0, min(self._kill_at, self.loop.time() + STOP_GRACE)
        self.conclude(None, stopped=True)

    def _warn_program(self, name: str, grace: float) -> None:
        """Signal the program once that it will be stopped. Ignore signals that this system does not have."""
        number = getattr(signal, f"SIG{name}", None)
        if number is None or self._warned or self._role is None or self._phase != "running":
            return
        self._warned, self._grace_over = True, self.loop.time() + grace
        starts_program, shells = self._role.is_starter, self._streams.shells
        relay = 0 if self._relay is None else self._relay.pid
        self.processes.warn(number, lambda pid: starts_program(pid) or pid in shells or pid == relay)
        self._link.send({"t": "warned"})

    def _describe_runner(self) -> dict[str, Any]:
        s = self.settings
        s.host = s.host or self._link.address
        runner = {"host": s.host, "name": s.name, "lrm_job": s.lrm_job, "life": self._run_id, "pid": os.getpid()}
        state = {"phase": self._phase, "start": self._output.start, "warned": self._warned}
        return {**runner, **state, "streams": True, "renew": self._lease.start_query()}

    def _note_agent(self) -> None:
        """Restart the timeouts of a silent agent."""
        self.loop.set_alarm("agent", self.settings.agent_timeout, self._give_up_waiting)
        self.loop.set_alarm("silence", self.settings.agent_timeout / RECONNECTS_PER_TIMEOUT, self._reconnect_link)

    def _reconnect_link(self) -> None:
        """Reconnect, since a silent connection may be dead."""
        self.loop.set_alarm("silence", self.settings.agent_timeout / RECONNECTS_PER_TIMEOUT, self._reconnect_link)
        self._link.reconnect()

    def _give_up_waiting(self) -> None:
        """Give the node back if the program has not begun: no agent can start it."""
        if self._phase == "waiting":
            error = f"node {self.settings.name} received nothing from its agent for {self.settings.agent_timeout:g} s"
            self._delivery_timeout = 0.0
            self.conclude(None, error, infrastructure=True)

    def _check_lease(self) -> None:
        """End the program when its lease is over: the daemon was silent for too long.

        The program first gets the warning and the time to finish (grace) that it asked for.
        If the lease ended while this process was stopped, it may have been renewed: halt the program and ask the agent
        first. The program must not run on, since the next attempt may have begun.
        """
        remaining = self._lease.remaining
        if self._result is not None:
            return
        if self._lease_is_over:
            if self._clock() >= self._lease_grace_ends:  # the alarm may be late: it stops with this process
                self._conclude_lease()
            return
        if remaining > 0:
            if self._halted_until is not None:
                self._halted_until = None
                self.processes.resume()
            elif remaining < float("inf"):
                self.loop.set_alarm("lease", remaining, self._check_lease)
            return
        if self._halted_until is None and remaining < -MAX_LAG:
            self._halted_until = self._clock() + RENEWAL_TIMEOUT
            self.processes.halt()
            self._request_renewal()
        elif self._halted_until is None or self._clock() >= self._halted_until:
            self._end_lease(-remaining)

    def _request_renewal(self) -> None:
        """Request renewals until the halted program is resumed or ended."""
        if self._halted_until is not None and self._result is None:
            self._lease.request_renewal()
            self.loop.set_alarm("request-renewal", RENEWAL_INTERVAL, self._request_renewal)

    def _end_lease(self, late: float) -> None:
        """Warn and end the program, ``late`` seconds after its lease, which shorten its time to finish (grace)."""
        self._lease_is_over = True
        warning = self._plan.get("lease_warning")
        grace = max(0.0, warning["grace"] - late) if warning and self._phase == "running" else 0.0
        if warning and grace > 0:
            if self._halted_until is not None:
                self._halted_until = None
                self.processes.resume()
            self._warn_program(warning["signal"], grace)
            grace = min(grace, self._grace_over - self.loop.time())
        if grace > 0:
            self._lease_grace_ends = self._clock() + grace
            self.loop.set_alarm("lease-grace", grace, self._conclude_lease)
        else:
            self._conclude_lease()

    def _conclude_lease(self) -> None:
        """End the program with an error, since the daemon was silent for longer than the lease."""
        if self._result is not None:
            return
        silence = f"the daemon was silent for {self._lease.silence:.0f} s"
        error = f"node {self.settings.name} ended the program: its lease is over, {silence}"
        if not self._link.welcomed:
            self._delivery_timeout = 0.0
        self.conclude(None, error, infrastructure=True)

    def _check_walltime(self) -> None:
        """End a program at its walltime, in case the daemon cannot be reached. No grace extends the walltime."""
        if self._walltime_ends is None or self._clock() < self._walltime_ends:
            return
        self._walltime_ends, self._grace_over = None, 0.0
        self._kill_at = min(self._kill_at, self.loop.time() + PROGRAM_GRACE)
        if self._result is None:
            self.say(f"the walltime is over: {self.settings.name} ends the program")
            self.conclude(WALLTIME_CODE)

    def _receive_message(self, message: dict[str, Any]) -> None:
        """Act on a message of the agent, and ignore one that does not fit the current phase."""
        kind = message["t"]
        if kind == "welcome":
            self.settings.lease = message["lease"]
            self._lease.record_message(message)
            if "silence" in message:
                self._lease.plan_renewal()
            else:  # an agent of an earlier version
                self._lease.request_renewal()
        self._note_agent()
        if kind == "welcome":
            self._output.acknowledge(message["output"])
            self._output.sent, self._exit_sent = self._output.start, False
            if self.relayed_before[0]:
                self._send_relayed()
            self._send_output()
        elif kind == "lease":
            self._lease.record_message(message)
        elif kind == "output":
            self._release_output(message["offset"])
        elif kind == "open" and self._phase == "waiting" and self._lease.remaining <= 0:
            self._end_lease(0.0)  # the plan may have been delayed
        elif kind == "open" and self._phase == "waiting":
            self._start_program(message)
        elif kind == "relay" and self._role is None:
            self._early_size += len(encode(message))
            if self._early_size <= EARLY_LIMIT:
                self._early.append(message)
        elif kind == "relay":
            self._handle_relay(message)
        elif kind == "stream":
            running = self._phase in ("opened", "running")
            self._streams.receive(message["message"], self.environment if running else None)
        elif kind == "refused" and self._phase == "waiting":
            self._status = 1  # another runner serves this node: do not touch its files
        elif kind == "refused":
            self._delivery_timeout = 0.0
            self._stop_now()
            if self._phase == "ended":
                self._give_up()
        elif kind == "relay_lost":
            self._lose_relay(str(message["why"]))
        elif kind == "stop":
            self._stop_program(message)
        elif kind == "exit_ack" and self._phase == "ended":
            self._status = 0

    def _release_output(self, offset: int) -> None:
        """Discard output before ``offset``, which the agent has stored, then read and send more."""
        if offset > self._output.start and self._phase == "ended":
            self._await_delivery()  # the agent is taking it
        self._output.acknowledge(offset)
        if not self._output.full:
            self._program_output.resume()
        self._send_output()

    def _handle_relay(self, message: dict[str, Any]) -> None:
        """Pass another node's message to this node's role in the program. Print the errors of some invalid ones."""
        payload, sender = message["payload"], (message["sender"], message["sender_node"])
        is_daemon_end = payload.get("op") == "daemon_ended"
        if self._role is not None and (is_daemon_end or self._phase in ("opened", "running")):
            try:
                self._role.relayed(sender, payload)
            except Failure as failure:
                self._report_failure(Failure(failure.message))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, OSError) as error:
                self._invalid_relays += 1
                if self._invalid_relays <= MAX_PRINTED_RELAYS:
                    print(f"koala runner: {sender} sent an invalid message: {error!r}"[:300], file=sys.stderr)

    def _start_program(self, message: dict[str, Any]) -> None:
        """Start this node's part of the program as the agent's message describes it."""
        plan = Plan(message, self.settings.token, self.settings.node)
        self._phase, self._warning, self._plan = "opened", message.get("warning"), message
        self.environment = plan.environment(self.settings)
        self._role = make_role(self, plan)
        self._program_output.role = self._role
        try:
            check_processors(plan, self.settings)
            enter_workdir(self, plan.context)
            self._program_output.prepare(plan)
            if (rank := self._role.first_rank) is not None:
                self._program_output.open_files(rank)
            self._role.start()
        except Failure as failure:
            self._cannot_start(failure)
        early, self._early = self._early, []
        for message in early:
            self._handle_relay(message)

    def _cannot_start(self, failure: Failure) -> None:
        """Report why this node's part of the program cannot start; of an error of the user, to the head node."""
        self.say(failure.message)
        if failure.code is not None and isinstance(self._role, Follower):
            self._role.report_unfit(failure)
        else:
            self._report_failure(failure)

    def say(self, line: str) -> None:
        """Insert a line for the user into the program's output."""
        self._program_output.say(line)

    def show(self, output: bytes, rank: int | None = None) -> None:
        """Insert what a role has held back of the program's output: messages of ``mpirun``, or errors of a rank."""
        self._program_output.add(rank, output, is_error=True)

    def read_output(self) -> bool:
        """Read all that the program has written, so that its role knows it, and return True."""
        self._program_output.read_pipes()
        return True

    def _keep_output(self, output: bytes) -> None:
        """Keep output until the agent acknowledges it, and send as much as possible now."""
        self._output.append(output)
        if self._output.full:
            self._program_output.pause()
        self._send_output()

    def _send_output(self) -> None:
        """Send as much output as may be unacknowledged at a time, and the result after the last of it."""
        if not self._link.welcomed:
            return
        for offset, data in self._output.chunks():
            self._link.send({"t": "out", "offset": offset, "data": base64.b64encode(data).decode()})
        if self._phase == "ended" and not self._exit_sent and self._output.sent == self._output.total:
            self._exit_sent = True
            self._link.send({"t": "exit", **(self._result or {})})

    def _watch_signals(self) -> None:
        """Let the event loop handle ended children, and the signals by which resource managers end a runner."""
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *END_SIGNALS):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self.loop.watch(reading, lambda _events: self._handle_signals(os.read(reading, 4096)))

    def _handle_signals(self, numbers: bytes) -> None:
        """Stop the program if the resource manager ends this runner, and reap ended children."""
        if any(number in numbers for number in END_SIGNALS):
            self._delivery_timeout = STOP_GRACE
            self._stop_now()
        if self._phase == "ending":
            self._end_processes()
        else:
            self._reap_children()

    def _reap_children(self) -> bool:
        """Reap ended children, and return whether any process of the program remains."""
        ended, alive = self.processes.reap()
        for pid, code in ended:
            if self._streams.child_ended(pid, code) or (self._relay and self._relay.child_ended(pid, code)):
                continue
            if self._role is not None and self._phase in ("opened", "running"):
                try:
                    self._role.child_ended(pid, code)
                except Failure as failure:
                    self._cannot_start(failure)
        return alive

    def _end_processes(self) -> None:
        """Signal the remaining processes, first SIGTERM and later SIGKILL, until the kernel reports no children."""
        if self._phase != "ending":
            return
        if not self._reap_children():
            self._finish_program()
            return
        now = self.loop.time()
        if now >= self._grace_over:
            self.processes.signal_all(signal.SIGTERM if now < self._kill_at else signal.SIGKILL)
        self.loop.set_alarm("sweep", 0.05, self._end_processes)

    def _finish_program(self) -> None:
        """Take the rest of the output, clean up, and deliver the result, once no process remains."""
        self._program_output.read_rest(stopped=bool(self._result and self._result["stopped"]))
        self._phase, self._result = "ended", {**(self._result or {}), "usage": self._usage.finish()}
        self.loop.cancel_alarm("sweep")
        if self._folder:
            self._report_ending()  # the removal of many files takes long
            remove_tree(self._folder)
        self._write_result()
        self._await_delivery()
        self._send_output()

    def _await_delivery(self) -> None:
        timeout = self.settings.agent_timeout if self._delivery_timeout is None else self._delivery_timeout
        self.loop.set_alarm("give-up", timeout, self._give_up)

    def _write_result(self) -> None:
        """Write the result and unsent output to the component's folder, for an agent on the same file system."""
        path = f"{self.settings.spool}/result.{self.settings.node}.json"
        self._output.save()
        node = {"host": self.settings.host, "name": self.settings.name, "output": self._output.total}
        result = encode({**(self._result or {}), **node}).encode()
        try:
            replace_file(path, seal_file(self.settings.secret, os.path.basename(path), result), sync=False)
        except OSError as error:
            print(f"koala runner: cannot write {path}: {error}", file=sys.stderr)

    def _lrm_ended(self, _events: int) -> None:
        """Kill the program at once: the next resource manager assumes free nodes, and cannot find every process."""
        self.loop.forget(self.settings.lrm_pipe)
        self._delivery_timeout = 0.0
        error = f"the resource manager of node {self.settings.name} was killed"
        self.conclude(None, error, infrastructure=True)
        self._grace_over = self._kill_at = 0.0
        self._end_processes()
        if self._phase == "ended":
            self._give_up()

    def _give_up(self) -> None:
        self._status = 1


def main(argv: list[str]) -> int:
    """Run one node's part; return 0 if the agent has acknowledged the result, else 1."""
    if argv == ["check"]:
        return check_node()
    if argv != ["node"]:
        print("usage: runner.py node|check", file=sys.stderr)
        return 2
    forbid_dumps()
    gc.disable()  # a runner lives on few objects, and a collection would copy every page shared with its parent
    try:
        settings = Settings(dict(os.environ))
    except SecretGone as error:
        print(f"koala runner: {error}", file=sys.stderr)
        return 1
    return Runner(settings).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
