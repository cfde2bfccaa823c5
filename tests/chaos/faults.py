"""Faults of a run, drawn from its seed."""

import random
from dataclasses import dataclass
from typing import Literal

from tests.chaos.workload import CLUSTERS

Timing = Literal["any", "start-up", "barrier", "forgetting", "draining"]
Target = Literal["daemon", "agent", "lrm", "runner", "mpi", "database"]
Method = Literal["kill", "stop", "fast", "immediate"]

TARGET_WEIGHTS: dict[Target, int] = {"daemon": 6, "agent": 26, "lrm": 9, "runner": 38, "mpi": 6}
TIMED_TARGETS: dict[Timing, tuple[Target, ...]] = {
    "start-up": ("daemon",),
    "barrier": ("daemon", "agent", "agent", "runner", "runner", "lrm"),
    "forgetting": ("agent", "agent", "agent", "daemon"),
    "draining": ("daemon", "agent", "agent", "runner", "runner"),
}
TIMING_WEIGHTS = (1, 4, 4, 4)
MAX_STOP_S = 15.0


@dataclass(frozen=True)
class Fault:
    time_s: float
    """Seconds after the start of the faults."""
    timing: Timing
    target: Target
    method: Method
    seconds: float
    """Duration of a suspension, or of the pause before the harness restarts a killed daemon."""
    pick: float
    """Position of the target among the candidates, from 0 to 1."""
    delay: float
    """Seconds to wait after the timing condition has become true."""
    cluster: str

    def __str__(self) -> str:
        stop = f" for {self.seconds:.2f} s" if self.method == "stop" else ""
        return f"{self.method} {self.target}{stop}" + (f" ({self.timing})" if self.timing != "any" else "")


def plan_faults(seed: int, count: int, seconds: float, *, database: bool) -> list[Fault]:
    """Return ``count`` faults spread over ``seconds`` seconds."""
    chance = random.Random(f"{seed}-faults")
    interval_s = seconds / max(1, count)
    return [_fault(interval_s * (number + chance.random()), chance, database) for number in range(count)]


def _fault(start_s: float, chance: random.Random, database: bool) -> Fault:
    timing: Timing = "any"
    weights: dict[Target, int] = {**TARGET_WEIGHTS, "database": 10} if database else TARGET_WEIGHTS
    (target,) = chance.choices(list(weights), list(weights.values()))
    method: Method = "kill" if chance.random() < 0.55 else "stop"
    if chance.random() < 0.25:
        (timing,) = chance.choices(list(TIMED_TARGETS), TIMING_WEIGHTS)
        target = chance.choice(TIMED_TARGETS[timing])
        method = "kill" if chance.random() < 0.8 else "stop"
    if timing == "start-up":
        method = "kill"
    # Log-uniform durations: some suspensions are shorter than any heartbeat, some longer than all timeouts.
    seconds = 0.2 * (MAX_STOP_S / 0.2) ** chance.random()
    if target == "database":
        method = chance.choice(["fast", "immediate"])
    if method != "stop":
        seconds = chance.uniform(0.0, 1.5)
    cluster = chance.choice(sorted(CLUSTERS))
    return Fault(start_s, timing, target, method, seconds, chance.random(), chance.uniform(0.0, 0.3), cluster)
