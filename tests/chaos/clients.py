"""Those who use the grid while it is attacked: submitters, local users, and one who looks at the clusters."""

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
from tests.chaos.evidence import FINAL, Cancellation, Look, Submission
from tests.chaos.grid import Chaos, Client, details
from tests.chaos.workload import LocalUser, Planned

PROGRAM = str(Path(rank.__file__).resolve())
LOOK_EVERY = 0.3


def command(ground: Path, task: Any) -> list[str]:
    return [sys.executable, "-I", "-S", PROGRAM, str(ground), json.dumps(dict(task))]


class Submitters:
    """Submit planned jobs by several threads, each until it is acknowledged, while few enough are unfinished."""

    def __init__(
        self, grid: Chaos, planned: Sequence[Planned], *, pace: float, most: int, stop_at: float, until: float
    ) -> None:
        """One every ``pace`` seconds; none is begun with after ``stop_at``, nor waited for after ``until``."""
        self._grid, self._pace, self._most, self._stop_at, self._until = grid, pace, most, stop_at, until
        self._coming = list(reversed(planned))
        self._lock = threading.Lock()
        self._next_at = time.monotonic()
        self.done: list[Submission] = []
        self.troubles: list[str] = []
        self._to_cancel: list[tuple[float, int, Planned]] = []
        self._cancelled: dict[int, Cancellation | None] = {}
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._submit_all, name=f"submitter-{n}") for n in range(3)]
        self._canceller = threading.Thread(target=self._cancel_all, name="canceller")

    def start(self) -> None:
        for thread in (*self._threads, self._canceller):
            thread.start()

    def finish(self) -> list[Submission]:
        """Everything that was submitted; what has not been is left out."""
        for thread in self._threads:
            thread.join()
        self._closing.set()
        self._canceller.join()
        tried = self._cancelled
        return [replace(one, cancelled=tried.get(n), cancel_tried=n in tried) for n, one in self._by_number()]

    def _by_number(self) -> list[tuple[int, Submission]]:
        return [(one.planned.number, one) for one in self.done]

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
                other = threading.Thread(target=self._post_too, args=(planned, body, ids))
                if planned.twice:
                    other.start()
                self._post(client, planned, body, ids)
                if planned.twice:
                    other.join()
            except TimeoutError as error:
                self.troubles.append(f"{planned.name} could not be submitted: {error}")
            with self._lock:
                self.done.append(Submission(planned, tuple(ids)))
                if planned.cancel_after is not None and ids:
                    heapq.heappush(self._to_cancel, (time.monotonic() + planned.cancel_after, ids[0], planned))
        client.close()

    def _next(self) -> Planned | None:
        with self._lock:
            if not self._coming or time.monotonic() > self._stop_at:
                return None
            planned = self._coming.pop()
            at = self._next_at = max(self._next_at, time.monotonic()) + self._pace
        time.sleep(max(0.0, at - self._pace - time.monotonic()))
        return planned

    def _crowded(self, client: Client) -> bool:
        try:
            health = details(client.once("GET", "/healthz"))
        except httpx2.HTTPError:
            return True
        return bool(health.get("queued", 0) + health.get("active", 0) >= self._most)

    def _body(self, client: Client, planned: Planned) -> dict[str, Any]:
        body = {**planned.body, "command": command(self._grid.ground, planned.task)}
        if planned.input:
            answer = client.ask("POST", "/api/v1/bundles", self._until, content=_archive(planned.input))
            body["bundle"] = details(answer).get("id", answer.text)
        return body

    def _post(self, client: Client, planned: Planned, body: dict[str, Any], ids: list[int]) -> None:
        """Until it is acknowledged: an answer that was lost on its way is asked for again by the same key."""
        headers = {"Idempotency-Key": f"key-{planned.number}"}
        answer = client.ask("POST", "/api/v1/jobs", self._until, json=body, headers=headers)
        if answer.status_code in (200, 201):
            ids.append(int(answer.json()["id"]))
        else:
            self.troubles.append(f"{planned.name} was refused: {answer.status_code} {answer.text[:300]}")

    def _post_too(self, planned: Planned, body: dict[str, Any], ids: list[int]) -> None:
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

    def _cancel(self, client: Client, ident: int, planned: Planned) -> None:
        self._cancelled[planned.number] = None
        try:
            answer = client.ask("POST", f"/api/v1/jobs/{ident}/cancel", self._until, json={})
        except TimeoutError as error:
            self.troubles.append(f"{planned.name} could not be cancelled: {error}")
            return
        told = details(answer)
        if answer.status_code == 200:
            if told["state"] not in FINAL or told["state"] == "cancelled":
                self._cancelled[planned.number] = Cancellation(time.monotonic(), told["generation"], told["state"])
        elif answer.status_code != 409:
            self.troubles.append(f"cancelling {planned.name}: {answer.status_code} {answer.text[:300]}")


def _archive(content: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:") as archive:
        member = tarfile.TarInfo("input.txt")
        member.size, member.mode = len(content), 0o644
        archive.addfile(member, io.BytesIO(content.encode()))
    return file.getvalue()


class LocalUsers:
    """Take nodes past the scheduler, by ``koala local-run``."""

    def __init__(self, grid: Chaos, users: Sequence[LocalUser], until: float) -> None:
        self._grid, self._users, self._until = grid, users, until
        self._closing = threading.Event()
        self._runs: list[subprocess.Popen[bytes]] = []
        self._thread = threading.Thread(target=self._run, name="local-users")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        for user in self._users:
            if self._closing.wait(max(0.0, began + user.at - time.monotonic())):
                return
            environment = self._grid.client_environment
            words = ["local-run", user.cluster, str(user.nodes), *command(self._grid.ground, user.task)]
            self._runs.append(
                subprocess.Popen(
                    [*self._grid.koala_command, *words],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )

    def finish(self, within: float) -> int:
        """How many there were; those that are not over by then are interrupted, as by ctrl-C."""
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


class Looker(threading.Thread):
    """Looks at the clusters again and again."""

    def __init__(self, grid: Chaos) -> None:
        super().__init__(name="looker")
        self._grid = grid
        self._closing = threading.Event()
        self.looks: list[Look] = []

    def run(self) -> None:
        client = self._grid.client()
        while not self._closing.wait(LOOK_EVERY):
            try:
                answer = client.once("GET", "/api/v1/clusters")
            except httpx2.HTTPError:
                continue
            if answer.status_code == 200:
                self.looks += looks(answer.json()["clusters"])
        client.close()

    def close(self) -> None:
        self._closing.set()
        self.join()


def looks(clusters: Sequence[dict[str, Any]]) -> list[Look]:
    """What the daemon says of its clusters now."""
    counts = ("total", "idle", "used", "background", "down")
    at = time.monotonic()
    return [Look(at, one["name"], one["state"], *(one[name] for name in counts)) for one in clusters]
