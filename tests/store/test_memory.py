"""The store in memory: what it answers is what a database answers, and nothing of it outlives its daemon."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koalapy.model.errors import ConflictError, UsageError
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.ports import Batch
from koalapy.store.engine import MEMORY, make_engine
from koalapy.store.memory import Memory, MemoryStore
from koalapy.store.migrate import migrate
from koalapy.store.opening import open_stores, stores_in_memory
from koalapy.store.output import FileOutput
from tests.store.answers import answers, statistics
from tests.store.jobs import a_job, batch

SPECS = [
    JobSpec(FlexibleRequest(3), ("./wave",), owner="ada", walltime=30.0),
    JobSpec(FlexibleRequest(3), ("./wave",), priority=Priority.HIGH, application="mine"),
    JobSpec(FlexibleRequest(3), ("./wave",), owner="koala", application="-", internal=True),
]
moments = st.none() | st.integers(0, 100).map(float)


@st.composite
def attempts(draw: st.DrawFn, generation: int) -> Attempt:
    sizes = draw(st.sampled_from([(3,), (2, 1)]))
    components = [
        Component(
            index,
            draw(st.sampled_from(["north", "south"])),
            size,
            draw(st.sampled_from(ComponentState)),
            claimed_at=draw(moments),
            ended_at=draw(moments),
        )
        for index, size in enumerate(sizes)
    ]
    if draw(st.booleans()):
        lost = replace(components[0], superseded=True)
        components = [lost, *components[1:], replace(components[0], index=len(sizes), replaces=0)]
    return Attempt(
        generation,
        tuple(components),
        placed_at=5.0,
        start_estimate=draw(moments),
        barrier_at=draw(moments),
        launched_at=draw(moments),
        ended_at=draw(moments),
        exit_code=draw(st.none() | st.just(1)),
    )


@st.composite
def jobs(draw: st.DrawFn, ident: int) -> list[Job]:
    """One as it is when it is first stored, and as it is then."""
    job = Job(ident, draw(st.sampled_from(SPECS)), 1.0, first_start_estimate=draw(moments))
    state = draw(st.sampled_from(JobState))
    ended = draw(st.integers(0, 100)) + ident / 1000 if state.is_final else None
    tries = [draw(attempts(generation)) for generation in range(1, draw(st.integers(1, 3)))]
    times = {"placed_at": draw(moments), "started_at": draw(moments), "restarts": draw(st.integers(0, 3))}
    last = tries[-1] if tries else None
    end = replace(job, state=state, ended_at=ended, generation=len(tries), attempt=last, **times)
    return [*(replace(job, generation=each.generation, attempt=each) for each in tries[:1]), end]


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "koala.db"
    engine = make_engine(f"sqlite:///{path}")
    migrate(engine)
    engine.dispose()
    return path


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(*map(jobs, range(1, 6))), st.sets(st.integers(1, 5)))
def test_it_answers_as_a_database_does(
    migrated: Path, tmp_path_factory: pytest.TempPathFactory, histories: tuple[list[Job], ...], over: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("one")
    shutil.copy(migrated, folder / "koala.db")
    output = FileOutput(folder / "output", 100)
    database = open_stores(f"sqlite:///{folder / 'koala.db'}", output)
    memory = stores_in_memory(Memory(), output)
    for stores in (database, memory):
        for step in range(2):
            states = {history[step].id: history[step] for history in histories if step < len(history)}
            stores.jobs.write(Batch(at=1.0, epoch=1, jobs=states))
    assert answers(memory) == answers(database)
    assert statistics(memory) == statistics(database)
    if gone := [job for job in sorted(over) if histories[job - 1][-1].state.is_final]:
        memory.history.remove(gone)
        database.history.remove(gone)
    assert answers(memory) == answers(database)
    assert statistics(memory) == statistics(database)
    database.jobs.close()


def test_it_is_chosen_by_its_url_and_is_another_each_time(tmp_path: Path) -> None:
    output = FileOutput(tmp_path, 100)
    first, second = (open_stores(MEMORY, output) for _ in range(2))
    first.jobs.write(batch(a_job(1)))
    assert second.jobs.job(1) is None
    assert first.jobs.instance != second.jobs.instance
    with pytest.raises(UsageError) as error:
        open_stores("mysql://localhost/koala", output)
    assert "memory:" in (error.value.hint or "")


def test_it_has_one_holder_at_a_time() -> None:
    memory = Memory()
    first = MemoryStore(memory)
    with pytest.raises(ConflictError, match="another daemon"):
        MemoryStore(memory)
    first.release_lease()
    second = MemoryStore(memory)
    assert (second.epoch, second.instance) == (2, first.instance)
    second.raise_epoch(7)
    second.write(batch(a_job(1)))
    assert second.epoch == 7
