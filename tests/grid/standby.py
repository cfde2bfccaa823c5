"""Two daemons of one PostgreSQL database, of which one stands by, and separate agents that know both."""

import json
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from koalapy.audit.readers import GridFiles, read_grid
from koalapy.audit.rules import Finding, find_violations
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import MAX_WAIT_S, wait_until

TOKENS = {"north": "the-secret-of-north", "south": "the-secret-of-south"}
DAEMONS = ("first", "second")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class StandbyGrid(EmbeddedGrid):
    """A grid of daemons that share a data directory. Requests go to the active daemon."""

    def __init__(self, folder: Path, database: str, nodes: int = 4, **settings: str) -> None:
        clusters = {
            name: {"nodes": nodes, "network": f"127.0.{number}", "token": token, "embedded": False}
            for number, (name, token) in enumerate(TOKENS.items(), 61)
        }
        super().__init__(
            folder / "data", KOALA_DATABASE=database, KOALA_CLUSTERS=json.dumps(clusters), KOALA_LEASE="120", **settings
        )
        self.folder, self.database = folder, database
        self.urls = {name: f"http://127.0.0.1:{free_port()}" for name in DAEMONS}
        self.daemons: dict[str, subprocess.Popen[str]] = {}
        self.agents: list[subprocess.Popen[bytes]] = []
        self.active = DAEMONS[0]

    @property
    def client_environment(self) -> dict[str, str]:
        return self.environment | {"KOALA_URL": ",".join(self.urls.values())}

    def start_koala(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command that knows both daemons."""
        return subprocess.Popen(
            [*self.koala_command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.client_environment,
        )

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def begin(self) -> "StandbyGrid":
        """Start both daemons and the agents, and wait until the clusters are usable."""
        self.start_one(self.active, "serves")
        self.admin_token = (self.directory / "token").read_text().strip()
        for cluster in TOKENS:
            self._start_agent(cluster)
        self.start_one(DAEMONS[1], "stands by at")
        self.connect(self.urls[self.active])
        return self

    def start_one(self, name: str, announcement: str = "", *options: str) -> None:
        """Start a daemon, and wait until it serves or stands by; empty: do not wait."""
        port = self.urls[name].rpartition(":")[2]
        command = [
            *self.koala_command,
            "serve",
            "--standby",
            "--port",
            port,
            "--data-dir",
            str(self.directory),
            *options,
        ]
        with (self.folder / f"{name}.log").open("a") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment, start_new_session=True
            )
        if announcement:
            self.expect_line(name, f"koala {announcement} {self.urls[name]}")

    def expect_line(self, name: str, start: str) -> None:
        """Read the next line that a daemon prints."""
        output = self.daemons[name].stdout
        assert output is not None
        if not (line := output.readline()).startswith(start):
            pytest.fail(f"the daemon said {line!r} and {self.log_of(name)[-2000:]}")

    def _start_agent(self, cluster: str) -> None:
        arguments = ["agent", cluster, "--url", ",".join(self.urls.values()), "--directory", str(self.folder / cluster)]
        with (self.folder / f"{cluster}.log").open("wb") as log:
            self.agents.append(
                subprocess.Popen(
                    [*self.koala_command, *arguments],
                    env=self.environment | {"KOALA_AGENT_TOKEN": TOKENS[cluster]},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    @property
    def standby(self) -> str:
        return next(name for name in DAEMONS if name != self.active)

    def end_active(self, number: signal.Signals) -> float:
        """Send a signal to the active daemon. Return the seconds until the other one has stored a change."""
        began, ended = time.monotonic(), self.active
        self.daemons[ended].send_signal(number)
        self.active = self.standby
        self.set_url(self.urls[self.active])
        wait_until(self.stores_changes, f"{self.active} to take over: {self.log_of(self.active)[-2000:]}")
        return time.monotonic() - began

    def wait_until_usable(self) -> None:
        wait_until(self._has_usable_clusters, "every cluster to be usable")

    def fill_queue(self, count: int, chance: random.Random) -> list[int]:
        """Submit jobs until ``count`` are unfinished, and return their numbers."""
        bodies = [
            {
                "request": {"type": "flexible", "total_size": chance.randint(1, 4)},
                "command": ["sh", "-c", f"sleep {chance.uniform(1.0, 5.0):.1f}; echo done"],
                "launcher": "processes",
            }
            for _ in range(count - self.count_unfinished())
        ]
        if not bodies:
            return []
        answer = self.http.post("/api/v1/jobs:batch", json={"jobs": bodies})
        assert answer.status_code == 201, answer.text
        numbers: list[int] = answer.json()["jobs"]
        return numbers

    def read_states(self, jobs: list[int]) -> set[str]:
        """Return the states that some of these jobs have."""
        answer = self.http.post("/api/v1/jobs/states", json={"jobs": jobs})
        return {job["state"] for job in answer.json()["jobs"]}

    def count_unfinished(self) -> int:
        return int(self.http.get("/api/v1/jobs", params={"active": True, "count": True, "limit": 1}).json()["count"])

    def find_violations(self) -> list[Finding]:
        """Audit the database, the data directory and what the agents wrote."""
        spools = tuple((cluster, self.folder / cluster / "spool") for cluster in TOKENS)
        accounting = tuple((cluster, self.folder / cluster / "lrm" / "accounting") for cluster in TOKENS)
        files = GridFiles(self.directory, self.database, spools, accounting)
        return find_violations(read_grid(files))

    def stores_changes(self) -> bool:
        """Return whether the active daemon stores a change, and is ready for jobs.

        Each of its writers learns for itself that the database is back, so that one may store while another waits.
        """
        try:
            answer = self.http.post("/api/v1/tokens", json={"note": "takeover"})
            is_ready = self.http.get("/readyz").status_code == 200
        except httpx2.TransportError:  # the server of the standby daemon has just ended
            return False
        assert answer.status_code in (201, 503), answer.text
        return answer.status_code == 201 and is_ready

    def read_epochs(self) -> list[int]:
        """Return the epochs with which the daemons served, in order of time."""
        lines = sorted(
            line for name in self.daemons for line in self.log_of(name).splitlines() if "daemon-serves" in line
        )
        return [int(re.findall(r"epoch=(\d+)", line)[0]) for line in lines]

    def call(self, name: str, method: str, path: str, **options: Any) -> Any:
        """Send a request to a daemon of this name."""
        return self.http.request(method, f"{self.urls[name]}{path}", **options)

    def close(self) -> None:
        """End all processes, and check that none is left."""
        if self.daemons and self.daemons[self.active].poll() is None:
            self.cancel_all_jobs()
        processes: Sequence[subprocess.Popen[Any]] = (*self.daemons.values(), *self.agents)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in processes:
            process.wait(timeout=MAX_WAIT_S)
        self.http.close()
        for manager in self.list_processes():
            manager.kill()
