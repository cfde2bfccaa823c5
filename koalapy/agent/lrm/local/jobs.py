"""What one local cluster has: its nodes, its jobs and the queue; knows neither processes nor sockets."""

import math
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

WALLTIME_EXCEEDED = "walltime exceeded"
MAX_RETAINED_JOBS = 10_000
"""Ended jobs remembered."""


class RequestRejected(Exception):
    """A request that cannot be; ``kind`` is ``rejected`` or, for what may work later, ``unavailable`` or ``limit``."""

    def __init__(self, message: str, kind: str = "rejected") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(eq=False, slots=True)
class LocalNode:
    name: str
    address: str
    state: str = "up"
    """``up``, ``drain`` (no new jobs) or ``down``."""
    job: "LocalJob | None" = None


@dataclass(eq=False, slots=True)
class LocalJob:
    id: int
    name: str
    user: str
    size: int
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list, repr=False)
    """One for each node, or none: handed to what is started there, and written down nowhere."""
    cwd: str = "/"
    output: str = os.devnull
    account: dict[str, Any] | None = None
    """As whom it runs, with number, groups and home; None: as locald itself."""
    walltime: float | None = None
    among: frozenset[str] = frozenset()
    """Addresses of the nodes that it may have; empty: any."""
    state: str = "queued"
    nodes: list[LocalNode] = field(default_factory=list)
    exit_code: int | None = None
    lost: bool = False
    reason: str = ""
    ended_seq: int = 0
    """The table's ``seq`` when the job ended."""

    def record(self) -> dict[str, Any]:
        """What clients see of the job."""
        return {
            "job": str(self.id),
            "name": self.name,
            "user": self.user,
            "size": self.size,
            "state": self.state,
            "nodes": [node.address for node in self.nodes],
            "exit_code": self.exit_code,
            "lost": self.lost,
            "reason": self.reason,
        }


class JobTable:
    """Strict first come, first served over all users; nodes belong to one job at a time, lowest numbers first."""

    def __init__(self, nodes: list[LocalNode], remembered: Iterable[LocalJob] = ()) -> None:
        self.nodes = nodes
        self.seq = 0
        """Rises with every change that a client can see."""
        self.queue: deque[LocalJob] = deque()
        self.running: dict[int, LocalJob] = {}
        self._ended: deque[LocalJob] = deque()
        self._known: dict[int, LocalJob] = {}
        self._newest: dict[str, LocalJob] = {}
        for job in remembered:
            self._remember(job)
            self._to_ended(job)
        self._next_id = max(self._known, default=0) + 1

    @property
    def active(self) -> list[LocalJob]:
        return [*self.running.values(), *self.queue]

    def submit(self, request: dict[str, Any]) -> LocalJob:
        """Queue a job as a client describes it; raises ``RequestRejected`` naming the field that is wrong."""
        job = _job_of(request, self._next_id, frozenset(node.address for node in self.nodes))
        self._next_id += 1
        self._remember(job)
        self.queue.append(job)
        self.seq += 1
        return job

    def start_next(self) -> LocalJob | None:
        """Allocate nodes to the head of the queue, if there are enough for it."""
        if not self.queue:
            return None
        idle = self.idle_nodes(self.queue[0].among)
        if len(idle) < self.queue[0].size:
            return None
        job = self.queue.popleft()
        job.state = "running"
        job.nodes = idle[: job.size]
        for node in job.nodes:
            node.job = job
        self.running[job.id] = job
        self.seq += 1
        return job

    def end(self, job: LocalJob) -> None:
        """The job is over and its nodes are free."""
        if self.running.pop(job.id, None) is None:
            self.queue.remove(job)
        for node in job.nodes:
            node.job = None
        self._to_ended(job)

    def mark_lost(self, job: LocalJob, reason: str) -> None:
        """The cluster has failed the job, which may still run on other nodes; the first reason counts."""
        if not job.lost:
            job.lost, job.reason = True, reason
            self.seq += 1

    def idle_nodes(self, among: frozenset[str] = frozenset()) -> list[LocalNode]:
        """Those that could be allocated now, of all or of these."""
        idle = [node for node in self.nodes if node.job is None and node.state == "up"]
        return [node for node in idle if node.address in among] if among else idle

    def node(self, name: object) -> LocalNode:
        """A node by name or address; raises ``RequestRejected``."""
        for node in self.nodes:
            if name in (node.name, node.address):
                return node
        raise RequestRejected(f"node: there is no {name!r}; nodes are {self.nodes[0].name} to {self.nodes[-1].name}")

    def job(self, id: object) -> LocalJob | None:
        return self._known.get(int(id)) if isinstance(id, str) and id.isdecimal() else None

    def newest(self, name: str) -> LocalJob | None:
        """The latest job of that name."""
        return self._newest.get(name)

    def ended_since(self, seq: int) -> list[LocalJob]:
        """Jobs that ended after the table stood at ``seq``, latest first."""
        found = []
        for job in reversed(self._ended):
            if job.ended_seq <= seq:
                break
            found.append(job)
        return found

    def remembered(self) -> list[LocalJob]:
        """All jobs known, in order of submission."""
        return list(self._known.values())

    def _remember(self, job: LocalJob) -> None:
        self._known[job.id] = self._newest[job.name] = job

    def _to_ended(self, job: LocalJob) -> None:
        self.seq += 1
        job.state = "ended"
        job.ended_seq = self.seq
        job.argv, job.env, job.secrets, job.account = [], {}, [], None
        self._ended.append(job)
        if len(self._ended) > MAX_RETAINED_JOBS:
            oldest = self._ended.popleft()
            del self._known[oldest.id]
            if self._newest.get(oldest.name) is oldest:
                del self._newest[oldest.name]


def _job_of(request: dict[str, Any], id: int, addresses: frozenset[str]) -> LocalJob:
    size = request.get("nodes")
    if type(size) is not int or size < 1:
        raise RequestRejected(f"nodes: a whole number of at least 1 is needed, not {size!r}")
    if size > len(addresses):
        raise RequestRejected(f"nodes: {size} asked for, the cluster has {len(addresses)}", "limit")
    among = _among(request.get("among", []), addresses)
    if among and size > len(among):
        raise RequestRejected(f"nodes: {size} asked for, of {len(among)} that it may have", "limit")
    argv = request.get("argv")
    if not isinstance(argv, list) or not argv:
        raise RequestRejected("argv: a list of at least one string is needed")
    env = request.get("env", {})
    if not isinstance(env, dict):
        raise RequestRejected("env: an object of strings is needed")
    if any(not key or "=" in key for key in env):
        raise RequestRejected("env: a name is empty or contains '='")
    secrets = request.get("secrets", [])
    if not isinstance(secrets, list) or len(secrets) not in (0, size):
        raise RequestRejected("secrets: a list of one string for each node is needed, or an empty one")
    return LocalJob(
        id=id,
        name=_text("name", request.get("name")),
        user=_text("user", request.get("user", "grid")),
        size=size,
        argv=[_text("argv", each, empty=position > 0) for position, each in enumerate(argv)],
        env={_text("env", key): _text("env", value, empty=True) for key, value in env.items()},
        secrets=[_text("secrets", each) for each in secrets],
        cwd=_directory("cwd", request.get("cwd", "/")),
        output=_output(request.get("output", os.devnull)),
        account=_account(request.get("account")),
        walltime=_walltime(request.get("walltime")),
        among=among,
    )


def _among(value: object, addresses: frozenset[str]) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each in addresses for each in value):
        raise RequestRejected("among: a list of addresses of nodes is needed")
    return frozenset(value)


def _text(name: str, value: object, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise RequestRejected(f"{name}: a string is needed, not {value!r}")
    try:
        encoded = os.fsencode(value)
    except UnicodeEncodeError as error:
        raise RequestRejected(f"{name}: {error}") from error
    if b"\0" in encoded:
        raise RequestRejected(f"{name}: contains a NUL character")
    return value


def _directory(name: str, value: object) -> str:
    path = _text(name, value)
    if not os.path.isabs(path) or not os.path.isdir(path):
        raise RequestRejected(f"{name}: {path!r} is no absolute path of a directory")
    return path


def _output(value: object) -> str:
    path = _text("output", value)
    _directory("output", os.path.dirname(path))
    return path


def _account(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    kinds = {"uid": int, "gid": int, "groups": list, "name": str, "home": str, "shell": str}
    if not isinstance(value, dict) or any(type(value.get(name)) is not kind for name, kind in kinds.items()):
        raise RequestRejected(f"account: an object with {', '.join(kinds)} is needed")
    if min(value["uid"], value["gid"]) < 1 or any(type(group) is not int for group in value["groups"]):
        raise RequestRejected("account: numbers of at least 1 are needed")
    return value


def _walltime(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise RequestRejected(f"walltime: a positive number of seconds is needed, not {value!r}")
    return float(value)
