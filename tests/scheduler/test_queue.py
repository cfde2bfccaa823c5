"""The placement queue against a plain list that is searched anew each time."""

import gc
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobSpec
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.scheduler.queue.queue import NODES_ANYWHERE, Entry, Group, PlacementQueue
from koalapy.scheduler.rules import QueueMode, QueueOrder

Jobs = list[tuple[int, int, int]]


def flexible(size: int) -> JobSpec:
    return JobSpec(FlexibleRequest(size), ("program",))


class PlainQueue:
    """Does what semantics 4 says, word by word: (key, job, shape) in order."""

    def __init__(self, order: QueueOrder) -> None:
        self.narrowest = order == "narrowest-first"
        self.jobs: list[tuple[tuple[int, int], int, int]] = []

    def push(self, job: int, seq: int, size: int) -> None:
        """To the place that ``seq`` gives it."""
        self.jobs.append(((size if self.narrowest else 0, seq), job, size))
        self.jobs.sort()

    def remove(self, job: int) -> None:
        self.jobs = [entry for entry in self.jobs if entry[1] != job]

    def scan(self, room: int, mode: QueueMode) -> tuple[list[int], int]:
        """Head to tail; a shape refused once is refused for the rest. The jobs offered, and the room left."""
        offered, refused, kept = [], set(), []
        stopped = False
        for entry in self.jobs:
            _, job, size = entry
            if stopped or size in refused:
                kept.append(entry)
                continue
            offered.append(job)
            if size <= room:
                room -= size
                continue
            kept.append(entry)
            refused.add(size)
            stopped = mode != "scan"
        self.jobs = kept
        return offered, room


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
def test_it_does_what_a_plain_list_does(actions: list[tuple[str, int]], order: QueueOrder, mode: QueueMode) -> None:
    queue, plain = PlacementQueue(order), PlainQueue(order)
    sizes: list[int] = []
    seqs: list[int] = []
    for seq, (action, value) in enumerate(actions):
        if action == "push":
            sizes.append(value)
            seqs.append(seq)
            queue.push(len(sizes) - 1, seq, value, flexible(value))
            plain.push(len(sizes) - 1, seq, value)
        elif action == "remove":
            queue.remove(value)
            plain.remove(value)
        elif action in ("release", "return") and value < len(sizes):
            # To the tail, or back to the place it had; whether it is still there, or not.
            seqs[value] = seq if action == "release" else seqs[value]
            queue.remove(value)
            plain.remove(value)
            queue.push(value, seqs[value], sizes[value], flexible(sizes[value]))
            plain.push(value, seqs[value], sizes[value])
        elif action == "scan":
            offered, _ = scan(queue, sizes, value, mode)
            assert (offered, _) == plain.scan(value, mode)
        expected = [job for _, job, _ in plain.jobs]
        assert list(queue) == expected
        assert len(queue) == len(expected)
        assert [job for job in range(len(sizes)) if job in queue] == sorted(expected)
        assert [queue.position(job) for job in expected] == list(range(len(expected)))
        assert queue.head() == next(iter(expected), None)
        oldest = {sizes[job]: job for job in sorted(expected, key=lambda job: -seqs[job])}
        assert [entry.job for entry in queue.first_of_each_shape(lambda _: True)] == sorted(
            oldest.values(), key=lambda job: seqs[job]
        )


COMES = st.tuples(st.integers(1, 2), st.integers(0, 12), st.integers(0, 4), st.integers(0, 4))
"""A size, a place, tries of before, and when it was submitted."""


@given(
    acts=st.lists(st.one_of(COMES, st.sampled_from(["scan", "leave first", "leave last", "tried"])), max_size=30),
    wanted=st.integers(0, 6),
    before=st.integers(0, 5),
)
def test_the_first_of_each_shape_that_has_waited_is_known(acts: list[Any], wanted: int, before: int) -> None:
    """By scans and tries of before, or since its submission; whoever stands before it, and leaves."""
    queue = PlacementQueue()
    here: dict[int, tuple[int, int, int, int]] = {}
    for job, act in enumerate(acts):
        if act == "scan":
            queue.count_scan()
            here = {other: (size, seq, tries + 1, at) for other, (size, seq, tries, at) in here.items()}
        elif isinstance(act, tuple):
            here[job] = size, seq, tries, at = act
            queue.push(job, seq, size, flexible(size), submitted_at=at)
            queue.set_tries(job, tries, None)
        elif here and act == "tried":
            (size, seq, tries, at), other = here[min(here)], min(here)
            here[other] = size, seq, tries + 3, at
            queue.set_tries(other, tries + 3, None)
        elif here:
            gone = (min if act == "leave first" else max)(here, key=lambda other: (here[other][1], other))
            del here[gone]
            queue.remove(gone)
        order = sorted(here, key=lambda other: (here[other][1], other))
        aged = {here[other][0]: other for other in reversed(order) if here[other][2] >= wanted}
        old = {here[other][0]: other for other in reversed(order) if here[other][3] <= before}
        has_aged = queue.first_of_each_shape(partial(queue.has_aged, wanted))
        is_old = queue.first_of_each_shape(lambda entry: entry.submitted_at <= before)
        assert sorted(entry.job for entry in has_aged) == sorted(aged.values())
        assert sorted(entry.job for entry in is_old) == sorted(old.values())
        assert [entry.place[2] for entry in has_aged] == sorted(entry.place[2] for entry in has_aged)


CLUSTERS = st.frozensets(st.sampled_from(["north", "south", "east"]), max_size=3)


@given(jobs=st.lists(st.tuples(CLUSTERS, st.booleans()), max_size=20))
def test_it_knows_what_clusters_its_jobs_name(jobs: list[tuple[frozenset[str], bool]]) -> None:
    queue = PlacementQueue()
    for job, (clusters, _) in enumerate(jobs):
        components = tuple(ComponentRequest(1, name) for name in sorted(clusters) * 2)
        request = FixedRequest(components) if components else FlexibleRequest(1)
        queue.push(job, job, clusters, JobSpec(request, ("program",)))
    for job, (_, stays) in enumerate(jobs):
        if not stays:
            queue.remove(job)
            queue.remove(job)
    named = [clusters or {NODES_ANYWHERE.name} for clusters, stays in jobs if stays]
    assert queue.awaited == frozenset().union(*named)


def scan(queue: PlacementQueue, sizes: list[int], room: int, mode: QueueMode) -> tuple[list[int], int]:
    offered = []
    for job in queue.scan(mode, lambda: lambda needs: True):
        offered.append(job)
        if sizes[job] <= room:
            room -= sizes[job]
            queue.remove(job)
    return offered, room


@given(
    jobs=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), max_size=20),
    leave=st.lists(st.integers(0, 19), max_size=20),
    tries=st.integers(1, 4),
)
def test_nothing_is_kept_of_jobs_that_have_left(jobs: list[tuple[int, int]], leave: list[int], tries: int) -> None:
    """Also not behind a first one of their shape that stays for ever, nor of shapes of which none is left."""
    queue = PlacementQueue()
    for job, (size, limited) in enumerate(jobs):
        queue.push(job, job, size, flexible(size))
        queue.set_tries(job, 0, tries if limited else None)
    for job in leave:
        queue.remove(job)
    stay = set(range(len(jobs))) - set(leave)
    kept = reachable(queue)
    assert sum(isinstance(thing, Entry) for thing in kept) == len(stay)
    assert sum(isinstance(thing, Group) for thing in kept) == len({jobs[job][0] for job in stay})
    used_up = [job for _ in range(tries) for job in queue.count_scan()]
    assert used_up == [job for job in sorted(stay) if jobs[job][1]]


def reachable(root: object) -> list[object]:
    """Everything that an object keeps alive."""
    seen: dict[int, object] = {}
    found = [root]
    while found:
        thing = found.pop()
        if id(thing) not in seen and not isinstance(thing, type | FunctionType | ModuleType):
            seen[id(thing)] = thing
            found += gc.get_referents(thing)
    return list(seen.values())
