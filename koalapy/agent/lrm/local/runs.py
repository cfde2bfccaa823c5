"""Start, watch and end the processes of locald's running jobs: one run for each node of a job.

Runners are forks of the preloaded program. Other programs, and those of other accounts, are executed.
"""

import importlib.util
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from koalapy.agent.lrm.local.jobs import WALLTIME_EXCEEDED, JobTable, LocalJob, LocalNode
from koalapy.agent.lrm.local.processes import (
    MARK,
    die_with_parent,
    find_orphans,
    process_trees,
    read_mark,
    read_owner,
    redirect_streams,
    send_signal,
)
from koalapy.runner.connections import Loop

HANDLED_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
"""Signals that locald or its preloaded program handles."""
SECRET_PIPE_VARIABLE = "KOALA_SECRET_PIPE"
END_PIPE_VARIABLE = "KOALA_LRM_PIPE"
START_FAILED = 127
"""Exit code of a process if its program cannot be started."""
_ALL_SIGNALS = signal.valid_signals()
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_BARE_OPTIONS = frozenset({"-I", "-S", "-B", "-E", "-s", "-u"})


class Preloaded:
    """A program kept in memory: a Python file with a ``main(args)`` that returns its exit code."""

    def __init__(self, path: str) -> None:
        """Load the file. Raise ``ImportError`` if it cannot be loaded or has no ``main(args)``."""
        spec = importlib.util.spec_from_file_location("locald_preloaded", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except (OSError, SyntaxError) as error:
            raise ImportError(f"{path} cannot be loaded: {error}") from error
        if not callable(getattr(module, "main", None)):
            raise ImportError(f"{path} has no function main(args)")
        self._path, self._module = path, module
        self._loaded_at = os.stat(path).st_mtime_ns

    def is_run_by(self, argv: Sequence[str]) -> bool:
        """Return whether ``argv`` runs this file, which may have changed."""
        return self._path in argv[1:]

    def parse_args(self, argv: Sequence[str]) -> list[str] | None:
        """Return the program's own arguments; None if ``argv`` runs another program or the file has changed."""
        if not self.is_run_by(argv):
            return None
        position = argv.index(self._path, 1)
        with suppress(OSError):
            if _BARE_OPTIONS.issuperset(argv[1:position]) and os.stat(self._path).st_mtime_ns == self._loaded_at:
                return list(argv[position + 1 :])
        return None

    def run(self, args: list[str], env: Mapping[str, str]) -> int:
        """Run the program in this process and return its exit code."""
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [self._path, *args]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return int(self._module.main(args) or 0)


class Spawner:
    """Starts processes that lead their own session and end when this process ends.

    The preloaded program gets the number of a pipe in its environment. The pipe closes when this process ends, and the
    program then ends its own processes. Other programs are killed by the kernel.
    """

    def __init__(self, preloaded: Preloaded | None, release: Callable[[], None]) -> None:
        """``release`` closes, in the new process, everything that belongs to this one."""
        self._preloaded = preloaded
        self._release = release
        self._end_pipe, self._end_pipe_writer = os.pipe()
        """The end that the preloaded program reads, and the one that only this process has open."""

    def spawn(self, job: LocalJob, environment: dict[str, str], secret: str = "") -> int:
        """Start the program of a job with an environment; return the process id. Raise ``OSError``.

        Another account's process is always started by exec: it must not be a copy of this one's memory.
        The process finds the number of a pipe with its secret in its environment. A failure after the fork ends it
        with 127 and a line in its output.
        """
        args = self._preloaded.parse_args(job.argv) if self._preloaded is not None and job.account is None else None
        parent = os.getpid()
        # A signal must not reach the handlers of this process in the new one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            if pid := os.fork():
                return pid
            code = 1
            try:
                os.close(self._end_pipe_writer)
                self._release()
                os.setsid()
                for signum in HANDLED_SIGNALS:
                    signal.signal(signum, signal.SIG_DFL)
                if args is None:
                    code = self._execute(job, environment, secret, parent)
                else:
                    code = self._run_preloaded(args, job, environment, secret)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:  # noqa: BLE001 no code of the forking program may run in this process
                sys.excepthook(*sys.exc_info())
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with suppress(OSError, ValueError):
                        stream.flush()
                os._exit(code & 0xFF)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _execute(self, job: LocalJob, environment: dict[str, str], secret: str, parent: int) -> int:
        """Execute a job's program in this process, as its account if it has one. Return 127 if that fails."""
        account = job.account
        ends_itself = self._preloaded is not None and self._preloaded.is_run_by(job.argv)
        if not ends_itself:
            die_with_parent(parent)
        if account is not None:
            os.setgroups(account["groups"])
            os.setresgid(account["gid"], account["gid"], account["gid"])
            os.setresuid(account["uid"], account["uid"], account["uid"])
            if not ends_itself:
                die_with_parent(parent)  # a change of account clears it
        self._add_pipes(environment, secret, with_end_pipe=ends_itself)
        try:
            redirect_streams(job.output, 0o644)
            os.chdir(job.cwd)
            for signum in (*_IGNORED_BY_PYTHON, signal.SIGINT):
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvpe(job.argv[0], job.argv, environment)
        except OSError as error:
            return _report_start_failure(job.argv[0], error)

    def _run_preloaded(self, args: list[str], job: LocalJob, environment: dict[str, str], secret: str) -> int:
        """Run the preloaded program in this process, and return its exit code; 127 if it cannot be started."""
        assert self._preloaded is not None
        try:
            redirect_streams(job.output, 0o644)
            os.chdir(job.cwd)
        except OSError as error:
            return _report_start_failure("the preloaded program", error)
        self._add_pipes(environment, secret, with_end_pipe=True)
        return self._preloaded.run(args, environment)

    def _add_pipes(self, environment: dict[str, str], secret: str, *, with_end_pipe: bool) -> None:
        """Add the numbers of a program's pipes to its environment, and let it inherit them."""
        if with_end_pipe:
            os.set_inheritable(self._end_pipe, True)
            environment[END_PIPE_VARIABLE] = str(self._end_pipe)
        if secret:
            reading, writing = os.pipe()
            os.write(writing, secret.encode())
            os.close(writing)
            os.set_inheritable(reading, True)
            environment[SECRET_PIPE_VARIABLE] = str(reading)


def _report_start_failure(program: str, error: OSError) -> int:
    """Print why a program cannot be started, and return the exit code for that."""
    print(f"locald: cannot start {program}: {error}", file=sys.stderr)
    return START_FAILED


@dataclass(eq=False, slots=True)
class NodeRun:
    """The processes of a job on one node."""

    job: LocalJob
    node: LocalNode
    mark: str
    pid: int = 0
    """The main process."""
    is_alive: bool = False
    """Whether the main process runs this job."""
    sent_signal: int = 0
    """The last signal that locald has sent: 0, SIGTERM or SIGKILL."""
    signalled_pids: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Runs:
    """The runs of all running jobs. A job ends when none of its processes is left on any node."""

    jobs: JobTable
    spawner: Spawner
    loop: Loop
    directory: str
    base_env: Mapping[str, str]
    kill_grace_s: float = 1.0
    """Seconds between SIGTERM and SIGKILL."""
    _runs: dict[tuple[LocalJob, LocalNode], NodeRun] = field(default_factory=dict)
    _by_pid: dict[int, NodeRun] = field(default_factory=dict)
    """Runs with a living main process."""
    _orphan_runs: dict[int, NodeRun] = field(default_factory=dict)
    """The runs of orphans, by process id."""

    def start_job(self, job: LocalJob) -> None:
        """Start the job's program on all of its nodes."""
        addresses = ",".join(node.address for node in job.nodes)
        base_env = dict(self.base_env)
        if job.account is not None:
            base_env.pop("TMPDIR", None)
            base_env |= {"HOME": job.account["home"], "USER": job.account["name"], "LOGNAME": job.account["name"]}
            base_env["SHELL"] = job.account["shell"] or "/bin/sh"
        for index, node in enumerate(job.nodes):
            run = NodeRun(job, node, f"{job.id}.{index}@{self.directory}")
            env = {
                **base_env,
                **job.env,
                "LOCALD_JOB": str(job.id),
                "LOCALD_NODES": addresses,
                "LOCALD_NODE": node.address,
                "LOCALD_NODE_NAME": node.name,
                "LOCALD_NODE_INDEX": str(index),
                MARK: run.mark,
            }
            self._runs[job, node] = run
            try:
                run.pid = self.spawner.spawn(job, env, job.secrets[index] if job.secrets else "")
            except OSError as error:
                self._end_main_process(run, 126, f"node {node.name}: cannot start: {error}")
            else:
                run.is_alive = True
                self._by_pid[run.pid] = run
        if job.walltime is not None:
            self.loop.set_alarm(f"{job.id}", job.walltime, lambda: self.stop_job(job, WALLTIME_EXCEEDED))
        self._sweep()

    def stop_job(self, job: LocalJob, reason: str) -> None:
        """End all processes of a running job: SIGTERM, and SIGKILL after the grace time."""
        if not job.reason:
            job.reason = reason
        self.loop.cancel_alarm(f"{job.id}")
        for node in job.nodes:
            run = self._runs.get((job, node))
            if run is not None and not run.sent_signal:
                self._signal_run(run, signal.SIGTERM)
        self._sweep()

    def reap(self) -> None:
        """Collect all ended child processes, and set exit codes of jobs with main processes among them."""
        statuses = dict(_reap_children())
        for pid, status in statuses.items():
            self._orphan_runs.pop(pid, None)
            run = self._by_pid.pop(pid, None)
            if run is not None:
                code = os.waitstatus_to_exitcode(status)
                is_lost = code < 0 and not run.sent_signal
                reason = f"node {run.node.name}: runner killed by signal {-code}" if is_lost else ""
                self._end_main_process(run, code if code >= 0 else 128 - code, reason)
        if statuses:
            self._sweep()

    def _end_main_process(self, run: NodeRun, code: int, lost_reason: str) -> None:
        """Record the end of a node's main process, and mark the job as lost if there is a reason.

        The first code that is not 0 is the job's.
        """
        run.is_alive = False
        if not run.job.exit_code:
            run.job.exit_code = code
        if lost_reason:
            self.jobs.mark_lost(run.job, lost_reason)

    def _signal_run(self, run: NodeRun, signum: signal.Signals) -> None:
        """Send a signal to all processes of a run; after SIGTERM, schedule SIGKILL."""
        run.sent_signal = signum
        run.signalled_pids.clear()
        if signum == signal.SIGTERM:

            def kill() -> None:
                self._signal_run(run, signal.SIGKILL)
                self._sweep()

            self.loop.set_alarm(run.mark, self.kill_grace_s, kill)
        if run.is_alive:
            tree = process_trees([run.pid])
            try:
                os.killpg(run.pid, signum)
            except (ProcessLookupError, PermissionError):  # too young to lead its session yet, or of another account
                send_signal([run.pid], signum)
            send_signal(tree[1:], signum)

    def _sweep(self) -> None:
        """End the processes that ending runs left, and free nodes on which none remains. End jobs without nodes."""
        ending = [run for run in self._runs.values() if run.sent_signal or not run.is_alive]
        if not ending:
            return
        orphans: defaultdict[NodeRun, list[int]] = defaultdict(list)
        for pid in find_orphans(self._by_pid):
            orphan_run = self._orphan_runs.get(pid) or self._find_run(pid, ending)
            if orphan_run is not None:
                orphans[orphan_run].append(pid)
        for run in ending:
            if pids := orphans.get(run):
                if not run.sent_signal:
                    self._signal_run(run, signal.SIGTERM)
                if new_pids := [pid for pid in pids if pid not in run.signalled_pids]:
                    run.signalled_pids.update(new_pids)
                    send_signal(process_trees(new_pids), run.sent_signal)
            elif not run.is_alive:
                self.loop.cancel_alarm(run.mark)
                del self._runs[run.job, run.node]
                if not any((run.job, node) in self._runs for node in run.job.nodes):
                    self.loop.cancel_alarm(f"{run.job.id}")
                    self.jobs.end_job(run.job)

    def _find_run(self, pid: int, ending: list[NodeRun]) -> NodeRun | None:
        """Return the run to which an orphaned process belongs, by its mark or else its session.

        The mark of a job of another account does not count, since programs choose their environment. A job without an
        account may have processes of any account that no job has, as a server that has given up its rights.
        One that has neither counts for the run that ends first: it is better ended early than left behind.
        """
        mark, owner = read_mark(pid), read_owner(pid)
        accounts = {run.job.account["uid"] for run in self._runs.values() if run.job.account}
        for run in self._runs.values():
            is_own = owner == run.job.account["uid"] if run.job.account else owner not in accounts
            if run.mark == mark and is_own:
                self._orphan_runs[pid] = run
                return run
        try:
            session = os.getsid(pid)
        except ProcessLookupError:
            return None
        by_session = next((run for run in self._runs.values() if run.pid == session), None)
        return by_session or next((run for run in ending if not run.is_alive), None)


def _reap_children() -> Iterator[tuple[int, int]]:
    """Yield the process id and the wait status of each child that has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            yield ended
