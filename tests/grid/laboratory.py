"""The whole of koalapy in the laboratory of network namespaces: daemon, hub, agents, heads and runners.

The daemon and the hub of relayed links are on the host ``hub``, agents and relays of clusters on the head nodes, and
runners on the nodes, which reach no node of the other cluster.
"""

import json
import os
import secrets
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tests.certificates import CertificateAuthority
from tests.grid.grid import GridUser, wait_until
from tests.grid.namespaces import CLUSTERS, HUB_ADDRESS, NODE_NAMES, Laboratory, laboratory

SITES = tuple(dict.fromkeys(CLUSTERS))
DAEMON_PORT, HUB_PORT, HEAD_PORT = 8642, 8643, 8644
AGENT = Path(__file__).with_name("laboratory_agent.py")
NODE_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
KILL_DELAY_S = 1.0
STOP_TIMEOUT_S = 30.0


@dataclass
class NodeJob:
    """A job of a cluster's resource manager: a process on each of its nodes."""

    id: int
    name: str
    nodes: list[int]
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        """The exit code; None while a process runs."""
        codes = [process.poll() for process in self.processes]
        return None if None in codes else max(abs(code) for code in codes if code is not None)


class NodeManager(socketserver.ThreadingUnixStreamServer):
    """The resource manager of a cluster. It outlives the agent; see ``laboratory_agent.py``."""

    daemon_threads = True

    def __init__(self, lab: Laboratory, cluster: str, path: Path) -> None:
        self._lab, self._nodes = lab, [i for i, name in enumerate(CLUSTERS) if name == cluster]
        self._jobs: list[NodeJob] = []
        self._lock = threading.Lock()
        super().__init__(str(path), NodeManagerHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            busy = {node for job in self._jobs if job.code is None for node in job.nodes}
            idle = [node for node in self._nodes if node not in busy]
            if request["op"] == "submit":
                return self._submit(request, idle)
            if request["op"] == "cancel":
                self._cancel(self._jobs[request["job"]])
            return {
                "total": len(self._nodes),
                "idle": len(idle),
                "jobs": [
                    {"id": job.id, "name": job.name, "code": job.code, "nodes": [NODE_NAMES[i] for i in job.nodes]}
                    for job in self._jobs
                ],
            }

    def _submit(self, request: dict[str, Any], idle: list[int]) -> dict[str, Any]:
        if len(idle) < request["nodes"]:
            return {"error": "too few idle nodes"}
        job = NodeJob(len(self._jobs), request["name"], idle[: request["nodes"]])
        path = f"{request['environment'].get('PATH', '')}:{NODE_PATH}"
        with open(request["output"], "ab") as output:
            for index, node in enumerate(job.nodes):
                place = {"KOALA_NODE_INDEX": str(index), "KOALA_NODE": NODE_NAMES[node], "PATH": path}
                job.processes.append(
                    subprocess.Popen(
                        [*self._lab.command(f"node-{node}", account=0), *request["argv"]],
                        env=request["environment"] | place,
                        cwd=request["folder"],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        self._jobs.append(job)
        return {"job": job.id}

    def _cancel(self, job: NodeJob) -> None:
        self._signal(job, signal.SIGTERM)
        threading.Timer(KILL_DELAY_S, self._signal, (job, signal.SIGKILL)).start()

    def _signal(self, job: NodeJob, number: int) -> None:
        """Send a signal to all processes on the job's nodes, unless it has ended."""
        if job.code is None:
            for pid in (pid for node in job.nodes for pid in self._lab.list_processes(f"node-{node}")):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


class NodeManagerHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, NodeManager)
        self.wfile.write(json.dumps(self.server.answer(json.loads(self.rfile.readline()))).encode() + b"\n")


class LaboratoryGrid(GridUser):
    """A daemon and two clusters behind firewalls. The caller's thread is on the host ``hub``."""

    def __init__(self, lab: Laboratory, folder: Path, mpi: dict[str, Any], *, relays: bool) -> None:
        super().__init__(token=secrets.token_hex())
        self._lab, self.folder, self._relays = lab, folder, relays
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        authority = CertificateAuthority(folder / "ca")
        files = authority.issue([HUB_ADDRESS])
        self._tls = {"certificate": str(files.certificate), "key": str(files.key)}
        self.ca_file = authority.file
        self._managers: list[NodeManager] = []
        self._configuration: dict[str, Any] = {
            "tls": self._tls,
            "tokens": [{"token": self.token, "user": "operator", "role": "admin"}],
            "clusters": {
                cluster: {
                    "kind": "slurm",
                    "token": f"token-of-the-agent-of-{cluster}",
                    "native_specification": str(folder / f"{cluster}.lrm"),
                    "poll_interval": 1,
                    "login_socket": "none",
                    "runner_address": lab.head_address(cluster),
                    "python": "/usr/bin/python3",
                    "home": str(folder),
                    "mpi": {"interface": f"{network}.0/24", **mpi},
                    **({"relay": str(folder / f"head-{cluster}.sock")} if relays else {}),
                }
                for cluster, network in zip(SITES, lab.networks, strict=True)
            },
            **({"relay": {"control": str(folder / "hub.sock")}} if relays else {}),
        }

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {
            "XDG_STATE_HOME": str(self.folder / "state"),
            "KOALA_CONFIG": str(self.folder / "koala.yaml"),
            "KOALA_CA_FILE": str(self.ca_file),
        }

    def start(self) -> "LaboratoryGrid":
        (self.folder / "koala.yaml").write_text(yaml.safe_dump(self._configuration))
        if self._relays:
            self.start_hub()
        data = self.folder / "data"
        self._start(
            "daemon", "hub", "serve", "--host", HUB_ADDRESS, "--port", str(DAEMON_PORT), "--data-dir", str(data)
        )
        daemon_log = self.folder / "daemon.log"
        wait_until(lambda: "koala serves" in daemon_log.read_text(), "the daemon to serve")
        for cluster in SITES:
            if self._relays:
                self.start_head(cluster)
            self._managers.append(NodeManager(self._lab, cluster, self.folder / f"{cluster}.lrm"))
            self.start_agent(cluster)
        self.connect(f"https://{HUB_ADDRESS}:{DAEMON_PORT}")
        if self._relays:
            self.wait_for_relays()
        return self

    def start_agent(self, cluster: str) -> None:
        url = f"https://{HUB_ADDRESS}:{DAEMON_PORT}"
        directory = str(self.folder / f"agent-{cluster}")
        token = {"KOALA_AGENT_TOKEN": self._configuration["clusters"][cluster]["token"]}
        arguments = ["agent", cluster, "--url", url, "--directory", directory]
        self._start(f"agent-{cluster}", f"head-{cluster}", *arguments, environment=token, program=[str(AGENT)])

    def start_hub(self) -> None:
        self._start_relay("hub", "hub", {"listen": f"{HUB_ADDRESS}:{HUB_PORT}", "tls": self._tls})

    def start_head(self, cluster: str) -> None:
        settings = {
            "cluster": cluster,
            "listen": f"{self._lab.head_address(cluster)}:{HEAD_PORT}",
            "hub": f"{HUB_ADDRESS}:{HUB_PORT}",
            "ca_file": str(self.ca_file),
            "tls": self._tls,
        }
        self._start_relay(f"head-{cluster}", "head", settings)

    def _start_relay(self, host: str, kind: str, settings: dict[str, Any]) -> None:
        file = self.folder / f"{host}.yaml"
        file.write_text(yaml.safe_dump(settings | {"control": str(self.folder / f"{host}.sock")}))
        self._start(f"relay-{host}", host, "relay", kind, "--config", str(file))

    def _start(
        self,
        name: str,
        host: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        program: list[str] | None = None,
    ) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self._lab.command(host), sys.executable, *(program or self.koala_command[1:]), *arguments],
                env=self.environment | {"PYTHONPATH": str(AGENT.parents[2])} | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self, name: str) -> None:
        """Stop a process and wait for it."""
        process = self.processes.pop(name)
        process.terminate()
        process.wait(STOP_TIMEOUT_S)

    def kill_relay(self, name: str) -> None:
        """Kill a relay; start the hub or head again."""
        if name.startswith("node-"):
            for pid in self._lab.list_processes(name):
                with suppress(OSError):
                    if b"relay_node.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)
            return
        process = self.processes.pop(name)
        process.kill()
        process.wait()
        if name == "relay-hub":
            self.start_hub()
        else:
            self.start_head(name.removeprefix("relay-head-"))

    def wait_for_relays(self) -> None:
        """Wait until the daemon reports the relays of both sites as ready."""
        lines = [f"action='relay-site' cluster='{cluster}' ready=" for cluster in SITES]
        wait_until(
            lambda: all(self.read_log("daemon").rpartition(line)[2].startswith("True") for line in lines),
            "the relays of both sites to be ready",
        )

    def list_node_processes(self) -> list[int]:
        return [pid for node in range(len(CLUSTERS)) for pid in self._lab.list_processes(f"node-{node}")]

    def read_log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def print_logs(self) -> None:
        for file in sorted(self.folder.glob("*.log")):
            print(f"-- {file.name}\n{file.read_text(errors='replace')[-3000:]}")

    def close(self) -> None:
        self.http.close()
        for name in list(self.processes):
            self.stop(name)
        for manager in self._managers:
            manager.shutdown()
            manager.server_close()


@contextmanager
def laboratory_grid(mpi: dict[str, Any], *, relays: bool = False, **options: bool) -> Iterator[LaboratoryGrid]:
    """Run koalapy in a laboratory. The caller's thread and its commands are on the host ``hub``."""
    # Not in a folder of pytest, which no other account may enter.
    with TemporaryDirectory() as name, laboratory(Path(name), **options) as lab, lab.entered("hub"):
        folder = Path(name)
        folder.chmod(0o755)
        grid = LaboratoryGrid(lab, folder, mpi, relays=relays)
        try:
            yield grid.start()
        finally:
            grid.close()
            grid.print_logs()
