"""What becomes of nodes that placed jobs need and do not hold: each claiming try looks, and that is evidence."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from koalapy.model.job import Component, Job, JobId
from koalapy.model.request import ClusterName
from koalapy.scheduler.claims.claim_try import ClaimTry
from koalapy.scheduler.grid import GridStatus

Place = tuple[int, ClusterName]
"""A component, by its index, on a cluster."""


@dataclass(frozen=True, slots=True)
class Look:
    """For which components of an attempt there was room, when that was last looked at."""

    generation: int
    at: float
    had_room: Mapping[Place, bool]


class Watch:
    """The last look at each job that is placed and not claimed."""

    def __init__(self, grid: GridStatus) -> None:
        self._grid = grid
        self._looks: dict[JobId, Look] = {}

    def placed(self, job: Job, components: Iterable[Component], now: float) -> None:
        """A job was placed where there is room, and is claimed for later."""
        self._looks[job.id] = Look(job.generation, now, {_place(component): True for component in components})

    def looked(self, job: Job, this: ClaimTry, now: float) -> None:
        """A claiming try has found that there is still room, or none, or room again."""
        before = self._looks.pop(job.id, None)
        if before is None and not this.blocked:
            return  # claimed for as soon as it was placed
        has_room = {_place(c): True for c in this.startable} | {_place(c): False for c in this.blocked}
        if before is not None and before.generation == job.generation and now > before.at:
            for component in (*this.startable, *this.blocked):
                had_room = before.had_room.get(_place(component))
                if had_room is not None:
                    self._grid[component.cluster].evidence.watched(
                        component.size,
                        now - before.at,
                        had_room=had_room,
                        has_room=has_room[_place(component)],
                        now=now,
                    )
        self._looks[job.id] = Look(job.generation, now, has_room)

    def forget(self, job: JobId) -> None:
        """A job is over."""
        self._looks.pop(job, None)


def _place(component: Component) -> Place:
    return component.index, component.cluster
