"""Interactive jobs without a client are cancelled."""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

from koalapy.daemon.agents.streams import Attendance
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.events import JobCancelled

GRACE = 60.0


class Daemon:
    def __init__(self) -> None:
        self.now = 0.0
        self.jobs = {number: self.job(number, interactive=number > 1) for number in (1, 2, 3)}
        self.cancelled: list[int] = []
        self.at_commit = list[Callable[[], object]]()
        self.observers: list[Any] = []
        queries = SimpleNamespace(job=self.jobs.get, jobs=lambda: list(self.jobs.values()))
        engine = SimpleNamespace(commit=self._commit, subscribe=self.observers.append, queries=queries)
        self.attendance = Attendance(cast(Engine, engine), lambda: self.now, GRACE)

    @staticmethod
    def job(number: int, *, interactive: bool) -> Job:
        return Job(number, JobSpec(FlexibleRequest(1), ("true",), interactive=interactive), 0.0)

    async def _commit(self, item: WorkItem) -> None:
        (event,) = cast(Any, item.events)
        assert isinstance(event, JobCancelled)
        self.cancelled.append(event.job)
        while self.at_commit:
            self.at_commit.pop()()
        del self.jobs[event.job]

    async def check_at(self, now: float) -> list[int]:
        self.now = now
        await self.attendance.cancel_unattended()
        return self.cancelled


async def test_interactive_job_without_client_is_cancelled_after_the_grace() -> None:
    daemon = Daemon()
    with daemon.attendance.attend(2), daemon.attendance.attend(2):
        assert await daemon.check_at(GRACE) == []
        assert await daemon.check_at(GRACE + 1) == [3]
    with daemon.attendance.attend(2):
        assert await daemon.check_at(10 * GRACE) == [3]
    assert await daemon.check_at(11 * GRACE) == [3]
    assert await daemon.check_at(11 * GRACE + 1) == [3, 2]
    assert await daemon.check_at(100 * GRACE) == [3, 2]


async def test_new_interactive_job_without_client_is_cancelled() -> None:
    daemon = Daemon()
    with daemon.attendance.attend(2), daemon.attendance.attend(3):
        daemon.now = GRACE
        daemon.jobs[4] = daemon.job(4, interactive=True)
        for previous in (None, JobState.QUEUED):
            daemon.observers[0](daemon.jobs[4], previous)
            daemon.now += 1
        daemon.observers[0](daemon.jobs[1], None)
        assert await daemon.check_at(2 * GRACE) == []
        assert await daemon.check_at(2 * GRACE + 1) == [4]


async def test_job_that_has_ended_is_not_cancelled() -> None:
    daemon = Daemon()
    daemon.jobs.clear()
    assert await daemon.check_at(2 * GRACE) == []


async def test_job_whose_client_returns_while_another_is_cancelled_goes_on() -> None:
    daemon = Daemon()
    with ExitStack() as clients:
        daemon.at_commit.append(lambda: clients.enter_context(daemon.attendance.attend(3)))
        assert await daemon.check_at(GRACE + 1) == [2]
    assert await daemon.check_at(2 * GRACE) == [2]
