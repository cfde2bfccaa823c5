"""The checker accepts a correct history, and finds each defect that is inserted in one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from koalapy.audit.facts import Fact, JobRecord, Run, RunKind, Source
from tests.chaos.checker import check
from tests.chaos.evidence import Cancellation, ClusterReport, Evidence, ReportedJob, Submission
from tests.chaos.marks import Mark
from tests.chaos.rank import format_line
from tests.chaos.workload import CLUSTERS, PlannedJob, plan_jobs

JOBS = 12
MAX_RESTARTS = 10
OUTPUT_LIMIT = 8192
"""Bytes, fewer than in a real run, as is the output of loud jobs."""
T = TypeVar("T")


def state_facts(job: ReportedJob) -> Iterator[Fact]:
    """Yield what the database holds of a job."""
    database = Source("database")
    yield JobRecord(database, job.id, job.state, job.generation, job.exit_code, job.reason, 0.0, 0.0)
    for generation, sizes in job.attempts.items():
        for index, (cluster, size) in enumerate(sizes.items()):
            yield Run(database, RunKind.CLAIM, job.id, generation, str(index), cluster, 0.0, size=size)


class History:
    """A history of jobs that run one after another on one cluster, some in a second or third attempt."""

    def __init__(self, seed: int, data: st.DataObject) -> None:
        self._data = data
        self._now = 0.0
        self.marks: list[Mark] = []
        self.jobs: list[ReportedJob] = []
        self.submissions: list[Submission] = []
        for planned in plan_jobs(seed, JOBS):
            lines = planned.task["lines"]
            self._play(replace(planned, task={**planned.task, "lines": lines if lines < 100 else lines // 200}))

    def evidence(self) -> Evidence:
        looks = [ClusterReport(1.0, name, "usable", total, total - 1, 1, 0, 0) for name, total in CLUSTERS.items()]
        final_reports = [ClusterReport(9.0, name, "usable", total, total, 0, 0, 0) for name, total in CLUSTERS.items()]
        facts = [fact for job in self.jobs for fact in state_facts(job)]
        return Evidence(
            self.submissions, self.jobs, self.marks, looks, final_reports, facts=facts, output_limit=OUTPUT_LIMIT
        )

    def _play(self, planned: PlannedJob) -> None:
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
        job = ReportedJob(
            ident,
            planned.name,
            state,
            generation=last,
            restarts=last - 1,
            max_restarts=MAX_RESTARTS,
            attempts={g: {"alder": size} for g in range(1, last + 1)},
            output={0: output},
            joined_output=output,
            results=results if state == "succeeded" else {},
            **states[planned.expected],
        )
        self.jobs.append(job)
        cancelled = Cancellation(self._now, last, "running") if planned.expected == "cancelled" else None
        self.submissions.append(Submission(planned, (ident, ident), cancelled, cancelled is not None))

    def _attempt(self, ident: int, generation: int, size: int, finish: int, planned: PlannedJob) -> None:
        """Add the marks of an attempt in which ``size`` ranks begin and ``finish`` end."""
        for event in ("begin", "end"):
            for index in range(size if event == "begin" else finish):
                self._now += 1.0
                node = f"alder-{index + 1}"
                mark = Mark(
                    event, str(ident), generation, index, size, node, "127.71.1.1", 1000 + index, self._now, 0.0
                )
                fails = event == "end" and index == 0
                self.marks.append(replace(mark, code=planned.task["code"] * fails) if event == "end" else mark)

    def _output(self, ident: int, generation: int, size: int, planned: PlannedJob) -> bytes:
        line_count, width = planned.task["lines"], planned.task["width"]
        complete = b"".join(
            format_line(str(ident), generation, r, n, line_count, width)
            for n in range(1, line_count + 1)
            for r in range(size)
        )
        if len(complete) <= OUTPUT_LIMIT:
            return complete
        half = OUTPUT_LIMIT // 2
        return complete[:half] + b"koala: some of it is left out\n" + complete[-half:]


def change_at(values: list[T], index: int, change: Callable[[T], T]) -> None:
    values[index] = change(values[index])


def pick_job(history: History, data: st.DataObject, matches: Callable[[ReportedJob, PlannedJob], bool]) -> int | None:
    """Draw the position of a job that matches, or return None."""
    fitting = [
        place
        for place, (job, submission) in enumerate(zip(history.jobs, history.submissions, strict=True))
        if matches(job, submission.planned)
    ]
    return data.draw(st.sampled_from(fitting)) if fitting else None


def succeeded(job: ReportedJob, planned: PlannedJob) -> bool:
    return job.state == "succeeded"


def short(job: ReportedJob, planned: PlannedJob) -> bool:
    return job.state == "succeeded" and not planned.kind.startswith("loud")


def failing(job: ReportedJob, planned: PlannedJob) -> bool:
    return planned.expected == "failed"


def loud(job: ReportedJob, planned: PlannedJob) -> bool:
    return len(job.joined_output) > OUTPUT_LIMIT // 2


def with_results(job: ReportedJob, planned: PlannedJob) -> bool:
    return bool(job.results)


def find_marks(history: History, job: ReportedJob, event: str) -> list[int]:
    """Return the positions of an event's marks in the job's last attempt."""
    marks = enumerate(history.marks)
    return [p for p, m in marks if (m.event, m.job, m.generation) == (event, str(job.id), job.generation)]


Defect = Callable[[History, st.DataObject], bool]
DEFECTS: dict[str, tuple[str, Defect]] = {}


def defect(rule: str) -> Callable[[Defect], Defect]:
    """Register a defect and its rule; the function returns whether the history allows the defect."""

    def enter(plant: Defect) -> Defect:
        DEFECTS[plant.__name__] = (rule, plant)
        return plant

    return enter


def change_job_if(
    matches: Callable[[ReportedJob, PlannedJob], bool], change: Callable[[ReportedJob], ReportedJob]
) -> Defect:
    """Return a defect that changes a matching job."""

    def plant(history: History, data: st.DataObject) -> bool:
        place = pick_job(history, data, matches)
        if place is not None:
            change_at(history.jobs, place, change)
        return place is not None

    return plant


def with_output(change: Callable[[list[bytes]], list[bytes]]) -> Defect:
    def change_job(job: ReportedJob) -> ReportedJob:
        data = b"".join(change(job.joined_output.splitlines(keepends=True)))
        return replace(job, output={0: data}, joined_output=data)

    return change_job_if(lambda job, planned: short(job, planned) and len(job.joined_output) > 64, change_job)


def find_begin_marks(history: History) -> list[int]:
    """Return the positions of the begin marks."""
    return [place for place, mark in enumerate(history.marks) if mark.event == "begin"]


def change_begin_mark(change: Callable[[Mark], Mark]) -> Defect:
    """Return a defect that changes a begin mark."""

    def plant(history: History, data: st.DataObject) -> bool:
        change_at(history.marks, data.draw(st.sampled_from(find_begin_marks(history))), change)
        return True

    return plant


def add_begin_mark(change: Callable[[Mark], Mark]) -> Defect:
    """Return a defect that adds a changed copy of a begin mark."""

    def plant(history: History, data: st.DataObject) -> bool:
        history.marks.append(change(history.marks[data.draw(st.sampled_from(find_begin_marks(history)))]))
        return True

    return plant


def cut_output_in_half(job: ReportedJob) -> ReportedJob:
    data = job.joined_output[: OUTPUT_LIMIT // 2]
    return replace(job, output={0: data}, joined_output=data)


GAVE_UP = "infrastructure-failure: alder: no word (gave up after 10 restarts)"
DEFECTS |= {
    "a_job_runs_for_ever": ("unfinished", change_job_if(succeeded, lambda job: replace(job, state="running"))),
    "an_exit_code_is_wrong": ("verdict", change_job_if(failing, lambda job: replace(job, exit_code=99))),
    "a_failure_without_a_reason": (
        "verdict",
        change_job_if(succeeded, lambda job: replace(job, state="failed", exit_code=None)),
    ),
    "it_gave_up_too_early": (
        "verdict",
        change_job_if(succeeded, lambda job: replace(job, state="failed", reason=GAVE_UP)),
    ),
    "nobody_cancelled_it": (
        "verdict",
        change_job_if(succeeded, lambda job: replace(job, state="cancelled", reason="cancelled")),
    ),
    "the_end_of_the_output_is_lost": ("output", with_output(lambda lines: lines[:-1])),
    "a_line_comes_twice": ("output", with_output(lambda lines: [*lines, lines[-1]])),
    "somebody_elses_line_is_there": ("output", with_output(lambda lines: [*lines, format_line("7", 1, 0, 1, 1, 64)])),
    "the_answer_for_all_components_lacks_something": (
        "output",
        change_job_if(short, lambda job: replace(job, joined_output=job.joined_output[:-1])),
    ),
    "the_end_of_much_output_is_lost": ("output", change_job_if(loud, cut_output_in_half)),
    "a_result_is_lost": ("results", change_job_if(with_results, lambda job: replace(job, results={}))),
    "a_lock_was_taken": ("overlap", change_begin_mark(lambda mark: replace(mark, trouble=("node taken: x",)))),
    "a_node_has_the_address_of_another_network": (
        "network",
        change_begin_mark(lambda mark: replace(mark, host="127.0.1.1")),
    ),
    "a_rank_ran_on_another_cluster": ("run-recorded", change_begin_mark(lambda mark: replace(mark, node="birch-1"))),
    "a_rank_begins_twice": ("attempt-once", add_begin_mark(lambda mark: replace(mark, pid=7, time_s=1e9))),
    "an_attempt_ran_that_nobody_knows": (
        "run-recorded",
        add_begin_mark(lambda mark: replace(mark, generation=9, time_s=1e9)),
    ),
}


@defect("submission-once")
def a_job_is_lost(history: History, data: st.DataObject) -> bool:
    del history.jobs[data.draw(st.integers(0, JOBS - 1))]
    return True


@defect("submission-once")
def a_job_is_there_twice(history: History, data: st.DataObject) -> bool:
    job = history.jobs[data.draw(st.integers(0, JOBS - 1))]
    history.jobs.append(replace(job, id=999))
    return True


@defect("gang-whole")
def a_rank_never_ended(history: History, data: st.DataObject) -> bool:
    place = pick_job(history, data, succeeded)
    if place is not None:
        del history.marks[data.draw(st.sampled_from(find_marks(history, history.jobs[place], "end")))]
    return place is not None


@defect("result-produced")
def a_rank_failed(history: History, data: st.DataObject) -> bool:
    place = pick_job(history, data, succeeded)
    if place is not None:
        end = data.draw(st.sampled_from(find_marks(history, history.jobs[place], "end")))
        change_at(history.marks, end, lambda mark: replace(mark, code=3))
    return place is not None


@defect("not stopped")
def a_cancelled_job_is_tried_again(history: History, data: st.DataObject) -> bool:
    place = pick_job(history, data, lambda job, planned: planned.expected == "cancelled")
    if place is not None:
        early_cancellation = Cancellation(0.0, 0, "queued")
        change_at(history.submissions, place, lambda submission: replace(submission, cancelled=early_cancellation))
    return place is not None


@defect("node-once")
def two_ranks_share_a_node(history: History, data: st.DataObject) -> bool:
    """Add a local user's job that begins while a rank runs."""
    place = pick_job(history, data, succeeded)
    if place is not None:
        mark = history.marks[find_marks(history, history.jobs[place], "end")[0]]
        history.marks.append(
            replace(mark, event="begin", job="local-1", generation=0, time_s=mark.time_s - 0.5, code=None)
        )
    return place is not None


@pytest.mark.parametrize("name", DEFECTS)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(seed=st.integers(0, 10**6), data=st.data())
def test_checker_finds_each_defect(name: str, seed: int, data: st.DataObject) -> None:
    rule, plant = DEFECTS[name]
    history = History(seed, data)
    assume(plant(history, data))
    assert rule in {violation.rule for violation in check(history.evidence())}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_checker_accepts_correct_history(seed: int, data: st.DataObject) -> None:
    assert check(History(seed, data).evidence()) == []


@pytest.mark.parametrize("counts", [(4, 3, 2, 0, 0), (4, 5, -1, 0, 0), (4, 3, 1, 0, 0), (4, 3, 0, 0, 1)])
def test_checker_finds_wrong_node_counts_and_busy_nodes_at_end(counts: tuple[int, int, int, int, int]) -> None:
    look = ClusterReport(1.0, "alder", "usable", *counts)
    is_sum = sum(counts[1:]) == counts[0] and min(counts) >= 0
    assert [v.rule for v in check(Evidence([], [], [], [look], []))] == ([] if is_sum else ["counts"])
    assert [v.rule for v in check(Evidence([], [], [], [], [look]))] == ["rest"]
    assert check(Evidence([], [], [], [replace(look, state="unreachable")], [])) == []


def test_checker_reports_remains_and_troubles() -> None:
    violations = check(Evidence([], [], [], [], [], remains=["process 7"], troubles=["the daemon ended by itself"]))
    assert [violation.rule for violation in violations] == ["left", "trouble"]


PROCESSES = next(planned for planned in plan_jobs(0, 200) if planned.kind == "fails" and planned.task["lines"] == 3)
"""A failing job of processes, each of which writes three lines."""


@pytest.mark.parametrize(
    ("state", "written", "missing", "was_power_lost", "rules"),
    [
        *(("failed", written, "alder", False, []) for written in ((), (1,), (1, 2), (1, 2, 3))),
        ("failed", (1, 2), "birch", False, ["output"]),
        ("failed", (2, 3), "alder", False, ["output"]),
        ("failed", (1, 3), "alder", False, ["output"]),
        ("succeeded", (1, 2), "alder", False, ["output"]),
        ("succeeded", (1, 2), "alder", True, []),
        ("succeeded", (1, 2), "birch", True, ["output"]),
        ("succeeded", (2, 3), "alder", True, ["output"]),
    ],
)
def test_checker_accepts_only_output_missing_by_timeline(
    state: str, written: Sequence[int], missing: str, was_power_lost: bool, rules: list[str]
) -> None:
    """One rank on alder has ended; ``written`` are the lines of three that arrived."""
    code = PROCESSES.task["code"] if state == "failed" else 0
    begin = Mark("begin", "7", 1, 0, 1, "alder-1", "127.71.1.1", 1000, 1.0, 0.0)
    output = b"".join(format_line("7", 1, 0, number, 3, PROCESSES.task["width"]) for number in written)
    job = ReportedJob(
        7,
        PROCESSES.name,
        state,
        exit_code=code,
        generation=1,
        attempts={1: {"alder": 1}},
        output={0: output},
        joined_output=output,
        missing=frozenset({missing}),
    )
    marks = [begin, replace(begin, event="end", time_s=2.0, code=code)]
    facts, submissions = list(state_facts(job)), [Submission(PROCESSES, (7,))]
    evidence = Evidence(submissions, [job], marks, [], [], facts=facts, was_power_lost=was_power_lost)
    assert [violation.rule for violation in check(evidence)] == rules
