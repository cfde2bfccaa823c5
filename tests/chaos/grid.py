"""The daemon of a run, and HTTP clients that retry while it is away."""

import json
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.chaos.workload import CLUSTERS, NETWORKS, OUTPUT_LIMIT
from tests.grid.embedded import EmbeddedGrid

RULES = {
    "unreachable_after": 1.5,
    "barrier_timeout": 20.0,
    "claim_grace": 3.0,
    "scan_interval": 2.0,
    "restart_pause": 0.1,
    "restart_pause_max": 1.0,
    "max_restarts": 10,
    "error_threshold": 8,
    "probation_pause": 0.5,
    "probation_pause_max": 2.0,
    "claim_epsilon": 0.2,
}
"""Short pauses, so that much happens in minutes. A cluster counts as lost only after the leases of all its runners have
expired, however long they were suspended."""
LEASE = 40.0
START_TIMEOUT_S = 60.0
RESPONSE_TIMEOUT_S = 10.0
"""Timeout of one response; a daemon may be suspended for longer."""
RETRY_INTERVAL_S = 0.1


class ChaosGrid(EmbeddedGrid):
    """A grid with a daemon that can be killed at any time and is restarted on the same port."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder / "data", KOALA_CONFIG=str(folder / "koala.yaml"), TMPDIR=str(folder / "tmp"))
        self.folder = folder
        self.port = 0
        self.starts = 0
        (folder / "tmp").mkdir()
        clusters = {
            name: {"nodes": nodes, "network": NETWORKS[name], "environment": {"TMPDIR": str(folder / "tmp")}}
            for name, nodes in CLUSTERS.items()
        }
        settings_of_run = {"rules": RULES, "lease": LEASE, "output_limit": OUTPUT_LIMIT, "clusters": clusters}
        (folder / "koala.yaml").write_text(yaml.safe_dump({**settings_of_run, **settings}))

    @property
    def log(self) -> Path:
        return self.folder / "daemon.log"

    def begin(self) -> None:
        """Start the daemon, and wait until it serves. Raise ``RuntimeError`` if it does not."""
        self.starts += 1
        with self.log.open("a") as log:
            self.daemon = subprocess.Popen(
                [*self.koala_command, "serve", "--port", str(self.port), "--data-dir", str(self.directory)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
                start_new_session=True,
            )
        line = _read_first_line(self.daemon)
        if not line.startswith("koala serves "):
            raise RuntimeError(f"the daemon said {line!r}, and ended with {self.daemon.poll()}")
        self.url = line.split()[2]
        self.token = (self.directory / "token").read_text().strip()
        self.port = int(self.url.rpartition(":")[2])

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request with the daemon's token."""
        return {"X-Requested-With": "koala"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})

    @property
    def client_environment(self) -> dict[str, str]:
        """Environment of commands that call the daemon."""
        return {**self.environment, "KOALA_URL": self.url} | ({"KOALA_TOKEN": self.token} if self.token else {})

    def client(self) -> "Client":
        return Client(self)


def _read_first_line(daemon: "subprocess.Popen[str]") -> str:
    """Return the daemon's first line of output, or an empty string if it ends before that."""
    timer = threading.Timer(START_TIMEOUT_S, daemon.kill)
    timer.start()
    try:
        assert daemon.stdout is not None
        return daemon.stdout.readline()
    finally:
        timer.cancel()


class Client:
    """A client for one thread that retries until it gets a final answer."""

    def __init__(self, grid: ChaosGrid) -> None:
        self._grid = grid
        self._http = httpx2.Client(timeout=RESPONSE_TIMEOUT_S)

    def send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request once. Raise ``httpx2.HTTPError`` without an answer."""
        headers = {**self._grid.headers, **options.pop("headers", {})}
        return self._http.request(method, f"{self._grid.url}{path}", headers=headers, **options)

    def request(self, method: str, path: str, until: float, **options: Any) -> httpx2.Response:
        """Return the first answer other than 429 or 503. Raise ``TimeoutError`` at the monotonic time ``until``."""
        problem = ""
        while time.monotonic() < until:
            try:
                answer = self.send(method, path, **options)
            except httpx2.HTTPError as error:
                problem = repr(error)
            else:
                if answer.status_code not in (429, 503):
                    return answer
                problem = f"{answer.status_code} {answer.text[:200]}"
            time.sleep(RETRY_INTERVAL_S)
        raise TimeoutError(f"{method} {path}: no answer: {problem}")

    def get(self, path: str, until: float, **parameters: Any) -> Any:
        answer = self.request("GET", path, until, params=parameters)
        if answer.status_code != 200:
            raise TimeoutError(f"GET {path}: {answer.status_code} {answer.text[:200]}")
        return answer.json()

    def close(self) -> None:
        self._http.close()


def read_details(answer: httpx2.Response) -> Mapping[str, Any]:
    """Return the JSON of an answer, or its text as ``detail``."""
    try:
        fields: Mapping[str, Any] = answer.json()
    except json.JSONDecodeError:
        return {"detail": answer.text[:300]}
    return fields
