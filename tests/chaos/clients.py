"""Clients of the grid during the faults: submitters, local users, and a poller of the clusters."""

import heapq
import io
import json
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from tests.chaos import rank
from tests.chaos.evidence import FINAL_STATES, Cancellation, ClusterReport, Submission
from tests.chaos.grid import ChaosGrid, Client, read_details
from tests.chaos.workload import LocalUser, PlannedJob

PROGRAM = str(Path(rank.__file__).resolve())
POLL_INTERVAL_S = 0.3


def build_command(folder: Path, task: Any) -> list[str]:
    return [sys.executable, "-I", "-S", PROGRAM, str(folder), json.dumps(dict(task))]


class Submitters:
    """Submit planned jobs from several threads, limit the unfinished ones, and retry until each is acknowledged."""

    def __init__(
        self,
        grid: ChaosGrid,
        planned: Sequence[PlannedJob],
        *,
        pace: float,
        max_unfinished: int,
        stop_at: float,
        deadline: float,
    ) -> None:
        """Submit one job every ``pace`` seconds until ``stop_at``, and retry until ``deadline``."""
        self._grid, self._pace, self._most, self._stop_at, self._until = grid, pace, max_unfinished, stop_at, deadline
        self._coming = list(reversed(planned))
        self._lock = threading.Lock()
        self._next_at = time.monotonic()
        self.done: list[Submission] = []
        self.troubles: list[str] = []
        self._to_cancel: list[tuple[float, int, PlannedJob]] = []
        self._cancelled: dict[int, Cancellation | None] = {}
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._submit_all, name=f"submitter-{n}") for n in range(3)]
        self._canceller = threading.Thread(target=self._cancel_all, name="canceller")

    def start(self) -> None:
        for thread in (*self._threads, self._canceller):
            thread.start()

    def finish(self) -> list[Submission]:
        """Wait for all threads, and return the submissions."""
        for thread in self._threads:
            thread.join()
        self._closing.set()
        self._canceller.join()
        cancellations = self._cancelled
        return [
            replace(submission, cancelled=cancellations.get(number), cancel_tried=number in cancellations)
            for number, submission in self._by_number()
        ]

    def _by_number(self) -> list[tuple[int, Submission]]:
        return [(submission.planned.number, submission) for submission in self.done]

    def _submit_all(self) -> None:
        client = self._grid.client()
        while (planned := self._next()) is not None:
            while self._crowded(client) and time.monotonic() < self._stop_at:
                time.sleep(0.4)
            if time.monotonic() > self._stop_at:
                break
            ids: list[int] = []
            try:
                body = self._body(client, planned)
                second_poster = threading.Thread(target=self._post_too, args=(planned, body, ids))
                if planned.twice:
                    second_poster.start()
                self._post(client, planned, body, ids)
                if planned.twice:
                    second_poster.join()
            except TimeoutError as error:
                self.troubles.append(f"{planned.name} could not be submitted: {error}")
            with self._lock:
                self.done.append(Submission(planned, tuple(ids)))
                if planned.cancel_after is not None and ids:
                    heapq.heappush(self._to_cancel, (time.monotonic() + planned.cancel_after, ids[0], planned))
        client.close()

    def _next(self) -> PlannedJob | None:
        with self._lock:
            if not self._coming or time.monotonic() > self._stop_at:
                return None
            planned = self._coming.pop()
            submit_time = self._next_at = max(self._next_at, time.monotonic()) + self._pace
        time.sleep(max(0.0, submit_time - self._pace - time.monotonic()))
        return planned

    def _crowded(self, client: Client) -> bool:
        try:
            health = read_details(client.send("GET", "/healthz"))
        except httpx2.HTTPError:
            return True
        return bool(health.get("queued", 0) + health.get("active", 0) >= self._most)

    def _body(self, client: Client, planned: PlannedJob) -> dict[str, Any]:
        body = {**planned.body, "command": build_command(self._grid.folder, planned.task)}
        if planned.input:
            answer = client.request("POST", "/api/v1/bundles", self._until, content=archive_input(planned.input))
            body["bundle"] = read_details(answer).get("id", answer.text)
        return body

    def _post(self, client: Client, planned: PlannedJob, body: dict[str, Any], ids: list[int]) -> None:
        """Submit a job until it is acknowledged, with the same key each time."""
        headers = {"Idempotency-Key": f"key-{planned.number}"}
        answer = client.request("POST", "/api/v1/jobs", self._until, json=body, headers=headers)
        if answer.status_code in (200, 201):
            ids.append(int(answer.json()["id"]))
        else:
            self.troubles.append(f"{planned.name} was refused: {answer.status_code} {answer.text[:300]}")

    def _post_too(self, planned: PlannedJob, body: dict[str, Any], ids: list[int]) -> None:
        client = self._grid.client()
        try:
            self._post(client, planned, body, ids)
        except TimeoutError as error:
            self.troubles.append(f"{planned.name} could not be submitted a second time: {error}")
        finally:
            client.close()

    def _cancel_all(self) -> None:
        client = self._grid.client()
        while True:
            closing = self._closing.is_set()
            with self._lock:
                due = bool(self._to_cancel) and (closing or self._to_cancel[0][0] <= time.monotonic())
                order = heapq.heappop(self._to_cancel) if due else None
            if order is not None:
                self._cancel(client, order[1], order[2])
            elif closing:
                break
            else:
                time.sleep(0.05)
        client.close()

    def _cancel(self, client: Client, ident: int, planned: PlannedJob) -> None:
        self._cancelled[planned.number] = None
        try:
            answer = client.request("POST", f"/api/v1/jobs/{ident}/cancel", self._until, json={"reason": "test"})
        except TimeoutError as error:
            self.troubles.append(f"{planned.name} could not be cancelled: {error}")
            return
        job = read_details(answer)
        if answer.status_code == 200:
            if job["state"] not in FINAL_STATES or job["state"] == "cancelled":
                self._cancelled[planned.number] = Cancellation(time.monotonic(), job["generation"], job["state"])
        elif answer.status_code != 409:
            self.troubles.append(f"cancelling {planned.name}: {answer.status_code} {answer.text[:300]}")


def archive_input(content: str) -> bytes:
    """Return an archive with the input file of a job."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:") as archive:
        member = tarfile.TarInfo("input.txt")
        member.size, member.mode = len(content), 0o644
        archive.addfile(member, io.BytesIO(content.encode()))
    return file.getvalue()


class LocalUsers:
    """Occupy nodes without the scheduler, by ``koala local-run``."""

    def __init__(self, grid: ChaosGrid, users: Sequence[LocalUser], until: float) -> None:
        self._grid, self._users, self._until = grid, users, until
        self._closing = threading.Event()
        self._runs: list[subprocess.Popen[bytes]] = []
        self._thread = threading.Thread(target=self._run, name="local-users")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        for user in self._users:
            if self._closing.wait(max(0.0, began + user.time_s - time.monotonic())):
                return
            environment = self._grid.client_environment
            arguments = ["local-run", user.cluster, str(user.nodes), *build_command(self._grid.folder, user.task)]
            self._runs.append(
                subprocess.Popen(
                    [*self._grid.koala_command, *arguments],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )

    def finish(self, within: float) -> int:
        """Return the number of local jobs; terminate those that have not ended within ``within`` seconds."""
        self._closing.set()
        self._thread.join()
        end = time.monotonic() + within
        for run in self._runs:
            try:
                run.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.terminate()
        for run in self._runs:
            try:
                run.wait(5)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
        return len(self._runs)


class ClusterPoller(threading.Thread):
    """Poll the daemon's reports on its clusters."""

    def __init__(self, grid: ChaosGrid) -> None:
        super().__init__(name="looker")
        self._grid = grid
        self._closing = threading.Event()
        self.looks: list[ClusterReport] = []

    def run(self) -> None:
        client = self._grid.client()
        while not self._closing.wait(POLL_INTERVAL_S):
            try:
                answer = client.send("GET", "/api/v1/clusters")
            except httpx2.HTTPError:
                continue
            if answer.status_code == 200:
                self.looks += read_reports(answer.json()["clusters"])
        client.close()

    def close(self) -> None:
        self._closing.set()
        self.join()


def read_reports(clusters: Sequence[dict[str, Any]]) -> list[ClusterReport]:
    """Convert an answer of the daemon on its clusters to reports."""
    counts = ("total", "idle", "used", "background", "down")
    time_s = time.monotonic()
    return [
        ClusterReport(time_s, cluster["name"], cluster["state"], *(cluster[name] for name in counts))
        for cluster in clusters
    ]
