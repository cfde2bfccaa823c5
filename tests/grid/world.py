"""A grid as its users see it: a daemon behind HTTP with clusters below it, embedded or in the testbed's containers."""

import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest

from koalapy.system.tls import Trust

DEADLINE = 60.0

T = TypeVar("T")


def until(look: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """Look again and again until there is something; fails with ``what`` was waited for."""
    end = time.monotonic() + deadline
    while not (found := look()):
        if time.monotonic() > end:
            pytest.fail(f"waited {deadline:g} s in vain: {what}")
        time.sleep(0.02)
    return found


@dataclass(frozen=True)
class Seen:
    """A process on a node, as it was when it was seen; it may be gone by now."""

    pid: int
    parent: int
    command: list[str]
    environment: dict[str, str]
    node: str
    kill: Callable[[], None]

    @property
    def text(self) -> str:
        return " ".join([*self.command, *(f"{name}={value}" for name, value in self.environment.items())])


class Gate(ABC):
    """A file for which programs wait, wherever they run."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def hold(self) -> list[str]:
        """A command that waits for the gate to be opened."""
        return ["sh", "-c", f"while [ ! -e {self.path} ]; do sleep 0.05; done; echo done"]

    @abstractmethod
    def open(self) -> None: ...


class Folder(ABC):
    """A working directory: its path as a submitter writes it, and what came to be in it."""

    path: str

    @abstractmethod
    def read(self, name: str, cluster: str) -> str: ...


class Load(ABC):
    """A local user's job."""

    @abstractmethod
    def stop(self) -> None: ...


class World(ABC):
    """What every grid can be asked and told by users and operators; and, below, what may befall it."""

    python: str
    """Word by which a program's command names Python with koalapy."""
    nodes: dict[str, int]
    """Clusters' sizes."""
    six: dict[str, Any]
    """A request of 6 nodes that has some in every cluster."""

    def __init__(self, url: str = "", token: str = "") -> None:
        self.url, self.token = url, token
        self.shown = ""
        """What is shown to the daemon where the command finds its token itself."""
        self.ca_file: Path | None = None
        """The authority by which a daemon with TLS is known."""
        self.http = httpx2.Client(timeout=90.0)

    def connect(self, url: str) -> None:
        """Ask the daemon there from now on, which has all its clusters soon."""
        self.speak_to(url)
        until(self._usable, "every cluster to be usable")

    def speak_to(self, url: str) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {self.token or self.shown}", "X-Requested-With": "koala"}
        self.http.close()
        verify = Trust(self.ca_file).create_context()
        self.http = httpx2.Client(base_url=url, timeout=90.0, headers=headers, verify=verify)

    def _usable(self) -> bool:
        try:
            return all(c["state"] == "usable" and c["total"] for c in self.clusters())
        except httpx2.HTTPError:
            return False

    @property
    def koala(self) -> list[str]:
        return [sys.executable, "-m", "koalapy.cli.main"]

    @property
    def environment(self) -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k not in ("KOALA_URL", "KOALA_TOKEN", "KOALA_DATA_DIR")}

    def run(self, *arguments: str, timeout: float = DEADLINE, **more: Any) -> "subprocess.CompletedProcess[str]":
        """The ``koala`` command against this daemon."""
        environment = self.environment | {"KOALA_URL": self.url} | ({"KOALA_TOKEN": self.token} if self.token else {})
        return subprocess.run(
            [*self.koala, *arguments], capture_output=True, text=True, timeout=timeout, env=environment, **more
        )

    # What it says

    def clusters(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.http.get("/api/v1/clusters").json()["clusters"]
        return answer

    def cluster(self, name: str) -> dict[str, Any]:
        return next(c for c in self.clusters() if c["name"] == name)

    def submit(self, request: dict[str, Any], *command: str, **more: Any) -> int:
        more.setdefault("launcher", "processes")
        body = {"request": request, "command": list(command), **more}
        answer = self.http.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    def submit_unheard(self, cluster: str, request: dict[str, Any], *command: str) -> tuple[int, Callable[[], None]]:
        """A job that is placed on a cluster whose agent is stopped, and what lets that one go on."""

        def place() -> tuple[int, Callable[[], None]] | None:
            resume = self.suspend_agent(cluster)
            ident = self.submit(request, *command)
            if self.job(ident)["state"] == "claiming":
                return ident, resume
            # We were late: an agent that is stopped for long is hung up on, and nothing is placed there any more.
            resume()
            self.cancel(ident)
            self.wait(ident)
            until(lambda: self.cluster(cluster)["state"] == "usable", f"{cluster} to be there again")
            return None

        return until(place, f"a job to be placed on {cluster}")  # type: ignore[return-value]

    def job(self, ident: int) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get(f"/api/v1/jobs/{ident}").json()
        return answer

    def wait(self, ident: int, deadline: float = DEADLINE) -> dict[str, Any]:
        """The job when it is over."""
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            job: dict[str, Any] = self.http.get(f"/api/v1/jobs/{ident}", params={"wait": 5}).json()
            if job["state"] in ("succeeded", "failed", "cancelled"):
                return job
        pytest.fail(f"job {ident} is {job['state']} ({job['reason']}) after {deadline:g} s: {job['timeline']}")

    def wait_state(self, ident: int, *states: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job = self.job(ident)
            if job["state"] not in states and job["state"] in ("succeeded", "failed", "cancelled"):
                pytest.fail(f"job {ident} {job['state']} ({job['reason']}): {self.logs(ident)[-2000:]}")
            return job if job["state"] in states else None

        return until(look, f"job {ident} to be {' or '.join(states)}")  # type: ignore[return-value]

    def start_waiting(self, gate: Gate, request: dict[str, Any], nodes: int, **more: Any) -> int:
        """Submit a program that waits for the gate, and return when it runs on so many nodes."""
        ident = self.submit(request, *gate.hold, **more)
        self.wait_state(ident, "running")
        until(lambda: len({program.node for program in self.programs(ident)}) == nodes, f"{nodes} programs to run")
        return ident

    def finish_waiting(self, ident: int, gate: Gate, restarts: int = 0) -> None:
        """Open the gate, and check that the job succeeds on all its nodes after so many restarts."""
        gate.open()
        job = self.wait(ident, 2 * DEADLINE)
        assert (job["state"], job["exit_code"], job["restarts"]) == ("succeeded", 0, restarts), job
        assert self.logs(ident).count("done") == sum(component["size"] for component in job["components"])

    def logs(self, ident: int) -> str:
        return str(self.http.get(f"/api/v1/jobs/{ident}/logs").text)

    def cancel(self, ident: int) -> None:
        assert self.http.post(f"/api/v1/jobs/{ident}/cancel").status_code == 200

    def cancel_all(self) -> None:
        """End every job that has not, and wait for it."""
        for job in self.http.get("/api/v1/jobs", params={"active": True}).json()["jobs"]:
            self.http.post(f"/api/v1/jobs/{job['id']}/cancel")
            self.wait(job["id"])

    # What is really there

    @abstractmethod
    def workers(self, token: str = "") -> list[Seen]:
        """Programs and MPI daemons on the nodes, of one component or of all."""

    @abstractmethod
    def runners(self, token: str = "", node: str = "") -> list[Seen]:
        """Runners with something to do."""

    def programs(self, ident: int) -> list[Seen]:
        """The programs that wait for a gate, not the runners and MPI daemons around them."""
        found = self.workers(f"{ident}.")
        shells = [p for p in found if p.command[1:2] == ["-c"] and "sleep 0.05; done" in p.command[2]]
        known = {(p.node, p.pid) for p in shells}
        # What a shell is about to start looks like the shell for a moment.
        return [p for p in shells if (p.node, p.parent) not in known]

    @abstractmethod
    def settle(self) -> None:
        """Nothing runs, nothing is held, every node is idle."""

    # What may befall it

    @abstractmethod
    def gate(self) -> Gate: ...

    @abstractmethod
    def folder(self) -> Folder: ...

    @abstractmethod
    def local_load(self, cluster: str, nodes: int) -> Load:
        """Hand in a local user's job of so many whole nodes that sleeps."""

    @abstractmethod
    def kill_agent(self, cluster: str) -> None:
        """It comes back by itself, but not before the daemon has noticed."""

    @abstractmethod
    def suspend_agent(self, cluster: str) -> Callable[[], None]:
        """Stop it in the middle of what it does; the answer lets it go on."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the daemon as the kernel would: no word of farewell."""

    @abstractmethod
    def start(self) -> "World": ...

    @abstractmethod
    def end(self) -> int:
        """Ask the daemon to end; its exit code."""
