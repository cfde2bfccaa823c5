"""The state of one component: commands, messages of its runners, and reports of the resource manager."""

import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from koalapy.agent.components.outputlog import DEFAULT_OUTPUT_LIMIT, OutputLog
from koalapy.agent.core.spool import RUNNER_LOG, JournalFolder
from koalapy.agent.lrm.port import PREEMPTED, Fault, LrmJob, LrmJobState
from koalapy.agent.runners.runners import RunnerConnection, encode_line, lrm_name
from koalapy.model.job import ComponentState
from koalapy.model.node_requirement import NodeRequirement
from koalapy.model.reports import ComponentStatus, ProgramUse, Refusal, RefusedSizes, ReportedState
from koalapy.runner.output_streams import mark_stream
from koalapy.runner.plan import separates_streams
from koalapy.runner.session import Line
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.process import read_boot_id

_REQUIREMENT = TypeAdapter[NodeRequirement | None](NodeRequirement | None)
KILLED_BY_KILL = 128 + 9
KILLED_BY_TERM = 128 + 15
MEMORY_KILL = re.compile(
    r"^(?:slurmstepd\S*|srun): (?:error: )?.*(?:exceeded .*memory limit|oom[-_ ]kill|out of memory)", re.IGNORECASE
)
"""A line of Slurm about a step that it killed for its memory. Its job is then often just killed by a signal."""
ORDER_FIELDS = (
    *("size", "walltime", "stage", "collect", "user"),
    *("node_class", "requirement", "reservation", "lease", "output_limit"),
)
"""Fields of a component that its journal records when it is submitted."""
END_FIELDS = {
    *("exit_code", "error", "infrastructure", "refused", "refused_sizes", "exceeded", "relay_lost", "results_lost")
}
"""Fields of a component that its journal records when it has ended."""
RESULT_ENTRY = "result.{node}"
"""Name of the journal entry with the result of a node's runner."""
CLOCK_MARGIN = 60.0
"""Maximum seconds by which the clocks of nodes and file servers may differ from this machine's."""


@dataclass(frozen=True, slots=True)
class Grace:
    """The signal that a program gets before it is stopped, its grace period in seconds, and the end of that.

    The end is counted from the boot of the machine, so that clock changes and agent restarts do not affect it.
    """

    signal: str
    seconds: float
    until: float

    @classmethod
    def start_now(cls, signal: str, seconds: float) -> "Grace | None":
        """Start a grace period of so many seconds; None if there is no signal or no time."""
        return cls(signal, seconds, _since_boot() + seconds) if signal and seconds > 0 else None

    @property
    def remaining_s(self) -> float:
        """Remaining seconds; at most the whole period, whatever the clock says."""
        return max(0.0, min(self.seconds, self.until - _since_boot()))


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Node:
    """One node of a component and its runner."""

    host: str = ""
    name: str = ""
    phase: str = ""
    """Phase that the runner reports: waiting, opened, running, ending, ended; empty before its hello."""
    runner: RunnerConnection | None = None
    is_awaited: bool = False
    """Whether its runner has connected before and still has time to reconnect."""
    has_program_ended: bool = False
    """Whether its program has ended. The rest of the output and the result follow."""
    lrm_job: str = ""
    """Job that the runner reports to run in; empty if it does not know."""
    result: dict[str, Any] | None = None
    warned: bool = False
    """Whether its runner has warned the program that it will be stopped."""
    life: str = ""
    """Digest that distinguishes runners with the same secret: only the first is accepted."""
    has_streams: bool = False
    """Whether its runner serves streams of clients."""
    exit: dict[str, Any] | None = None
    """Exit message of its runner on this connection."""


@dataclass(eq=False, slots=True)
class Component:
    """One component. Methods record events; ``current_status`` derives the status from all of them."""

    instance: str
    token: str
    folder: JournalFolder
    size: int = 0
    walltime: float | None = None
    stage: str | None = None
    """Token of the stage that is its working folder."""
    collect: tuple[str, ...] = ()
    user: str = ""
    """Account that it runs as; empty for the agent's own."""
    node_class: str = ""
    """Class of the nodes that it needs; empty for any."""
    fetched: bool = True
    """Whether the files of its runners were copied to ``folder``, if another account owns them."""
    output_limit: int = DEFAULT_OUTPUT_LIMIT
    lease: float | None = None
    """Seconds of the daemon's silence after which it ends; None for no limit."""
    requirement: NodeRequirement | None = None
    """What each of its nodes must have, and the account to charge."""
    reservation: str = ""
    """The reservation that has its nodes; empty for none."""
    lrm_job: str | None = None
    submitted_at: float = 0.0
    """When the resource manager accepted its job, or a later agent found it (monotonic); earlier snapshots say nothing
    about it."""
    pending: str = ""
    """Why its job does not run, from the last snapshot."""
    limited: bool = False
    """Whether that is a limit of its account."""
    starting: float = 0.0
    """Maximum seconds of the start of its nodes, while they start."""
    plan: dict[str, Any] | None = None
    relayed: tuple[tuple[str, str], ...] = ()
    """Pairs of clusters between which its program's messages go through relays."""
    unreached: tuple[tuple[str, str], ...] | None = None
    """Those that need relays, since their nodes did not reach each other directly; None: unknown."""
    relay_lost: bool = False
    """Whether it has failed because relayed links outside this site were lost, or because it was preempted here."""
    results_lost: bool = False
    """Whether its program had succeeded, but its files may have been lost before they were sent."""
    was_cut: bool = False
    """Whether the machine was restarted after its program was opened, and no runner has shown that it outlived that."""
    stop: str | None = None
    grace: Grace | None = None
    """Grace period of a component that is being stopped."""
    error: str = ""
    infrastructure: bool = False
    refused: Refusal = ""
    refused_sizes: RefusedSizes = ""
    exceeded: Literal["", "memory"] = ""
    """Limit for which its resource manager ended it, except the walltime."""
    exit_code: int | None = None
    ended: bool = False
    collected: bool = False
    """Whether its results were sent, or are lost."""
    nodes: list[Node] = field(default_factory=list)
    output: OutputLog = field(init=False)
    reported: ComponentStatus | None = None
    """The last status that was sent on this connection."""
    _opening: Line | None = None
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.nodes = [Node() for _ in range(self.size)]
        self.output = OutputLog(self.folder.path, max(1, self.size), self.output_limit, clock=self.clock)

    @property
    def name(self) -> str:
        return lrm_name(self.instance, self.token)

    @classmethod
    def load_journal(cls, instance: str, token: str, folder: JournalFolder, clock: Clock = SYSTEM_CLOCK) -> "Component":
        """Restore a component from the journal and the runners' results in its folder. Raise if it is damaged."""
        entries = folder.load_entries()
        submitted = entries.get("submit", {})
        order = {name: submitted[name] for name in ORDER_FIELDS if name in submitted}
        component = cls(instance, token, folder, clock=clock, **order)
        component.collect, component.fetched = tuple(component.collect), not component.user
        component.requirement = _REQUIREMENT.validate_python(component.requirement)
        component.lrm_job, component.plan, component.stop = entries.get("lrm"), entries.get("open"), entries.get("stop")
        component.grace = Grace(**grace) if (grace := entries.get("grace")) else None
        for node, life in zip(component.nodes, entries.get("lives", ()), strict=False):
            node.life = life
        component.collected = bool(entries.get("collected"))
        component.was_cut = entries.get("boot", boot := read_boot_id()) != boot
        end = entries.get("end", {})
        component.output.recover(end.get("missing", ""), end.get("output", 0))
        for index in range(component.size):
            if result := entries.get(RESULT_ENTRY.format(node=index)):
                component._apply_result(index, result)
        component.collect_results()
        if end:
            component.ended = True
            for name in END_FIELDS & end.keys():
                setattr(component, name, end[name])
            for node, host in zip(component.nodes, end["hosts"], strict=False):
                node.host = host
        component.was_cut |= "results_lost" in entries
        component._fail_unsent_results()
        return component

    def _fail_unsent_results(self) -> None:
        """Fail a successful component if the daemon has not stored its files, after a restart of the machine.

        Its program may not have flushed them to the disk. The job's next attempt writes them again.
        """
        if not self.was_cut or not self.collect or self.stage is None or self.collected or self.plan is None:
            return
        has_succeeded = self.exit_code == 0
        if self.exit_code is None and not self.error and self.plan["launcher"] == "openmpi" and not self.is_leader:
            has_succeeded = all(node.result and not node.result["code"] for node in self.nodes)  # as far as known here
        if has_succeeded:
            self.error = "the cluster's machine was restarted before it had sent the result files, which may be lost"
            self.exit_code, self.infrastructure, self.relay_lost, self.results_lost = None, True, False, True
            self.folder.note_entry(results_lost=True)
            if self.ended:
                self.mark_ended()

    def record_opening(self, plan: dict[str, Any]) -> None:
        """Record the plan in the journal, before it is sent to the runners. Raise ``OSError``."""
        self.folder.write_entry(open=plan, lives=[node.life for node in self.nodes], boot=read_boot_id())

    def note_survival(self) -> None:
        """Record that its files outlived the last restart of the machine, since one of its runners did."""
        if self.was_cut and not self.results_lost:
            self.was_cut = False
            self.folder.note_entry(boot=read_boot_id())

    def write_order(self) -> None:
        """Record the order in the journal. Raise ``OSError``."""
        order = {name: getattr(self, name) for name in ORDER_FIELDS}
        self.folder.write_entry(submit=order | {"requirement": _REQUIREMENT.dump_python(self.requirement, mode="json")})

    @property
    def open_line(self) -> Line:
        """The message that starts the program, with the plan. It is equal for all runners, so it is encoded once."""
        if self._opening is None:
            self._opening = encode_line(self._open_message(has_script=False))
        return self._opening

    def _open_message(self, *, has_script: bool) -> dict[str, Any]:
        hidden = {"relay_entry"} if has_script else {"relay_entry", "script"}
        plan = {name: value for name, value in (self.plan or {}).items() if name not in hidden}
        return {"t": "open", **plan}

    def open_line_for(self, node: int) -> Line:
        """Return the message that starts the program on a node; only the node that runs the script gets its text."""
        if node == 0 and self.plan is not None and self.plan.get("script"):
            return encode_line(self._open_message(has_script=True))
        return self.open_line

    @property
    def remaining_grace_s(self) -> float:
        """Seconds in which the program may still end by itself after a stop; 0 without a grace period."""
        return self.grace.remaining_s if self.grace is not None else 0.0

    @property
    def stop_message(self) -> dict[str, Any]:
        """The message that stops the component's runners, with the remaining grace period."""
        if self.grace is None or not (remaining := self.grace.remaining_s):
            return {"t": "stop"}
        return {"t": "stop", "signal": self.grace.signal, "grace": remaining}

    @property
    def warned(self) -> bool:
        """Whether the program was warned of the stop on all nodes where it still ran."""
        nodes = self.nodes
        return any(n.warned for n in nodes) and all(n.warned or n.phase in ("ending", "ended") for n in nodes)

    @property
    def is_leader(self) -> bool:
        """Whether its node 0 runs ``mpirun`` for all components of the job."""
        return self.plan is not None and self.plan["launcher"] == "openmpi" and self.plan["head"] == self.token

    @property
    def awaits_collection(self) -> bool:
        """Whether the component's results must still be sent before it counts as ended.

        This holds for every started program with files to collect, even if nodes were lost: the job may have succeeded.
        """
        has_results_to_send = self.collect and self.stage is not None and not self.collected
        return bool(self.ended and has_results_to_send and self.plan is not None)

    @property
    def runners(self) -> list[RunnerConnection]:
        return [node.runner for node in self.nodes if node.runner is not None]

    @property
    def has_runners(self) -> bool:
        """Whether runners have connected to this agent or an earlier one."""
        return self.plan is not None or any(node.phase for node in self.nodes)

    @property
    def may_run(self) -> bool:
        """Whether a runner without a result is connected, or has time to connect again."""
        return any(node.result is None and (node.runner is not None or node.is_awaited) for node in self.nodes)

    @property
    def has_seen_all_runners(self) -> bool:
        return all(node.phase for node in self.nodes)

    def send_to_runners(self, message: dict[str, Any]) -> None:
        for runner in self.runners:
            runner.send_message(message)

    @property
    def is_program_over(self) -> bool:
        """Whether no process of the program runs any more, even if reports of runners are outstanding."""
        telling = self.nodes[:1] if self.is_leader else self.nodes
        return self.plan is not None and all(n.has_program_ended or n.phase in ("ending", "ended") for n in telling)

    def current_state(self) -> ReportedState:
        """Return the state to report, derived from the job and the phases of all runners."""
        if self.ended:
            return ComponentState.ENDED
        phases = [n.phase for n in self.nodes]
        if phases and all(phases):
            started = phases[:1] if self.is_leader else phases
            runs = self.plan and all(p in ("running", "ending", "ended") for p in started)
            return ComponentState.RUNNING if runs else ComponentState.CLAIMED
        return ComponentState.WAITING if self.lrm_job else ComponentState.SUBMITTED

    def current_status(self) -> ComponentStatus:
        """Return the status to report to the daemon, with hosts only if those of all nodes are known."""
        state = self.current_state()
        waits = state in (ComponentState.SUBMITTED, ComponentState.WAITING)
        return ComponentStatus(
            token=self.token,
            state=state,
            hosts=tuple(n.host for n in self.nodes) if all(n.host for n in self.nodes) else (),
            lrm_job=self.lrm_job,
            program_exit=self.exit_code,
            error=self.error,
            infrastructure=self.infrastructure,
            refused=self.refused,
            refused_sizes=self.refused_sizes,
            exceeded=self.exceeded,
            missing=self.output.missing,
            over=self.is_program_over,
            warned=self.warned,
            pending=self.pending if not self.ended else "",
            limited=self.limited and waits,
            starting=self.starting if waits else 0.0,
            lease=self.lease,
            use=self._node_use(),
            relayed=self.relayed,
            unreached=self.unreached,
            relay_lost=self.relay_lost,
            results_lost=self.results_lost,
        )

    def _node_use(self) -> ProgramUse | None:
        """Return the use of the nodes with a report of their runner; None without any, and before the end."""
        usages = [usage for node in self.nodes if node.result and (usage := node.result.get("usage"))]
        if not self.ended or not usages:
            return None
        return ProgramUse(
            nodes=len(usages),
            cpu_time=sum(usage["cpu"] for usage in usages),
            cpu_available=sum(usage["processors"] * usage["seconds"] for usage in usages),
            peak_memory=max(usage["memory"] for usage in usages),
        )

    @property
    def may_fail(self) -> bool:
        """Whether an error now is a failure: only the first one, before a stop and before the program succeeds."""
        return not self.error and self.stop is None and self.exit_code != 0

    def fail(self, error: str, fault: Fault = "site", sizes: RefusedSizes = "") -> None:
        """Record a failure, by the cluster's fault unless another is given. ``sizes``: which a rejection concerns."""
        if self.may_fail:
            self.error, self.infrastructure = error, fault == "site"
            self.refused = "" if fault == "site" else fault
            self.refused_sizes = sizes

    def on_job_alive(self, job: LrmJob) -> None:
        """Update from a job that has not ended. Keep the last reason for waiting if the snapshot has none."""
        if job.reason or job.state is LrmJobState.RUNNING:
            self.pending, self.limited = job.reason, job.limited
        self.starting = job.starting

    def record_result(self, index: int, result: dict[str, Any]) -> None:
        """Record the result of a node's runner, once all available output is stored.

        Save it in the journal: a later agent cannot verify the runner's file if the resource manager was killed with
        the key. Flush the output before it, which the runner then forgets.
        """
        if self.nodes[index].result is None:
            self.folder.mark_written(*self.output.paths, self.folder.path)
            self.folder.note_entry(**{RESULT_ENTRY.format(node=index): result})
            self._apply_result(index, result)

    def _apply_result(self, index: int, result: dict[str, Any]) -> None:
        """Set a node's final data from its result, and the program's exit code as soon as it is known."""
        node = self.nodes[index]
        node.result, node.phase = result, "ended"
        node.host, node.name = result.get("host") or node.host, result.get("name") or node.name
        node.warned |= bool(result.get("warned"))
        if result["infrastructure"]:
            self.fail(result["error"])
        if self.exit_code is None:
            self.exit_code = self._program_exit(index, result["code"])

    def collect_results(self) -> None:
        """Process the results that runners saved in the folder, and before each its unsent output."""
        unsent: dict[int, list[tuple[int, Path]]] | None = None
        for index, node in enumerate(self.nodes):
            if node.result is None and (result := self.folder.read_result(index)):
                unsent = self.folder.unsent_files() if unsent is None else unsent
                files, total = unsent.get(index, []), result.get("output")
                self.output.copy_unsent(index, files, total, self.folder.read_runner_file)
                if not (result["infrastructure"] or result["stopped"]) and self._was_saved_since_boot(index):
                    self.note_survival()
                self.record_result(index, result)

    def _was_saved_since_boot(self, index: int) -> bool:
        """Return whether a node's runner saved its result since the machine's boot, by a time before the present."""
        if not self.was_cut:
            return False
        with suppress(OSError):
            age = self.clock.now() - (self.folder.path / f"result.{index}.json").stat().st_mtime
            return -CLOCK_MARGIN <= age < self.clock.since_boot() - CLOCK_MARGIN
        return False

    def _note_killed_runners(self) -> None:
        """Report possibly lost output of nodes with runners that were killed while the program ran."""
        if self.plan is None:
            return
        writers = self.nodes if self.plan["launcher"] != "openmpi" else self.nodes[: self.is_leader]
        for index, node in enumerate(writers):
            if node.result is None:
                self.output.note_killed_runner(index)

    def on_job_ended(self, job: LrmJob | None, lrm: str = "the local resource manager") -> None:
        """Process the end of a component's job and set its error; None if the ``lrm`` no longer knows it."""
        self.collect_results()
        self._fail_unsent_results()
        unsent = self.folder.unsent_files()
        for index, node in enumerate(self.nodes):
            total = (node.result or {}).get("output")
            self.output.recover_unsent(index, unsent.get(index, []), total, self.folder.read_runner_file)
        results = [n.result for n in self.nodes]
        reason = job.reason if job else f"{lrm} no longer knows it"
        self.relay_lost |= reason.startswith(PREEMPTED) and self.may_fail
        if job is None and not all(results):
            self.fail(reason)
        elif job is not None and self.exit_code != 0 and (memory := self._memory_limit_reason(job)):
            # Earlier reports of runners are consequences: a killed process, or a lost MPI daemon.
            self.exceeded, self.error, self.infrastructure = "memory", memory, False
            self.exit_code = self.exit_code or job.exit_code or KILLED_BY_KILL
        elif job is not None and job.exceeded == "walltime" and self.stop is None and self.exit_code is None:
            limit = f"walltime of {self.walltime:g} s exceeded" if self.walltime and "walltime" in reason else reason
            self.error = self.error or limit
            self.exit_code = KILLED_BY_TERM
        elif lost := next((n for n in self.nodes if n.result is None), None):
            who = f"the runner on {lost.name or 'a node'}" if lost.phase else "the resource manager's job"
            code = f" (exit code {job.exit_code})" if job and job.exit_code is not None else ""
            last_line = self.folder.last_log_line()
            wrote = f"; the last line of its {RUNNER_LOG}: {last_line}" if last_line else ""
            self.fail(f"{who} ended without a word{code}: {reason or 'no reason given'}{wrote}")
        elif any(r and r["stopped"] for r in results) and self.exit_code is None:
            self.fail(f"{lrm} ended it: {reason or 'no reason given'}" if job else reason)
        self._note_killed_runners()
        self.mark_ended()

    def _memory_limit_reason(self, job: LrmJob) -> str:
        """Return the reason if the resource manager ended the job for its memory; empty if it did not."""
        if job.exceeded:
            return job.reason if job.exceeded == "memory" else ""
        line = self.folder.last_log_line(MEMORY_KILL)
        return f"memory limit exceeded: {line}" if line else ""

    def mark_ended(self) -> None:
        """Record the end in the journal and report output that is lost with it."""
        self.ended = True
        self.output.close()
        end = {name: getattr(self, name) for name in END_FIELDS} | {"hosts": [n.host for n in self.nodes]}
        self.folder.note_entry(end=end | {"missing": self.output.missing, "output": self.output.total})

    def mark_collected(self, problem: str) -> None:
        """Record that the results were sent or are lost; ``problem`` is reported, but is not a failure."""
        self.collected = True
        if problem:
            contexts = [context for context in (self.plan or {}).get("contexts", ()) if context["token"] == self.token]
            line = f"koala: {problem}\n".encode()
            if any(separates_streams(self.plan or {}, context) for context in contexts):
                line = mark_stream(line, is_error=True)
            self.output.append_line(line)
            self.error = self.error or problem
            self.mark_ended()
        self.folder.note_entry(collected=True)

    @property
    def awaits_job_end(self) -> bool:
        """Whether no runner is connected or expected any more, so that its job should be over."""
        started = any(node.phase for node in self.nodes)
        return self.lrm_job is not None and not self.runners and (started or self.stop is not None)

    def is_over(self, job: LrmJob | None) -> bool:
        """Return whether the job has ended and no runner is connected."""
        return not self.runners and (job is None or job.state is LrmJobState.ENDED)

    def _program_exit(self, index: int, code: int | None) -> int | None:
        """Return the exit code of the whole program when a node has ended with ``code``; None while unknown."""
        if self.plan is None or code is None:
            return None
        if self.plan["launcher"] == "openmpi":
            return code if self.is_leader and index == 0 else None
        if code != 0:
            return code
        return 0 if all(n.result and n.result["code"] == 0 for n in self.nodes) else None
