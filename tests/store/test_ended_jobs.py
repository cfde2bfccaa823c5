"""Lists and sums of ended jobs, compared with a selection in Python."""

import random
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product

import pytest

from koalapy.model.history import EndedJob, HistoryFilter, HistoryPage, HistoryPosition, HistorySort, HistorySums
from koalapy.model.job import FINAL_STATES, Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.store.history import HistoryStore
from koalapy.store.opening import Stores
from koalapy.store.records import Batch

START = 1000.0
ANY_TIME = HistoryFilter(0.0, 1e10)
ENDS = sorted(FINAL_STATES)
NAMES = ("wave", "wave-2", "wa*e", "", "50%_off", "[x]")


def make_component(index: int, cluster: str, draw: random.Random, ended: float) -> Component:
    component = Component(
        index, cluster, draw.randint(1, 3), ComponentState.ENDED, claimed_at=ended - 10.0, ended_at=ended
    )
    measured = draw.choice((0, component.size, component.size, 1))
    if not measured:
        return component
    seconds = float(draw.randint(0, 40))
    return replace(
        component, measured_nodes=measured, cpu_time=seconds, cpu_available=40.0, peak_memory=draw.randint(1, 9)
    )


def make_ended_job(ident: int, draw: random.Random) -> Job:
    ended = START + draw.randint(0, 20)
    clusters = draw.sample(("north", "south", "west"), draw.randint(1, 2))
    components = tuple(make_component(index, cluster, draw, ended) for index, cluster in enumerate(clusters))
    superseded = make_component(len(components), "far", draw, ended)
    attempt = Attempt(1, (*components, replace(superseded, superseded=True, replaces=0)), ended - 20.0)
    attempt = replace(attempt, components=(*components,) if ident % 5 else attempt.components)
    spec = JobSpec(
        FlexibleRequest(2),
        ("true",),
        name=draw.choice(NAMES),
        owner=draw.choice(("ada", "bob")),
        memory=ident % 3 or None,
    )
    job = Job(ident, spec, ended - 30.0, draw.choice(ENDS), generation=1, attempt=attempt, ended_at=ended)
    if draw.random() < 0.2:
        return replace(job, attempt=None, generation=0)
    return replace(job, started_at=ended - draw.randint(1, 9), placed_at=ended - 20.0)


def write_jobs(stores: Stores, jobs: list[Job]) -> None:
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={job.id: job for job in jobs}))


def matches(entry: EndedJob, which: HistoryFilter) -> bool:
    pattern = which.name.replace("[", "[[]")
    return (
        which.since <= entry.ended_at < which.until
        and which.owner in ("", entry.owner)
        and (not which.name or fnmatchcase(entry.name, pattern))
        and (not which.cluster or which.cluster in entry.clusters)
        and (not which.states or entry.state in which.states)
    )


def read_pages(history: HistoryStore, which: HistoryFilter) -> list[HistoryPage]:
    """Return all pages of a list, following ``next``."""
    pages = [history.ended_page(which)]
    while (position := pages[-1].next) is not None:
        assert len(pages) < 100
        pages.append(history.ended_page(replace(which, before=position)))
    return pages


def sum_entries(entries: list[EndedJob]) -> HistorySums:
    sums = HistorySums(len(entries))
    for entry in entries:
        setattr(sums, entry.state, getattr(sums, entry.state) + 1)
        sums.node_seconds += entry.node_seconds
        sums.cpu_time += entry.cpu_time or 0.0
        sums.cpu_available += entry.cpu_available or 0.0
        if entry.run_time is not None and entry.wait_time is not None:
            sums.started, sums.unmeasured = sums.started + 1, sums.unmeasured + (entry.measured_nodes < entry.nodes)
            sums.wait_time, sums.run_time = sums.wait_time + entry.wait_time, sums.run_time + entry.run_time
    sums.peak_memory = max((entry.peak_memory for entry in entries if entry.peak_memory is not None), default=None)
    return sums


def join_sums(parts: list[HistorySums | None]) -> HistorySums:
    joined = HistorySums()
    for part in parts:
        assert part is not None
        for name in HistorySums.__slots__:
            first, second = getattr(joined, name), getattr(part, name)
            is_peak = name == "peak_memory"
            value = (
                max((peak for peak in (first, second) if peak is not None), default=None) if is_peak else first + second
            )
            setattr(joined, name, value)
    return joined


@pytest.fixture
def history(stores: Stores) -> HistoryStore:
    """A history of 80 jobs that examines at most 7 rows for a page."""
    draw = random.Random(3)
    write_jobs(stores, [make_ended_job(ident, draw) for ident in range(1, 81)])
    return HistoryStore(stores.jobs.database, max_examined=7)


FILTERS = [
    replace(ANY_TIME, owner=owner, name=name, cluster=cluster, states=states, since=since, until=until, limit=limit)
    for (owner, name, cluster), (states, since, until), limit in product(
        [
            ("", "", ""),
            ("ada", "", ""),
            ("ada", "wave", ""),
            ("", "wa*", ""),
            ("", "*%_*", ""),
            ("", "[*", ""),
            ("", "", "north"),
            ("bob", "", "south"),
            ("", "", "far"),
        ],
        [
            ((), 0.0, 1e10),
            ((JobState.FAILED,), START + 3.0, START + 15.0),
            ((JobState.FAILED, JobState.CANCELLED), START, START),
            ((JobState.FAILED, JobState.SUCCEEDED), START + 5.0, 1e10),
        ],
        [3],
    )
]


def test_pages_of_ended_jobs_equal_selection(history: HistoryStore) -> None:
    whole = [entry for page in read_pages(history, replace(ANY_TIME, limit=100)) for entry in page.jobs]
    assert len(whole) == 80
    assert whole == sorted(whole, key=lambda entry: (-entry.ended_at, -entry.id))
    for which in FILTERS:
        expected = [entry for entry in whole if matches(entry, which)]
        pages = read_pages(history, which)
        assert [entry for page in pages for entry in page.jobs] == expected, which
        assert all(len(page.jobs) <= which.limit for page in pages)
        sums = history.ended_page(replace(which, with_sums=True))
        parts, position = [sums.sums], sums.sums_next
        while position is not None:
            sums = history.ended_page(replace(which, with_sums=True, before=position))
            parts, position = [*parts, sums.sums], sums.sums_next
        assert join_sums(parts) == sum_entries(expected), which


KEYS: dict[HistorySort, Callable[[EndedJob], float | None]] = {
    HistorySort.WAIT: lambda entry: entry.wait_time,
    HistorySort.RUN: lambda entry: entry.run_time,
    HistorySort.NODES: lambda entry: entry.nodes,
    HistorySort.NODE_HOURS: lambda entry: entry.node_seconds,
    HistorySort.CPU: lambda entry: entry.cpu_time,
    HistorySort.EFFICIENCY: lambda entry: None if entry.efficiency is None else -entry.efficiency,
    HistorySort.MEMORY: lambda entry: entry.peak_memory,
}


@pytest.mark.parametrize("sort", list(KEYS))
def test_other_orders_list_largest_first_and_unknown_last(
    stores: Stores, history: HistoryStore, sort: HistorySort
) -> None:
    page = HistoryStore(stores.jobs.database).ended_page(replace(ANY_TIME, sort=sort, limit=100))
    assert (page.next, len(page.jobs)) == (None, 80)
    keys = [KEYS[sort](entry) for entry in page.jobs]
    values = [key for key in keys if key is not None]
    assert values == sorted(values, reverse=True)
    assert keys == [*values, *[None] * (80 - len(values))]
    parts = [page.jobs for page in read_pages(history, replace(ANY_TIME, sort=sort, limit=100))]
    assert sorted(entry.id for part in parts for entry in part) == list(range(1, 81))


def test_entry_has_use_of_whole_job(stores: Stores) -> None:
    claimed = {"claimed_at": 100.0, "ended_at": 110.0}
    measured = {"cpu_time": 15.0, "cpu_available": 40.0, "peak_memory": 7}
    components = (
        Component(0, "north", 2, ComponentState.ENDED, **claimed, measured_nodes=2, **measured),  # type: ignore[arg-type]
        Component(1, "south", 1, ComponentState.ENDED, **claimed),  # type: ignore[arg-type]
    )
    spec = JobSpec(FlexibleRequest(3), ("true",), name="n", owner="ada", memory=64)
    first = Attempt(1, components[:1], 90.0)
    job = Job(7, spec, 80.0, JobState.RUNNING, generation=1, attempt=first, placed_at=90.0, started_at=101.0)
    write_jobs(stores, [job])
    second = replace(job, generation=2, attempt=Attempt(2, components, 95.0), restarts=1)
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={7: second}, attempts=[(7, first)]))
    write_jobs(stores, [replace(second, state=JobState.FAILED, reason="exited with 3", exit_code=3, ended_at=111.0)])
    (entry,) = stores.history.ended_page(ANY_TIME).jobs
    assert (entry.clusters, entry.nodes) == (("north", "south"), 3)
    assert entry.measured_nodes == 2
    assert (entry.node_seconds, entry.wait_time, entry.run_time) == (20.0 + 30.0, 21.0, 10.0)
    assert (entry.cpu_time, entry.cpu_available, entry.peak_memory, entry.efficiency) == (15.0, 40.0, 7, 0.375)
    assert (entry.reason, entry.exit_code, entry.restarts, entry.memory) == ("exited with 3", 3, 1, 64)
    assert stores.history.ended_page(replace(ANY_TIME, before=HistoryPosition(111.0, 7))).jobs == []


def test_history_excludes_internal_and_unfinished_jobs(stores: Stores) -> None:
    spec = JobSpec(FlexibleRequest(1), ("true",))
    internal = Job(1, replace(spec, internal=True), 80.0, JobState.SUCCEEDED, ended_at=90.0)
    write_jobs(stores, [internal, Job(2, spec, 80.0), Job(3, spec, 80.0, JobState.CANCELLED, ended_at=90.0)])
    page = stores.history.ended_page(replace(ANY_TIME, with_sums=True))
    assert [(entry.id, entry.nodes, entry.run_time, entry.clusters) for entry in page.jobs] == [(3, 0, None, ())]
    assert page.sums == HistorySums(1, cancelled=1)


def test_ended_components_are_the_largest_of_those_that_ended_last(stores: Stores) -> None:
    def make_job(ident: int, size: int, *clusters: str, ended: float = START) -> Job:
        parts = tuple(
            Component(n, name, size, ComponentState.ENDED, claimed_at=ended - 10.0, ended_at=ended, error="lost")
            for n, name in enumerate(clusters)
        )
        attempt = Attempt(1, parts, ended - 20.0, barrier_at=ended - 8.0, launched_at=ended - 7.0, ended_at=ended)
        job = Job(ident, JobSpec(FlexibleRequest(2), ("true",)), 1.0, JobState.SUCCEEDED, generation=1)
        return replace(job, attempt=attempt, ended_at=ended)

    jobs = [make_job(1, 9, "north", ended=START - 50), make_job(2, 2, "north", "south"), make_job(3, 1, "west")]
    write_jobs(stores, [*jobs, make_job(4, 3, "north", ended=START + 1)])
    history = stores.history
    found, is_cut = history.ended_components(START - 5, START + 9, 10)
    assert not is_cut
    assert [(one.job, one.cluster, one.is_shared) for one in found] == [
        (2, "north", True),
        (2, "south", True),
        (3, "west", False),
        (4, "north", False),
    ]
    first = found[0]
    assert first.owner == jobs[1].spec.owner
    assert (first.size, first.claimed_at, first.barrier_at, first.launched_at, first.ended_at, first.error) == (
        2,
        START - 10,
        START - 8,
        START - 7,
        START,
        "lost",
    )

    def jobs_between(since: float, until: float, limit: int = 10, cluster: str = "") -> tuple[list[int], bool]:
        components, is_cut = history.ended_components(since, until, limit, cluster)
        return [one.job for one in components], is_cut

    assert jobs_between(START - 5, START + 9, 1) == ([4], True)
    assert jobs_between(START - 60, START + 9, 1) == ([1], True)
    assert jobs_between(START - 60, START - 50) == ([1], False), "those claimed later are not in the time range"
    assert jobs_between(START - 60, START - 9.5, 2) == ([1, 2], True), "only the part in the time range counts"
    assert jobs_between(0.0, START + 9, 10, "north") == ([1, 2, 4], False)
    assert jobs_between(0.0, START - 9.5, 10, "north") == ([1, 2], False)
    assert jobs_between(0.0, START + 9, 10, "nowhere") == ([], False)
    bounded = HistoryStore(stores.jobs.database, max_examined=2)
    components, is_cut = bounded.ended_components(0.0, START + 9, 10)
    assert (len(components), is_cut) == (2, True)
    assert [one.job for one in bounded.ended_components(0.0, START - 15, 10)[0]] == [1]
    assert [(one.job, one.error) for one in history.failed_components("north", 2)] == [(4, "lost"), (2, "lost")]
    assert history.failed_components("far", 2) == []


def test_outcomes_of_second_half_of_slot_count_in_it(stores: Stores) -> None:
    spec = JobSpec(FlexibleRequest(1), ("true",))
    ends = (100.0, 104.0, 107.0, 110.0, 119.9)
    write_jobs(stores, [Job(n, spec, 1.0, JobState.SUCCEEDED, ended_at=end) for n, end in enumerate(ends, 1)])
    counts = sorted(stores.history.count_outcomes(100.0, 200.0, 10.0))
    assert counts == [(0, "succeeded", 3), (1, "succeeded", 2)]
