"""History: what is told of days, weeks, clusters, users and so on, from what the store has of them."""

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from koalapy.daemon.jobs.history import History
from koalapy.model.errors import UsageError
from koalapy.model.history import DAY, Kind, Step
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState
from koalapy.model.request import FlexibleRequest
from koalapy.ports import Batch, ClusterRecord
from koalapy.workload import swf
from tests.memory_stores import memory_stores

THURSDAY = 20_006
"""2024-10-10, in days since the epoch."""


def record(name: str, total: int) -> ClusterRecord:
    return ClusterRecord(name, "local", "usable", total, 0, 0, 0, 0, 0, "", None, 1, 1.0)


def job(ident: int, *, day: int, hours: float, clusters: dict[str, int], state: JobState, **spec: Any) -> Job:
    """One that waited for a minute, and ran for so many hours from noon of a day on."""
    start = day * DAY + DAY / 2
    end = start + hours * 3600
    parts = tuple(
        Component(index, name, nodes, ComponentState.ENDED, claimed_at=start, ended_at=end)
        for index, (name, nodes) in enumerate(clusters.items())
    )
    attempt = Attempt(1, parts, placed_at=start - 5, barrier_at=start, launched_at=start, ended_at=end)
    given = JobSpec(FlexibleRequest(1), ("true",), **({"owner": "ada", "policy": "worst-fit"} | spec))
    times = {"placed_at": start - 5, "started_at": start, "ended_at": end}
    return Job(ident, given, start - 65, state, generation=1, attempt=attempt, **times)  # type: ignore[arg-type]


class Place:
    """A history of the jobs that were put in; it is noon of the Friday."""

    def __init__(self) -> None:
        self.stores = memory_stores()
        self.active: list[Job] = []
        self.now = (THURSDAY + 1.5) * DAY
        self.history = History(self.stores.history, lambda: self.now, lambda: self.active, jobs_keep=3600.0)

    def end(self, *jobs: Job) -> None:
        self.stores.jobs.write(Batch(at=self.now, epoch=1, jobs={each.id: each for each in jobs}))

    async def lines(self, by: Kind = Kind.GRID, step: Step = Step.DAY, **which: Any) -> list[Any]:
        span = self.history.make_span(which.pop("first", None), which.pop("last", None))
        return list((await self.history.read_table(by, step, span, **which)).lines)


@pytest.fixture
def place() -> Place:
    place = Place()
    records = [record("north", 10), record("south", 5)]
    place.stores.jobs.write(Batch(at=(THURSDAY - 1) * DAY, epoch=1, clusters=records))
    place.end(
        job(1, day=THURSDAY, hours=2, clusters={"north": 4}, state=JobState.SUCCEEDED),
        job(2, day=THURSDAY, hours=1, clusters={"north": 2, "south": 2}, state=JobState.SUCCEEDED, owner="bob"),
        job(3, day=THURSDAY, hours=1, clusters={"south": 1}, state=JobState.FAILED),
    )
    return place


async def test_a_day_of_the_grid(place: Place) -> None:
    (line,) = await place.lines()
    assert (line.start, line.end, line.name) == (date(2024, 10, 10), date(2024, 10, 10), "")
    assert (line.jobs, line.succeeded, line.failed, line.cancelled, line.ran) == (3, 2, 1, 0, 3)
    assert line.success == pytest.approx(2 / 3, abs=1e-5)
    assert (line.queue_time, line.wait_time, line.startup_overhead) == (60.0, 65.0, 5.0)
    assert line.run_time == 4800.0
    assert (line.within_1m, line.within_1d) == (1.0, 1.0)
    assert line.coallocated == pytest.approx(1 / 3, abs=1e-5)
    assert line.node_seconds == (8 + 4 + 1) * 3600
    assert line.coallocated_node_seconds == 4 * 3600
    assert line.utilisation == pytest.approx(13 / (15 * 24), abs=1e-5)


async def test_each_cluster_has_its_own_nodes_and_the_jobs_that_were_there(place: Place) -> None:
    north, south = await place.lines(Kind.CLUSTER)
    assert (north.name, north.jobs, north.node_seconds) == ("north", 2, 10 * 3600)
    assert (south.name, south.jobs, south.node_seconds) == ("south", 2, 3 * 3600)
    assert north.utilisation == pytest.approx(10 / 240, abs=1e-5)
    assert south.utilisation == pytest.approx(3 / 120, abs=1e-5)


async def test_nodes_that_are_still_had_count_until_now(place: Place) -> None:
    """On each day so much of them as was in it."""
    runs = job(9, day=THURSDAY, hours=100, clusters={"north": 10}, state=JobState.RUNNING)
    assert runs.attempt is not None
    part = replace(runs.attempt.components[0], ended_at=None, state=ComponentState.RUNNING)
    place.active = [replace(runs, ended_at=None, attempt=replace(runs.attempt, components=(part,), ended_at=None))]
    thursday, friday = await place.lines(Kind.CLUSTER, name="north")
    assert thursday.node_seconds == (10 + 120) * 3600
    assert (friday.jobs, friday.node_seconds, friday.utilisation) == (0, 120 * 3600, 1.0)


async def test_a_week_begins_on_monday(place: Place) -> None:
    place.end(job(4, day=THURSDAY - 4, hours=1, clusters={"north": 1}, state=JobState.SUCCEEDED))
    before, this = await place.lines(step=Step.WEEK)
    assert (before.start, before.end, before.jobs) == (date(2024, 9, 30), date(2024, 10, 6), 1)
    assert (this.start, this.end, this.jobs) == (date(2024, 10, 7), date(2024, 10, 11), 3)
    (all_of_it,) = await place.lines(step=Step.ALL)
    assert all_of_it.jobs == 4


async def test_days_outlive_their_jobs(place: Place) -> None:
    before = await place.lines(Kind.USER)
    place.stores.history.remove([1, 2, 3])
    assert await place.lines(Kind.USER) == before
    assert [line.name for line in before] == ["ada", "bob"]


async def test_the_daemons_own_jobs_are_no_use(place: Place) -> None:
    before = await place.lines()
    place.end(job(5, day=THURSDAY, hours=9, clusters={"north": 9}, state=JobState.SUCCEEDED, internal=True))
    assert await place.lines() == before


async def test_nothing_is_told_of_the_wrong_way_round_and_of_too_much(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="first is 2024-10-11, which is after last"):
        place.history.make_span(date(2024, 10, 11), date(2024, 10, 10))
    monkeypatch.setattr("koalapy.daemon.jobs.history.MAX_LINES", 1)
    with pytest.raises(UsageError, match="has more than 1 lines") as refused:
        await place.lines(Kind.USER)
    assert "step=week" in (refused.value.hint or "")


async def test_a_trace_can_be_read_as_a_workload(place: Place) -> None:
    place.end(job(4, day=THURSDAY, hours=1, clusters={}, state=JobState.CANCELLED))
    span = place.history.make_span(None, None)
    text = "".join([piece async for piece in place.history.export_trace(span, None)])
    trace = swf.parse_trace(text.splitlines(), "trace")
    assert [(each.number, each.processors, each.ran, each.status) for each in trace.jobs] == [
        (1, 4, 7200.0, 1),
        (2, 4, 3600.0, 1),
        (3, 1, 3600.0, 0),
        (4, 0, 3600.0, 5),
    ]
    assert trace.processors == 15
    users = [line.split()[11] for line in text.splitlines() if not line.startswith(";")]
    assert len({*users}) == 2
    own = "".join([piece async for piece in place.history.export_trace(span, "bob")])
    assert sorted(line.split()[11] for line in own.splitlines() if not line.startswith(";")) == ["-1", "-1", "-1", "1"]


async def test_a_trace_is_told_piece_by_piece(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that ended at the same moment, too."""
    monkeypatch.setattr("koalapy.daemon.jobs.history.TRACE_PAGE_SIZE", 1)
    span = place.history.make_span(None, None)
    text = "".join([piece async for piece in place.history.export_trace(span, None)])
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(";")] == ["2", "3", "1"]


async def test_days_of_home_sites_are_of_their_users_jobs_wherever_these_ran(place: Place) -> None:
    place.end(
        job(4, day=THURSDAY, hours=3, clusters={"south": 2}, state=JobState.SUCCEEDED, home_site="north"),
        job(5, day=THURSDAY, hours=1, clusters={"north": 2}, state=JobState.SUCCEEDED, home_site="north"),
        job(6, day=THURSDAY, hours=1, clusters={"north": 2}, state=JobState.CANCELLED, home_site="south"),
    )
    lines = await place.lines(Kind.SITE, Step.ALL)
    assert [(line.name, line.jobs, line.ran, line.node_seconds) for line in lines] == [
        ("north", 2, 2, (6 + 2) * 3600),
        ("south", 1, 0, 2 * 3600),
    ]
    assert lines[0].response_time == 65 + 2 * 3600
    assert lines[1].response_time is None


async def test_utilisation_of_first_day_counts_nodes_from_first_submission() -> None:
    place = Place()
    place.stores.jobs.write(Batch(at=(THURSDAY + 0.5) * DAY, epoch=1, clusters=[record("north", 10)]))
    first = job(1, day=THURSDAY, hours=6, clusters={"north": 10}, state=JobState.SUCCEEDED)
    place.end(first)
    place.now = (THURSDAY + 1) * DAY
    used = 6 * 3600 / (DAY / 2 + 65)
    for by in (Kind.GRID, Kind.CLUSTER):
        (line,) = await place.lines(by, last=date(2024, 10, 10))
        assert line.utilisation == pytest.approx(used, abs=1e-6)
    place.now = (THURSDAY + 2) * DAY
    (all_of_it,) = await place.lines(step=Step.ALL, last=date(2024, 10, 11))
    assert all_of_it.utilisation == pytest.approx(6 * 3600 / (1.5 * DAY + 65), abs=1e-6)
