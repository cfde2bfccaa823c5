"""The processes of locald's running jobs: one run for each node of a job, from the fork to the last orphan's end."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from koalapy.agent.lrm.local.jobs import WALLTIME_EXCEEDED, JobTable, LocalJob, LocalNode
from koalapy.agent.lrm.local.processes import MARK, Adopted, mark_of, send, trees_of
from koalapy.agent.lrm.local.spawn import Spawner


class Deadlines:
    """Things to do later, one for each key."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[float, Callable[[], None]]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def set(self, key: Hashable, seconds: float, action: Callable[[], None]) -> None:
        self._entries[key] = (time.monotonic() + seconds, action)

    def drop(self, key: Hashable) -> None:
        self._entries.pop(key, None)

    def timeout(self) -> float | None:
        """Seconds until the next one; None when there is none."""
        if not self._entries:
            return None
        return max(0.0, min(when for when, _ in self._entries.values()) - time.monotonic())

    def run_due(self) -> None:
        """Do what is due now; what an action drops, or sets anew, is not done."""
        now = time.monotonic()
        for key, entry in list(self._entries.items()):
            when, action = entry
            if when <= now and self._entries.get(key) is entry:
                del self._entries[key]
                action()


class NodeRun:
    """What a job does on one node. ``stage`` is the last signal that locald has sent: 0, SIGTERM or SIGKILL."""

    __slots__ = ("alive", "job", "mark", "node", "pid", "signalled", "stage")

    def __init__(self, job: LocalJob, node: LocalNode, mark: str) -> None:
        self.job = job
        self.node = node
        self.mark = mark
        self.pid = 0
        self.alive = False
        """The main process lives."""
        self.stage = 0
        self.signalled: set[int] = set()


class Runs:
    """Starts, watches and ends the processes of jobs; a job is over when no process of it is left on any node."""

    def __init__(
        self, jobs: JobTable, spawner: Spawner, deadlines: Deadlines, *, mark_ending: str, base_env: Mapping[str, str]
    ) -> None:
        self._jobs = jobs
        self._spawner = spawner
        self._deadlines = deadlines
        self._mark_ending = mark_ending
        self._base_env = base_env
        self._adopted = Adopted()
        self._runs: dict[LocalNode, NodeRun] = {}
        self._by_pid: dict[int, NodeRun] = {}
        """Runs whose main process lives."""
        self._owners: dict[int, NodeRun] = {}
        """Orphans whose run is known."""
        self.kill_grace = 1.0
        """Seconds between SIGTERM and SIGKILL."""

    def start(self, job: LocalJob) -> None:
        """Start the job on all of its nodes."""
        addresses = ",".join(node.address for node in job.nodes)
        for index, node in enumerate(job.nodes):
            run = NodeRun(job, node, f"{job.id}.{index}{self._mark_ending}")
            env = {
                **(self._base_env if job.account is None else _environment_of(job.account, self._base_env)),
                **job.env,
                "LOCALD_JOB": str(job.id),
                "LOCALD_NODES": addresses,
                "LOCALD_NODE": node.address,
                "LOCALD_NODE_NAME": node.name,
                "LOCALD_NODE_INDEX": str(index),
                MARK: run.mark,
            }
            self._runs[node] = run
            try:
                secret = job.secrets[index] if job.secrets else ""
                run.pid = self._spawner.spawn(job.argv, env, job.cwd, job.output, account=job.account, secret=secret)
            except OSError as error:
                self._main_over(run, 126, f"node {node.name}: cannot start: {error}")
            else:
                run.alive = True
                self._by_pid[run.pid] = run
        if job.walltime is not None:
            self._deadlines.set(job, job.walltime, lambda: self.stop(job, WALLTIME_EXCEEDED))
        self._sweep()

    def stop(self, job: LocalJob, reason: str) -> None:
        """End all processes of a running job: SIGTERM, and SIGKILL after the grace."""
        if not job.reason:
            job.reason = reason
        self._deadlines.drop(job)
        for node in job.nodes:
            run = self._runs.get(node)
            if run is not None and not run.stage:
                self._end(run, signal.SIGTERM)
        self._sweep()

    def fail_node(self, node: LocalNode) -> None:
        """The node breaks: kill what runs there."""
        run = self._runs.get(node)
        if run is not None:
            self._jobs.mark_lost(run.job, f"node {node.name}: down")
            self._end(run, signal.SIGKILL)
            self._sweep()

    def reap(self) -> None:
        """Collect every child that has ended."""
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended = True
            self._owners.pop(pid, None)
            run = self._by_pid.pop(pid, None)
            if run is not None:
                code = os.waitstatus_to_exitcode(status)
                lost = f"node {run.node.name}: runner killed by signal {-code}" if code < 0 and not run.stage else ""
                self._main_over(run, code if code >= 0 else 128 - code, lost)
        if ended:
            self._sweep()

    def _main_over(self, run: NodeRun, code: int, lost: str) -> None:
        run.alive = False
        job = run.job
        if not job.exit_code:
            job.exit_code = code
        if lost:
            self._jobs.mark_lost(job, lost)

    def _end(self, run: NodeRun, how: signal.Signals) -> None:
        run.stage = how
        run.signalled.clear()
        if how == signal.SIGTERM:
            self._deadlines.set(run, self.kill_grace, lambda: self._kill(run))
        else:
            self._deadlines.drop(run)
        if run.alive:
            tree = trees_of([run.pid])
            try:
                os.killpg(run.pid, how)
            except ProcessLookupError:  # so young that it does not lead its session yet
                os.kill(run.pid, how)
            send(tree[1:], how)

    def _kill(self, run: NodeRun) -> None:
        self._end(run, signal.SIGKILL)
        self._sweep()

    def _sweep(self) -> None:
        """End the orphans of runs that are ending; let go of nodes on which nothing is left."""
        ending = [run for run in self._runs.values() if run.stage or not run.alive]
        if not ending:
            return
        left = self._orphans_of(ending)
        for run in ending:
            if pids := left.get(run):
                if not run.stage:
                    self._end(run, signal.SIGTERM)
                if new := [pid for pid in pids if pid not in run.signalled]:
                    run.signalled.update(new)
                    send(trees_of(new), run.stage)
            elif not run.alive:
                self._release(run)

    def _orphans_of(self, ending: list[NodeRun]) -> dict[NodeRun, list[int]]:
        found: defaultdict[NodeRun, list[int]] = defaultdict(list)
        for pid in self._adopted.besides(self._by_pid):
            owner = self._owners.get(pid) or self._owner_of(pid, ending)
            if owner is not None:
                found[owner].append(pid)
        return found

    def _owner_of(self, pid: int, ending: list[NodeRun]) -> NodeRun | None:
        """The run of an orphan: by its mark, else by its session.

        One that has given up both belongs to whichever node ends first: better ended early than left behind.
        """
        mark = mark_of(pid)
        for run in self._runs.values():
            if run.mark == mark:
                self._owners[pid] = run
                return run
        try:
            session = os.getsid(pid)
        except ProcessLookupError:
            return None
        by_session = next((run for run in self._runs.values() if run.pid == session), None)
        return by_session or next((run for run in ending if not run.alive), None)

    def _release(self, run: NodeRun) -> None:
        self._deadlines.drop(run)
        del self._runs[run.node]
        job = run.job
        if not any(node in self._runs for node in job.nodes):
            self._deadlines.drop(job)
            self._jobs.end(job)


def _environment_of(account: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, str]:
    """What is ours gives way to what is the account's own."""
    kept = {name: value for name, value in base.items() if name != "TMPDIR"}
    own = {"HOME": account["home"], "USER": account["name"], "LOGNAME": account["name"]}
    return kept | own | {"SHELL": account["shell"] or "/bin/sh"}
