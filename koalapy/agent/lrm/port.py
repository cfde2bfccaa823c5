"""The interface of local resource managers (LRMs), and the features of each kind."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.model.job_sizes import MAX_TIME, NodeReservation, SizeRanges
from koalapy.model.node_requirement import NO_REQUIREMENT, NodeRequirement
from koalapy.model.reports import MAX_RESERVATIONS, ListedNode, NodeClassReport

SUSPENDED_TEXT = "suspended by {}"
"""The reason of a job that the resource manager has suspended."""
JOB_PREFIX = "koala-"
"""Prefix of the names of grid jobs in every resource manager."""
RESERVATION_NAME = re.compile(rf"{JOB_PREFIX}[0-9a-f]{{12}}-[0-9]{{1,9}}", re.ASCII)
"""Names of the daemon's reservations in every resource manager. They are safe on a command line."""
Fault = Literal["job", "unsuitable", "limit", "site", "unknown"]
"""The cause of a rejection by a resource manager.

``job``: wrong on any cluster. ``unsuitable``: this cluster never accepts the job's walltime or size. ``limit``: a limit
or quota that may allow it later. ``site``: the cluster, its configuration, or the options of all jobs of koalapy.
"""

Exceeded = Literal["", "walltime", "memory"]
"""The limit for which a resource manager ended a job. The program exceeded it, so the cluster is not at fault."""


@dataclass(frozen=True, slots=True)
class LrmKind:
    """A kind of resource manager. ``make_lrm`` in ``agent.lrm.KIND.adapter`` creates its adapter."""

    on_this_host: bool = False
    """Whether its nodes are processes of this host.

    Then there is no shared file system, addresses are loopback ones, the daemon starts the agent, jobs use the
    account's home and Python, and starts may fail on purpose.
    """
    sees_local_users: bool = True
    """Whether it lists the jobs of local users."""


KINDS = {
    "local": LrmKind(on_this_host=True),
    "slurm": LrmKind(),
    "sge": LrmKind(),
    "drmaa": LrmKind(sees_local_users=False),
}


class LrmJobState(StrEnum):
    """The state of a job in its resource manager."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The resource manager does not know. Such a job is never taken for ended."""


PREEMPTED = "preempted by another job"
"""The reason for the end of a job that had to give its nodes to a local one. This is no fault of the cluster."""


@dataclass(frozen=True, slots=True)
class LrmJob:
    """A grid job in the resource manager. ``nodes`` are host names, empty until they are allocated."""

    id: str
    name: str
    state: LrmJobState
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    lost: bool = False
    """Whether the cluster ended it, as when a node failed, and not the program itself."""
    reason: str = ""
    """The reason for its end, or for its wait before that."""
    starting: float = 0.0
    """Maximum seconds until its nodes are ready, as when they are being switched on; 0 if they are not being started.
    Until then its claim does not time out."""
    fault: Fault | None = None
    """The cause if a queued job will never start, for ``reason``."""
    limited: bool = False
    """Whether ``reason`` is a limit of its account or quality of service for which a queued job waits."""
    user: str = ""
    """The account that it runs as; empty for the agent's own."""
    exceeded: Exceeded = ""
    gone: bool = False
    """Whether the resource manager no longer holds it, although how it ended is not known yet."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The fields of ``LrmJob`` that say how it ended."""

    exit_code: int | None
    lost: bool = False
    reason: str = ""
    exceeded: Exceeded = ""

    def apply_to(self, job: LrmJob) -> LrmJob:
        """Return the job with these fields."""
        return replace(job, exit_code=self.exit_code, lost=self.lost, reason=self.reason, exceeded=self.exceeded)


@dataclass(frozen=True, slots=True)
class DrmaaEnding:
    """How a job ended by a DRMAA library; without values if the library only knows that the job is gone."""

    job: str
    exit_code: int | None = None
    signal: str = ""
    aborted: bool = False

    @property
    def signal_number(self) -> int | None:
        """The signal that killed it. A shell between reports it as an exit code over 128."""
        if self.signal:
            return signal.Signals.__members__.get(self.signal, signal.SIGKILL).value
        return self.exit_code - 128 if self.exit_code is not None and self.exit_code > 128 else None


@dataclass(frozen=True, slots=True)
class LrmSnapshot:
    """The node counts of a cluster and its grid jobs, also ended ones while the resource manager lists them.

    ``idle`` nodes can be allocated now; ``background`` nodes are held by local users, or reserved for them; ``down``
    ones are drained or broken. ``withheld`` nodes are idle, but the resource manager gives one job no more than the
    ``idle`` ones.
    """

    total: int
    idle: int
    background: int
    down: int
    jobs: tuple[LrmJob, ...]
    submit_error: str = ""
    """Why no job can be submitted although this query succeeded; empty if none is known."""
    notices: tuple[str, ...] = ()
    """Warnings for operators."""
    node_classes: tuple[NodeClassReport, ...] = ()
    """Classes of nodes that are known to differ; empty if none are."""
    job_sizes: SizeRanges = ()
    """The sizes that one job may have; empty: any."""
    reservations: tuple[NodeReservation, ...] = ()
    """Reservations for other jobs or for maintenance, the earliest first."""
    nodes: tuple[ListedNode, ...] = ()
    """The nodes one by one, without components; empty if the resource manager does not list them."""
    shares: bool = False
    """Whether jobs may share nodes."""
    withheld: int = 0
    unreadable: int = 0
    """Lines on jobs that could not be read. A job that is missing has not ended, then."""


@dataclass(frozen=True, slots=True)
class LrmSubmission:
    """A job to submit: ``argv`` runs once on each of ``nodes`` nodes, with ``environment`` added.

    The nodes are exclusive unless its requirement says otherwise and the site lets jobs share nodes.
    """

    name: str
    nodes: int
    argv: Sequence[str]
    environment: Mapping[str, str]
    workdir: Path
    output: Path
    """File for the diagnostics of the runner, not for the program's output."""
    walltime: float | None = None
    """Seconds."""
    modules: Sequence[str] = ()
    """Environment modules to load on the nodes."""
    user: str = ""
    """The account that it runs as; empty for the agent's own."""
    secrets: Sequence[str] = field(default=(), repr=False)
    """One for the runner of each node. No other process may learn it."""
    node_class: str = ""
    """The class of its nodes, by its name in snapshots; empty: any."""
    requirement: NodeRequirement = NO_REQUIREMENT
    """What each node must have, and the account to charge."""
    reservation: str = ""
    """The name of the reservation with its nodes; empty: it gets none that are reserved."""


@dataclass(frozen=True, slots=True)
class ReservationOrder:
    """Whole nodes to reserve for jobs of some accounts; times in seconds since the epoch."""

    name: str
    """Matches ``RESERVATION_NAME``. No other order ever has it."""
    nodes: int
    begins: float
    ends: float
    accounts: Sequence[str]
    """The accounts of jobs that may use them; an empty one is the agent's own."""


def report_reservations(
    reservations: Iterable[tuple[str, Collection[str], float, float | None]],
    nodes: Set[str],
    idle: Set[str],
    default_walltime: float | None = None,
) -> tuple[NodeReservation, ...]:
    """Return the reservations of some of a cluster's nodes, the earliest first.

    ``reservations``: name, nodes, begin and end, if known. ``default_walltime``: seconds that jobs without a walltime
    get; None: no limit.
    """
    longest = MAX_TIME if default_walltime is None else default_walltime
    reports = [
        NodeReservation(name, len(names), len(names & idle), max(0.0, begins), max(0.0, ends or MAX_TIME), longest)
        for name, hosts, begins, ends in reservations
        if (names := nodes & set(hosts))
    ]
    return tuple(sorted(reports, key=lambda report: (report.begins, report.name))[:MAX_RESERVATIONS])


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of ``koala check``: its subject, the result or problem, and a hint what to do."""

    subject: str
    ok: bool
    result: str
    hint: str = ""


class Lrm(Protocol):
    """A local resource manager. Methods raise ``SiteUnavailable`` if a retry may succeed, else ``SiteRejected``."""

    product: str = "the local resource manager"
    """Its name for users."""
    max_snapshot_age_s: float = 0.0
    """Seconds by which a snapshot may be older than its query, as of a cache or a server that has taken over."""

    async def open(self) -> None:
        """Prepare for other calls. The agent calls it until it succeeds."""

    async def close(self) -> None:
        """Close connections; jobs continue."""

    async def submit_job(self, submission: LrmSubmission) -> str:
        """Submit a job and return its id."""
        ...

    async def find_job(self, name: str, user: str = "") -> str | None:
        """Return the id of an account's job of that name, or None. It is called before a submission is repeated."""
        ...

    def expect_job(self, job: str, name: str, user: str = "") -> None:
        """Follow an account's job that an earlier agent submitted. It may have ended since."""
        return

    async def settling_time(self) -> float:
        """Return the seconds after which an unanswered submission is listed, if it was accepted at all."""
        ...

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        """End an account's job and all its processes if its name is ``name``. An ended job is not an error.

        ``by_force``: use a stronger command, for a job that is still there after an earlier cancellation.
        """

    async def reserve_nodes(self, order: ReservationOrder) -> Sequence[str]:
        """Reserve nodes and return their names. If the reservation exists, change nothing and return those it has."""
        raise SiteRejected(
            f"a cluster driven by {self.product} cannot reserve nodes",
            hint="leave the cluster out",
            fault=SiteFault.SITE,
        )

    async def release_reservation(self, name: str) -> None:
        """End a reservation; none of that name is not an error. No job ends by this.

        Raise ``SiteUnavailable`` if jobs use it, and the resource manager would end them or does not permit it.
        """
        return

    async def list_reservations(self, prefix: str) -> Sequence[str]:
        """Return the names of the present and coming reservations that begin with ``prefix``."""
        return ()

    async def take_snapshot(self) -> LrmSnapshot:
        """Query node counts and grid jobs."""
        ...

    async def read_version(self) -> str:
        """Return the product and its version, for operators."""
        ...

    async def check_setup(self) -> Sequence[Finding]:
        """Return what ``koala check`` shows of it, in order. Raise nothing."""
        ...

    def runners_key(self) -> bytes | None:
        """Return the key from which runners' secrets are derived, if the resource manager keeps it while jobs run.

        None while it is not known; empty if it keeps none.
        """
        ...

    def watch_changes(self) -> AsyncIterator[None]:
        """Yield when a new snapshot may differ: at once if the resource manager reports changes, else periodically."""
        ...


class PolledLrm(Lrm):
    """A resource manager that is polled at a fixed rate and keeps no key for runners."""

    max_snapshot_age_s = 30.0

    def __init__(self, poll_interval: float) -> None:
        self._poll_interval = poll_interval
        self._soon = asyncio.Event()
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        self._soon.set()

    def poll_soon(self, delay_s: float = 0.0) -> None:
        """Report a change ``delay_s`` from now."""
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._soon.set)
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
    """Submits and cancels jobs, by a DRMAA library or ``qsub``. It raises ``SiteUnavailable`` or ``SiteRejected``.

    Methods with a default are for libraries, which report endings themselves and must be closed.
    """

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        """Submit ``script`` with the submission's name, working directory and output file; return the job's id.

        ``native`` are all other options (nodes, walltime, partition or queue), as words of the submit command.
        """
        ...

    async def cancel_job(self, job: str, user: str = "") -> None:
        """End an account's job and all its processes. An ended or unknown job is not an error."""

    async def check_setup(self, nodes: int = 1) -> Sequence[Finding]:
        """Return what ``koala check`` shows of it, for jobs of so many nodes. Raise nothing."""
        ...

    async def submit_error(self) -> str:
        """Return why no job can be submitted now, in one line; empty if no problem is known. It is cheap."""
        return ""

    def on_ended(self, listener: Callable[[], None]) -> None:
        """Call a function whenever the end of a job is reported."""
        return

    def reported_ending(self, job: str) -> DrmaaEnding | None:
        """Return how a job ended, if that was reported."""
        return None

    async def close(self) -> None:
        """Release resources; jobs continue."""
        return
