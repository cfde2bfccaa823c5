"""One step of a scheduler as it is written down: what it was told, and what it did."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Ge, Le

from koalapy.model.job import JobId, Nonce, Token
from koalapy.model.request import ClusterName
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import Event


class Placed(NamedTuple):
    """A component of a job that was placed."""

    cluster: ClusterName
    nodes: int
    node_class: str = ""


class JobNow(NamedTuple):
    """How a job stands after a step that has changed it."""

    job: JobId
    state: str
    generation: int
    gang: tuple[Placed, ...]


class Told(NamedTuple):
    """A line of a job's timeline, without its words."""

    job: JobId
    event: str
    generation: int
    component: int | None
    cluster: ClusterName | None


class Ordered(NamedTuple):
    """A command to a cluster's agent."""

    what: str
    cluster: ClusterName
    token: Token


class Done(NamedTuple):
    """What a step did, as far as it shows outside."""

    jobs: tuple[JobNow, ...] = ()
    timeline: tuple[Told, ...] = ()
    commands: tuple[Ordered, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.jobs or self.timeline or self.commands)

    @classmethod
    def of(cls, effects: Effects) -> "Done":
        return cls(
            tuple(
                JobNow(
                    job.id,
                    str(job.state),
                    job.generation,
                    tuple(Placed(c.cluster, c.size, c.node_class) for c in job.attempt.gang) if job.attempt else (),
                )
                for job in effects.jobs.values()
            ),
            tuple(Told(e.job, e.event, e.generation, e.component, e.cluster) for e in effects.timeline),
            tuple(Ordered(type(c).__name__, c.cluster, c.token) for c in effects.commands),
        )


Count = Annotated[int, Ge(0), Le(2**53)]
Moment = Annotated[float, Ge(0), Le(253_402_300_799.0)]
"""Seconds since the epoch, up to the year 9999."""


NOTHING_DONE = Done()


@dataclass(frozen=True, slots=True)
class Step:
    """What a scheduler was told at one moment, all that it did not know of itself, and what it did."""

    number: Count
    """Of its life, from 1 on, without a gap."""
    at: Moment
    events: tuple[Event, ...] = ()
    refused: tuple[Count, ...] = ()
    """The events that were not possible, by their places."""
    nonces: tuple[Nonce, ...] = ()
    looks: tuple[tuple[Count, Count], ...] = ()
    """How often in a row its clock read how many ticks of its budget, where that was more than none."""
    done: Done = NOTHING_DONE
