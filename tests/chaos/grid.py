"""The daemon under attack: started in a folder of its own, asked by HTTP with all the patience that takes."""

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
    "aging_tries": 50,
}
"""Pauses short, so that much happens in minutes. A cluster counts as lost only after the leases of all its runners are
over, however long they were stopped."""
LEASE = 40.0
START_WITHIN = 60.0
PATIENCE = 10.0
"""Seconds for one answer; a daemon may be stopped for longer than that."""
PAUSE = 0.1


class Chaos(EmbeddedGrid):
    """A real ``koala serve`` with its clusters, which may die at any moment and is started again on the same port."""

    def __init__(self, ground: Path, **settings: Any) -> None:
        super().__init__(ground / "data", KOALA_CONFIG=str(ground / "koala.yaml"), TMPDIR=str(ground / "tmp"))
        self.ground = ground
        self.port = 0
        self.starts = 0
        (ground / "tmp").mkdir()
        clusters = {
            name: {"nodes": nodes, "network": NETWORKS[name], "environment": {"TMPDIR": str(ground / "tmp")}}
            for name, nodes in CLUSTERS.items()
        }
        own = {"rules": RULES, "lease": LEASE, "output_limit": OUTPUT_LIMIT, "clusters": clusters}
        (ground / "koala.yaml").write_text(yaml.safe_dump({**own, **settings}))

    @property
    def log(self) -> Path:
        return self.ground / "daemon.log"

    def begin(self) -> None:
        """Start it, and wait until it answers; not for its clusters. ``RuntimeError`` when it does not."""
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
        line = _first_line(self.daemon)
        if not line.startswith("koala serves "):
            raise RuntimeError(f"the daemon said {line!r}, and ended with {self.daemon.poll()}")
        self.url = line.split()[2]
        self.token = (self.directory / "token").read_text().strip()
        self.port = int(self.url.rpartition(":")[2])

    @property
    def headers(self) -> dict[str, str]:
        """By which users are known."""
        return {"X-Requested-With": "koala"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})

    @property
    def client_environment(self) -> dict[str, str]:
        """Of commands that ask the daemon."""
        return {**self.environment, "KOALA_URL": self.url} | ({"KOALA_TOKEN": self.token} if self.token else {})

    def client(self) -> "Client":
        return Client(self)


def _first_line(daemon: "subprocess.Popen[str]") -> str:
    """What it says first; nothing when it ends, or is killed, before that."""
    timer = threading.Timer(START_WITHIN, daemon.kill)
    timer.start()
    try:
        assert daemon.stdout is not None
        return daemon.stdout.readline()
    finally:
        timer.cancel()


class Client:
    """Asks again until there is an answer that is one: for one thread."""

    def __init__(self, grid: Chaos) -> None:
        self._grid = grid
        self._http = httpx2.Client(timeout=PATIENCE)

    def once(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """``httpx2.HTTPError`` when there is no answer."""
        headers = {**self._grid.headers, **more.pop("headers", {})}
        return self._http.request(method, f"{self._grid.url}{path}", headers=headers, **more)

    def ask(self, method: str, path: str, until: float, **more: Any) -> httpx2.Response:
        """The first answer that is not "come back later", before a moment of the monotonic clock; ``TimeoutError``."""
        said = ""
        while time.monotonic() < until:
            try:
                answer = self.once(method, path, **more)
            except httpx2.HTTPError as error:
                said = repr(error)
            else:
                if answer.status_code not in (429, 503):
                    return answer
                said = f"{answer.status_code} {answer.text[:200]}"
            time.sleep(PAUSE)
        raise TimeoutError(f"{method} {path}: no answer: {said}")

    def get(self, path: str, until: float, **parameters: Any) -> Any:
        answer = self.ask("GET", path, until, params=parameters)
        if answer.status_code != 200:
            raise TimeoutError(f"GET {path}: {answer.status_code} {answer.text[:200]}")
        return answer.json()

    def close(self) -> None:
        self._http.close()


def details(answer: httpx2.Response) -> Mapping[str, Any]:
    """The JSON of an answer; what it says when that is none."""
    try:
        found: Mapping[str, Any] = answer.json()
    except json.JSONDecodeError:
        return {"detail": answer.text[:300]}
    return found
