"""What runs on every allocated node: it reports to its cluster's agent, waits at the barrier, starts the program, and
sees to it that nothing of the program is left when it ends.

It is started for every node of every job, so it and its neighbours need the standard library only, and little of that:
on its own as ``python -I -S runner.py node``, or by calling ``main`` in a fork of a process that has it loaded.
"""

from __future__ import annotations

import base64
import gc
import os
import signal
import socket
import sys
from traceback import print_exc

if not __package__:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from koalapy.runner.atomic_files import replace_file
from koalapy.runner.folders import make_folder, remove_tree, sweep
from koalapy.runner.lease import SilenceClock, boot_time, renewal_interval
from koalapy.runner.link import MAX_LAG, Link, Loop, encode
from koalapy.runner.openmpi import Follower, Head
from koalapy.runner.output import Output
from koalapy.runner.plan import Plan, Role, Single
from koalapy.runner.processes import Processes, conceal, require_program
from koalapy.runner.session import seal_file
from koalapy.runner.settings import Failure, SecretGone, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from koalapy.runner.exec_guard import ExecGuard

PROGRAM_GRACE = 1.0
STOP_GRACE = 2.0
RECONNECTS_PER_TIMEOUT = 4
"""How often, while an agent that says nothing is waited for, we look for another."""
RENEWAL_TIMEOUT = 5.0
"""Seconds for which a program is halted whose lease ended while this process was stopped, until the agent has renewed
it."""
ASK_AGAIN_INTERVAL = 0.5
"""Seconds between two questions in that time."""
WALLTIME_CODE = 128 + signal.SIGTERM
"""Exit code of a program that was ended at its walltime."""
EARLY_LIMIT = 1024 * 1024
"""Bytes of relays that are kept until the plan is known."""
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""By which a resource manager asks us to end; Grid Engine's qrsh hands SIGHUP on to the other nodes of a job."""


class Runner:
    """One node's part in one component, from hello to goodbye."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = boot_time) -> None:
        """``clock`` counts leases and walltimes, also while this process is stopped or the machine suspended."""
        self.settings = settings
        self.loop = Loop()
        self._clock = clock
        self._silence = SilenceClock(clock(), clock)
        self._halted_until: float | None = None
        """By ``clock``, of a program that is halted until its lease is renewed."""
        self._lease_is_over = False
        self._lease_grace_ends = float("inf")
        """By ``clock``, once the lease is over and the program was warned of that."""
        self._walltime_ends: float | None = None
        self._plan: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self._phase = "waiting"
        self._life = os.urandom(16).hex()
        """Tells this process from another that would come with the same secret."""
        self._processes = Processes()
        self._output = Output(f"{settings.spool}/output.{settings.node}", settings.secret)
        self._copy, self._copy_path, self._copy_failed = -1, "", False
        self._folder, self._mark = "", -1
        """Kept for the program below the node's own temporary folder, and the descriptor that says that we live."""
        self._role: Role | None = None
        self._early: list[dict[str, Any]] = []
        """Relays that came before the plan, which says who is of our gang; what is dropped comes again."""
        self._early_size = 0
        self._result: dict[str, Any] | None = None
        self._exit_sent = False
        self._warning: dict[str, Any] | None = None
        """Of its walltime: the signal, how long after its start, and the grace in seconds that is left then."""
        self._kill_at = 0.0
        self._warned, self._grace_over = False, 0.0
        """Whether the program was told that it will be stopped, and until when it may end by itself all the same."""
        self._delivery_timeout: float | None = None
        """Seconds for which the result waits for the agent; None: ``agent_timeout``."""
        self._status: int | None = None
        self._link = Link(self.loop, settings, self._hello, self._receive)
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._writing, True)

    def run(self) -> int:
        self._watch_signals()
        self.loop.watch(self._reading, self._read)
        if self.settings.lrm_pipe >= 0:
            self.loop.watch(self.settings.lrm_pipe, self._lrm_ended)
        self._note_agent()
        self._renew()
        if self.settings.problem:
            self.conclude(None, self.settings.problem, infrastructure=True)
        self._link.connect()
        while self._status is None:
            try:
                self.loop.turn()
                self._check_lease()
                self._check_walltime()
            except Exception as error:  # noqa: BLE001 whatever it was, somebody waits to hear of it
                self._failed(error)
        self._link.close()
        return self._status

    def _failed(self, error: Exception) -> None:
        """The program cannot be started or followed on this node; what nobody thought of is raised when all is over."""
        if isinstance(error, Failure):
            self.conclude(error.code, error.message, infrastructure=error.code is None)
        elif self._result is not None:
            raise error
        else:
            print_exc()
            what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
            text = str(what) if isinstance(error, OSError) else repr(error)
            self.conclude(None, f"the runner on {self.settings.name} failed: {text}", infrastructure=True)

    def spawn(
        self, command: list[str], environment: dict[str, str] | None = None, guard: ExecGuard | None = None
    ) -> int:
        """Start a command of the program's on this node; ``Failure`` when it cannot be."""
        program = require_program(command[0], self.environment)
        argv, environment = [program, *command[1:]], self.environment if environment is None else environment
        try:
            if guard is not None:
                return self._processes.start_guarded(argv, environment, self._writing, guard)
            return self._processes.start(argv, environment, self._writing)
        except OSError as error:
            raise Failure(f"cannot run {command[0]}: {error.strerror}", 126) from error

    def make_folder(self) -> str:
        base = self.environment.get("TMPDIR", "/tmp")
        sweep(base)
        try:
            self._folder, self._mark = make_folder(base, self.settings.token, self.settings.node)
        except OSError as error:
            raise Failure(f"cannot make a folder in {base} on {self.settings.name}: {error.strerror}") from error
        return self._folder

    def report_running(self) -> None:
        if self._phase == "opened":
            self._phase = "running"
            self._link.send({"t": "running"})
            if warning := self._warning:
                after, name, grace = warning["after"], warning["signal"], warning["grace"]
                self.loop.after("warning", after, lambda: self._warn(name, grace))
            if walltime := self._plan.get("walltime"):
                self._walltime_ends = self._clock() + walltime
                self.loop.after("walltime", walltime, self._check_walltime)

    def relay(self, token: str, node: int, payload: dict[str, Any]) -> None:
        self._link.send({"t": "relay", "token": token, "node": node, "payload": payload})

    def conclude(
        self, code: int | None, error: str = "", *, infrastructure: bool = False, stopped: bool = False
    ) -> None:
        """The program is over; end what it left behind, then report."""
        if self._result is not None:
            return
        how = {"code": code, "error": error, "infrastructure": infrastructure, "stopped": stopped}
        self._result = {**how, "warned": self._warned}
        self._phase = "ending"
        if self._link.welcomed:  # else the hello says it
            self._link.send({"t": "ending"})
        if self._role is not None:
            self._role.close()
        if stopped or infrastructure:
            self._grace_over = 0.0
        self._kill_at = max(self.loop.time(), self._grace_over) + (STOP_GRACE if stopped else PROGRAM_GRACE)
        if self._halted_until is not None and not stopped:
            self._kill_at = 0.0  # it may not run on for a moment: the next attempt may have begun
        self._sweep()

    def _stop(self, message: dict[str, Any]) -> None:
        """End the program, once its grace is over where it is to be warned."""
        if "signal" in message and self._phase == "running":
            self._warn(message["signal"], message["grace"])
        left = min(self._grace_over - self.loop.time(), message.get("grace", 0.0))
        if left > 0:
            self.loop.after("grace", left, self._stop_now)
        else:
            self._stop_now()

    def _stop_now(self) -> None:
        self._grace_over, self._kill_at = 0.0, min(self._kill_at, self.loop.time() + STOP_GRACE)
        self.conclude(None, stopped=True)

    def _warn(self, name: str, grace: float) -> None:
        """Tell the program, once, that it will be stopped; not with a signal that this node does not know."""
        number = getattr(signal, f"SIG{name}", None)
        if number is None or self._warned or self._role is None or self._phase != "running":
            return
        self._warned, self._grace_over = True, self.loop.time() + grace
        self._processes.warn(number, self._role.is_starter)
        self._link.send({"t": "warned"})

    def _hello(self) -> dict[str, Any]:
        s = self.settings
        s.host = s.host or self._link.address
        own = {"host": s.host, "name": s.name, "lrm_job": s.lrm_job, "life": self._life, "pid": os.getpid()}
        return {**own, "phase": self._phase, "start": self._output.start, "warned": self._warned}

    def _note_agent(self) -> None:
        """Note that the agent is there: it may be silent for as long as before."""
        self.loop.after("agent", self.settings.agent_timeout, self._agent_is_gone)
        self.loop.after("silence", self.settings.agent_timeout / RECONNECTS_PER_TIMEOUT, self._reconnect)

    def _reconnect(self) -> None:
        """The connection may be open though nobody is at its other end."""
        self.loop.after("silence", self.settings.agent_timeout / RECONNECTS_PER_TIMEOUT, self._reconnect)
        self._link.reconnect()

    def _agent_is_gone(self) -> None:
        """Give the node back while nothing runs on it: nobody can let the program begin."""
        if self._phase == "waiting":
            error = f"node {self.settings.name} had no word from its agent for {self.settings.agent_timeout:g} s"
            self._delivery_timeout = 0.0
            self.conclude(None, error, infrastructure=True)

    # The lease

    def _renew(self) -> None:
        """Ask the agent how long the daemon has been silent, now and from time to time."""
        self._link.send({"t": "renew", "number": self._silence.ask()})
        self.loop.after("renew", renewal_interval(self.settings.lease), self._renew)

    def _lease_left(self) -> float:
        return float("inf") if self.settings.lease is None else self.settings.lease - self._silence.silence

    def _check_lease(self) -> None:
        """End the program when its lease is over, after the warning and the grace that it asked for.

        When the lease ended while this process was stopped the agent is asked first: it may have been renewed. The
        program is halted meanwhile, since the next attempt may run already.
        """
        left = self._lease_left()
        if self._result is not None:
            return
        if self._lease_is_over:
            if self._clock() >= self._lease_grace_ends:  # by its alarm, too, which stands still with this process
                self._conclude_lease()
            return
        if left > 0:
            if self._halted_until is not None:
                self._halted_until = None
                self._processes.resume()
            elif left < float("inf"):
                self.loop.after("lease", left, self._check_lease)
            return
        if self._halted_until is None and left < -MAX_LAG:
            self._halted_until = self._clock() + RENEWAL_TIMEOUT
            self._processes.halt()
            self._ask_again()
        elif self._halted_until is None or self._clock() >= self._halted_until:
            self._end_lease(-left)

    def _ask_again(self) -> None:
        """Ask until the halted program may go on, or is ended."""
        if self._halted_until is not None and self._result is None:
            self._renew()
            self.loop.after("ask-again", ASK_AGAIN_INTERVAL, self._ask_again)

    def _end_lease(self, late: float) -> None:
        """End the program; what is left of its grace ``late`` seconds after the end of the lease is still its own."""
        self._lease_is_over = True
        warning = self._plan.get("lease_warning")
        grace = max(0.0, warning["grace"] - late) if warning and self._phase == "running" else 0.0
        if warning and grace > 0:
            if self._halted_until is not None:
                self._halted_until = None
                self._processes.resume()
            self._warn(warning["signal"], grace)
            grace = min(grace, self._grace_over - self.loop.time())
        if grace > 0:
            self._lease_grace_ends = self._clock() + grace
            self.loop.after("lease-grace", grace, self._conclude_lease)
        else:
            self._conclude_lease()

    def _conclude_lease(self) -> None:
        if self._result is not None:
            return
        silence = f"the daemon was silent for {self._silence.silence:.0f} s"
        error = f"node {self.settings.name} ended it: its lease is over, {silence}"
        if not self._link.welcomed:
            self._delivery_timeout = 0.0
        self.conclude(None, error, infrastructure=True)

    # The walltime

    def _check_walltime(self) -> None:
        """End a program at its walltime and allowance, for a daemon that is out of reach.

        What is left of an earlier warning's grace is not waited for: the daemon counts the walltime only.
        """
        if self._walltime_ends is None or self._clock() < self._walltime_ends:
            return
        self._walltime_ends, self._grace_over = None, 0.0
        self._kill_at = min(self._kill_at, self.loop.time() + PROGRAM_GRACE)
        if self._result is None:
            self.say(f"the walltime is over, and nobody has ended the program: {self.settings.name} does")
            self.conclude(WALLTIME_CODE)

    def _receive(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "welcome":
            self.settings.lease = message["lease"]
            self._renew()
        self._note_agent()
        if kind == "welcome":
            self._output.acknowledge(message["output"])
            self._output.sent, self._exit_sent = self._output.start, False
            self._pump()
        elif kind == "lease":
            if message["silence"] is not None:
                self._silence.answered(message["number"], message["silence"])
        elif kind == "output":
            self._acknowledged(message["offset"])
        elif kind == "open" and self._phase == "waiting" and self._lease_left() <= 0:
            self._end_lease(0.0)  # it may have been on its way for long
        elif kind == "open" and self._phase == "waiting":
            self._open(message)
        elif kind == "relay" and self._role is None:
            self._early_size += len(encode(message))
            if self._early_size <= EARLY_LIMIT:
                self._early.append(message)
        elif kind == "relay":
            self._relayed(message)
        elif kind == "refused" and self._phase == "waiting":
            self._status = 1  # another has our place: nothing that is its own may be touched
        elif kind == "refused":
            self._refused()
        elif kind == "stop":
            self._stop(message)
        elif kind == "exit_ack" and self._phase == "ended":
            self._status = 0

    def _refused(self) -> None:
        """End the program, if any, and do not wait for its result to be taken: the agent will never take it."""
        self._delivery_timeout = 0.0
        self._stop_now()
        if self._phase == "ended":
            self._give_up()

    def _acknowledged(self, offset: int) -> None:
        if offset > self._output.start and self._phase == "ended":
            self._await_delivery()  # somebody is taking it
        self._output.acknowledge(offset)
        if not self._output.full:
            self.loop.watch(self._reading, self._read)
        self._pump()

    def _relayed(self, message: dict[str, Any]) -> None:
        payload, sender = message["payload"], (message["sender"], message["sender_node"])
        late = payload.get("op") == "daemon_ended"
        if self._role is not None and (late or self._phase in ("opened", "running")):
            try:
                self._role.relayed(sender, payload)
            except Failure as failure:
                self._failed(Failure(failure.message))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                print(f"koala runner: {sender} sent an invalid message: {error!r}", file=sys.stderr)

    def _open(self, message: dict[str, Any]) -> None:
        plan = Plan(message, self.settings.token, self.settings.node)
        self._phase, self._warning, self._plan = "opened", message.get("warning"), message
        self.environment = plan.environment(self.settings)
        if message["launcher"] == "processes":
            self._role = Single(self, plan)
        else:
            self._role = Head(self, plan) if plan.me is plan.head else Follower(self, plan)
        try:
            self._enter(plan.context)
            self._copy_to(plan.context["output"])
            self._role.start()
        except Failure as failure:
            self.say(failure.message)
            if failure.code is not None and isinstance(self._role, Follower):
                self._role.refuse(failure)
            else:
                self._failed(failure)
        early, self._early = self._early, []
        for message in early:
            self._relayed(message)

    def _enter(self, context: dict[str, Any]) -> None:
        """Go where the program is to run; ``Failure`` where the user has named a place that is not there."""
        workdir = context["workdir"] or self.settings.stage or self.settings.spool
        try:
            os.chdir(workdir)
        except OSError as error:
            if context["workdir"] and not context.get("workdir_optional"):
                text = f"cannot run in {workdir} on {self.settings.name}: {error.strerror}"
                raise Failure(text, 126) from error
            # Home rather than the spool: what the program leaves there stays.
            places = (self.environment.get("HOME", ""), self.settings.spool)
            place = next((p for p in places if os.access(p, os.W_OK | os.X_OK)), "/")
            if self.settings.node == 0:
                self.say(f"cannot use {workdir} on {self.settings.name} ({error.strerror}): running in {place}")
            os.chdir(place)

    def _copy_to(self, path: str | None) -> None:
        """Write the output to a file that the user has named, too; ``Failure`` where what comes here could not be."""
        if path:
            self._copy_path = path
            try:
                self._copy = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            except OSError as error:
                text = f"cannot write {path} on {self.settings.name}: {error.strerror}"
                if not isinstance(self._role, Follower):  # nothing of the program's comes to it
                    raise Failure(text, 126) from error
                self.say(text)

    def say(self, line: str) -> None:
        """Tell the user, between the lines of the program's output."""
        self.show(f"koala: {line}\n".encode())

    def _read(self, _events: int) -> None:
        self._read_once()

    def _read_once(self) -> bool:
        """Keep what the program wrote; False when there is nothing."""
        try:
            data = os.read(self._reading, 65536)
        except BlockingIOError:
            return False
        self.show(data if self._role is None else self._role.filter_output(data))
        return True

    def show(self, output: bytes) -> None:
        """Keep it until the agent has it, for the user to see."""
        self._output.append(output)
        if self._copy >= 0:
            self._add_to_copy(output)
        if self._output.full:
            self.loop.forget(self._reading)
        self._pump()

    def _add_to_copy(self, data: bytes) -> None:
        """To the file that the user wants; what cannot be written is missing there, which is said once."""
        copy = self._copy
        try:
            while data:
                data = data[os.write(copy, data) :]
        except OSError as error:
            if not self._copy_failed:
                self._copy_failed, self._copy = True, -1
                self.say(f"{self._copy_path} on {self.settings.name} is not whole: {error.strerror}")
                self._copy = copy

    def _pump(self) -> None:
        """Send what may be sent, and the end once all output is on its way."""
        if not self._link.welcomed:
            return
        for offset, data in self._output.chunks():
            self._link.send({"t": "out", "offset": offset, "data": base64.b64encode(data).decode()})
        if self._phase == "ended" and not self._exit_sent and self._output.sent == self._output.total:
            self._exit_sent = True
            self._link.send({"t": "exit", **(self._result or {})})

    def _watch_signals(self) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *END_SIGNALS):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self.loop.watch(reading, lambda _events: self._signalled(os.read(reading, 4096)))

    def _signalled(self, numbers: bytes) -> None:
        if any(number in numbers for number in END_SIGNALS):
            self._delivery_timeout = STOP_GRACE
            self._stop_now()
        if self._phase == "ending":
            self._sweep()
        else:
            self._reap()

    def _reap(self) -> bool:
        """Take leave of children that ended; whether any process is left."""
        ended, alive = self._processes.reap()
        for pid, code in ended:
            if self._role is not None and self._phase in ("opened", "running"):
                self._role.child_ended(pid, code)
        return alive

    def _sweep(self) -> None:
        """End what is left below, first politely; the last word is the kernel's, that there are no children."""
        if self._phase != "ending":
            return
        if not self._reap():
            self._finish()
            return
        now = self.loop.time()
        if now >= self._grace_over:
            self._processes.signal_all(signal.SIGTERM if now < self._kill_at else signal.SIGKILL)
        self.loop.after("sweep", 0.05, self._sweep)

    def _finish(self) -> None:
        while self._read_once():
            pass
        if self._role is not None:
            self.show(self._role.rest_of_output(stopped=bool(self._result and self._result["stopped"])))
        self._phase = "ended"
        self.loop.cancel("sweep")
        if self._folder:
            remove_tree(self._folder)
        self._write_result()
        self._await_delivery()
        self._pump()

    def _await_delivery(self) -> None:
        timeout = self.settings.agent_timeout if self._delivery_timeout is None else self._delivery_timeout
        self.loop.after("give-up", timeout, self._give_up)

    def _write_result(self) -> None:
        """For an agent that was away: where spool and agent share a file system, the result outlives the runner, and
        what of the output it could not send any more."""
        path = f"{self.settings.spool}/result.{self.settings.node}.json"
        self._output.save()
        own = {"host": self.settings.host, "name": self.settings.name, "output": self._output.total}
        result = encode({**(self._result or {}), **own}).encode()
        try:
            replace_file(path, seal_file(self.settings.secret, os.path.basename(path), result), sync=False)
        except OSError as error:
            print(f"koala runner: cannot write {path}: {error}", file=sys.stderr)

    def _lrm_ended(self, _events: int) -> None:
        """Kill the program at once: the next resource manager starts with free nodes, and finds no process that has
        cleared its environment."""
        self.loop.forget(self.settings.lrm_pipe)
        self._delivery_timeout = 0.0
        error = f"the resource manager of node {self.settings.name} was killed"
        self.conclude(None, error, infrastructure=True)
        self._grace_over = self._kill_at = 0.0
        self._sweep()
        if self._phase == "ended":
            self._give_up()

    def _give_up(self) -> None:
        self._status = 1


def check() -> int:
    """Say where we are, once a program could be started here as those of jobs are."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    processes = Processes()
    processes.start(["/bin/sh", "-c", "echo started"], dict(os.environ), writing)
    os.close(writing)
    with open(reading, "rb") as output:
        started = output.read() == b"started\n"
    os.wait()
    if started:
        print(f"koala-runner {socket.gethostname()}")
    return 0 if started else 1


def main(argv: list[str]) -> int:
    """Run one node's part; 0 when the agent has acknowledged the result, 1 when it could not be told."""
    if argv == ["check"]:
        return check()
    if argv != ["node"]:
        print("usage: runner.py node|check", file=sys.stderr)
        return 2
    conceal()
    gc.disable()  # a runner lives on few objects, and a collection would copy every page shared with its parent
    try:
        settings = Settings(dict(os.environ))
    except SecretGone as error:
        print(f"koala runner: {error}", file=sys.stderr)
        return 1
    return Runner(settings).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
