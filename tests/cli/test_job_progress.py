"""Who waits for a job is told what happens to it."""

import json
from queue import SimpleQueue

import pytest

from koalapy.cli.jobs import job_progress
from koalapy.cli.jobs.job_progress import progress_lines, read_changes
from koalapy.model.job import JobState, TimelineEntry
from tests.cli.conftest import FAST, Koala, Server

MISSING = "infrastructure-failure: north: rsync not found (restart 3 of 10, next try after 2 s)"
STORY = [
    (0, TimelineEntry(1, 1.0, "submitted", JobState.QUEUED)),
    (1, TimelineEntry(1, 2.0, "requeued", JobState.QUEUED, MISSING)),
    (1, TimelineEntry(1, 3.0, "requeued", JobState.QUEUED, "claim-failed: local users of north were faster")),
    (2, TimelineEntry(1, 4.0, "requeued", JobState.QUEUED, MISSING)),
    (2, TimelineEntry(1, 5.0, "unknown", JobState.UNKNOWN, "north is out of reach")),
    (2, TimelineEntry(1, 6.0, "running", JobState.RUNNING, "north is back")),
]
TOLD = [
    f"koala: job 1 queues again: {MISSING}",
    "koala: job 1 queues again: claim-failed: local users of north were faster",
    f"koala: job 1 queues again: {MISSING}",
    "koala: job 1 is unknown: north is out of reach",
    "koala: job 1 is running: north is back",
]


def test_who_submits_and_waits_is_told_each_change(koala: Koala, server: Server) -> None:
    server.service.story = STORY
    done = koala("submit", "--flexible", "1", "--wait", "--", "echo", "hello")
    assert (done.code, done.out) == (0, "hello\n")
    assert [line for line in done.err.splitlines() if line.startswith("koala:")] == TOLD


def test_who_waits_later_is_told_what_happens_from_then_on(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "1", "--", "echo", "hello")
    server.service.story = STORY[3:]
    done = koala("wait", "1")
    assert done.code == 0
    assert done.err.splitlines() == TOLD[3:], "the first is what had been before"


def test_a_failure_that_ends_the_waiting_is_told_once(koala: Koala, server: Server) -> None:
    done = koala("submit", "--flexible", "1", "--wait", "--", "exit", "3")
    assert done.code == 3
    assert sum("koala:" in line for line in done.err.splitlines()) == 1


@pytest.mark.parametrize("command", [("logs", "-f", "1"), ("wait", "1"), ("submit", "--flexible", "1", "--wait", "x")])
def test_who_waits_for_a_queued_job_is_told_for_what(
    koala: Koala, server: Server, interrupted_wait: list[str], command: tuple[str, ...]
) -> None:
    koala("submit", "--flexible", "1", "program")
    server.service.story = STORY[:1]
    assert koala(*command, timeouts=FAST).code == 130
    assert interrupted_wait == [f"job {2 if command[0] == 'submit' else 1} is queued: too few idle nodes"]


def test_the_wait_is_told_once_and_again_when_it_is_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    said: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(job_progress, "_report_line", said.put)
    wait = job_progress.WaitReporter(FAST)

    def now(state: str, reason: str = "", *, is_reported: bool = False) -> None:
        wait.update({"id": 7, "state": state, "reason": reason}, is_reported=is_reported)

    now("queued", "4 of 6 nodes are idle")
    assert said.get(timeout=30) == "job 7 is queued: 4 of 6 nodes are idle"
    now("queued", "5 of 6 nodes are idle")
    now("queued", "north is drained")
    assert said.get(timeout=30) == "job 7 is queued: north is drained"
    now("queued", "restart 1", is_reported=True)
    now("claiming")
    now("running", "3 s")
    now("running", "4 s")
    now("succeeded")
    assert [said.get(timeout=30) for _ in range(2)] == ["job 7 is claiming", "job 7 is running"]
    assert said.empty()


def test_one_that_runs_at_once_is_said_nothing_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(job_progress, "_report_line", said.append)
    wait = job_progress.WaitReporter()
    wait.update({"id": 7, "state": "queued", "reason": "new"}, is_reported=False)
    wait.update({"id": 7, "state": "running", "reason": ""}, is_reported=False)
    wait._timer.function()
    wait.close()
    assert said == []


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_put_together_however_they_are_cut(size: int) -> None:
    job = {"id": 7, "restarts": 3, "max_restarts": None}
    entries = [{"event": "requeued", "reason": reason, "state": "queued"} for reason in (MISSING, MISSING)]
    text = ": still here\n\n"
    text += "".join(f"id: {n}\nevent: timeline\ndata: {json.dumps(e)}\n\n" for n, e in enumerate(entries, 4))
    data = f"{text}event: job\ndata: {json.dumps(job)}\n\n".encode()
    ((found, then),) = read_changes(iter([data[at : at + size] for at in range(0, len(data), size)]))
    assert ([number for number, _ in found], then) == ([4, 5], job)
    assert list(progress_lines(found, then)) == [f"job 7 queues again: {MISSING}"] * 2
