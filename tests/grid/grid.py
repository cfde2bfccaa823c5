"""A daemon with its clusters, embedded or in the containers of the testbed, for tests that use it as users do."""

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

MAX_WAIT_S = 60.0

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], description: str, timeout_s: float = MAX_WAIT_S) -> T:
    """Poll a condition and return its first true value. Fail with the description after the timeout."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"waited {timeout_s:g} s for {description}")
        time.sleep(0.02)
    return value


@dataclass(frozen=True)
class NodeProcess:
    """A snapshot of a process on a node, which may have ended since."""

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
    """A file for which programs wait on every node."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def hold(self) -> list[str]:
        """Return a command that waits until the gate is open."""
        return ["sh", "-c", f"while [ ! -e {self.path} ]; do sleep 0.05; done; echo done"]

    @abstractmethod
    def open(self) -> None: ...


class Folder(ABC):
    """A working directory, with the path that a submitter writes."""

    path: str

    @abstractmethod
    def read(self, name: str, cluster: str) -> str: ...


class Load(ABC):
    """A local user's job."""

    @abstractmethod
    def stop(self) -> None: ...


class GridUser:
    """The requests of users and operators to a daemon."""

    def __init__(self, url: str = "", token: str = "") -> None:
        self.url, self.token = url, token
        self.admin_token = ""
        """The token of the data directory, for clients other than the command, which finds it itself."""
        self.ca_file: Path | None = None
        """The certificate authority of a daemon with TLS."""
        self.http = httpx2.Client(timeout=90.0)

    def connect(self, url: str) -> None:
        """Send all further requests to ``url``, and wait until every cluster is usable."""
        self.set_url(url)
        wait_until(self._has_usable_clusters, "every cluster to be usable")

    def set_url(self, url: str) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {self.token or self.admin_token}", "X-Requested-With": "koala"}
        self.http.close()
        verify = Trust(self.ca_file).create_context()
        self.http = httpx2.Client(base_url=url, timeout=90.0, headers=headers, verify=verify)

    def _has_usable_clusters(self) -> bool:
        try:
            return all(cluster["state"] == "usable" and cluster["total"] for cluster in self.list_clusters())
        except httpx2.HTTPError:
            return False

    @property
    def koala_command(self) -> list[str]:
        return [sys.executable, "-m", "koalapy.cli.main"]

    @property
    def environment(self) -> dict[str, str]:
        return {
            variable: value
            for variable, value in os.environ.items()
            if variable not in ("KOALA_URL", "KOALA_TOKEN", "KOALA_DATA_DIR")
        }

    @property
    def client_environment(self) -> dict[str, str]:
        """Return the environment of commands that use this daemon."""
        return self.environment | {"KOALA_URL": self.url} | ({"KOALA_TOKEN": self.token} if self.token else {})

    def run_koala(
        self, *arguments: str, timeout: float = MAX_WAIT_S, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Run the ``koala`` command with this daemon."""
        return subprocess.run(
            [*self.koala_command, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.client_environment,
            **options,
        )

    # Requests

    def list_clusters(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.http.get("/api/v1/clusters").json()["clusters"]
        return answer

    def get_cluster(self, name: str) -> dict[str, Any]:
        return next(cluster for cluster in self.list_clusters() if cluster["name"] == name)

    def submit(self, request: dict[str, Any], *command: str, **fields: Any) -> int:
        fields.setdefault("launcher", "processes")
        body = {"request": request, "command": list(command), **fields}
        answer = self.http.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    def get_job(self, ident: int) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get(f"/api/v1/jobs/{ident}").json()
        return answer

    def wait_for_end(self, ident: int, timeout_s: float = MAX_WAIT_S) -> dict[str, Any]:
        """Return the job once it has ended."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            job: dict[str, Any] = self.http.get(f"/api/v1/jobs/{ident}", params={"wait": 5}).json()
            if job["state"] in ("succeeded", "failed", "cancelled"):
                return job
        pytest.fail(f"job {ident} is {job['state']} ({job['reason']}) after {timeout_s:g} s: {job['timeline']}")

    def wait_for_state(self, ident: int, *states: str) -> dict[str, Any]:
        def get_job_in_state() -> dict[str, Any] | None:
            job = self.get_job(ident)
            if job["state"] not in states and job["state"] in ("succeeded", "failed", "cancelled"):
                pytest.fail(f"job {ident} {job['state']} ({job['reason']}): {self.read_output(ident)[-2000:]}")
            return job if job["state"] in states else None

        return wait_until(get_job_in_state, f"job {ident} to be {' or '.join(states)}")

    def read_output(self, ident: int) -> str:
        return str(self.http.get(f"/api/v1/jobs/{ident}/logs").text)

    def cancel(self, ident: int) -> None:
        answer = self.http.post(f"/api/v1/jobs/{ident}/cancel", json={"reason": "test"})
        assert answer.status_code == 200

    def cancel_all_jobs(self) -> None:
        """Cancel every active job, and wait until it has ended."""
        for job in self.http.get("/api/v1/jobs", params={"active": True}).json()["jobs"]:
            self.http.post(f"/api/v1/jobs/{job['id']}/cancel", json={"reason": "test"})
            self.wait_for_end(job["id"])


class Grid(GridUser, ABC):
    """A grid with the requests of users and operators, its processes, and the faults that tests inject."""

    python: str
    """The command that starts Python with koalapy on a node."""
    nodes: dict[str, int]
    """Number of nodes by cluster."""
    six_nodes: dict[str, Any]
    """A request for 6 nodes with some in every cluster."""
    managers: tuple[str, ...]
    """Clusters that together have each resource manager and release of the grid, with at least two nodes each."""

    def request_on_managers(self) -> dict[str, Any]:
        """Return a request for two nodes of each cluster in ``managers``."""
        return {"type": "fixed", "components": [{"cluster": name, "size": 2} for name in self.managers]}

    def submit_to_stopped_agent(
        self, cluster: str, request: dict[str, Any], *command: str
    ) -> tuple[int, Callable[[], None]]:
        """Place a job on a cluster with a suspended agent. Return the job and a function that resumes the agent."""

        def place() -> tuple[int, Callable[[], None]] | None:
            resume = self.suspend_agent(cluster)
            ident = self.submit(request, *command)
            if self.get_job(ident)["state"] == "claiming":
                return ident, resume
            # The daemon has closed the connection of the suspended agent, so it places nothing on its cluster.
            resume()
            self.cancel(ident)
            self.wait_for_end(ident)
            wait_until(lambda: self.get_cluster(cluster)["state"] == "usable", f"{cluster} to be usable")
            return None

        return wait_until(place, f"a job to be placed on {cluster}")

    def start_gated_job(self, gate: Gate, request: dict[str, Any], node_count: int, **fields: Any) -> int:
        """Submit a program that waits for the gate, and return when it runs on ``node_count`` nodes."""
        ident = self.submit(request, *gate.hold, **fields)
        self.wait_for_state(ident, "running")
        wait_until(
            lambda: len({program.node for program in self.list_programs(ident)}) == node_count,
            f"{node_count} programs to run",
        )
        return ident

    def finish_gated_job(self, ident: int, gate: Gate, restarts: int = 0) -> None:
        """Open the gate, and check that the job succeeds on all its nodes after ``restarts`` restarts."""
        gate.open()
        job = self.wait_for_end(ident, 2 * MAX_WAIT_S)
        assert (job["state"], job["exit_code"], job["restarts"]) == ("succeeded", 0, restarts), job
        assert self.read_output(ident).count("done") == sum(component["size"] for component in job["components"])

    # Processes and nodes

    @abstractmethod
    def list_workers(self, token: str = "") -> list[NodeProcess]:
        """Return programs and MPI daemons on the nodes with component tokens that begin with ``token``."""

    @abstractmethod
    def list_runners(self, token: str = "", node: str = "") -> list[NodeProcess]:
        """Return the runners of components with tokens that begin with ``token``, on one node or all."""

    def list_programs(self, ident: int) -> list[NodeProcess]:
        """Return the programs of a job that wait for a gate, without runners and MPI daemons."""
        processes = self.list_workers(f"{ident}.")
        shells = [
            process
            for process in processes
            if process.command[1:2] == ["-c"] and "sleep 0.05; done" in process.command[2]
        ]
        shell_ids = {(process.node, process.pid) for process in shells}
        # A forked child has the command line of its shell until it executes its own program.
        return [process for process in shells if (process.node, process.parent) not in shell_ids]

    @abstractmethod
    def wait_until_idle(self) -> None:
        """Wait until no process of a job is left and every node is idle."""

    # Faults

    @abstractmethod
    def make_gate(self) -> Gate: ...

    @abstractmethod
    def make_folder(self) -> Folder: ...

    @abstractmethod
    def start_local_job(self, cluster: str, nodes: int) -> Load:
        """Submit a sleeping job of a local user on ``nodes`` whole nodes."""

    @abstractmethod
    def kill_agent(self, cluster: str) -> None:
        """Kill the agent and wait until the daemon has noticed; it is started again automatically."""

    @abstractmethod
    def suspend_agent(self, cluster: str) -> Callable[[], None]:
        """Suspend the agent's process, and return a function that resumes it."""

    @abstractmethod
    def kill_daemon(self) -> None:
        """Kill the daemon by SIGKILL."""

    @abstractmethod
    def start(self) -> "Grid": ...

    @abstractmethod
    def stop_daemon(self) -> int:
        """Stop the daemon by SIGTERM, and return its exit code."""
