"""The jobs of a run, drawn from its seed, with their expected outcomes."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.chaos.rank import SHORT_LINE

Expected = Literal["succeeded", "failed", "cancelled", "walltime"]
"""The outcome of a job unless too many faults hit it; a ``cancelled`` job may end before that."""

CLUSTERS = {"alder": 6, "birch": 5, "cedar": 8, "dogwood": 5}
NETWORKS = {"alder": "127.71.1", "birch": "127.71.2", "cedar": "127.71.3", "dogwood": "127.71.4"}
AMPLE_WALLTIME_S = 300.0
"""A walltime that is longer than any job needs."""
LOUD_LINES, LOUD_WIDTH = (700, 4000), 1024
OUTPUT_LIMIT = 2 * 1024 * 1024
"""Bytes of output that are kept of each component; half of the loud ranks write more."""
KINDS = {
    "plain": 48,
    "fails": 9,
    "loud": 3,
    "loud-fails": 2,
    "straggler": 4,
    "stubborn": 4,
    "long": 9,
    "walltime": 5,
    "files": 6,
    "mpi": 6,
    "mpi-fails": 1,
}
FAILING = ("fails", "loud-fails", "mpi-fails")


@dataclass(frozen=True)
class PlannedJob:
    """A job to submit. ``body`` lacks the command, which depends on the folder of the run."""

    number: int
    kind: str
    body: Mapping[str, Any]
    task: Mapping[str, Any]
    expected: Expected
    cancel_after: float | None = None
    """Seconds after its acknowledgement, or None."""
    twice: bool = False
    """Whether two clients submit it at the same time with one key."""
    input: str = field(default="", repr=False)
    """Content of the staged input file."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    @property
    def is_mpi(self) -> bool:
        return self.body["launcher"] == "openmpi"

    @property
    def walltime(self) -> float | None:
        walltime: float | None = self.body.get("walltime")
        return walltime


@dataclass(frozen=True)
class LocalUser:
    """A local user's job that occupies nodes without the scheduler, ``time_s`` seconds after the start."""

    number: int
    time_s: float
    cluster: str
    nodes: int
    seconds: float

    @property
    def name(self) -> str:
        return f"local-{self.number}"

    @property
    def task(self) -> dict[str, Any]:
        identity = {"local": self.name, "size": self.nodes, "seconds": self.seconds}
        return {**identity, "lines": 2, "width": SHORT_LINE, "code": 0}


def plan_jobs(seed: int, count: int) -> list[PlannedJob]:
    chance = random.Random(f"{seed}-jobs")
    return [_plan_job(number, chance) for number in range(1, count + 1)]


def plan_local_users(seed: int, count: int, seconds: float) -> list[LocalUser]:
    chance = random.Random(f"{seed}-local-users")
    users = []
    for number in range(1, count + 1):
        cluster = chance.choice(sorted(CLUSTERS))
        nodes = chance.randint(1, CLUSTERS[cluster] - 1)
        users.append(LocalUser(number, chance.uniform(0, seconds), cluster, nodes, chance.uniform(0.5, 3)))
    return sorted(users, key=lambda user: user.time_s)


def _plan_job(number: int, chance: random.Random) -> PlannedJob:
    (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
    long = kind in ("long", "stubborn", "walltime")
    body: dict[str, Any] = {
        "name": f"{kind}-{number}",
        "request": _draw_request(chance, 3 if long else 5),
        "launcher": "openmpi" if kind.startswith("mpi") else "processes",
        "priority": "high" if chance.random() < 0.12 else "low",
        "claiming": "incremental" if chance.random() < 0.3 else "atomic",
    }
    if body["claiming"] == "incremental":
        body["claim_threshold"] = chance.choice([0.0, 0.5, 1.0])
    if kind == "walltime":
        body["walltime"] = chance.choice([1.0, 2.0])
    elif chance.random() < 0.3:
        body["walltime"] = AMPLE_WALLTIME_S
    if chance.random() < 0.1:
        body["max_restarts"] = chance.randint(0, 2)
    loud = kind.startswith("loud")
    task: dict[str, Any] = {
        "seconds": 120.0 if long else round(chance.uniform(0.05, 1.2), 2),
        "lines": chance.choice(LOUD_LINES) if loud else chance.randint(1, 20),
        "width": LOUD_WIDTH if loud else SHORT_LINE,
        "code": chance.choice([1, 3, 42, 126]) if kind in FAILING else 0,
    }
    task |= {name: True for name in ("loud", "straggler", "stubborn") if name in kind}
    content = ""
    if kind == "files":
        content = task["input"] = f"input of job {number} {chance.getrandbits(64):x}"
        body["collect"] = ["out/*"]
    cancel = chance.uniform(0.0, 4.0) if kind in ("long", "stubborn") else None
    if cancel is None and chance.random() < 0.04:
        cancel = chance.uniform(0.0, 2.0)
    return PlannedJob(number, kind, body, task, _expected(kind, cancel), cancel, chance.random() < 0.1, content)


def _expected(kind: str, cancel: float | None) -> Expected:
    if cancel is not None:
        return "cancelled"
    if kind == "walltime":
        return "walltime"
    return "failed" if kind in FAILING else "succeeded"


def _draw_request(chance: random.Random, max_size: int) -> dict[str, Any]:
    form = chance.choice(["fixed", "nonfixed", "flexible"])
    total = chance.randint(1, max_size)
    if form == "flexible":
        return {"type": form, "total_size": total}
    sizes = [total] if total == 1 or chance.random() < 0.3 else [total - total // 2, total // 2]
    if form == "nonfixed":
        return {"type": form, "components": [{"size": size} for size in sizes]}
    clusters = chance.sample(sorted(CLUSTERS), len(sizes))
    components = [{"size": min(n, CLUSTERS[c]), "cluster": c} for n, c in zip(sizes, clusters, strict=True)]
    return {"type": form, "components": components}
