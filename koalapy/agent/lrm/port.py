"""The port behind which every local resource manager looks alike, and what each kind of them can do."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

from koalapy.model.reports import NodeClassReport

JOB_PREFIX = "koala-"
"""How the names of our jobs begin, in every resource manager."""
Fault = Literal["job", "unsuitable", "limit", "site", "unknown"]
"""What a refusal of a resource manager concerns: the job on any cluster (``job``); this job on this cluster, which
never takes its walltime or size (``unsuitable``); a limit or quota that may be gone later (``limit``); the cluster, its
configuration, or the options that every job of koalapy has (``site``); or nothing that is known (``unknown``)."""

Exceeded = Literal["", "walltime", "memory"]
"""The limit of a job for which its resource manager ended it: an ending of the program, and no fault of the cluster."""


@dataclass(frozen=True, slots=True)
class LrmKind:
    """A kind of resource manager; its adapter is made by the function ``make`` of ``agent.lrm.KIND.adapter``."""

    on_this_host: bool = False
    """Its nodes are processes of this host: no shared file system, loopback addresses, an agent started by the daemon,
    the account's own home and Python, and starts that fail on purpose."""
    sees_local_users: bool = True
    """Whether it shows the jobs of local users."""


KINDS = {
    "local": LrmKind(on_this_host=True),
    "slurm": LrmKind(),
    "sge": LrmKind(),
    "drmaa": LrmKind(sees_local_users=False),
}


class LrmJobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The resource manager cannot say; never guessed to be ended."""


@dataclass(frozen=True, slots=True)
class LrmJob:
    """One LRM job that carries our token as its name; ``nodes`` are host names, once allocated."""

    id: str
    name: str
    state: LrmJobState
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    lost: bool = False
    """Ended by the cluster (node lost, killed by the system), not by the program's own exit."""
    reason: str = ""
    """Why it ended so; of one that has not, what it waits for."""
    starting: float = 0.0
    """Of one whose nodes are its own and are still made ready, as when they are switched on: the seconds that may take
    at most. Its claim has not timed out."""
    fault: Fault | None = None
    """Of one that is queued and that will never start as it is, for ``reason``: whose fault that is."""
    user: str = ""
    """The account that it runs as; empty: the agent's own."""
    exceeded: Exceeded = ""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended, as ``LrmJob`` tells it."""

    exit_code: int | None
    lost: bool = False
    reason: str = ""
    exceeded: Exceeded = ""

    def apply_to(self, job: LrmJob) -> LrmJob:
        """Return the job as it has ended."""
        return replace(job, exit_code=self.exit_code, lost=self.lost, reason=self.reason, exceeded=self.exceeded)


@dataclass(frozen=True, slots=True)
class DrmaaEnding:
    """How a job ended as a DRMAA library tells it; all of it unknown when it only knows that the job is gone."""

    job: str
    exit_code: int | None = None
    signal: str = ""
    aborted: bool = False

    @property
    def signal_number(self) -> int | None:
        """What killed it; shells, which stand between, tell of it as an exit code over 128."""
        if self.signal:
            return signal.Signals.__members__.get(self.signal, signal.SIGKILL).value
        return self.exit_code - 128 if self.exit_code is not None and self.exit_code > 128 else None


@dataclass(frozen=True, slots=True)
class LrmSnapshot:
    """One batched look at a cluster: node counts and all LRM jobs of ours, ended ones as long as the LRM knows them.

    ``idle`` nodes could be allocated now; ``background`` are held by local users, or kept for them; ``down`` are
    drained or broken.
    """

    total: int
    idle: int
    background: int
    down: int
    jobs: tuple[LrmJob, ...]
    submit_error: str = ""
    """Why no job can be submitted though all this is known; empty when one can, as far as that shows."""
    notices: tuple[str, ...] = ()
    """What people should know beside the counts."""
    node_classes: tuple[NodeClassReport, ...] = ()
    """By what its nodes are, as far as they are known to differ."""
    min_job_nodes: int = 1
    """The least number of nodes that a job may have."""


@dataclass(frozen=True, slots=True)
class LrmSubmission:
    """What to start: ``argv`` once on each of ``nodes`` nodes, exclusive, with ``environment`` added."""

    name: str
    nodes: int
    argv: Sequence[str]
    environment: Mapping[str, str]
    workdir: Path
    output: Path
    """Where the runner's own diagnostics go (not the program's output)."""
    walltime: float | None = None
    modules: Sequence[str] = ()
    """Environment modules to load on the nodes first."""
    user: str = ""
    """The account that it runs as; empty: the agent's own."""
    secrets: Sequence[str] = field(default=(), repr=False)
    """One for each node's runner, which nobody else may get to know."""
    node_class: str = ""
    """The class that its nodes must be of, by its name in the snapshots; empty: any."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, for people: what it is, what was found or is wrong, and the way out."""

    subject: str
    ok: bool
    result: str
    hint: str = ""


class Lrm(Protocol):
    """A local resource manager. Errors: ``SiteUnavailable`` (try again), ``SiteRejected`` (do not; of the ``Fault`` it
    names, else ``unknown``)."""

    async def open(self) -> None:
        """Get ready to answer; called until it succeeds."""

    async def close(self) -> None:
        """Let go of connections; jobs go on."""

    async def submit_job(self, submission: LrmSubmission) -> str:
        """Submit one LRM job and return its id."""
        ...

    async def find_job(self, name: str, user: str = "") -> str | None:
        """The id of an account's LRM job of that name, if the LRM knows one: asked before anything is submitted
        again."""
        ...

    async def settling_time(self) -> float:
        """Seconds after which a submission that was not answered has as a rule been taken, or never will be."""
        ...

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        """End an account's LRM job and everything it started, if it still carries ``name``; ended ones are no error.

        ``by_force``: one that was told before and is still there, by whatever stronger word there is.
        """

    async def take_snapshot(self) -> LrmSnapshot:
        """Look once at everything."""
        ...

    async def read_version(self) -> str:
        """What it is, and of which version, in a few words for people."""
        ...

    async def check_setup(self) -> Sequence[Finding]:
        """What an operator should know before the first job: everything looked at, in order; raises nothing."""
        ...

    def runners_key(self) -> bytes | None:
        """What it keeps for us as long as its jobs live, and from them: the key from which their runners' secrets
        follow. None while that is not known; empty when it keeps none."""
        ...

    def watch_changes(self) -> AsyncIterator[None]:
        """Yields whenever a new snapshot may differ: at once where the LRM can tell, else at its poll interval."""
        ...


class PolledLrm(Lrm):
    """The part of adapters that is alike: they look at a fixed rate, and keep no key for runners."""

    def __init__(self, poll_interval: float) -> None:
        self._poll_interval = poll_interval
        self._soon = asyncio.Event()
        self._closed = False

    async def close(self) -> None:
        """End the changes."""
        self._closed = True
        self._soon.set()

    def poll_soon(self, after: float = 0.0) -> None:
        """Have a change told ``after`` seconds from now: something was done or heard."""
        if after > 0:
            asyncio.get_running_loop().call_later(after, self._soon.set)
        else:
            self._soon.set()

    async def watch_changes(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._closed:
            self._soon.clear()
            yield
            now = loop.time()
            while due <= now:
                due += self._poll_interval
            try:
                async with asyncio.timeout_at(due):
                    await self._soon.wait()
            except TimeoutError:
                pass

    def runners_key(self) -> bytes:
        return b""


class JobControl(Protocol):
    """The acting half of a resource manager. Errors: ``SiteUnavailable`` (try again), ``SiteRejected`` (do not).

    What has a default here is of libraries, which have something to close and tell of ends themselves.
    """

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        """Submit ``script`` under the submission's name, working directory and output file; the job's id.

        ``native`` are all further options (nodes, walltime, partition or queue and so on), one word each, as the
        resource manager's own command for submitting takes them.
        """
        ...

    async def cancel_job(self, job: str, user: str = "") -> None:
        """End an account's job and everything it started; one that has ended or is not known is no error."""

    async def check_setup(self, nodes: int = 1) -> Sequence[Finding]:
        """What an operator should know of it; raises nothing."""
        ...

    async def submit_error(self) -> str:
        """Why no job could be submitted now, in one line; empty when nothing is known to be in the way. Cheap."""
        return ""

    def on_ended(self, listener: Callable[[], None]) -> None:
        """Have a function called whenever the end of a job is reported."""
        return

    def reported_ending(self, job: str) -> DrmaaEnding | None:
        """How a job ended, if that was reported."""
        return None

    async def close(self) -> None:
        """Let go of what is held; jobs go on."""
        return
