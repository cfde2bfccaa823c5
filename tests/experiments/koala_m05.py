"""Run the workload of mohamed-2005 on an embedded grid with a real daemon, real processes and failing starts.

``python -m tests.experiments.koala_m05 --jobs 500 --claiming atomic --failures 0.3`` prints one table. No file is
transferred, so a start delay comes from failures only.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from koalapy.agent.lrm.local.cluster import LocalCluster, LocalConnection
from koalapy.model.job_spec import ClaimingMode, Priority
from tests.experiments.m05 import CLUSTERS, QUEUE_LIMIT, LocalUser, Outcome, PlannedJob, Run, Workload, table, workload
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until

LOOK_EVERY = 0.1
RULES = {
    "scan_interval": "4",
    "claim_epsilon": "0.05",
    "claim_grace": "1",
    "plan_after": "null",
    "preemption_order": "jst",
    "placement_queue_limit": str(QUEUE_LIMIT),
    "max_restarts": "null",
    "restart_pause": "0",
    # With a failure probability of 0.3, many errors in a row are chance.
    "error_threshold": "100",
    "probation_pause": "2",
    "probation_pause_max": "16",
}


def make_grid(directory: Path, claiming: ClaimingMode, failures: float) -> EmbeddedGrid:
    """Return an embedded grid, not yet started, with two clusters on which starts fail."""
    directory.mkdir()
    config = directory / "koala.yaml"
    rules = "".join(f"  {name}: {value}\n" for name, value in {**RULES, "claiming": claiming}.items())
    clusters = "".join(f"  {c}: {{nodes: {nodes}, start_failures: {failures}}}\n" for c, nodes in CLUSTERS.items())
    config.write_text(f"rules:\n{rules}clusters:\n{clusters}")
    return EmbeddedGrid(directory / "data", KOALA_CONFIG=str(config))


class Experiment:
    """Submit the jobs of a workload as planned and measure the load until every job has ended."""

    def __init__(self, grid: EmbeddedGrid, plan: Workload, localds: dict[str, LocalConnection]) -> None:
        self._grid, self._localds = grid, localds
        arrivals: list[PlannedJob | LocalUser] = [*plan.jobs, *plan.local_users]
        self._coming: deque[PlannedJob | LocalUser] = deque(sorted(arrivals, key=lambda one: one.arrives))
        self._outside: deque[PlannedJob] = deque()
        self._let_in_at = 0.0
        self._looked_at = 0.0
        self.node_seconds = {"ours": 0.0, "local": 0.0}

    def run(self, longest: float) -> float:
        """Run until every job has ended or ``longest`` seconds have passed; return the seconds that passed."""
        began = time.monotonic()
        while (lasted := time.monotonic() - began) < longest:
            while self._coming and self._coming[0].arrives <= lasted:
                one = self._coming.popleft()
                if isinstance(one, PlannedJob):
                    self._outside.append(one)
                else:
                    self._comes(one)
            while self._outside and lasted >= self._let_in_at and self._is_let_in(self._outside[0]):
                self._outside.popleft()
            if self._outside and lasted >= self._let_in_at:
                self._let_in_at = lasted + 1.0
            if self._is_over(lasted):
                break
            time.sleep(LOOK_EVERY)
        return lasted

    def _is_over(self, lasted: float) -> bool:
        for cluster in self._grid.list_clusters():
            self.node_seconds["ours"] += cluster["used"] * (lasted - self._looked_at)
            self.node_seconds["local"] += cluster["background"] * (lasted - self._looked_at)
        self._looked_at = lasted
        if self._coming or self._outside:
            return False
        return not self._grid.http.get("/api/v1/jobs", params={"active": True, "limit": 1}).json()["jobs"]

    def _is_let_in(self, job: PlannedJob) -> bool:
        answer = self._grid.http.post("/api/v1/jobs", json=job.submission)
        assert answer.status_code in (201, 429), answer.text
        return answer.status_code == 201

    def _comes(self, user: LocalUser) -> None:
        self._localds[user.cluster].request(
            "submit",
            name="sleep",
            user="alice",
            nodes=user.nodes,
            argv=["/bin/sleep", f"{user.lasts:.3f}"],
            env={},
            cwd="/",
            output="/dev/null",
        )

    def outcomes(self, number: int) -> list[Outcome]:
        return [_outcome(job) for job in self._jobs(number)]

    def at_barriers(self, number: int) -> tuple[float, float]:
        """Return the node-seconds spent at barriers by components that started, and by those that did not."""
        before, without = 0.0, 0.0
        for job in self._jobs(number):
            for attempt in self._grid.http.get(f"/api/v1/jobs/{job['id']}/attempts").json()["attempts"]:
                for component in attempt["components"]:
                    if component["claimed_at"] is None:
                        continue
                    starts = attempt["barrier_at"] is not None and not component["superseded"]
                    until = attempt["barrier_at"] if starts else component["ended_at"] or attempt["ended_at"]
                    waited = datetime.fromisoformat(until) - datetime.fromisoformat(component["claimed_at"])
                    before += component["size"] * waited.total_seconds() if starts else 0.0
                    without += 0.0 if starts else component["size"] * waited.total_seconds()
        return before, without

    def _jobs(self, number: int) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = []
        while len(jobs) < number:
            before = {"before": jobs[-1]["id"]} if jobs else {}
            page = self._grid.http.get("/api/v1/jobs", params={"limit": 100, **before}).json()["jobs"]
            if not page:
                break
            jobs += page
        return jobs


def _outcome(job: dict[str, Any]) -> Outcome:
    return Outcome(
        Priority(job["priority"]),
        job["state"] == "succeeded",
        job["queue_time"] or 0.0,
        job["start_delay"] or 0.0,
        job["wait_time"] or 0.0,
        job["response_time"] or 0.0,
        job["placement_tries"],
        job["claiming_tries"],
        job["restarts"],
    )


@contextmanager
def _grid(directory: Path, claiming: ClaimingMode, failures: float) -> Iterator[EmbeddedGrid]:
    grid = make_grid(directory, claiming, failures)
    try:
        yield grid.start()
    finally:
        # A second interrupt must not leave processes behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            if grid.url:
                _cancel_everything(grid)
                close_grid(grid)
            elif grid.daemon is not None:
                grid.stop_daemon()
        finally:
            signal.signal(signal.SIGINT, before)


def _cancel_everything(grid: EmbeddedGrid) -> None:
    def none_left() -> bool:
        jobs = grid.http.get("/api/v1/jobs", params={"active": True, "limit": 100}).json()["jobs"]
        for job in jobs:
            grid.http.post(f"/api/v1/jobs/{job['id']}/cancel")
        return not jobs

    wait_until(none_left, "every job to be cancelled")


def run(
    directory: Path,
    claiming: ClaimingMode,
    *,
    jobs: int,
    failures: float,
    every: float = 1.2,
    scale: float = 1.0,
    longest: float = 1800.0,
) -> Run:
    """Run the workload once on a new grid below ``directory``."""
    plan = workload(jobs, every=every, scale=scale)
    with _grid(directory, claiming, failures) as grid, ExitStack() as connections:
        began = time.monotonic()
        localds: dict[str, LocalConnection] = {}
        for name, nodes in CLUSTERS.items():
            place = Path(grid.get_cluster(name)["details"]["directory"])
            localds[name] = connections.enter_context(LocalCluster(place, name, nodes).connect())
        experiment = Experiment(grid, plan, localds)
        lasted = experiment.run(longest)
        offered = sum(CLUSTERS.values()) * lasted
        ours, local = (experiment.node_seconds[who] / offered for who in ("ours", "local"))
        outcomes, at_barriers = experiment.outcomes(jobs), experiment.at_barriers(jobs)
        return Run(claiming, outcomes, ours, local, lasted, time.monotonic() - began, *at_barriers)


def main() -> int:
    parser = argparse.ArgumentParser(prog="koala_m05", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument(
        "--claiming", choices=list(ClaimingMode), action="append", help="may be given more than once; default: all"
    )
    parser.add_argument("--failures", type=float, default=0.3, help="probability that a component's start fails")
    parser.add_argument("--every", type=float, default=1.2, help="seconds between two jobs, on average")
    parser.add_argument("--longest", type=float, default=1800.0, help="seconds that one run may take")
    options = parser.parse_args()
    modes = [ClaimingMode(each) for each in options.claiming or ClaimingMode]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="koala-m05-") as folder:
        try:
            for claiming in modes:
                runs.append(
                    run(
                        Path(folder, claiming),
                        claiming,
                        jobs=options.jobs,
                        failures=options.failures,
                        every=options.every,
                        longest=options.longest,
                    )
                )
        except KeyboardInterrupt:
            print("interrupted: every job was cancelled, every process ended", file=sys.stderr)
    print(table(runs))
    complete = len(runs) == len(modes)
    return 0 if complete and all(outcome.succeeded for one in runs for outcome in one.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
