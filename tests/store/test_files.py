"""Replicas, bundles and results in every database."""

from dataclasses import replace

import pytest

from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.replica import Part, Replica, ReplicaState
from koalapy.model.request import FlexibleRequest
from koalapy.store.records import Batch, StoredResult
from koalapy.store.service_tables import FileStore
from tests.store.conftest import OpenAll

MESH = Replica("climate/mesh.nc", "north", "/data/mésh -x.nc", 2**40, "c0ffee", added_at=1.5, verified_at=2.5)
FIELDS = Replica("fields", "south", "/data/fields", 30, "f1", (Part("a b", 10, "aa"), Part("é", 20, "bb")))


@pytest.fixture
def files(open_stores: OpenAll) -> FileStore:
    return open_stores().files


def test_replicas_are_read_as_written(files: FileStore) -> None:
    second = replace(MESH, cluster="south", state=ReplicaState.CHANGED, reason="it has 1 byte, not 2")
    files.save_replicas([FIELDS, second, MESH])
    assert files.replicas() == [MESH, second, FIELDS]
    files.save_replicas([replace(second, state=ReplicaState.GOOD, reason="")])
    files.save_replicas([])
    assert files.replicas()[1].state is ReplicaState.GOOD
    files.remove_replicas("climate/mesh.nc", ["north", "west"])
    assert [(r.name, r.cluster) for r in files.replicas()] == [("climate/mesh.nc", "south"), ("fields", "south")]


def test_replica_of_empty_folder_has_no_parts(files: FileStore) -> None:
    files.save_replicas([replace(FIELDS, parts=())])
    assert files.replicas()[0].parts == ()


def test_results_of_new_attempt_replace_old_ones(open_stores: OpenAll) -> None:
    stores = open_stores()
    files = stores.files
    jobs = {i: Job(i, JobSpec(FlexibleRequest(2), ("true",)), 1.0) for i in (1, 2, 3)}
    jobs[1] = replace(jobs[1], state=JobState.SUCCEEDED, ended_at=10.0)
    jobs[2] = replace(jobs[2], state=JobState.FAILED, ended_at=20.0)
    stores.jobs.write(Batch(1.0, stores.jobs.epoch, jobs))
    first = StoredResult(1, 2, 0, "north", 10, 1, 9.0)
    earlier = [files.save_result(replace(first, generation=1, rank=rank, size=7)) for rank in (0, 1)]
    assert (earlier, sum(files.results_sizes().values())) == ([0, 0], 14)
    assert [files.save_result(result) for result in (replace(first, rank=1), first)] == [14, 0]
    assert files.save_result(replace(first, job=2, size=2**40)) == 0
    assert files.save_result(replace(first, size=20, files=5)) == 10
    assert files.results(1, 2) == [replace(first, size=20, files=5), replace(first, rank=1)]
    assert (files.results(1, 1), sum(files.results_sizes().values())) == ([], 30 + 2**40)


def test_old_results_are_ordered_by_job_end(open_stores: OpenAll) -> None:
    stores = open_stores()
    files = stores.files
    jobs = {i: Job(i, JobSpec(FlexibleRequest(2), ("true",)), 1.0) for i in range(1, 6)}
    for ident, ended in ((1, 30.0), (2, 10.0), (3, 20.0), (4, 40.0)):
        jobs[ident] = replace(jobs[ident], state=JobState.SUCCEEDED, ended_at=ended)
    stores.jobs.write(Batch(1.0, stores.jobs.epoch, jobs))
    for job in jobs:
        for rank in (0, 1):
            files.save_result(StoredResult(job, 1, rank, "north", 10, 1, 9.0))
    assert files.old_results(10.0) == {}
    assert list(files.old_results(40.0).items()) == [(2, 20), (3, 20), (1, 20)]
    assert (files.clear_results([2, 3]), files.clear_results([2, 9]), files.clear_results([])) == (40, 0, 0)
    assert [result.size for result in files.results(2, 1)] == [0, 0], "deleted results stay listed"
    assert list(files.old_results(1e9).items()) == [(1, 20), (4, 20)], "results of an unfinished job are not old"
    assert sum(files.results_sizes().values()) == 60


def test_results_are_counted_by_job_owner(open_stores: OpenAll) -> None:
    stores = open_stores()
    files, owners = stores.files, ("alice", "bob", "alice", "alice")
    jobs = {
        i: Job(i, JobSpec(FlexibleRequest(2), ("true",), owner=owner), 1.0, JobState.SUCCEEDED, ended_at=float(i))
        for i, owner in enumerate(owners, 1)
    }
    stores.jobs.write(Batch(1.0, stores.jobs.epoch, jobs))
    for job in jobs:
        files.save_result(StoredResult(job, 1, 0, "north", 10, 1, 9.0))
    assert files.results_sizes() == {"alice": 30, "bob": 10}
    assert files.old_results(3.5, ["alice", "carl"]) == {1: 10, 3: 10}
    assert files.clear_results([1, 3]) == 20
    assert files.results_sizes() == {"alice": 10, "bob": 10}
    assert files.old_results(1e9, []) == {}
