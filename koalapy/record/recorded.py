"""A scheduler of which is noted what it is told and what it does."""

from collections.abc import Sequence

from koalapy.model.errors import KoalaError
from koalapy.record.recorder import Recorder
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import Event
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.scheduler import Scheduler


class RecordedScheduler:
    """Is asked and told as the scheduler is."""

    def __init__(self, scheduler: Scheduler, recorder: Recorder) -> None:
        self._scheduler, self._recorder = scheduler, recorder

    @property
    def queries(self) -> Queries:
        return self._scheduler.queries

    @property
    def is_unfinished(self) -> bool:
        return self._scheduler.is_unfinished

    def next_wakeup(self) -> float | None:
        return self._scheduler.next_wakeup()

    def step(self, events: Sequence[Event], now: float) -> Effects:
        for event in events:
            self.apply(event, now)
        effects = self._scheduler.step((), now)
        self._recorder.stepped(now, effects)
        return effects

    def apply(self, event: Event, now: float) -> None:
        self._recorder.told(event)
        try:
            self._scheduler.apply(event, now)
        except KoalaError:
            self._recorder.refused()
            raise
