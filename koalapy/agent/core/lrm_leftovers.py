"""Jobs that a resource manager has of us and should not have: several of one name, and those that do not go away."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from koalapy.agent.components.component import Component
from koalapy.agent.lrm.port import LrmJob, LrmJobState
from koalapy.model.wording import clock as clock_text
from koalapy.model.wording import nodes
from koalapy.system.clock import SYSTEM_CLOCK, Clock

REPORT_AFTER = 10.0
"""Seconds after it was told to end from which it is told of that a job is still there."""
FORCE_AFTER = 30.0
"""Seconds until a job that is still there is told to end again, by force."""
MAX_RETAINED_NAMES = 10_000


@dataclass(slots=True)
class Leftover:
    """A job that was told to end: when first, in seconds since the epoch for people, and by the monotonic clock when
    first and last."""

    job: LrmJob
    since: float
    began: float
    ordered: float
    refusal: str = ""
    """Why the resource manager refused to end it by force, and the remedy."""


class Leftovers:
    """What was told to end and has not."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._over: dict[str, str] = {}
        """Accounts of components that have ended, by their names: what is found of both, even if late, is to go."""
        self._left: dict[str, Leftover] = {}

    def component_ended(self, name: str, user: str = "") -> None:
        self._over.pop(name, None)
        self._over[name] = user
        if len(self._over) > MAX_RETAINED_NAMES:
            del self._over[next(iter(self._over))]

    def component_begins(self, name: str) -> None:
        self._over.pop(name, None)

    def see(self, jobs: Iterable[LrmJob], ending: Iterable[LrmJob]) -> list[tuple[LrmJob, bool]]:
        """Take in a look and, of the live components, the jobs that were ordered to end already.

        What is to be ordered to end now, and whether by force because it was ordered before.
        """
        now = self._clock.monotonic()
        ordered = {job.id: job for job in ending}
        alive = [job for job in jobs if job.state is not LrmJobState.ENDED]
        over = {job.id: job for job in alive if self._over.get(job.name) == job.user}
        self._left = {id: left for id, left in self._left.items() if id in ordered or id in over}
        orders = []
        for job in (*ordered.values(), *over.values()):
            left = self._left.get(job.id)
            if left is None:
                self._left[job.id] = Leftover(job, self._clock.now(), now, now)
                if job.id not in ordered:
                    orders.append((job, False))
                continue
            left.job = job
            if now >= left.ordered + FORCE_AFTER:
                left.ordered = now
                orders.append((job, True))
        return orders

    def refused(self, job: LrmJob, refusal: str) -> None:
        """Note why the resource manager refused to end a job by force."""
        if job.id in self._left:
            self._left[job.id].refusal = refusal

    def notices(self) -> list[str]:
        """Of each, for people, what is still there and since when it should not be."""
        now = self._clock.now()
        return [
            f"the resource manager still holds job {left.job.id} ({left.job.name}"
            f"{f', {nodes(len(left.job.nodes))}' if left.job.nodes else ''}), "
            f"told to end at {clock_text(left.since, now, exact=True)}"
            + (f": {left.job.reason}" if left.job.reason else "")
            + (f"; {left.refusal}" if left.refusal else "")
            for left in self._left.values()
            if self._clock.monotonic() >= left.began + REPORT_AFTER
        ]


def job_of(component: Component, named: Sequence[LrmJob]) -> tuple[LrmJob | None, list[LrmJob]]:
    """Of all jobs of a component's name, its own, and those that must be ended because there may be but one.

    A submission that was not answered may have been taken all the same, perhaps late. What a runner is connected from
    stays; else the job that is known to have ended is the component's, else the oldest.
    """
    active = [job for job in named if job.state is not LrmJobState.ENDED]
    known = next((job for job in named if job.id == component.lrm_job), None)
    if not active or (len(active) == 1 and known in (None, active[0])):
        return known or next(iter(active), None) or (named[-1] if named else None), []
    runners = {node.lrm_job for node in component.nodes if node.runner is not None}
    connected = [job for job in active if job.id in runners]
    if connected:
        own = min(connected, key=_age)
    elif known is not None and known.state is LrmJobState.ENDED:
        own = known
    else:
        own = min(active, key=_age)
    return own, [job for job in active if job is not own]


def _age(job: LrmJob) -> tuple[int, str]:
    """Resource managers number their jobs upwards."""
    return len(job.id), job.id


def by_name(jobs: Iterable[LrmJob]) -> Mapping[tuple[str, str], list[LrmJob]]:
    """By name and account: another account's job of the same name is none of ours."""
    named: dict[tuple[str, str], list[LrmJob]] = {}
    for job in jobs:
        named.setdefault((job.name, job.user), []).append(job)
    return named
