"""The placement queue compared with a plain list that is searched completely."""

import gc
from types import FunctionType, ModuleType

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.scheduler.queue.queue import NODES_ANYWHERE, Entry, Group, PlacementQueue
from koalapy.scheduler.rules import QueueMode, QueueOrder

Jobs = list[tuple[int, int, int]]


def make_spec(size: int) -> JobSpec:
    return JobSpec(FlexibleRequest(size), ("program",))


class PlainQueue:
    """A literal implementation of semantics 4: (key, job, shape) in order."""

    def __init__(self, order: QueueOrder) -> None:
        self.narrowest = order == "narrowest-first"
        self.jobs: list[tuple[tuple[int, int], int, int]] = []

    def push(self, job: int, seq: int, size: int) -> None:
        """Insert a job at the position given by ``seq``."""
        self.jobs.append(((size if self.narrowest else 0, seq), job, size))
        self.jobs.sort()

    def remove(self, job: int) -> None:
        self.jobs = [entry for entry in self.jobs if entry[1] != job]

    def scan(self, capacity: int, mode: QueueMode) -> tuple[list[int], int]:
        """Return the offered jobs and the remaining capacity. A rejected shape is skipped afterwards."""
        offered, refused, remaining = [], set(), []
        is_stopped = False
        for entry in self.jobs:
            _, job, size = entry
            if is_stopped or size in refused:
                remaining.append(entry)
                continue
            offered.append(job)
            if size <= capacity:
                capacity -= size
                continue
            remaining.append(entry)
            refused.add(size)
            is_stopped = mode != "scan"
        self.jobs = remaining
        return offered, capacity


ACTIONS = st.one_of(
    st.tuples(st.just("push"), st.integers(1, 5)),
    st.tuples(st.just("remove"), st.integers(0, 30)),
    st.tuples(st.just("release"), st.integers(0, 30)),
    st.tuples(st.just("return"), st.integers(0, 30)),
    st.tuples(st.just("scan"), st.integers(0, 12)),
)


@given(
    actions=st.lists(ACTIONS, max_size=40),
    order=st.sampled_from(["fcfs", "narrowest-first"]),
    mode=st.sampled_from(["scan", "head", "fcfs"]),
)
def test_queue_behaves_like_plain_list(actions: list[tuple[str, int]], order: QueueOrder, mode: QueueMode) -> None:
    queue, plain_queue = PlacementQueue(order), PlainQueue(order)
    sizes: list[int] = []
    seqs: list[int] = []
    waits_since = [40 - job // 2 for job in range(40)]
    for seq, (action, value) in enumerate(actions):
        if action == "push":
            sizes.append(value)
            seqs.append(seq)
            queue.push(len(sizes) - 1, seq, value, make_spec(value), waits_since=waits_since[len(sizes) - 1])
            plain_queue.push(len(sizes) - 1, seq, value)
        elif action == "remove":
            queue.remove(value)
            plain_queue.remove(value)
        elif action in ("release", "return") and value < len(sizes):
            # To the tail or back to its old position, whether or not it is queued.
            seqs[value] = seq if action == "release" else seqs[value]
            queue.remove(value)
            plain_queue.remove(value)
            queue.push(value, seqs[value], sizes[value], make_spec(sizes[value]), waits_since=waits_since[value])
            plain_queue.push(value, seqs[value], sizes[value])
        elif action == "scan":
            offered, _ = scan_queue(queue, sizes, value, mode)
            assert (offered, _) == plain_queue.scan(value, mode)
        expected = [job for _, job, _ in plain_queue.jobs]
        assert list(queue) == expected
        assert len(queue) == len(expected)
        assert [job for job in range(len(sizes)) if job in queue] == sorted(expected)
        assert [queue.position(job) for job in expected] == list(range(len(expected)))
        assert queue.head() == next(iter(expected), None)
        first = {sizes[job]: job for job in sorted(expected, key=lambda job: -seqs[job])}
        assert [entry.job for entry in queue.first_of_each_shape(lambda _: True)] == sorted(
            first.values(), key=lambda job: (waits_since[job], seqs[job])
        )


CLUSTERS = st.frozensets(st.sampled_from(["north", "south", "east"]), max_size=3)


@given(jobs=st.lists(st.tuples(CLUSTERS, st.booleans()), max_size=20))
def test_awaited_clusters_are_those_of_queued_jobs(jobs: list[tuple[frozenset[str], bool]]) -> None:
    queue = PlacementQueue()
    for job, (clusters, _) in enumerate(jobs):
        components = tuple(ComponentRequest(1, name) for name in sorted(clusters) * 2)
        request = FixedRequest(components) if components else FlexibleRequest(1)
        queue.push(job, job, clusters, JobSpec(request, ("program",)))
    for job, (_, is_queued) in enumerate(jobs):
        if not is_queued:
            queue.remove(job)
            queue.remove(job)
    clusters_of_jobs = [clusters or {NODES_ANYWHERE.name} for clusters, is_queued in jobs if is_queued]
    assert queue.awaited == frozenset().union(*clusters_of_jobs)


def scan_queue(queue: PlacementQueue, sizes: list[int], capacity: int, mode: QueueMode) -> tuple[list[int], int]:
    offered = []
    for job in queue.scan(mode, lambda: lambda needs: True):
        offered.append(job)
        if sizes[job] <= capacity:
            capacity -= sizes[job]
            queue.remove(job)
    return offered, capacity


@given(
    jobs=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), max_size=20),
    removed_jobs=st.lists(st.integers(0, 19), max_size=20),
    tries=st.integers(1, 4),
)
def test_queue_keeps_nothing_of_removed_jobs(jobs: list[tuple[int, int]], removed_jobs: list[int], tries: int) -> None:
    """This includes groups of equal shape and shapes without a job."""
    queue = PlacementQueue()
    for job, (size, limited) in enumerate(jobs):
        queue.push(job, job, size, make_spec(size))
        queue.set_tries(job, 0, tries if limited else None)
    for job in removed_jobs:
        queue.remove(job)
    queued_jobs = set(range(len(jobs))) - set(removed_jobs)
    objects = reachable_objects(queue)
    assert sum(isinstance(value, Entry) for value in objects) == len(queued_jobs)
    assert sum(isinstance(value, Group) for value in objects) == len({jobs[job][0] for job in queued_jobs})
    exhausted_jobs = [job for _ in range(tries) for job in queue.count_scan()]
    assert exhausted_jobs == [job for job in sorted(queued_jobs) if jobs[job][1]]


def reachable_objects(root: object) -> list[object]:
    """Return every object that an object keeps alive."""
    objects_by_id: dict[int, object] = {}
    pending = [root]
    while pending:
        value = pending.pop()
        if id(value) not in objects_by_id and not isinstance(value, type | FunctionType | ModuleType):
            objects_by_id[id(value)] = value
            pending += gc.get_referents(value)
    return list(objects_by_id.values())
