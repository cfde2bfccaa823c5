"""Usage history by days, weeks, clusters and users."""

from dataclasses import asdict, replace
from datetime import date
from typing import Any

import pytest
from sqlalchemy import insert

from koalapy.daemon.jobs.history import MAX_LINES, History
from koalapy.model.errors import UsageError
from koalapy.model.history import DAY, Figures, Kind, Step
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.store.records import Batch, ClusterRecord
from koalapy.store.tables import days
from koalapy.workload import swf
from tests.memory_stores import memory_stores

THURSDAY = 20_006
"""2024-10-10, in days since the epoch."""


def make_record(name: str, total: int) -> ClusterRecord:
    return ClusterRecord(name, "local", "usable", total, 0, 0, 0, 0, 0, "", None, 1, 1.0)


def make_job(ident: int, *, day: int, hours: float, clusters: dict[str, int], state: JobState, **spec: Any) -> Job:
    """Return a job that waited for a minute and ran for ``hours`` from noon of ``day``."""
    start = day * DAY + DAY / 2
    end = start + hours * 3600
    parts = tuple(
        Component(index, name, nodes, ComponentState.ENDED, claimed_at=start, ended_at=end)
        for index, (name, nodes) in enumerate(clusters.items())
    )
    attempt = Attempt(1, parts, placed_at=start - 5, barrier_at=start, launched_at=start, ended_at=end)
    complete_spec = JobSpec(FlexibleRequest(1), ("true",), **({"owner": "ada", "policy": "worst-fit"} | spec))
    times = {"placed_at": start - 5, "started_at": start, "ended_at": end}
    return Job(ident, complete_spec, start - 65, state, generation=1, attempt=attempt, **times)  # type: ignore[arg-type]


class Place:
    """A history of stored jobs, at noon of the Friday."""

    def __init__(self) -> None:
        self.stores = memory_stores()
        self.active: list[Job] = []
        self.now = (THURSDAY + 1.5) * DAY
        self.history = History(self.stores.history, lambda: self.now, lambda: self.active, jobs_keep=3600.0)

    def store_ended(self, *jobs: Job) -> None:
        self.stores.jobs.write(Batch(at=self.now, epoch=1, jobs={job.id: job for job in jobs}))

    async def read_lines(self, kind: Kind = Kind.GRID, step: Step = Step.DAY, **options: Any) -> list[Any]:
        span = self.history.make_span(options.pop("first", None), options.pop("last", None))
        return list((await self.history.read_table(kind, step, span, **options)).lines)


@pytest.fixture
def place() -> Place:
    place = Place()
    records = [make_record("north", 10), make_record("south", 5)]
    place.stores.jobs.write(Batch(at=(THURSDAY - 1) * DAY, epoch=1, clusters=records))
    place.store_ended(
        make_job(1, day=THURSDAY, hours=2, clusters={"north": 4}, state=JobState.SUCCEEDED),
        make_job(2, day=THURSDAY, hours=1, clusters={"north": 2, "south": 2}, state=JobState.SUCCEEDED, owner="bob"),
        make_job(3, day=THURSDAY, hours=1, clusters={"south": 1}, state=JobState.FAILED),
    )
    return place


async def test_history_of_one_day_has_all_figures(place: Place) -> None:
    (line,) = await place.read_lines()
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


async def test_history_by_cluster_counts_own_nodes_and_jobs(place: Place) -> None:
    north, south = await place.read_lines(Kind.CLUSTER)
    assert (north.name, north.jobs, north.node_seconds) == ("north", 2, 10 * 3600)
    assert (south.name, south.jobs, south.node_seconds) == ("south", 2, 3 * 3600)
    assert north.utilisation == pytest.approx(10 / 240, abs=1e-5)
    assert south.utilisation == pytest.approx(3 / 120, abs=1e-5)


async def test_history_counts_held_nodes_until_now(place: Place) -> None:
    """Each day counts the part of the nodes' time that falls into it."""
    runs = make_job(9, day=THURSDAY, hours=100, clusters={"north": 10}, state=JobState.RUNNING)
    assert runs.attempt is not None
    part = replace(runs.attempt.components[0], ended_at=None, state=ComponentState.RUNNING)
    place.active = [replace(runs, ended_at=None, attempt=replace(runs.attempt, components=(part,), ended_at=None))]
    thursday, friday = await place.read_lines(Kind.CLUSTER, name="north")
    assert thursday.node_seconds == (10 + 120) * 3600
    assert (friday.jobs, friday.node_seconds, friday.utilisation) == (0, 120 * 3600, 1.0)


async def test_history_of_two_names_reads_no_others(place: Place) -> None:
    with place.stores.jobs.database.writing() as connection:
        figures = asdict(Figures(jobs=1))
        others = [{"kind": Kind.USER, "day": THURSDAY, "name": f"user{n}", **figures} for n in range(MAX_LINES)]
        connection.execute(insert(days), others)
    span = place.history.make_span(None, None)
    table, totals = await place.history.read_table_and_totals(Kind.USER, Step.DAY, span, ["bob", "ada"])
    assert [(line.name, line.jobs) for line in table.lines] == [("ada", 2), ("bob", 1)]
    assert [(line.name, line.jobs) for line in totals] == [("bob", 1), ("ada", 2)]
    (total,) = (await place.history.read_table_and_totals(Kind.GRID, Step.DAY, span, [None]))[1]
    assert total.jobs == 3
    with pytest.raises(UsageError, match=f"more than {MAX_LINES} lines"):
        await place.history.read_table_and_totals(Kind.USER, Step.DAY, span, [None])


async def test_node_seconds_of_some_users_in_a_past_time(place: Place) -> None:
    start = THURSDAY * DAY
    everything = await place.history.read_node_seconds(start, start + DAY, DAY)
    assert everything == {"ada": [9 * 3600.0], "bob": [4 * 3600.0]}
    assert await place.history.read_node_seconds(start, start + DAY, DAY, ["bob"]) == {"bob": [4 * 3600.0]}


async def test_history_by_week_begins_on_monday(place: Place) -> None:
    place.store_ended(make_job(4, day=THURSDAY - 4, hours=1, clusters={"north": 1}, state=JobState.SUCCEEDED))
    previous, this = await place.read_lines(step=Step.WEEK)
    assert (previous.start, previous.end, previous.jobs) == (date(2024, 9, 30), date(2024, 10, 6), 1)
    assert (this.start, this.end, this.jobs) == (date(2024, 10, 7), date(2024, 10, 11), 3)
    (all_of_it,) = await place.read_lines(step=Step.ALL)
    assert all_of_it.jobs == 4


async def test_history_remains_after_jobs_are_removed(place: Place) -> None:
    previous = await place.read_lines(Kind.USER)
    place.stores.history.remove([1, 2, 3])
    assert await place.read_lines(Kind.USER) == previous
    assert [line.name for line in previous] == ["ada", "bob"]


async def test_history_omits_internal_jobs(place: Place) -> None:
    previous = await place.read_lines()
    place.store_ended(
        make_job(5, day=THURSDAY, hours=9, clusters={"north": 9}, state=JobState.SUCCEEDED, internal=True)
    )
    assert await place.read_lines() == previous


async def test_history_with_large_span_is_rejected(place: Place) -> None:
    with pytest.raises(UsageError, match="has more than 1 lines") as refused:
        await place.read_lines(Kind.USER, max_lines=1)
    assert "step=week" in (refused.value.hint or "")


async def test_export_trace_is_readable_as_workload(place: Place) -> None:
    place.store_ended(make_job(4, day=THURSDAY, hours=1, clusters={}, state=JobState.CANCELLED))
    span = place.history.make_span(None, None)
    text = "".join([piece async for piece in place.history.export_trace(span, None)])
    trace = swf.parse_trace(text.splitlines(), "trace")
    assert [
        (traced_job.number, traced_job.processors, traced_job.ran, traced_job.status) for traced_job in trace.jobs
    ] == [(1, 4, 7200.0, 1), (2, 4, 3600.0, 1), (3, 1, 3600.0, 0), (4, 0, 3600.0, 5)]
    assert trace.processors == 15
    users = [line.split()[11] for line in text.splitlines() if not line.startswith(";")]
    assert len({*users}) == 2
    own_trace = "".join([piece async for piece in place.history.export_trace(span, "bob")])
    assert sorted(line.split()[11] for line in own_trace.splitlines() if not line.startswith(";")) == [
        "-1",
        "-1",
        "-1",
        "1",
    ]


async def test_export_trace_yields_pages(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages also separate jobs that ended at the same time."""
    monkeypatch.setattr("koalapy.daemon.jobs.history.TRACE_PAGE_SIZE", 1)
    span = place.history.make_span(None, None)
    text = "".join([piece async for piece in place.history.export_trace(span, None)])
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(";")] == ["2", "3", "1"]


async def test_history_by_home_site_counts_jobs_of_its_users(place: Place) -> None:
    place.store_ended(
        make_job(4, day=THURSDAY, hours=3, clusters={"south": 2}, state=JobState.SUCCEEDED, home_site="north"),
        make_job(5, day=THURSDAY, hours=1, clusters={"north": 2}, state=JobState.SUCCEEDED, home_site="north"),
        make_job(6, day=THURSDAY, hours=1, clusters={"north": 2}, state=JobState.CANCELLED, home_site="south"),
    )
    lines = await place.read_lines(Kind.SITE, Step.ALL)
    assert [(line.name, line.jobs, line.ran, line.node_seconds) for line in lines] == [
        ("north", 2, 2, (6 + 2) * 3600),
        ("south", 1, 0, 2 * 3600),
    ]
    assert lines[0].response_time == 65 + 2 * 3600
    assert lines[1].response_time is None


async def test_history_utilisation_starts_at_first_submission() -> None:
    place = Place()
    place.stores.jobs.write(Batch(at=(THURSDAY + 0.5) * DAY, epoch=1, clusters=[make_record("north", 10)]))
    first = make_job(1, day=THURSDAY, hours=6, clusters={"north": 10}, state=JobState.SUCCEEDED)
    place.store_ended(first)
    place.now = (THURSDAY + 1) * DAY
    used = 6 * 3600 / (DAY / 2 + 65)
    for kind in (Kind.GRID, Kind.CLUSTER):
        (line,) = await place.read_lines(kind, last=date(2024, 10, 10))
        assert line.utilisation == pytest.approx(used, abs=1e-6)
    place.now = (THURSDAY + 2) * DAY
    (all_of_it,) = await place.read_lines(step=Step.ALL, last=date(2024, 10, 11))
    assert all_of_it.utilisation == pytest.approx(6 * 3600 / (1.5 * DAY + 65), abs=1e-6)
