"""One recorded step of a scheduler: its inputs and effects."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Ge, Le

from koalapy.model.job import JobId, Nonce, Token
from koalapy.model.request import ClusterName
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import Event


class Placed(NamedTuple):
    """A placed component of a job."""

    cluster: ClusterName
    nodes: int
    node_class: str = ""


class JobNow(NamedTuple):
    """The state of a job after a step that changed it."""

    job: JobId
    state: str
    generation: int
    gang: tuple[Placed, ...]


class Told(NamedTuple):
    """A timeline entry of a job, without its reason text."""

    job: JobId
    event: str
    generation: int
    component: int | None
    cluster: ClusterName | None


class Ordered(NamedTuple):
    """A command to the agent of a cluster."""

    what: str
    cluster: ClusterName
    token: Token


class Done(NamedTuple):
    """The externally visible effects of a step."""

    jobs: tuple[JobNow, ...] = ()
    timeline: tuple[Told, ...] = ()
    commands: tuple[Ordered, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.jobs or self.timeline or self.commands)

    @classmethod
    def from_effects(cls, effects: Effects) -> "Done":
        """Select from a step's effects what the record compares."""
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
"""Time in seconds since 1970, up to the year 9999."""


NOTHING_DONE = Done()


@dataclass(frozen=True, slots=True)
class Step:
    """The events of one step, its nonces and clock readings, and its effects."""

    number: Count
    """Number within the daemon run, from 1 without a gap."""
    at: Moment
    events: tuple[Event, ...] = ()
    refused: tuple[Count, ...] = ()
    """Indices of the events that were rejected."""
    nonces: tuple[Nonce, ...] = ()
    looks: tuple[tuple[Count, Count], ...] = ()
    """Clock readings as (count, ticks) of equal readings in a row; empty if all are 0."""
    done: Done = NOTHING_DONE
