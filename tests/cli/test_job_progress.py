"""Progress of a job while a command waits for it."""

import json
import re
from queue import SimpleQueue

import pytest

from koalapy.cli.jobs import shell, waiting
from koalapy.cli.jobs.waiting import progress_lines, read_changes
from koalapy.client.client import Client
from koalapy.client.timeouts import ClientTimeouts
from koalapy.model.job import JobState, TimelineEntry
from tests.cli.conftest import FAST, TOKEN, Koala, Server
from tests.client.test_standby import serve_answers

MISSING_RSYNC = "infrastructure-failure: north: rsync not found (restart 3 of 10, next try after 2 s)"
TIMELINE = [
    (0, TimelineEntry(1, 1.0, "submitted", JobState.QUEUED)),
    (1, TimelineEntry(1, 2.0, "requeued", JobState.QUEUED, MISSING_RSYNC)),
    (1, TimelineEntry(1, 3.0, "requeued", JobState.QUEUED, "claim-failed: local users of north were faster")),
    (2, TimelineEntry(1, 4.0, "requeued", JobState.QUEUED, MISSING_RSYNC)),
    (2, TimelineEntry(1, 5.0, "unknown", JobState.UNKNOWN, "north is out of reach")),
    (2, TimelineEntry(1, 6.0, "running", JobState.RUNNING, "north is back")),
]
PROGRESS_LINES = [
    f"koala: job 1 queues again: {MISSING_RSYNC}",
    "koala: job 1 queues again: claim-failed: local users of north were faster",
    f"koala: job 1 queues again: {MISSING_RSYNC}",
    "koala: job 1 is unknown: north is out of reach",
    "koala: job 1 is running: north is back",
]


def test_submit_wait_prints_each_change_of_job(koala: Koala, server: Server) -> None:
    server.service.timeline_entries = TIMELINE
    result = koala("submit", "--flexible", "1", "--wait", "--", "echo", "hello")
    assert (result.code, result.out) == (0, "hello\n")
    assert [line for line in result.err.splitlines() if line.startswith("koala:")] == PROGRESS_LINES


def test_wait_prints_later_changes_only(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "1", "--", "echo", "hello")
    server.service.timeline_entries = TIMELINE[3:]
    result = koala("wait", "1")
    assert result.code == 0
    assert result.err.splitlines() == PROGRESS_LINES[3:], "earlier changes are not printed"


def test_submit_wait_prints_failure_once(koala: Koala, server: Server) -> None:
    result = koala("submit", "--flexible", "1", "--wait", "--", "exit", "3")
    assert result.code == 3
    assert sum("koala:" in line for line in result.err.splitlines()) == 1


@pytest.mark.parametrize("command", [("logs", "-f", "1"), ("wait", "1"), ("submit", "--flexible", "1", "--wait", "x")])
def test_waiting_command_prints_cause_of_wait(
    koala: Koala, server: Server, interrupted_wait: list[str], command: tuple[str, ...]
) -> None:
    koala("submit", "--flexible", "1", "program")
    server.service.timeline_entries = TIMELINE[:1]
    assert koala(*command, timeouts=FAST).code == 130
    assert interrupted_wait == [f"job {2 if command[0] == 'submit' else 1} is queued: too few idle nodes"]


def test_submission_without_an_answer_names_its_key(koala: Koala) -> None:
    answer = {"status": 503, "code": "not-ready", "detail": "the change may still be made", "hint": "repeat it"}
    with serve_answers(answer, 503) as (url, requests):
        ended = koala("submit", "--url", url, "--flexible", "1", "--", "x", timeouts=FAST)
    assert len(requests) > 1
    assert re.search(r"may still be made; repeat it with --idempotency-key [0-9a-f]{32}: it becomes one job", ended.err)


def test_interrupted_wait_names_jobs_that_go_on(koala: Koala, server: Server, interrupted_wait: list[str]) -> None:
    koala("submit", "--flexible", "1", "--wait", "--", "echo", "hello")
    koala("submit", "--flexible", "1", "program")
    server.service.timeline_entries = TIMELINE[:1]
    ended = koala("wait", "1", "2", timeouts=FAST)
    assert (ended.code, ended.err.splitlines()[-1]) == (130, "koala: job 2 goes on; cancel with: koala cancel 2")


def test_shell_waits_for_its_job_while_the_daemon_is_away(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "2", "--", "start", "x")

    def start_again() -> None:
        server.service.timeline_entries = TIMELINE[-1:]
        server.start()

    lines, changes = list[str](), [server.end, start_again]
    timeouts = ClientTimeouts(sleep=lambda _: changes.pop(0)())
    client = Client(server.url, TOKEN, timeouts=timeouts, report=lines.append)
    shell._wait_until_running(client, 1)  # the first stream ends without a change, as at a shutdown
    assert changes == []
    assert re.fullmatch(r"koala: no daemon answers at .*; still waiting", "\n".join(lines))


def test_wait_reporter_prints_each_cause_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(waiting, "_report_line", messages.put)
    wait = waiting.WaitReporter(FAST)

    def now(state: str, reason: str = "", *, is_reported: bool = False) -> None:
        wait.update({"id": 7, "state": state, "reason": reason}, is_reported=is_reported)

    now("queued", "4 of 6 nodes are idle")
    assert messages.get(timeout=30) == "job 7 is queued: 4 of 6 nodes are idle"
    now("queued", "5 of 6 nodes are idle")
    now("queued", "north is drained")
    assert messages.get(timeout=30) == "job 7 is queued: north is drained"
    now("queued", "restart 1", is_reported=True)
    now("claiming")
    now("running", "3 s")
    now("running", "4 s")
    now("succeeded")
    assert [messages.get(timeout=30) for _ in range(2)] == ["job 7 is claiming", "job 7 is running"]
    assert messages.empty()


def test_wait_reporter_omits_job_that_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(waiting, "_report_line", messages.append)
    wait = waiting.WaitReporter()
    wait.update({"id": 7, "state": "queued", "reason": "new"}, is_reported=False)
    wait.update({"id": 7, "state": "running", "reason": ""}, is_reported=False)
    wait._timer.function()
    wait.close()
    assert messages == []


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_read_changes_joins_split_events(size: int) -> None:
    job = {"id": 7, "restarts": 3, "max_restarts": None}
    entries = [{"event": "requeued", "reason": reason, "state": "queued"} for reason in (MISSING_RSYNC, MISSING_RSYNC)]
    text = ": still here\n\n"
    text += "".join(f"id: {n}\nevent: timeline\ndata: {json.dumps(e)}\n\n" for n, e in enumerate(entries, 4))
    data = f"{text}event: job\ndata: {json.dumps(job)}\n\n".encode()
    ((entries_read, then),) = read_changes(iter([data[start : start + size] for start in range(0, len(data), size)]))
    assert ([number for number, _ in entries_read], then) == ([4, 5], job)
    assert list(progress_lines(entries_read, then)) == [f"job 7 queues again: {MISSING_RSYNC}"] * 2
