"""Start, watch and end the processes of locald's running jobs: one run for each node of a job."""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from koalapy.agent.lrm.local.jobs import WALLTIME_EXCEEDED, JobTable, LocalJob, LocalNode
from koalapy.agent.lrm.local.processes import MARK, find_orphans, process_trees, read_mark, send_signal
from koalapy.agent.lrm.local.spawn import Spawner
from koalapy.runner.connections import Loop


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
            except ProcessLookupError:  # too young to lead its session yet
                os.kill(run.pid, signum)
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

        One that has neither counts for the run that ends first: it is better ended early than left behind.
        """
        mark = read_mark(pid)
        for run in self._runs.values():
            if run.mark == mark:
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
