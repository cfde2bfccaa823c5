"""One component as its agent knows it: what was decided, what its runners said, what the resource manager says."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from koalapy.agent.components.outputlog import DEFAULT_OUTPUT_LIMIT, OutputLog
from koalapy.agent.core.spool import RUNNER_LOG, JournalFolder
from koalapy.agent.lrm.port import Fault, LrmJob, LrmJobState
from koalapy.agent.runners.runners import RunnerConnection, encode_line, lrm_name
from koalapy.model.job import ComponentState
from koalapy.model.reports import ComponentStatus, Refusal, ReportedState
from koalapy.runner.session import Line
from koalapy.system.clock import SYSTEM_CLOCK, Clock

KILLED_BY_KILL = 128 + 9
KILLED_BY_TERM = 128 + 15
RESULT_ENTRY = "result.{node}"
"""The journal's entry with the result of a node's runner."""


@dataclass(frozen=True, slots=True)
class Grace:
    """What a program is told, the seconds that it has from then on, and when they are over.

    The end is counted from the boot of the machine: a step of its clock changes nothing, and neither does a new agent.
    """

    signal: str
    seconds: float
    until: float

    @classmethod
    def start_now(cls, signal: str, seconds: float) -> "Grace | None":
        return cls(signal, seconds, _since_boot() + seconds) if signal and seconds > 0 else None

    @classmethod
    def from_journal(cls, noted: dict[str, Any] | None) -> "Grace | None":
        return cls(**noted) if noted else None

    @property
    def remaining_s(self) -> float:
        """Seconds; no more than there were, whatever the clock says."""
        return max(0.0, min(self.seconds, self.until - _since_boot()))

    def to_journal(self) -> dict[str, Any]:
        return asdict(self)


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Node:
    host: str = ""
    name: str = ""
    phase: str = ""
    """As the runner says: waiting, opened, running, ending, ended; empty before its hello."""
    runner: RunnerConnection | None = None
    has_program_ended: bool = False
    """Whether its program has ended: what it wrote is on its way, and the result after that."""
    lrm_job: str = ""
    """The job in the resource manager that it says it runs in; empty where it cannot tell."""
    result: dict[str, Any] | None = None
    warned: bool = False
    """Whether its runner says that its program was told that it will be stopped."""
    life: str = ""
    """Digest of what tells its runner from another with the same secret: the first that was there has the place."""
    exit: dict[str, Any] | None = None
    """How its runner says that it ended, on this connection."""


@dataclass(eq=False, slots=True)
class Component:
    """What is known; every method takes in one more fact, ``status`` says what follows from all of them."""

    instance: str
    token: str
    folder: JournalFolder
    size: int = 0
    walltime: float | None = None
    stage: str | None = None
    """Token of the stage whose folder is its own."""
    collect: tuple[str, ...] = ()
    user: str = ""
    """The account that it runs as; empty: the agent's own."""
    node_class: str = ""
    """Which of the cluster's nodes it is to get; empty: any."""
    fetched: bool = True
    """Whether all that its runners left is in ``folder``, and not still where only that account can read."""
    output_limit: int = DEFAULT_OUTPUT_LIMIT
    lease: float | None = None
    """Seconds of the daemon's silence after which it ends; None: never for that reason."""
    lrm_job: str | None = None
    submitted_at: float = 0.0
    """When the resource manager had taken it (loop's clock): earlier snapshots say nothing about it."""
    allocated: bool = False
    pending: str = ""
    """Why its job does not run, as the resource manager said last."""
    starting: float = 0.0
    """Seconds that its nodes may take at most, while they are being started."""
    plan: dict[str, Any] | None = None
    stop: str | None = None
    grace: Grace | None = None
    """Of one that is told to stop: what its program is told before, and until when it may end by itself."""
    error: str = ""
    infrastructure: bool = False
    refused: Refusal = ""
    exceeded: Literal["", "memory"] = ""
    """The limit for which its resource manager ended it, other than its walltime."""
    exit_code: int | None = None
    ended: bool = False
    collected: bool = False
    """Whether its results were sent, or will never be."""
    nodes: list[Node] = field(default_factory=list)
    output: OutputLog = field(init=False)
    reported: ComponentStatus | None = None
    """The last status the daemon was sent on this connection."""
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
        known = folder.load_entries()
        submitted = known.get("submit", {})
        own = cls(
            instance,
            token,
            folder,
            submitted.get("size", 0),
            submitted.get("walltime"),
            submitted.get("stage"),
            tuple(submitted.get("collect", ())),
            user := submitted.get("user", ""),
            submitted.get("node_class", ""),
            not user,
            submitted.get("output_limit", DEFAULT_OUTPUT_LIMIT),
            clock=clock,
        )
        own.lease = submitted.get("lease")
        own.lrm_job, own.plan, own.stop = known.get("lrm"), known.get("open"), known.get("stop")
        own.grace = Grace.from_journal(known.get("grace"))
        for node, life in zip(own.nodes, known.get("lives", ()), strict=False):
            node.life = life
        own.collected = bool(known.get("collected"))
        own.output.recover()
        for index in range(own.size):
            if result := known.get(RESULT_ENTRY.format(node=index)):
                own._apply_result(index, result)
        own.collect_results()
        if end := known.get("end"):
            own.ended, own.exit_code = True, end["exit_code"]
            own.error, own.infrastructure = end["error"], end["infrastructure"]
            own.refused, own.exceeded = end.get("refused", ""), end.get("exceeded", "")
            for node, host in zip(own.nodes, end["hosts"], strict=False):
                node.host = host
        return own

    @property
    def open_line(self) -> Line:
        """Its plan as its runners are told it, the same for all: encoded once, for they may be many and it is long."""
        if self._opening is None:
            self._opening = encode_line({"t": "open", **(self.plan or {})})
        return self._opening

    @property
    def remaining_grace_s(self) -> float:
        """Seconds for which its program may still end by itself, though it was told to stop."""
        return self.grace.remaining_s if self.grace is not None else 0.0

    @property
    def stop_message(self) -> dict[str, Any]:
        """What its runners are told when it is to end."""
        if self.grace is None or not (left := self.grace.remaining_s):
            return {"t": "stop"}
        return {"t": "stop", "signal": self.grace.signal, "grace": left}

    @property
    def warned(self) -> bool:
        """Whether its program was told that it will be stopped, wherever it still ran."""
        own = self.nodes
        return any(n.warned for n in own) and all(n.warned or n.phase in ("ending", "ended") for n in own)

    @property
    def is_leader(self) -> bool:
        """Whether its node 0 runs ``mpirun`` for all."""
        return self.plan is not None and self.plan["launcher"] == "openmpi" and self.plan["head"] == self.token

    @property
    def awaits_collection(self) -> bool:
        """Whether its results are to be sent before it counts as ended: only a program that ran has any.

        Also where a node was lost: the job may have succeeded all the same, and whether it has we are not told.
        """
        wanted = self.collect and self.stage is not None and not self.collected
        return bool(self.ended and wanted and self.plan is not None)

    @property
    def runners(self) -> list[RunnerConnection]:
        return [node.runner for node in self.nodes if node.runner is not None]

    @property
    def has_seen_all_runners(self) -> bool:
        return all(node.phase for node in self.nodes)

    def send_to_runners(self, message: dict[str, Any]) -> None:
        for runner in self.runners:
            runner.send_message(message)

    @property
    def is_program_over(self) -> bool:
        """Whether nothing of its program runs any more, whatever there is still to be told of it."""
        telling = self.nodes[:1] if self.is_leader else self.nodes
        return self.plan is not None and all(n.has_program_ended or n.phase in ("ending", "ended") for n in telling)

    def current_state(self) -> ReportedState:
        if self.ended:
            return ComponentState.ENDED
        phases = [n.phase for n in self.nodes]
        if phases and all(phases):
            started = phases[:1] if self.is_leader else phases
            runs = self.plan and all(p in ("running", "ending", "ended") for p in started)
            return ComponentState.RUNNING if runs else ComponentState.CLAIMED
        return ComponentState.WAITING if self.lrm_job else ComponentState.SUBMITTED

    def current_status(self) -> ComponentStatus:
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
            exceeded=self.exceeded,
            missing=self.output.missing,
            over=self.is_program_over,
            warned=self.warned,
            pending=self.pending if waits else "",
            starting=self.starting if waits else 0.0,
            lease=self.lease,
        )

    @property
    def may_fail(self) -> bool:
        """Whether what happens to it now is a failure: the first one counts, and none does once it was told to stop or
        its program came to a good end."""
        return not self.error and self.stop is None and self.exit_code != 0

    def fail(self, error: str, fault: Fault = "site") -> None:
        """It cannot go on, by the cluster's fault unless another is named."""
        if self.may_fail:
            self.error, self.infrastructure = error, fault == "site"
            self.refused = "" if fault == "site" else fault

    def on_job_alive(self, job: LrmJob) -> None:
        """Its job has not ended. Why it waits stays what it was where that is not said at each look."""
        if job.reason or job.state is LrmJobState.RUNNING:
            self.pending = job.reason
        self.starting = job.starting

    def record_result(self, index: int, result: dict[str, Any]) -> None:
        """Take in the result of a node's runner, once all of its output is kept that can be had.

        Note it in the journal: a later agent cannot verify the runner's own file if the resource manager was killed
        with the key.
        """
        if self.nodes[index].result is None:
            self.folder.note_entry(**{RESULT_ENTRY.format(node=index): result})
            self._apply_result(index, result)

    def _apply_result(self, index: int, result: dict[str, Any]) -> None:
        node = self.nodes[index]
        node.result, node.phase = result, "ended"
        node.host, node.name = result.get("host") or node.host, result.get("name") or node.name
        node.warned |= bool(result.get("warned"))
        if result["infrastructure"]:
            self.fail(result["error"])
        if self.exit_code is None:
            self.exit_code = self._program_exit(index, result["code"])

    def collect_results(self) -> None:
        """Take in the results that runners left in the folder, and before each the output that was not sent."""
        unsent: dict[int, list[tuple[int, Path]]] | None = None
        for index, node in enumerate(self.nodes):
            if node.result is None and (left := self.folder.read_result(index)):
                unsent = self.folder.unsent_files() if unsent is None else unsent
                self.output.copy_unsent(index, unsent.get(index, []), left.get("output"), self.folder.read_runner_file)
                self.record_result(index, left)

    def _collect_output(self) -> None:
        unsent = self.folder.unsent_files()
        for index, node in enumerate(self.nodes):
            total = (node.result or {}).get("output")
            self.output.recover_unsent(index, unsent.get(index, []), total, self.folder.read_runner_file)

    def _note_killed_runners(self) -> None:
        """Say that output may be missing of the nodes whose runners were killed, once the program was let go."""
        if self.plan is None:
            return
        writers = self.nodes if self.plan["launcher"] != "openmpi" else self.nodes[: self.is_leader]
        for index, node in enumerate(writers):
            if node.result is None:
                self.output.note_killed_runner(index)

    def on_job_ended(self, job: LrmJob | None) -> None:
        """The resource manager has the nodes back, or (None) knows nothing of the job any more."""
        self.collect_results()
        self._collect_output()
        results = [n.result for n in self.nodes]
        reason = job.reason if job else ""
        if job is None and not all(results):
            self.fail("the local resource manager no longer knows it")
        elif job is not None and job.exceeded == "memory" and self.exit_code != 0:
            # What runners reported before is what came of it: of one killed process, or of a lost MPI daemon.
            self.exceeded, self.error, self.infrastructure = "memory", reason, False
            self.exit_code = self.exit_code or job.exit_code or KILLED_BY_KILL
        elif job is not None and job.exceeded == "walltime" and self.stop is None and self.exit_code is None:
            self.error = self.error or f"walltime of {self.walltime:g} s exceeded" if self.walltime else reason
            self.exit_code = KILLED_BY_TERM
        elif lost := next((n for n in self.nodes if n.result is None), None):
            who = f"the runner on {lost.name or 'a node'}" if lost.phase else "the resource manager's job"
            code = f" (exit code {job.exit_code})" if job and job.exit_code is not None else ""
            last_line = self.folder.last_log_line()
            wrote = f"; the last line of its {RUNNER_LOG}: {last_line}" if last_line else ""
            self.fail(f"{who} ended without a word{code}: {reason or 'no reason given'}{wrote}")
        elif any(r and r["stopped"] for r in results) and self.exit_code is None:
            self.fail(f"the local resource manager ended it: {reason or 'no reason given'}")
        self._note_killed_runners()
        self.mark_ended()

    def mark_ended(self) -> None:
        self.ended = True
        self.output.close()
        hosts = [n.host for n in self.nodes]
        facts = {"exit_code": self.exit_code, "error": self.error, "infrastructure": self.infrastructure}
        self.folder.note_entry(end={**facts, "refused": self.refused, "exceeded": self.exceeded, "hosts": hosts})

    def mark_collected(self, problem: str) -> None:
        """Its results are with the daemon, or lost: that is worth a word, but no failure."""
        self.collected = True
        if problem:
            self.output.append_line(f"koala: {problem}\n".encode())
            self.error = self.error or problem
            self.mark_ended()
        self.folder.note_entry(collected=True)

    @property
    def awaits_job_end(self) -> bool:
        """Whether its runners are gone, or none is awaited any more, so that its job should be over."""
        started = any(node.phase for node in self.nodes)
        return self.lrm_job is not None and not self.runners and (started or self.stop is not None)

    def is_over(self, job: LrmJob | None) -> bool:
        """Whether the resource manager's word means that all is over: not while a runner is still there."""
        return not self.runners and (job is None or job.state is LrmJobState.ENDED)

    def _program_exit(self, index: int, code: int | None) -> int | None:
        """What one more node's exit code says of the program as a whole."""
        if self.plan is None or code is None:
            return None
        if self.plan["launcher"] == "openmpi":
            return code if self.is_leader and index == 0 else None
        if code != 0:
            return code
        return 0 if all(n.result and n.result["code"] == 0 for n in self.nodes) else None
