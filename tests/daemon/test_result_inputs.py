"""Results of jobs as inputs of other jobs: what a submission may name, and what agents get."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from koalapy.daemon.files import results
from koalapy.daemon.files.results import ResultInputs, Results, _find_entries
from koalapy.daemon.jobs.quota import StorageLimits
from koalapy.model.array import TaskIndices
from koalapy.model.dependency import ResultInput, parse_result_input
from koalapy.model.errors import NotFoundError, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Attempt, Component, Job, JobState, new_job
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.store.records import Batch
from koalapy.store.service_tables import FileStore
from tests.daemon.archives import archive_of, unpack_archive, yield_pieces
from tests.daemon.test_hub import Daemon, running_daemon

ALICE = Identity("alice", Role.USER, "test")
SPEC = JobSpec(FlexibleRequest(1), ("true",), owner="alice", collect=("out*", "res/**/*.csv"))
DAY = 86400.0
NOW = 100 * DAY


class World:
    """The stores of a daemon: jobs 1 (succeeded), 2 (runs), 3 (of bob), an array 4 with the tasks 5 and 6."""

    def __init__(self, path: Path, daemon: Daemon) -> None:
        self.store, self.needed = daemon.store, set[int]()
        limits, attempts = StorageLimits(10**6, 10**9), daemon.jobs.list_attempts
        self.results = Results(
            FileStore(self.store.database),
            path / "results",
            limits,
            clock=lambda: NOW,
            attempts=attempts,
            needed=lambda: self.needed,
        )
        self.inputs = ResultInputs(self.results, daemon.jobs.get)

    def save(self, job: Job) -> None:
        self.store.write(Batch(1.0, self.store.epoch, {job.id: job}))

    async def add_job(self, ident: int, spec: JobSpec, state: JobState, *files: Mapping[str, bytes]) -> None:
        """Add a job with results of its components on north, and an end at time 1; 5 and 6 are tasks of array 4."""
        components = tuple(Component(rank, "north", 1) for rank in range(max(1, len(files))))
        job = Job(ident, spec, 1.0, JobState.RUNNING, generation=1, attempt=Attempt(1, components, 1.0, nonce="n"))
        if ident in (5, 6):
            job = replace(job, array_job=4, array_index=ident - 2)
        self.save(job)
        for rank, content in enumerate(files):
            await self.results.store_result("north", f"{ident}.1.{rank}.n", yield_pieces(archive_of(content)))
        self.save(replace(job, state=state, ended_at=1.0 if state.is_final else None))

    async def resolve(self, *texts: str, caller: Identity = ALICE) -> JobSpec:
        return await self.inputs.resolve_spec(replace(SPEC, result_inputs=_parse(texts)), caller)

    async def read_inputs(self, *texts: str) -> dict[str, bytes | None]:
        """Return what an agent gets for a component of a job that names results and waits for them."""
        await self.add_job(9, await self.resolve(*texts), JobState.RUNNING)
        return unpack_archive(b"".join(await self.inputs.open_archive("north", "9.1.0.n")))


def _parse(texts: tuple[str, ...]) -> tuple[ResultInput, ...]:
    return tuple(map(parse_result_input, texts))


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        world = World(tmp_path, daemon)
        await world.add_job(
            1, SPEC, JobState.SUCCEEDED, {"out": b"0", "res/a.csv": b"a", "res/b/c.csv": b"c"}, {"out": b"1"}
        )
        await world.add_job(2, SPEC, JobState.RUNNING)
        await world.add_job(3, replace(SPEC, owner="bob"), JobState.SUCCEEDED, {"out": b"x"})
        array = new_job(4, replace(SPEC, array=TaskIndices.parse("3-4")), 1.0)
        world.save(replace(array, state=JobState.SUCCEEDED, ended_at=1.0))
        for ident in (5, 6):
            await world.add_job(ident, SPEC, JobState.SUCCEEDED, {"out": b"task"})
        await world.add_job(7, replace(SPEC, collect=()), JobState.SUCCEEDED)
        yield world


async def test_agent_gets_selected_files_and_folders_under_their_names(world: World) -> None:
    content = await world.read_inputs("1.1:out", "1.0:./out:as=zero", "1:res/:as=r", "4[4]:out:as=task")
    assert content == {"out": b"1", "zero": b"0", "r/a.csv": b"a", "r/b/c.csv": b"c", "task": b"task"}


async def test_sources_are_jobs_and_tasks_and_jobs_are_awaited(world: World) -> None:
    spec = await world.resolve("2:out", "4[4]:out:as=task")
    assert [result.source for result in spec.result_inputs] == [2, 6]
    assert [str(dependency.job) for (dependency,) in spec.after] == ["2", "4"]


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("99:out", "names job 99, which does not exist", "koala history"),
        ("3:out", "names job 3, which is not yours", "your own"),
        ("5:out", "names task 4[3] of an array by the number 5", "name it 4[3]:out"),
        ("4:out", "names job 4, which is an array", "as 4[3]:out"),
        ("4[5]:out", "names task 4[5], but array 4 has the tasks 3-4", "one of them"),
        ("1[3]:out", "names task 1[3], but job 1 is no array", "name it 1:out"),
        ("7:out", "is 7:out, but job 7 collects nothing", "--collect out"),
        ("2:log", "is 2:log, but job 2 collects only 'out*' and 'res/**/*.csv'", "--collect log"),
        ("1:out.x", "is 1:out.x, but job 1 collected no out.x", "such as out, res/a.csv"),
        ("1.3:out", "but component 3 of job 1 collected no out", "such as"),
        ("1:out", "components 0 (north) and 1 (north) of job 1 each have out", "1.0:out"),
        ("1:/etc/passwd", "with a path that leads out", "below the folder"),
        ("1:res/../../x", "with a path that leads out", "below the folder"),
        ("1.0:out:as=a/b", "is named 'a/b', with a /", "plain file name"),
    ],
)
async def test_result_that_a_job_cannot_get_is_rejected(world: World, text: str, problem: str, hint: str) -> None:
    with pytest.raises(UsageError) as rejected:
        await world.resolve(text)
    assert rejected.value.field == "result_inputs[0]"
    assert problem in rejected.value.message
    assert hint in rejected.value.hint


async def test_archives_are_searched_once_for_many_inputs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Path] = []

    def find_entries(path: Path) -> frozenset[str]:
        searched.append(path)
        return _find_entries(path)

    monkeypatch.setattr(results, "_find_entries", find_entries)
    await world.resolve(*(f"1.{number % 2}:out:as=out{number}" for number in range(20)))
    assert len(searched) == len(set(searched)) == 2


async def test_inputs_with_the_same_name_are_rejected(world: World) -> None:
    with pytest.raises(UsageError, match=r"would make 1\.1:out out in the component's folder, as 1\.0:out is"):
        await world.resolve("1.0:out", "1.1:out")


async def test_removed_results_are_rejected_at_submission_and_by_agents(world: World) -> None:
    await world.add_job(8, await world.resolve("1.0:out"), JobState.RUNNING)
    await world.results.remove_expired(50 * DAY)
    with pytest.raises(UsageError, match="the files of job 1 are not kept any more"):
        await world.resolve("1.0:out")
    with pytest.raises(NotFoundError, match="the files of job 1 are not kept any more"):
        await world.inputs.open_archive("north", "8.1.0.n")


async def test_needed_results_are_not_removed(world: World) -> None:
    world.needed = {1, 5}
    assert sorted(await world.results.remove_expired(50 * DAY)) == [3, 6]
    assert await world.read_inputs("1.0:out", "4[3]:out:as=three") == {"out": b"0", "three": b"task"}


@pytest.mark.evidence("G3")
@pytest.mark.parametrize(("cluster", "token"), [("south", "8.1.0.n"), ("north", "8.1.0.x"), ("north", "8.2.0.n")])
async def test_inputs_of_another_component_are_not_sent(world: World, cluster: str, token: str) -> None:
    await world.add_job(8, await world.resolve("1.0:out"), JobState.RUNNING)
    with pytest.raises(NotFoundError):
        await world.inputs.open_archive(cluster, token)
