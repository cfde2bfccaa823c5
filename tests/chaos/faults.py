"""What befalls the grid, drawn from the run's seed: when, whom, how, and for how long."""

import random
from dataclasses import dataclass
from typing import Literal

from tests.chaos.workload import CLUSTERS

Moment = Literal["any", "start-up", "barrier", "forgetting", "draining"]
Whom = Literal["daemon", "agent", "lrm", "runner", "mpi", "database"]
How = Literal["kill", "stop", "fast", "immediate"]

WHOM: dict[Whom, int] = {"daemon": 6, "agent": 26, "lrm": 9, "runner": 38, "mpi": 6}
PLANTED: dict[Moment, tuple[Whom, ...]] = {
    "start-up": ("daemon",),
    "barrier": ("daemon", "agent", "agent", "runner", "runner", "lrm"),
    "forgetting": ("agent", "agent", "agent", "daemon"),
    "draining": ("daemon", "agent", "agent", "runner", "runner"),
}
PLANTED_WEIGHTS = (1, 4, 4, 4)
LONGEST_STOP = 15.0


@dataclass(frozen=True)
class Fault:
    at: float
    """Seconds after the first fault could come."""
    moment: Moment
    whom: Whom
    how: How
    seconds: float
    """How long a stop lasts, or until what was killed is started again where the harness does that."""
    pick: float
    """Which of those that there are then: 0 the first, almost 1 the last."""
    delay: float
    """Seconds that pass after a planted moment has come."""
    cluster: str

    def __str__(self) -> str:
        stop = f" for {self.seconds:.2f} s" if self.how == "stop" else ""
        return f"{self.how} {self.whom}{stop}" + (f" ({self.moment})" if self.moment != "any" else "")


def plan_faults(seed: int, count: int, seconds: float, *, database: bool) -> list[Fault]:
    """So many faults spread over so many seconds."""
    chance = random.Random(f"{seed}-faults")
    every = seconds / max(1, count)
    return [_fault(every * (number + chance.random()), chance, database) for number in range(count)]


def _fault(at: float, chance: random.Random, database: bool) -> Fault:
    moment: Moment = "any"
    whom_else: dict[Whom, int] = {**WHOM, "database": 10} if database else WHOM
    (whom,) = chance.choices(list(whom_else), whom_else.values())
    how: How = "kill" if chance.random() < 0.55 else "stop"
    if chance.random() < 0.25:
        (moment,) = chance.choices(list(PLANTED), PLANTED_WEIGHTS)
        whom = chance.choice(PLANTED[moment])
        how = "kill" if chance.random() < 0.8 else "stop"
    if moment == "start-up":
        how = "kill"
    # Short and long stops alike: some end before anybody can notice, some after all patience.
    seconds = 0.2 * (LONGEST_STOP / 0.2) ** chance.random()
    if whom == "database":
        how = chance.choice(["fast", "immediate"])
    if how != "stop":
        seconds = chance.uniform(0.0, 1.5)
    cluster = chance.choice(sorted(CLUSTERS))
    return Fault(at, moment, whom, how, seconds, chance.random(), chance.uniform(0.0, 0.3), cluster)
