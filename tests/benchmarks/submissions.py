"""Measure the processor time of single submissions and of batches: ``python -m tests.benchmarks.submissions``.

Jobs wait behind one that holds all nodes, so that the figures contain no placement. Clients are threads with one
connection each, and their requests are encoded beforehand.
"""

import argparse
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.grid.embedded import EmbeddedGrid

CLIENTS = 8
SINGLE_JOBS = 3000
BATCHES, BATCH_SIZE = 120, 500
CONFIG = "clusters: {north: {nodes: 2}, south: {nodes: 2}}\n"


@dataclass(frozen=True, slots=True)
class Figures:
    """Processor time in milliseconds of the daemon for a job, and jobs per second of all clients together."""

    single_cpu_ms: float
    single_keyed_cpu_ms: float
    single_jobs_per_s: float
    batch_cpu_ms: float
    batch_jobs_per_s: float


def job_body(number: int) -> dict[str, object]:
    request = {"type": "flexible", "total_size": 4}
    return {"request": request, "command": ["./program", f"--case={number}"], "name": "study", "launcher": "processes"}


class Client(threading.Thread):
    """Sends its share of requests over one connection."""

    def __init__(self, url: str, token: str, path: str, bodies: list[bytes], keyed: bool) -> None:
        super().__init__()
        self._bodies, self._path, self._keyed = bodies, path, keyed
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self.error = ""

    def run(self) -> None:
        for body in self._bodies:
            key = {"Idempotency-Key": os.urandom(8).hex()} if self._keyed else {}
            self._connection.request("POST", self._path, body, self._headers | key)
            answer = self._connection.getresponse()
            text = answer.read()
            if answer.status != 201:
                self.error = text.decode()
                return


def send_all(grid: EmbeddedGrid, path: str, bodies: list[bytes], *, keyed: bool = False) -> tuple[float, float]:
    """Send requests from all clients; return seconds, and processor seconds of the daemon."""
    assert grid.daemon is not None
    shares = [bodies[number::CLIENTS] for number in range(CLIENTS)]
    clients = [Client(grid.url, grid.admin_token, path, share, keyed) for share in shares]
    process = psutil.Process(grid.daemon.pid)
    before, began = process.cpu_times(), time.monotonic()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds, after = time.monotonic() - began, process.cpu_times()
    assert not any(client.error for client in clients), [client.error for client in clients]
    return seconds, after.user + after.system - before.user - before.system


def measure(grid: EmbeddedGrid, *, has_batches: bool = True) -> Figures:
    """Measure on a grid with all nodes in use."""
    encoded = [json.dumps(job_body(number)).encode() for number in range(SINGLE_JOBS)]
    send_all(grid, "/api/v1/jobs", encoded[: SINGLE_JOBS // 10])
    single_s, single_cpu_s = send_all(grid, "/api/v1/jobs", encoded)
    _, keyed_cpu_s = send_all(grid, "/api/v1/jobs", encoded, keyed=True)
    batch_s = batch_cpu_s = float("nan")
    if has_batches:
        batch = json.dumps({"jobs": [job_body(number) for number in range(BATCH_SIZE)]}).encode()
        batch_s, batch_cpu_s = send_all(grid, "/api/v1/jobs:batch", [batch] * BATCHES)
    jobs = BATCHES * BATCH_SIZE
    return Figures(
        single_cpu_s / SINGLE_JOBS * 1000,
        keyed_cpu_s / SINGLE_JOBS * 1000,
        SINGLE_JOBS / single_s,
        batch_cpu_s / jobs * 1000,
        jobs / batch_s,
    )


def environment_of(source: str) -> dict[str, str]:
    """Return the variables with which a daemon runs the code of a checkout; none for the one of this process."""
    return {"PYTHONPATH": source, "PYTHONSAFEPATH": "1"} if source else {}


def with_busy_grid(folder: Path, source: str, act: Callable[[EmbeddedGrid], Figures]) -> Figures:
    """Start a daemon of the checkout ``source`` with all nodes in use, and measure on it."""
    config = folder / "koala.yaml"
    config.write_text(CONFIG)
    grid = EmbeddedGrid(folder / "data", KOALA_CONFIG=str(config), **environment_of(source)).start()
    try:
        holder = grid.submit({"type": "flexible", "total_size": 4}, "sleep", "3600", launcher="processes")
        grid.wait_for_state(holder, "running")
        return act(grid)
    finally:
        grid.stop_daemon()


def main() -> None:
    """Measure checkouts in turns, and print one line of JSON for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", default=[""], help="checkouts to compare; default: this one")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--single", action="store_true", help="measure single submissions only")
    options = parser.parse_args()
    for _ in range(options.rounds):
        for source in options.sources:
            with tempfile.TemporaryDirectory() as folder:
                figures = with_busy_grid(
                    Path(folder), source, lambda grid: measure(grid, has_batches=not options.single)
                )
            rounded = {name: round(value, 3) for name, value in asdict(figures).items()}
            json.dump({"source": source, **rounded, "load": psutil.getloadavg()[0]}, sys.stdout)
            print(flush=True)


if __name__ == "__main__":
    main()
