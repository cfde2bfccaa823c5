"""The checker finds nothing wrong with an honest history, and everything that is planted in one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.chaos.checker import check
from tests.chaos.evidence import Cancellation, Evidence, Look, Submission, Told
from tests.chaos.marks import Mark
from tests.chaos.rank import line
from tests.chaos.workload import CLUSTERS, Planned, plan_jobs

JOBS = 12
MAX_RESTARTS = 10
OUTPUT_LIMIT = 8192
"""Bytes, less than in a real run, as is what loud jobs write."""
T = TypeVar("T")


class History:
    """Jobs that run one after the other on one cluster, some of them only in a second or third attempt."""

    def __init__(self, seed: int, data: st.DataObject) -> None:
        self._data = data
        self._now = 0.0
        self.marks: list[Mark] = []
        self.told: list[Told] = []
        self.submissions: list[Submission] = []
        for planned in plan_jobs(seed, JOBS):
            lines = planned.task["lines"]
            self._play(replace(planned, task={**planned.task, "lines": lines if lines < 100 else lines // 200}))

    def evidence(self) -> Evidence:
        looks = [Look(1.0, name, "usable", total, total - 1, 1, 0, 0) for name, total in CLUSTERS.items()]
        rest = [Look(9.0, name, "usable", total, total, 0, 0, 0) for name, total in CLUSTERS.items()]
        return Evidence(self.submissions, self.told, self.marks, looks, rest, output_limit=OUTPUT_LIMIT)

    def _play(self, planned: Planned) -> None:
        ident = planned.number + 100
        size = self._data.draw(st.integers(1, 3))
        last = self._data.draw(st.integers(1, 3))
        for generation in range(1, last):
            self._attempt(ident, generation, size, self._data.draw(st.integers(0, size)), planned)
        finishes = planned.expected in ("succeeded", "failed")
        self._attempt(ident, last, size, size if finishes else 0, planned)
        states: dict[str, dict[str, Any]] = {
            "succeeded": {"exit_code": 0},
            "failed": {"exit_code": planned.task["code"], "reason": "the program exited"},
            "cancelled": {"reason": "cancelled"},
            "walltime": {"reason": "walltime of 1 s exceeded"},
        }
        state = "failed" if planned.expected == "walltime" else planned.expected
        output = self._output(ident, last, size if finishes else 0, planned)
        results = {f"out/{r}.txt": f"{ident} {last} {r}".encode() for r in range(size)} if planned.input else {}
        told = Told(
            ident,
            planned.name,
            state,
            generation=last,
            restarts=last - 1,
            max_restarts=MAX_RESTARTS,
            attempts={g: {"alder": size} for g in range(1, last + 1)},
            output={0: output},
            whole_output=output,
            results=results if state == "succeeded" else {},
            **states[planned.expected],
        )
        self.told.append(told)
        cancelled = Cancellation(self._now, last, "running") if planned.expected == "cancelled" else None
        self.submissions.append(Submission(planned, (ident, ident), cancelled, cancelled is not None))

    def _attempt(self, ident: int, generation: int, size: int, finish: int, planned: Planned) -> None:
        """All ranks begin, and so many come to their ends; the others are killed before the next attempt."""
        for what in ("begin", "end"):
            for index in range(size if what == "begin" else finish):
                self._now += 1.0
                node = f"alder-{index + 1}"
                mark = Mark(what, str(ident), generation, index, size, node, "127.71.1.1", 1000 + index, self._now, 0.0)
                fails = what == "end" and index == 0
                self.marks.append(replace(mark, code=planned.task["code"] * fails) if what == "end" else mark)

    def _output(self, ident: int, generation: int, size: int, planned: Planned) -> bytes:
        of, width = planned.task["lines"], planned.task["width"]
        whole = b"".join(line(str(ident), generation, r, n, of, width) for n in range(1, of + 1) for r in range(size))
        if len(whole) <= OUTPUT_LIMIT:
            return whole
        half = OUTPUT_LIMIT // 2
        return whole[:half] + b"koala: some of it is left out\n" + whole[-half:]


def changed(values: list[T], index: int, change: Callable[[T], T]) -> None:
    values[index] = change(values[index])


def pick(history: History, data: st.DataObject, of: Callable[[Told, Planned], bool]) -> int | None:
    """One of the jobs that are like that, by its place."""
    fitting = [
        place
        for place, (job, submission) in enumerate(zip(history.told, history.submissions, strict=True))
        if of(job, submission.planned)
    ]
    return data.draw(st.sampled_from(fitting)) if fitting else None


def succeeded(job: Told, planned: Planned) -> bool:
    return job.state == "succeeded"


def short(job: Told, planned: Planned) -> bool:
    return job.state == "succeeded" and not planned.kind.startswith("loud")


def failing(job: Told, planned: Planned) -> bool:
    return planned.expected == "failed"


def loud(job: Told, planned: Planned) -> bool:
    return len(job.whole_output) > OUTPUT_LIMIT // 2


def with_results(job: Told, planned: Planned) -> bool:
    return bool(job.results)


def own_marks(history: History, job: Told, what: str) -> list[int]:
    """Places of the marks of its last attempt."""
    marks = enumerate(history.marks)
    return [p for p, m in marks if (m.what, m.job, m.generation) == (what, str(job.id), job.generation)]


Plant = Callable[[History, st.DataObject], bool]
PLANTED: dict[str, tuple[str, Plant]] = {}


def plants(rule: str) -> Callable[[Plant], Plant]:
    """A wrong, and the rule by which it must be found; it answers whether it could be done to that history."""

    def enter(plant: Plant) -> Plant:
        PLANTED[plant.__name__] = (rule, plant)
        return plant

    return enter


def at(of: Callable[[Told, Planned], bool], change: Callable[[Told], Told]) -> Plant:
    """Change one of those jobs."""

    def plant(history: History, data: st.DataObject) -> bool:
        place = pick(history, data, of)
        if place is not None:
            changed(history.told, place, change)
        return place is not None

    return plant


def with_output(change: Callable[[list[bytes]], list[bytes]]) -> Plant:
    def told(job: Told) -> Told:
        data = b"".join(change(job.whole_output.splitlines(keepends=True)))
        return replace(job, output={0: data}, whole_output=data)

    return at(lambda job, planned: short(job, planned) and len(job.whole_output) > 64, told)


def begins_of(history: History) -> list[int]:
    """Return the places of the marks of ranks that begin."""
    return [place for place, mark in enumerate(history.marks) if mark.what == "begin"]


def at_begin(change: Callable[[Mark], Mark]) -> Plant:
    """Change one mark of a rank that begins."""

    def plant(history: History, data: st.DataObject) -> bool:
        changed(history.marks, data.draw(st.sampled_from(begins_of(history))), change)
        return True

    return plant


def one_more_begin(change: Callable[[Mark], Mark]) -> Plant:
    """Add a changed copy of one mark of a rank that begins."""

    def plant(history: History, data: st.DataObject) -> bool:
        history.marks.append(change(history.marks[data.draw(st.sampled_from(begins_of(history)))]))
        return True

    return plant


def cut_in_half(job: Told) -> Told:
    data = job.whole_output[: OUTPUT_LIMIT // 2]
    return replace(job, output={0: data}, whole_output=data)


GAVE_UP = "infrastructure-failure: alder: no word (gave up after 10 restarts)"
PLANTED |= {
    "a_job_runs_for_ever": ("unfinished", at(succeeded, lambda job: replace(job, state="running"))),
    "an_exit_code_is_wrong": ("verdict", at(failing, lambda job: replace(job, exit_code=99))),
    "a_failure_without_a_reason": ("verdict", at(succeeded, lambda job: replace(job, state="failed", exit_code=None))),
    "a_job_that_ended_in_time_exceeded_its_walltime": (
        "verdict",
        at(succeeded, lambda job: replace(job, state="failed", reason="walltime of 1 s exceeded", exit_code=None)),
    ),
    "it_gave_up_too_early": ("verdict", at(succeeded, lambda job: replace(job, state="failed", reason=GAVE_UP))),
    "nobody_cancelled_it": ("verdict", at(succeeded, lambda job: replace(job, state="cancelled", reason="cancelled"))),
    "the_end_of_the_output_is_lost": ("output", with_output(lambda lines: lines[:-1])),
    "the_beginning_of_the_output_is_lost": ("output", with_output(lambda lines: lines[1:])),
    "a_line_comes_twice": ("output", with_output(lambda lines: [*lines, lines[-1]])),
    "somebody_elses_line_is_there": ("output", with_output(lambda lines: [*lines, line("7", 1, 0, 1, 1, 64)])),
    "the_answer_for_all_components_lacks_something": (
        "output",
        at(short, lambda job: replace(job, whole_output=job.whole_output[:-1])),
    ),
    "the_end_of_much_output_is_lost": ("output", at(loud, cut_in_half)),
    "a_result_is_lost": ("results", at(with_results, lambda job: replace(job, results={}))),
    "a_lock_was_taken": ("overlap", at_begin(lambda mark: replace(mark, trouble=("node taken: x",)))),
    "a_node_has_the_address_of_another_network": ("network", at_begin(lambda mark: replace(mark, host="127.0.1.1"))),
    "a_rank_ran_on_another_cluster": ("unrecorded", at_begin(lambda mark: replace(mark, node="birch-1"))),
    "a_rank_begins_twice": ("rank twice", one_more_begin(lambda mark: replace(mark, pid=7, at=1e9))),
    "an_attempt_ran_that_nobody_knows": (
        "unrecorded",
        one_more_begin(lambda mark: replace(mark, generation=9, at=1e9)),
    ),
}


@plants("lost")
def a_job_is_lost(history: History, data: st.DataObject) -> bool:
    del history.told[data.draw(st.integers(0, JOBS - 1))]
    return True


@plants("lost")
def a_job_is_never_acknowledged(history: History, data: st.DataObject) -> bool:
    place = data.draw(st.integers(0, JOBS - 1))
    changed(history.submissions, place, lambda one: replace(one, ids=()))
    del history.told[place]
    return True


@plants("twice")
def a_job_is_there_twice(history: History, data: st.DataObject) -> bool:
    job = history.told[data.draw(st.integers(0, JOBS - 1))]
    history.told.append(replace(job, id=999))
    return True


@plants("twice")
def a_key_is_acknowledged_with_two_jobs(history: History, data: st.DataObject) -> bool:
    other = history.told[0].id
    changed(history.submissions, data.draw(st.integers(1, JOBS - 1)), lambda one: replace(one, ids=(*one.ids, other)))
    return True


@plants("verdict")
def a_rank_never_ended(history: History, data: st.DataObject) -> bool:
    place = pick(history, data, succeeded)
    if place is not None:
        del history.marks[data.draw(st.sampled_from(own_marks(history, history.told[place], "end")))]
    return place is not None


@plants("verdict")
def nothing_ran_at_all(history: History, data: st.DataObject) -> bool:
    place = pick(history, data, succeeded)
    if place is not None:
        own = str(history.told[place].id)
        history.marks = [mark for mark in history.marks if mark.job != own]
    return place is not None


@plants("verdict")
def a_rank_failed(history: History, data: st.DataObject) -> bool:
    place = pick(history, data, succeeded)
    if place is not None:
        end = data.draw(st.sampled_from(own_marks(history, history.told[place], "end")))
        changed(history.marks, end, lambda mark: replace(mark, code=3))
    return place is not None


@plants("verdict")
def ample_walltime_is_exceeded(history: History, data: st.DataObject) -> bool:
    place = pick(history, data, lambda job, planned: planned.expected == "walltime")
    if place is not None:
        body = {**history.submissions[place].planned.body, "walltime": 300.0}
        planned = replace(history.submissions[place].planned, body=body)
        changed(history.submissions, place, lambda one: replace(one, planned=planned))
    return place is not None


@plants("not stopped")
def a_cancelled_job_is_tried_again(history: History, data: st.DataObject) -> bool:
    place = pick(history, data, lambda job, planned: planned.expected == "cancelled")
    if place is not None:
        before = Cancellation(0.0, 0, "queued")
        changed(history.submissions, place, lambda one: replace(one, cancelled=before))
    return place is not None


@plants("overlap")
def two_ranks_share_a_node(history: History, data: st.DataObject) -> bool:
    """Seen by the times alone: a local user's job begins while a rank is there."""
    place = pick(history, data, succeeded)
    if place is not None:
        mark = history.marks[own_marks(history, history.told[place], "end")[0]]
        history.marks.append(replace(mark, what="begin", job="local-1", generation=0, at=mark.at - 0.5, code=None))
    return place is not None


@pytest.mark.parametrize("name", PLANTED)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(seed=st.integers(0, 10**6), data=st.data())
def test_what_is_planted_is_found(name: str, seed: int, data: st.DataObject) -> None:
    rule, plant = PLANTED[name]
    history = History(seed, data)
    assume(plant(history, data))
    assert rule in {violation.rule for violation in check(history.evidence())}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_an_honest_history_is_clean(seed: int, data: st.DataObject) -> None:
    assert check(History(seed, data).evidence()) == []


COUNTS = [(4, 3, 2, 0, 0), (4, 3, 0, 0, 0), (4, 5, -1, 0, 0), (3, 0, 2, 3, 0)]


@pytest.mark.parametrize("counts", COUNTS)
def test_nodes_must_add_up(counts: tuple[int, int, int, int, int]) -> None:
    def rules(state: str) -> list[str]:
        look = Look(1.0, "alder", state, *counts)
        return [violation.rule for violation in check(Evidence([], [], [], [look], []))]

    assert rules("usable") == ["counts"]
    assert rules("unreachable") == [], "nobody knows of its nodes then"


@pytest.mark.parametrize("counts", [(4, 3, 1, 0, 0), (4, 3, 0, 1, 0), (4, 3, 0, 0, 1)])
def test_all_nodes_must_be_idle_in_the_end(counts: tuple[int, int, int, int, int]) -> None:
    look = Look(1.0, "alder", "usable", *counts)
    assert [violation.rule for violation in check(Evidence([], [], [], [], [look]))] == ["rest"]


def test_what_is_left_and_what_went_wrong_on_the_way_are_violations() -> None:
    found = check(Evidence([], [], [], [], [], left=["process 7"], troubles=["the daemon ended by itself"]))
    assert [(violation.rule, violation.text) for violation in found] == [
        ("left", "process 7"),
        ("trouble", "the daemon ended by itself"),
    ]


PROCESSES = next(planned for planned in plan_jobs(0, 200) if planned.kind == "fails" and planned.task["lines"] == 3)
"""A job of plain processes, each rank of which writes three lines."""


def check_output_of(state: str, written: Sequence[int], missing: str) -> list[str]:
    """Check a job of one rank on alder that has ended, of whose three lines these came, and alder or another cluster
    is said to lack output."""
    code = PROCESSES.task["code"] if state == "failed" else 0
    begin = Mark("begin", "7", 1, 0, 1, "alder-1", "127.71.1.1", 1000, 1.0, 0.0)
    output = b"".join(line("7", 1, 0, number, 3, PROCESSES.task["width"]) for number in written)
    told = Told(
        7,
        PROCESSES.name,
        state,
        exit_code=code,
        generation=1,
        attempts={1: {"alder": 1}},
        output={0: output},
        whole_output=output,
        missing=frozenset(filter(None, [missing])),
    )
    marks = [begin, replace(begin, what="end", at=2.0, code=code)]
    return [violation.rule for violation in check(Evidence([Submission(PROCESSES, (7,))], [told], marks, [], []))]


@pytest.mark.parametrize("written", [(), (1,), (1, 2), (1, 2, 3)])
def test_output_of_failed_job_cut_where_timeline_says_so_is_clean(written: Sequence[int]) -> None:
    assert check_output_of("failed", written, missing="alder") == []


@pytest.mark.parametrize(
    ("state", "written", "missing"),
    [
        ("failed", (1, 2), ""),
        ("failed", (1, 2), "birch"),
        ("failed", (2, 3), "alder"),
        ("failed", (1, 3), "alder"),
        ("succeeded", (1, 2), "alder"),
    ],
)
def test_output_cut_elsewhere_or_unannounced_or_of_succeeded_job_is_found(
    state: str, written: Sequence[int], missing: str
) -> None:
    assert check_output_of(state, written, missing) == ["output"]
