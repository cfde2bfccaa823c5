"""The nodes, jobs and queue of an embedded cluster, and the journal that keeps jobs over restarts.

Nothing here knows processes or sockets.
"""

import json
import math
import os
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from koalapy.runner.folders import replace_file

WALLTIME_EXCEEDED = "walltime exceeded"
MAX_RETAINED_JOBS = 10_000
_MAX_JOURNAL_LINES = 6 * MAX_RETAINED_JOBS


Part = dict[str, tuple[int, int | None]]
"""By resource: how much a job uses of a node, and how much of it all jobs on the node may use together.

None: it is not checked for this job.
"""


class RequestRejected(Exception):
    """A rejected request; ``kind`` is ``rejected``, or ``unavailable`` or ``limit`` if it may succeed later."""

    def __init__(self, message: str, kind: str = "rejected") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(eq=False, slots=True)
class LocalNode:
    """A node, and the jobs on it: one, or several that share it."""

    name: str
    address: str
    jobs: "list[LocalJob]" = field(default_factory=list)

    def can_run(self, job: "LocalJob") -> bool:
        """Return whether a job may get the node now, alone or beside those that it has."""
        if job.eligible and self.address not in job.eligible:
            return False
        if not self.jobs:
            return True
        part = job.parts.get(self.address)
        if part is None:
            return False
        others = [other.parts[self.address] for other in self.jobs if self.address in other.parts]
        return len(others) == len(self.jobs) and all(
            capacity is None or amount + sum(other[name][0] for other in others if name in other) <= capacity
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
    """What it takes of each node that it may share, by address."""
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


class JobTable:
    """All jobs, and a queue that is strictly first come, first served over all users.

    A node belongs to one job at a time, or to several that share it. Partly used nodes are allocated first, and then
    the lowest numbers.
    """

    def __init__(self, nodes: list[LocalNode], ended_jobs: Iterable[LocalJob] = ()) -> None:
        self.nodes = nodes
        self.seq = 0
        """Rises with every change that a client can see."""
        self.queue: deque[LocalJob] = deque()
        self.running: dict[int, LocalJob] = {}
        self._ended: deque[LocalJob] = deque()
        self._by_id: dict[int, LocalJob] = {}
        self._newest_by_name: dict[str, LocalJob] = {}
        for job in ended_jobs:
            self._add(job)
            self._add_ended(job)
        self._next_id = max(self._by_id, default=0) + 1

    @property
    def active_jobs(self) -> list[LocalJob]:
        return [*self.running.values(), *self.queue]

    @property
    def all_jobs(self) -> list[LocalJob]:
        """All retained jobs, in order of submission."""
        return list(self._by_id.values())

    def submit_job(self, request: dict[str, Any]) -> LocalJob:
        """Queue the job that a request describes. Raise ``RequestRejected``, which names the wrong field."""
        job = parse_submission(request, self._next_id, frozenset(node.address for node in self.nodes))
        self._next_id += 1
        self._add(job)
        self.queue.append(job)
        self.seq += 1
        return job

    def start_next_job(self) -> LocalJob | None:
        """Allocate nodes to the head of the queue and return it; None if it would get too few."""
        if not self.queue:
            return None
        head = self.queue[0]
        nodes = [node for node in self.nodes if node.can_run(head)]
        if head.parts:
            nodes.sort(key=lambda node: not node.jobs)
        if len(nodes) < head.size:
            return None
        job = self.queue.popleft()
        job.state = "running"
        job.nodes = nodes[: job.size]
        for node in job.nodes:
            node.jobs.append(job)
        self.running[job.id] = job
        self.seq += 1
        return job

    def end_job(self, job: LocalJob) -> None:
        """Free the job's nodes, or take it out of the queue."""
        if self.running.pop(job.id, None) is None:
            self.queue.remove(job)
        for node in job.nodes:
            node.jobs.remove(job)
        self._add_ended(job)

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

    def _add(self, job: LocalJob) -> None:
        self._by_id[job.id] = self._newest_by_name[job.name] = job

    def _add_ended(self, job: LocalJob) -> None:
        """Mark a job as ended, drop its command, parts and secrets, and forget the oldest ended job above the limit."""
        self.seq += 1
        job.state = "ended"
        job.ended_seq = self.seq
        job.argv, job.env, job.secrets, job.account, job.parts = [], {}, [], None, {}
        self._ended.append(job)
        if len(self._ended) > MAX_RETAINED_JOBS:
            oldest = self._ended.popleft()
            del self._by_id[oldest.id]
            if self._newest_by_name.get(oldest.name) is oldest:
                del self._newest_by_name[oldest.name]


def parse_submission(request: dict[str, Any], id: int, addresses: frozenset[str]) -> LocalJob:
    """Return the job that a request describes. Raise ``RequestRejected``, which names the wrong field."""
    size = request.get("nodes")
    if type(size) is not int or size < 1:
        raise RequestRejected(f"nodes: must be a whole number of at least 1, not {size!r}")
    if size > len(addresses):
        raise RequestRejected(f"nodes: {size} requested, and the cluster has {len(addresses)}", "limit")
    eligible = request.get("eligible", [])
    if not isinstance(eligible, list) or not all(isinstance(node, str) and node in addresses for node in eligible):
        raise RequestRejected("eligible: must be a list of addresses of nodes")
    if eligible and size > len(set(eligible)):
        raise RequestRejected(f"nodes: {size} requested, and {len(set(eligible))} are eligible", "limit")
    argv = request.get("argv")
    if not isinstance(argv, list) or not argv:
        raise RequestRejected("argv: must be a list of at least one string")
    env = request.get("env", {})
    if not isinstance(env, dict):
        raise RequestRejected("env: must be an object of strings")
    if any(not key or "=" in key for key in env):
        raise RequestRejected("env: a name is empty or contains '='")
    secrets = request.get("secrets", [])
    if not isinstance(secrets, list) or len(secrets) not in (0, size):
        raise RequestRejected("secrets: must be a list of one string for each node, or an empty list")
    output = _parse_text("output", request.get("output", os.devnull))
    _parse_directory("output", os.path.dirname(output))
    walltime = request.get("walltime")
    if walltime is not None and (
        isinstance(walltime, bool)
        or not isinstance(walltime, int | float)
        or not (math.isfinite(walltime) and walltime > 0)
    ):
        raise RequestRejected(f"walltime: must be a positive number of seconds, not {walltime!r}")
    return LocalJob(
        id=id,
        name=_parse_text("name", request.get("name")),
        user=_parse_text("user", request.get("user", "grid")),
        size=size,
        argv=[_parse_text("argv", argument, may_be_empty=index > 0) for index, argument in enumerate(argv)],
        env={_parse_text("env", key): _parse_text("env", value, may_be_empty=True) for key, value in env.items()},
        secrets=[_parse_text("secrets", secret) for secret in secrets],
        cwd=_parse_directory("cwd", request.get("cwd", "/")),
        output=output,
        account=_parse_account(request.get("account")),
        walltime=None if walltime is None else float(walltime),
        eligible=frozenset(eligible),
        parts=_parse_parts(request.get("parts", {}), addresses),
    )


def _parse_parts(value: object, addresses: frozenset[str]) -> dict[str, Part]:
    """Return the parts of nodes in a request. Raise ``RequestRejected`` if they are malformed."""
    parts: dict[str, Part] = {}
    try:
        for address, part in value.items():  # type: ignore[attr-defined]
            parts[address] = {str(name): (amount, capacity) for name, (amount, capacity) in part.items()}
    except (AttributeError, TypeError, ValueError):
        raise RequestRejected("parts: must have an amount and a capacity of each resource, by address") from None
    for amount, capacity in (entry for part in parts.values() for entry in part.values()):
        is_whole = type(amount) is int and (capacity is None or type(capacity) is int)
        if not is_whole or amount < 0 or (capacity is not None and amount > capacity):
            raise RequestRejected(f"parts: {amount!r} of {capacity!r} is no part of a node")
    if not addresses.issuperset(parts):
        raise RequestRejected("parts: must have addresses of nodes")
    return parts


def _parse_text(name: str, value: object, *, may_be_empty: bool = False) -> str:
    """Return a text of a request. Raise ``RequestRejected`` if it is no text or contains a NUL."""
    if not isinstance(value, str) or not (value or may_be_empty):
        raise RequestRejected(f"{name}: must be a string, not {value!r}")
    try:
        encoded = os.fsencode(value)
    except UnicodeEncodeError as error:
        raise RequestRejected(f"{name}: {error}") from error
    if b"\0" in encoded:
        raise RequestRejected(f"{name}: contains a NUL character")
    return value


def _parse_directory(name: str, value: object) -> str:
    """Return the absolute path of a directory in a request. Raise ``RequestRejected`` for anything else."""
    path = _parse_text(name, value)
    if not os.path.isabs(path) or not os.path.isdir(path):
        raise RequestRejected(f"{name}: must be the absolute path of a directory, not {path!r}")
    return path


def _parse_account(value: object) -> dict[str, Any] | None:
    """Return the account of a request, or None; raise ``RequestRejected`` if it is malformed or root."""
    if value is None:
        return None
    types = {"uid": int, "gid": int, "groups": list, "name": str, "home": str, "shell": str}
    if not isinstance(value, dict) or any(type(value.get(name)) is not kind for name, kind in types.items()):
        raise RequestRejected(f"account: must be an object with {', '.join(types)}")
    if min(value["uid"], value["gid"]) < 1 or any(type(group) is not int for group in value["groups"]):
        raise RequestRejected("account: uid and gid must be at least 1, and groups must be numbers")
    return value


class Journal:
    """An append-only file of submitted and ended jobs, one JSON line each, rewritten when it is long.

    It is not synced: it survives a restart of locald, and not a crash of the machine.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._line_count = 0

    def load(self) -> list[LocalJob]:
        """Return the jobs of the last locald; those that had not ended are lost."""
        jobs: dict[int, LocalJob] = {}
        try:
            lines = self._path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # cut off when the machine or the process died
                continue
            match entry:
                case ["submitted", int(id), str(name), str(user), int(size)]:
                    jobs[id] = LocalJob(id, name, user, size)
                case ["ended", int(id), int() | None as exit_code, bool(lost), str(reason)] if id in jobs:
                    job = jobs[id]
                    job.state, job.exit_code, job.lost, job.reason = "ended", exit_code, lost, reason
        for job in jobs.values():
            if job.state != "ended":
                job.lost, job.reason = True, "the cluster's resource manager was killed"
        return list(jobs.values())[-MAX_RETAINED_JOBS:]

    def add_submitted(self, job: LocalJob) -> None:
        """Append a job. Raise ``OSError``."""
        self._append(_submitted_line(job))

    def add_ended(self, job: LocalJob) -> None:
        """Append how a job ended; an error is only printed."""
        try:
            self._append(_ended_line(job))
        except OSError as error:
            print(f"locald: {self._path}: {error}", file=sys.stderr)

    @property
    def exists(self) -> bool:
        """Whether the file is still there: its directory may have been removed."""
        return self._path.exists()

    @property
    def is_long(self) -> bool:
        return self._line_count > _MAX_JOURNAL_LINES

    def rewrite(self, jobs: Iterable[LocalJob]) -> None:
        """Replace the file by these jobs. Raise ``OSError``."""
        lines = []
        for job in jobs:
            lines += [_submitted_line(job), _ended_line(job)] if job.state == "ended" else [_submitted_line(job)]
        replace_file(self._path, b"".join(lines))
        self.close()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._line_count = len(lines)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, line: bytes) -> None:
        os.write(self._file, line)
        self._line_count += 1


def _submitted_line(job: LocalJob) -> bytes:
    return _encode_line(["submitted", job.id, job.name, job.user, job.size])


def _ended_line(job: LocalJob) -> bytes:
    return _encode_line(["ended", job.id, job.exit_code, job.lost, job.reason])


def _encode_line(entry: list[object]) -> bytes:
    return b"\n" + json.dumps(entry).encode() + b"\n"  # a newline first ends a line that was cut off
