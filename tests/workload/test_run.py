"""Runs against a daemon in memory, in virtual time, including a failing run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.workload.daemon import WorkloadDaemon
from koalapy.workload.plan import Arrival, Workload
from koalapy.workload.run import Options, Progress, Run


class MemoryDaemon(WorkloadDaemon):
    """A daemon with one cluster of 4 nodes. Each job starts at once and runs as long as its command requests."""

    def __init__(self) -> None:
        self.now = 0.0
        self.jobs: dict[int, Json] = {}
        self.keys: dict[str, int] = {}
        self.submissions: list[float] = []
        self.loads: list[tuple[str, int, float]] = []
        self.unloaded: list[str] = []
        self.cancelled: list[int] = []
        self.limit: int | None = None
        self.away: Callable[[float], bool] = lambda _: False
        self.lose_answer_at: float | None = None

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _check(self) -> None:
        if self.away(self.now):
            raise GridError("nobody answers", Exit.UNREACHABLE)

    def submit_job(self, job: Json, key: str) -> Json:
        self._check()
        if key in self.keys:
            return self.fetch_job(self.keys[key])
        if self.limit is not None and len(self.active_states()) >= self.limit:
            error = GridError("the queue is full", Exit.NOT_ALLOWED)
            error.retry_after = 3.0
            raise error
        if job["command"] == ["wrong"]:
            raise GridError("it can never run", Exit.USAGE)
        ident = self.keys[key] = len(self.jobs) + 1
        self.jobs[ident] = {**job, "id": ident, "submitted": self.now, "lasts": float(job["command"][1])}
        self.submissions.append(round(self.now, 3))
        if self.lose_answer_at is not None and self.now >= self.lose_answer_at:
            self.lose_answer_at = None
            raise GridError("the answer was lost", Exit.UNREACHABLE)
        return self.fetch_job(ident)

    def _over(self, job: Json) -> bool:
        return job["id"] in self.cancelled or bool(self.now >= job["submitted"] + job["lasts"])

    def list_clusters(self) -> Sequence[Json]:
        self._check()
        used = min(4, len(self.active_states()))
        return [
            {"name": "north", "state": "usable", "total": 4, "used": used, "background": 0, "idle": 4 - used, "down": 0}
        ]

    def active_states(self) -> Mapping[int, str]:
        self._check()
        return {job["id"]: "running" for job in self.jobs.values() if not self._over(job)}

    def fetch_job(self, job: int) -> Json:
        self._check()
        record = self.jobs[job]
        is_over = self._over(record)
        state = "cancelled" if job in self.cancelled else "succeeded" if is_over else "running"
        return {
            "id": job,
            "request": record["request"],
            "policy": "worst-fit",
            "state": state,
            "ended_at": "then" if is_over else None,
            "wait_time": 0.5,
            "queue_time": 0.25,
            "startup_overhead": 0.25,
            "response_time": record["lasts"] if is_over else None,
            "start_delay": 0.0,
            "placement_tries": 1,
            "claiming_tries": 1,
            "restarts": 0,
            "components": [{"cluster": "north", "size": 1}],
        }

    def list_attempts(self, job: int) -> Sequence[Json]:
        return []

    def cancel_jobs(self, jobs: Sequence[int]) -> Sequence[str]:
        self._check()
        self.cancelled += jobs
        return [f"job {job} is succeeded already" for job in jobs if self.fetch_job(job)["state"] == "succeeded"]

    def start_load(self, cluster: str, nodes: int, seconds: float) -> None:
        self.loads.append((cluster, nodes, seconds))

    def end_load(self, cluster: str) -> None:
        self.unloaded.append(cluster)


def make_workload(*jobs: tuple[float, float]) -> Workload:
    """Return a workload with jobs of these arrival and run times."""
    request = {"type": "flexible", "total_size": 1}
    return Workload(
        {"seed": 1},
        tuple(Arrival(arrival, "sleep", {"request": request, "command": ["sleep", str(s)]}) for arrival, s in jobs),
    )


def run_workload(
    daemon: MemoryDaemon, work: Workload, show: Callable[[Progress], None] = lambda _: None, **options: Any
) -> tuple[Json, list[str]]:
    messages: list[str] = []
    run = Run(
        work, daemon, Options(**options), tell=messages.append, show=show, clock=lambda: daemon.now, sleep=daemon.sleep
    )
    return run.run(), messages


def test_run_submits_jobs_at_arrival_and_awaits_their_end() -> None:
    daemon, progress = MemoryDaemon(), []
    report, messages = run_workload(daemon, make_workload((0.0, 5.0), (2.0, 5.0), (2.5, 20.0)), progress.append)
    assert daemon.submissions == pytest.approx([0.0, 2.0, 2.5], abs=0.15)
    assert report["summary"]["states"] == {"succeeded": 3}
    assert report["summary"]["response_time"] == 10.0
    assert report["run"]["complete"] is True
    assert (report["run"]["late"], messages) == (0, [])
    assert 22.5 <= report["run"]["seconds"] <= 25
    # Over 22.5 s on 4 nodes: one node for 2 s, two for 0.5 s, three for 2.5 s, two for 2 s, one for 15.5 s.
    assert report["utilisation"]["all"]["ours"] == pytest.approx(30 / 90, abs=0.05)
    assert progress[-1].ended == {"succeeded": 3}
    assert max(p.states["running"] for p in progress) == 3


def test_run_with_busy_daemon_retries_after_its_delay() -> None:
    daemon = MemoryDaemon()
    daemon.limit = 1
    report, messages = run_workload(daemon, make_workload((0.0, 4.0), (1.0, 4.0)))
    assert daemon.submissions == pytest.approx([0.0, 4.0], abs=0.3)
    assert report["summary"]["states"] == {"succeeded": 2}
    assert report["run"]["late"] == 1
    assert report["run"]["latest"] == pytest.approx(3.0, abs=0.3)
    assert any("waits 3 s" in line for line in messages)
    assert any("3.0 s late" in line or "late" in line for line in messages)


def test_run_with_rejected_job_continues() -> None:
    work = make_workload((0.0, 1.0), (1.0, 1.0))
    wrong = Arrival(0.5, "sleep", {"request": {"type": "flexible", "total_size": 1}, "command": ["wrong"]})
    report, messages = run_workload(MemoryDaemon(), Workload({}, (work.jobs[0], wrong, work.jobs[1])))
    assert report["summary"]["states"] == {"refused": 1, "succeeded": 2}
    assert report["jobs"][1]["reason"] == "it can never run"
    assert any("refused" in line for line in messages)


def test_run_with_daemon_briefly_away_waits() -> None:
    daemon = MemoryDaemon()
    daemon.away = lambda now: 2.0 <= now < 30.0
    report, messages = run_workload(daemon, make_workload((0.0, 10.0), (5.0, 10.0)))
    assert report["summary"]["states"] == {"succeeded": 2}
    assert daemon.submissions == pytest.approx([0.0, 30.0], abs=1.2)
    assert report["run"]["daemon_away"] == pytest.approx(28, abs=1.5)
    assert [line.split(":")[0] for line in messages][:2] == ["the daemon is away", "the daemon is back after 28 s"]
    # Sampled for 2 s before the outage and 11 s after it. All samples but the first and the third have one node in use.
    assert report["utilisation"]["all"]["ours"] == pytest.approx(10 / (4 * 12), abs=0.01)


def test_run_with_daemon_away_for_too_long_ends() -> None:
    daemon = MemoryDaemon()
    daemon.away = lambda now: now >= 2.0
    report, _ = run_workload(daemon, make_workload((0.0, 10.0), (5.0, 10.0)), patience=20.0)
    assert report["run"]["complete"] is False
    assert "away for 20 s" in report["run"]["interrupted"]
    assert report["summary"]["states"] == {"not submitted": 1, "running": 1}


def test_run_with_lost_answer_submits_job_once() -> None:
    daemon = MemoryDaemon()
    daemon.lose_answer_at = 1.0
    report, _ = run_workload(daemon, make_workload((0.0, 2.0), (1.0, 2.0)))
    assert len(daemon.jobs) == 2
    assert report["summary"]["states"] == {"succeeded": 2}


def interrupt_at(daemon: MemoryDaemon, time: float) -> Callable[[Progress], None]:
    def show(_: Progress) -> None:
        if daemon.now >= time:
            raise KeyboardInterrupt

    return show


@pytest.mark.parametrize("cancels", [False, True])
def test_run_interrupted_cancels_jobs_only_with_option(cancels: bool) -> None:
    daemon = MemoryDaemon()
    report, messages = run_workload(
        daemon,
        make_workload((0.0, 1.0), (0.5, 50.0), (30.0, 1.0)),
        interrupt_at(daemon, 5.0),
        cancel_on_interrupt=cancels,
    )
    assert daemon.cancelled == ([2] if cancels else [])
    states = {"succeeded": 1, "not submitted": 1, "cancelled" if cancels else "running": 1}
    assert report["summary"]["states"] == states
    assert report["run"]["interrupted"] == "interrupted"
    assert any("1 job is cancelled" in line if cancels else "1 job goes on" in line for line in messages)


@pytest.mark.parametrize("arrived", [False, True])
def test_run_interrupted_in_submission_cancels_that_job(arrived: bool) -> None:
    class Slow(MemoryDaemon):
        interrupts = True

        def submit_job(self, job: Json, key: str) -> Json:
            if self.interrupts and arrived:
                super().submit_job(job, key)
            if self.interrupts:
                self.interrupts = False
                raise KeyboardInterrupt
            return super().submit_job(job, key)

    daemon = Slow()
    report, _ = run_workload(daemon, make_workload((0.0, 50.0), (5.0, 50.0)), cancel_on_interrupt=True)
    assert daemon.cancelled == [1]
    assert report["summary"]["states"] == {"cancelled": 1, "not submitted": 1}


def test_run_shows_progress_of_many_jobs_rarely() -> None:
    """Displaying the progress of many jobs is slow and would delay submissions."""
    daemon, progress = MemoryDaemon(), []
    report, _ = run_workload(daemon, make_workload((0.0, 60.0)), progress.append)
    assert len(progress) <= 4 * report["run"]["seconds"]


def test_run_awaits_the_end_of_cancelled_jobs() -> None:
    """Cancelled jobs free their nodes a moment later, and the report needs their final states."""

    class Dying(MemoryDaemon):
        def cancel_jobs(self, jobs: Sequence[int]) -> Sequence[str]:
            for job in jobs:
                self.jobs[job]["lasts"] = self.now + 2.0 - self.jobs[job]["submitted"]
            return ["and this is said"]

        def fetch_job(self, job: int) -> Json:
            record = super().fetch_job(job)
            return record | {"state": "cancelled"} if record["state"] == "succeeded" else record

    daemon = Dying()
    report, messages = run_workload(
        daemon, make_workload((0.0, 50.0)), interrupt_at(daemon, 5.0), cancel_on_interrupt=True
    )
    assert report["summary"]["states"] == {"cancelled": 1}
    assert "and this is said" in messages


def test_run_with_timeout_ends() -> None:
    report, _ = run_workload(MemoryDaemon(), make_workload((0.0, 500.0)), timeout=10.0)
    assert report["run"]["interrupted"] == "not done within 10 s"
    assert 10 <= report["run"]["seconds"] <= 11


def test_run_starts_and_ends_background_load() -> None:
    daemon = MemoryDaemon()
    run_workload(daemon, make_workload((0.0, 30.0)), background=0.25, background_seconds=5.0)
    assert daemon.loads
    assert {cluster for cluster, _, _ in daemon.loads} == {"north"}
    assert daemon.unloaded == ["north"]


def test_run_reports_cluster_without_background_load_once() -> None:
    class Grudging(MemoryDaemon):
        def start_load(self, cluster: str, nodes: int, seconds: float) -> None:
            raise GridError("not here", Exit.NOT_ALLOWED)

    report, messages = run_workload(Grudging(), make_workload((0.0, 30.0)), background=0.25, background_seconds=5.0)
    assert [line for line in messages if "background" in line] == ["no background load on north: not here"]
    assert report["summary"]["states"] == {"succeeded": 1}


def test_run_with_rejecting_daemon_reports_known_results() -> None:
    class Closed(MemoryDaemon):
        def active_states(self) -> Mapping[int, str]:
            if self.now > 3:
                raise GridError("the token is not known", Exit.NOT_ALLOWED)
            return super().active_states()

    report, _ = run_workload(Closed(), make_workload((0.0, 1.0), (1.0, 50.0)))
    assert report["run"]["interrupted"] == "the daemon refuses to tell more: the token is not known"
    assert report["summary"]["states"] == {"running": 1, "succeeded": 1}
