"""The nodes, jobs and queue of an embedded cluster. Nothing here knows processes or sockets."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from koalapy.runner.folders import replace_file

WALLTIME_EXCEEDED = "walltime exceeded"
MAX_RETAINED_JOBS = 10_000
MAX_WALLTIME_S = 1e12

Part = dict[str, tuple[int, int | None]]
"""By resource: how much a job uses of a node, and how much of it all jobs on the node may use together.

None: it is not checked for this job.
"""


class RequestRejected(Exception):
    """A rejected request.

    ``kind`` is ``rejected``, ``unavailable`` or ``limit`` if it may succeed later, or ``reservation`` if the job's
    reservation does not suit it.
    """

    def __init__(self, message: str, kind: str = "rejected") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(eq=False, slots=True)
class LocalNode:
    """A node, and the jobs on it: one, or several that share it."""

    name: str
    address: str
    jobs: "list[LocalJob]" = field(default_factory=list)

    def has_room_for(self, job: "LocalJob") -> bool:
        """Return whether the node has room for a job now, alone or with those that it has."""
        if not self.jobs:
            return True
        part = job.parts.get(self.address)
        if part is None:
            return False
        parts = [job.parts[self.address] for job in self.jobs if self.address in job.parts]
        return len(parts) == len(self.jobs) and all(
            capacity is None or amount + sum(part[name][0] for part in parts if name in part) <= capacity
            for name, (amount, capacity) in part.items()
        )


@dataclass(eq=False, slots=True)
class LocalJob:
    """A job of a grid or a local user."""

    id: int
    name: str
    user: str
    size: int
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list, repr=False)
    """One for each node, or none. Only the process on that node gets it; it is never written to a file."""
    cwd: str = "/"
    output: str = os.devnull
    account: dict[str, Any] | None = None
    """The account that the job runs as, with uid, groups and home; None: that of locald."""
    walltime: float | None = None
    eligible: frozenset[str] = frozenset()
    """Addresses of the nodes that it may get; empty: any."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Its part of each node that it may share, by address."""
    reservation: str = ""
    """The reservation of its nodes; empty: none."""
    ends_at: float = math.inf
    """When a running job's walltime is over, in seconds since the epoch."""
    state: str = "queued"
    """``queued``, ``running`` or ``ended``."""
    nodes: list[LocalNode] = field(default_factory=list)
    exit_code: int | None = None
    lost: bool = False
    reason: str = ""
    ended_seq: int = 0
    """The table's ``seq`` when the job ended."""

    def as_record(self) -> dict[str, Any]:
        """Return the job as clients see it, with the parts of its nodes."""
        addresses = [node.address for node in self.nodes]
        used = [(address, self.parts[address]) for address in addresses if address in self.parts]
        return {
            "job": str(self.id),
            "name": self.name,
            "user": self.user,
            "size": self.size,
            "state": self.state,
            "nodes": addresses,
            "parts": {address: {name: amount for name, (amount, _) in part.items()} for address, part in used},
            "exit_code": self.exit_code,
            "lost": self.lost,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class LocalReservation:
    """Nodes, by address, that only jobs of these users get from begin to end, in seconds since the epoch."""

    name: str
    nodes: list[str]
    begins: float
    ends: float
    users: list[str]


class JobTable:
    """All jobs, and a queue that is strictly first come, first served over all users.

    A node belongs to one job at a time, or to several that share it. Partly used nodes are allocated first, and then
    the lowest numbers. Each reservation has a separate queue. Other jobs get its nodes if they end before it begins,
    and hold up no others if too few nodes are left to them.
    """

    def __init__(
        self,
        nodes: list[LocalNode],
        first_id: int = 1,
        reservations_file: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``first_id``: the id of the first job, larger than those of earlier tables. ``reservations_file``: keeps the
        reservations for later tables; empty: none does. ``clock``: returns seconds since the epoch."""
        self.nodes, self._reservations_file, self._clock = nodes, reservations_file, clock
        self.reservations = {reservation.name: reservation for reservation in self._load_reservations()}
        self._begun: set[str] = set()
        """The reservations that had begun when that was last checked."""
        self.seq = 0
        """Rises with every change that a client can see."""
        self.queue: deque[LocalJob] = deque()
        self.running: dict[int, LocalJob] = {}
        self._ended: deque[LocalJob] = deque()
        self._by_id: dict[int, LocalJob] = {}
        self._newest_by_name: dict[str, LocalJob] = {}
        self._next_id = first_id

    @property
    def active_jobs(self) -> list[LocalJob]:
        return [*self.running.values(), *self.queue]

    def submit_job(self, request: dict[str, Any]) -> LocalJob:
        """Queue the job that a request describes. Raise ``RequestRejected``, which names the wrong field."""
        job = parse_submission(request, self._next_id, frozenset(node.address for node in self.nodes))
        if job.reservation:
            self._check_reservation(job)
        self._next_id += 1
        self._by_id[job.id] = self._newest_by_name[job.name] = job
        self.queue.append(job)
        self.seq += 1
        return job

    def start_next_job(self) -> LocalJob | None:
        """Allocate nodes to the first job of a queue and return it; None if each would get too few."""
        if not self.queue:
            return None
        now = self._clock()
        heads: dict[str, LocalJob] = {}
        for job in self.queue if self.reservations or self.queue[0].reservation else (self.queue[0],):
            if job.reservation in heads:
                continue
            # A job for which the reservations leave too few eligible nodes holds up no others.
            if sum(self._admits(node.address, job, now) for node in self.nodes) >= job.size:
                heads[job.reservation] = job
        for job in heads.values():
            nodes = [node for node in self.nodes if node.has_room_for(job) and self._admits(node.address, job, now)]
            if len(nodes) >= job.size:
                break
        else:
            return None
        if job.parts:
            nodes.sort(key=lambda node: not node.jobs)
        self.queue.remove(job)
        if job.reservation:  # it ends with its reservation
            job.walltime = min(job.walltime or math.inf, self.reservations[job.reservation].ends - now)
        job.state, job.ends_at = "running", now + (job.walltime or math.inf)
        job.nodes = nodes[: job.size]
        for node in job.nodes:
            node.jobs.append(job)
        self.running[job.id] = job
        self.seq += 1
        return job

    def _admits(self, address: str, job: LocalJob, now: float) -> bool:
        """Return whether a node is eligible for a job that starts now, and reservations leave it to the job."""
        if job.eligible and address not in job.eligible:
            return False
        if job.reservation:
            entry = self.reservations.get(job.reservation)
            return entry is not None and entry.begins <= now < entry.ends and address in entry.nodes
        end = now + (job.walltime or math.inf)
        return not any(
            address in entry.nodes and now < entry.ends and entry.begins < end for entry in self.reservations.values()
        )

    def _check_reservation(self, job: LocalJob) -> None:
        """Raise ``RequestRejected`` if the job's reservation never gives it nodes."""
        reservation = self.reservations.get(job.reservation)
        if reservation is None:
            raise RequestRejected(f"reservation: there is no {job.reservation} on this cluster", "reservation")
        if job.user not in reservation.users:
            raise RequestRejected(f"reservation: {job.user} may not use {job.reservation}", "reservation")
        limit = len(job.eligible.intersection(reservation.nodes) if job.eligible else reservation.nodes)
        if job.size > limit:
            problem = f"{job.size} nodes requested, and it has {limit}" + (" that are eligible" if job.eligible else "")
            raise RequestRejected(f"reservation: {problem}", "reservation")

    def reserve_nodes(self, request: dict[str, Any]) -> LocalReservation:
        """Make the reservation that a request describes, or return the one of its name. Raise ``RequestRejected``.

        Its nodes are those with the highest numbers that neither a running job nor another reservation has then.
        """
        name, begins, ends, users = request["name"], float(request["begins"]), float(request["ends"]), request["users"]
        if not name or not users or not all(map(_is_text, (name, *users))) or not begins < ends < math.inf:
            raise RequestRejected("name, users and times must be those of a reservation")
        if existing := self.reservations.get(name):
            return existing
        overlapping = [entry for entry in self.reservations.values() if entry.begins < ends and begins < entry.ends]
        busy = {node for entry in overlapping for node in entry.nodes}
        busy |= {node.address for job in self.running.values() if job.ends_at > begins for node in job.nodes}
        free = [node.address for node in reversed(self.nodes) if node.address not in busy]
        if len(free) < int(request["nodes"]):
            available = f"{len(free)} of its {len(self.nodes)} nodes are free then"
            raise RequestRejected(f"nodes: {int(request['nodes'])} requested, and {available}", "limit")
        reservation = LocalReservation(name, free[: int(request["nodes"])], begins, ends, list(users))
        self._set_reservations([*self.reservations.values(), reservation])
        return reservation

    def release_reservation(self, name: object) -> None:
        """Remove a reservation, if it exists. Its running jobs continue. Raise ``RequestRejected``."""
        if name in self.reservations:
            self._set_reservations(entry for entry in self.reservations.values() if entry.name != name)

    def next_change_s(self) -> float | None:
        """Forget the reservations that are over, and count those that have begun as a change.

        Return the seconds until another one begins or ends; None without one.
        """
        if not self.reservations and not self._begun:
            return None
        now = self._clock()
        self.reservations = {name: entry for name, entry in self.reservations.items() if entry.ends > now}
        begun = {name for name, entry in self.reservations.items() if entry.begins <= now}
        if begun != self._begun:
            self._begun = begun
            self.seq += 1
        times = (entry.ends if entry.name in begun else entry.begins for entry in self.reservations.values())
        return min(times, default=math.inf) - now if self.reservations else None

    def _set_reservations(self, reservations: Iterable[LocalReservation]) -> None:
        """Replace all reservations, first in the file. Raise ``RequestRejected`` if it cannot be written."""
        changed = {reservation.name: reservation for reservation in reservations}
        if self._reservations_file:
            try:
                text = json.dumps([asdict(reservation) for reservation in changed.values()])
                replace_file(self._reservations_file, text.encode())
            except OSError as error:
                raise RequestRejected(f"cannot write the reservations: {error.strerror}", "unavailable") from error
        self.reservations = changed
        self.seq += 1

    def _load_reservations(self) -> Iterable[LocalReservation]:
        """Yield the reservations of an earlier table that are not over, without nodes that no longer exist."""
        try:
            with open(self._reservations_file, encoding="utf-8") as file:
                stored = [LocalReservation(**entry) for entry in json.load(file)]
        except (OSError, ValueError, TypeError):
            return
        addresses = {node.address for node in self.nodes}
        yield from (entry for entry in stored if entry.ends > self._clock() and addresses.issuperset(entry.nodes))

    def end_job(self, job: LocalJob) -> None:
        """Free a job's nodes, or take it out of the queue. Forget the oldest ended job above the limit."""
        if self.running.pop(job.id, None) is None:
            self.queue.remove(job)
        for node in job.nodes:
            node.jobs.remove(job)
        self.seq += 1
        job.state, job.ended_seq = "ended", self.seq
        job.argv, job.env, job.secrets, job.account, job.parts = [], {}, [], None, {}
        self._ended.append(job)
        if len(self._ended) > MAX_RETAINED_JOBS:
            oldest = self._ended.popleft()
            del self._by_id[oldest.id]
            if self._newest_by_name.get(oldest.name) is oldest:
                del self._newest_by_name[oldest.name]

    def mark_lost(self, job: LocalJob, reason: str) -> None:
        """Record that the cluster failed the job, which may still run on other nodes. The first reason is kept."""
        if not job.lost:
            job.lost, job.reason = True, reason
            self.seq += 1

    def idle_nodes(self) -> list[LocalNode]:
        return [node for node in self.nodes if not node.jobs]

    def find_job(self, id: object) -> LocalJob | None:
        """Return the job with this id, a decimal string as in records."""
        return self._by_id.get(int(id)) if isinstance(id, str) and id.isdecimal() else None

    def newest_job(self, name: str) -> LocalJob | None:
        return self._newest_by_name.get(name)

    def jobs_ended_since(self, seq: int) -> list[LocalJob]:
        """Return the jobs that ended after ``seq``, latest first."""
        jobs = []
        for job in reversed(self._ended):
            if job.ended_seq <= seq:
                break
            jobs.append(job)
        return jobs


_DEFAULTS: Mapping[str, Any] = {
    "name": "",
    "user": "grid",
    "nodes": 0,
    "argv": [],
    "env": {},
    "secrets": [],
    "cwd": "/",
    "output": os.devnull,
    "eligible": [],
    "parts": {},
    "reservation": "",
}
"""The fields of a submission that always have a value of the same type, and their defaults."""


def parse_submission(request: dict[str, Any], id: int, addresses: frozenset[str]) -> LocalJob:
    """Return the job that a request describes. Raise ``RequestRejected``, which names the wrong field.

    Accounts and parts, which only agents send, may raise other errors.
    """
    values = {name: request.get(name, default) for name, default in _DEFAULTS.items()}
    size, argv, env, eligible = values["nodes"], values["argv"], values["env"], values["eligible"]
    for name, value in values.items():
        if type(value) is not type(_DEFAULTS[name]):
            raise RequestRejected(f"{name}: must be a {type(_DEFAULTS[name]).__name__}, not {value!r}")
        texts = [*env, *env.values()] if name == "env" else [value] if isinstance(value, str) else value
        for text in texts if not isinstance(texts, int | dict) else ():
            if not _is_text(text):
                raise RequestRejected(f"{name}: {text!r} is no text, or contains characters that no text may have")
    for name, directory in (("cwd", values["cwd"]), ("output", os.path.dirname(values["output"]))):
        if not os.path.isabs(directory) or not os.path.isdir(directory):
            raise RequestRejected(f"{name}: must be an absolute path in a directory that exists, not {values[name]!r}")
    walltime, account = request.get("walltime"), request.get("account")
    if size < 1:
        raise RequestRejected(f"nodes: must be at least 1, not {size}")
    if size > (max_nodes := len(set(eligible) or addresses)):
        problem = f"{max_nodes} are eligible" if eligible else f"the cluster has {max_nodes}"
        raise RequestRejected(f"nodes: {size} requested, and {problem}", "limit")
    if not addresses.issuperset(eligible):
        raise RequestRejected("eligible: must be a list of addresses of nodes")
    if not values["name"] or not argv or not argv[0]:
        raise RequestRejected(f"{'argv' if values['name'] else 'name'}: must not be empty")
    if any(not key or "=" in key for key in env):
        raise RequestRejected("env: a name is empty or contains '='")
    if len(values["secrets"]) not in (0, size):
        raise RequestRejected("secrets: must be a list of one string for each node, or an empty list")
    if walltime is not None and (type(walltime) not in (int, float) or not 0 < walltime <= MAX_WALLTIME_S):
        raise RequestRejected(f"walltime: must be a positive number of seconds, not {walltime!r}")
    if account is not None and min(account["uid"], account["gid"]) < 1:
        raise RequestRejected("account: uid and gid must be at least 1")
    del values["nodes"]
    values["eligible"] = frozenset(eligible)
    values["parts"] = {
        address: {key: (int(amount), capacity and int(capacity)) for key, (amount, capacity) in part.items()}
        for address, part in values["parts"].items()
    }
    return LocalJob(id, size=size, walltime=walltime, account=account, **values)


def _is_text(value: object) -> bool:
    """Return whether a value can be an argument or a variable of a process."""
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False
