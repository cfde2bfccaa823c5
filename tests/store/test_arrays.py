"""The records of arrays and their tasks, the numbers that they use, and lists with and without tasks."""

from dataclasses import fields, replace

from koalapy.model.array import TaskIndices
from koalapy.model.job import Job, JobState, new_job, task_of, task_spec_of
from koalapy.store.records import JobFilter
from tests.store.conftest import OpenAll
from tests.store.jobs import make_batch, make_job


def make_array(number: int, text: str) -> Job:
    spec = replace(make_job(number).spec, array=TaskIndices.parse(text), each_line=("a", "b", "c"))
    return new_job(number, spec, 5.0)


def start_task(array: Job, position: int, **changes: object) -> Job:
    return replace(task_of(array, position, task_spec_of(array.spec)), **changes)  # type: ignore[arg-type]


def test_array_and_task_are_loaded_as_they_were_stored(open_stores: OpenAll) -> None:
    array = make_array(3, "1-3%2")
    assert array.tasks is not None
    array = replace(array, tasks=replace(array.tasks, pending=((1, 2),), live=1))
    task = start_task(array, 0)
    open_stores().jobs.write(make_batch(array, task))
    stores = open_stores()
    assert stores.jobs.job(3) == array
    assert stores.saved.jobs == (array, task)
    assert stores.saved.next_job == 7


def test_numbers_of_a_deleted_array_are_not_given_again(open_stores: OpenAll) -> None:
    array = replace(make_array(3, "1-3"), state=JobState.CANCELLED, ended_at=9.0)
    stores = open_stores()
    stores.jobs.write(make_batch(array))
    stores.history.remove([3])
    assert open_stores().saved.next_job == 7


def test_lists_have_tasks_only_of_a_named_array(open_stores: OpenAll) -> None:
    jobs = open_stores().jobs
    first, second = make_array(1, "1-3"), make_array(5, "1-3")
    tasks = [start_task(first, 0), start_task(first, 2, state=JobState.SUCCEEDED), start_task(second, 1)]
    jobs.write(make_batch(first, second, make_job(10), *tasks))

    def listed(**fields: object) -> list[int]:
        return [job.id for job in jobs.page(JobFilter(**fields)).jobs]  # type: ignore[arg-type]

    owner = first.spec.owner
    assert listed() == listed(owner=owner) == listed(states=("queued",)) == listed(priority="low") == [10, 5, 1]
    assert listed(array=1) == listed(array=1, owner=owner) == [4, 2]
    assert listed(array=1, states=("succeeded",)) == [4]
    assert listed(array=5) == [7]
    assert listed(array=9) == []
    assert listed(ids=(2, 10)) == [10, 2]


def test_tasks_of_an_array_are_filtered_by_each_field(open_stores: OpenAll) -> None:
    jobs = open_stores().jobs
    array = make_array(1, "1-3")
    jobs.write(make_batch(array, start_task(array, 0, ended_at=5.0)))
    unequal: dict[str, object] = dict.fromkeys(("owner", "name", "application", "home_site", "cluster"), "unlike")
    unequal |= {"priority": "high", "states": ("failed",), "texts": (("user", ("unlike",), False),)}
    unequal |= {"min_restarts": 1, "max_restarts": -1, "min_size": 100, "max_size": 1, "before": 2}
    unequal |= {"since": 99.0, "until": 1.0, "ended_since": 99.0, "ended_until": 1.0, "ids": (1,)}
    assert unequal.keys() == {field.name for field in fields(JobFilter)} - {"limit", "first", "array"}
    found = [name for name, value in unequal.items() if jobs.page(JobFilter(array=1, **{name: value})).jobs]
    assert found == ["ids"], "only of these is the array itself"


def test_jobs_are_found_by_time_past_tasks_that_started_later(open_stores: OpenAll) -> None:
    jobs = open_stores().jobs
    array = make_array(1, "1-9")
    tasks = [replace(start_task(array, position), submitted_at=100.0 * position) for position in range(9)]
    later = [replace(make_job(number), submitted_at=float(number)) for number in range(11, 20)]
    jobs.write(make_batch(array, *tasks, *later))

    def listed(**fields: object) -> list[int]:
        return [job.id for job in jobs.page(JobFilter(**fields)).jobs]  # type: ignore[arg-type]

    assert listed(until=15.0) == [14, 13, 12, 11, 1]
    assert listed(since=13.0, until=15.0) == [14, 13]
    assert listed(array=1, since=750.0) == [10]
