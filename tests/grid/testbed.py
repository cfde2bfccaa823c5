"""The testbed (``make testbed``) as a grid: Slurm and Grid Engine with one container for each node."""

import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.grid.containers import Container, list_containers
from tests.grid.grid import Folder, Gate, Grid, Load, NodeProcess, wait_until
from tests.needs import TESTBED_ENV

CLUSTERS = {"north": ("slurm", 3), "south": ("slurm", 2), "east": ("sge", 3)}
"""The clusters of the common scenarios. West (Slurm 24.11) is drained except within ``Testbed.open_west``."""
WEST = "west"
ADDRESSES = {"north-head": "198.18.0.10", "south-head": "198.18.0.20", "east-head": "198.18.0.30"}


class NodeGate(Gate):
    def __init__(self, nodes: Iterable[Container]) -> None:
        super().__init__(f"/scratch/gate-{uuid.uuid4().hex}")
        self._nodes = list(nodes)

    def open(self) -> None:
        for node in self._nodes:
            node.run("touch", self.path)


class SharedFolder(Folder):
    """A folder that is /projects/NAME for the submitter and has another path in every cluster."""

    def __init__(self, heads: dict[str, Container]) -> None:
        self._heads, self._name = heads, uuid.uuid4().hex
        self.path = f"/projects/{self._name}"
        for cluster, head in heads.items():
            head.run("mkdir", self._path_in_cluster(cluster), user="koala")

    def _path_in_cluster(self, cluster: str) -> str:
        return f"/shared/{cluster}/{'work' if cluster == 'south' else 'projects'}/{self._name}"

    def read(self, name: str, cluster: str) -> str:
        return self._heads[cluster].run("cat", f"{self._path_in_cluster(cluster)}/{name}")


class LocalUserJob(Load):
    """A job that the user alice submits to the resource manager directly."""

    def __init__(self, head: Container, cluster: str, nodes: int) -> None:
        self._head, self._kind = head, CLUSTERS[cluster][0]
        if self._kind == "slurm":
            command = ["sbatch", "--parsable", "--nodes", str(nodes), "--output=/dev/null", "--wrap", "sleep 300"]
        else:
            command = ["qsub", "-terse", "-o", "/dev/null", "-j", "y", "-b", "y", "-pe", "koala", str(2 * nodes)]
            command += ["sleep", "300"]
        self.id = head.shell(f"cd /tmp && {' '.join(map(_quote, command))}", user="alice").strip()
        if self._kind == "slurm":
            wait_until(lambda: "RUNNING" in head.run("squeue", "-h", "-j", self.id, "-o", "%T"), "alice's job to run")
        else:
            wait_until(lambda: " r " in head.shell("qstat -u alice"), "alice's job to run")

    def stop(self) -> None:
        if self._kind == "slurm":
            self._head.run("scancel", self.id)
            wait_until(lambda: not self._head.run("squeue", "-h", "-u", "alice"), "alice's job to be gone")
        else:
            self._head.run("qdel", self.id, user="alice")
            wait_until(lambda: not self._head.shell("qstat -u alice"), "alice's job to be gone")


class Testbed(Grid):
    """The daemon and the clusters of ``docker-compose.yml``."""

    __test__ = False
    python = "python"
    nodes = {name: size for name, (_, size) in CLUSTERS.items()}  # noqa: RUF012
    six_nodes = {"type": "fixed", "components": [{"size": 2, "cluster": name} for name in CLUSTERS]}  # noqa: RUF012
    managers = ("north", "east", WEST)

    def __init__(self) -> None:
        settings = dict(line.split("=", 1) for line in TESTBED_ENV.read_text().splitlines() if "=" in line)
        super().__init__(settings["KOALA_URL"], settings["KOALA_TOKEN"])
        self.ca_file = Path(settings["KOALA_CA_FILE"])
        self.containers = list_containers()
        self.heads = {name: self.containers[f"{name}-head"] for name in CLUSTERS}
        self.west_head = self.containers[f"{WEST}-head"]
        self.worker_nodes = [
            self.containers[f"{name}-{number}"]
            for name, size in [*self.nodes.items(), (WEST, 3)]
            for number in range(1, size + 1)
        ]
        self._pool = ThreadPoolExecutor(len(self.containers))

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"KOALA_CA_FILE": str(self.ca_file)}

    def start(self) -> "Testbed":
        self.containers["daemon"].release("daemon")
        self.connect(self.url)
        self.drain(WEST)
        return self

    def drain(self, cluster: str) -> None:
        answer = self.http.post(f"/api/v1/clusters/{cluster}/drain", json={"reason": "tests"})
        assert answer.is_success, answer.text

    def resume(self, cluster: str) -> None:
        answer = self.http.post(f"/api/v1/clusters/{cluster}/resume", json={})
        assert answer.is_success, answer.text

    @contextmanager
    def open_west(self) -> Iterator[None]:
        """Let west take jobs while the block runs. Its queue is full of other users' jobs by then."""
        wait_until(lambda: "queue-filled" in self.west_head.run("ls", "/run"), "carol's jobs to be submitted", 120)
        self.resume(WEST)
        wait_until(lambda: self.get_cluster(WEST)["state"] == "usable", "west to be usable")
        yield
        self.cancel_all_jobs()
        self.wait_until_idle()
        self.drain(WEST)

    def list_clusters(self) -> list[dict[str, Any]]:
        """Return the clusters of the common scenarios."""
        return [cluster for cluster in super().list_clusters() if cluster["name"] in CLUSTERS]

    def get_cluster(self, name: str) -> dict[str, Any]:
        return next(cluster for cluster in super().list_clusters() if cluster["name"] == name)

    def kill_daemon(self) -> None:
        self.containers["daemon"].hold("daemon")

    def stop_daemon(self) -> int:
        daemon = self.containers["daemon"]
        daemon.shell("touch /run/held/daemon; kill $(cat /run/kept/daemon)")
        wait_until(lambda: not [p for p in daemon.list_processes() if "serve" in p[2]], "the daemon to end")
        return 0

    def restart_daemon(self, **settings: str) -> None:
        """Restart the daemon with these variables besides its configuration, and wait until its clusters are usable."""
        lines = "".join(f"{name}={value}\n" for name, value in settings.items())
        self.containers["daemon"].shell(f"printf %s '{lines}' >/run/settings.env")
        self.stop_daemon()
        self.containers["daemon"].release("daemon")
        self.connect(self.url)

    # Processes and nodes

    def list_processes(self) -> list[NodeProcess]:
        """Return runners and processes of components in the containers of all nodes."""

        def list_in_container(container: Container) -> list[NodeProcess]:
            return [
                NodeProcess(pid, parent, command, environment, container.service, self._make_killer(container, pid))
                for pid, parent, command, environment in container.list_processes()
                if "KOALA_COMPONENT_TOKEN" in environment or "runner.py" in " ".join(command)
            ]

        return [process for processes in self._pool.map(list_in_container, self.worker_nodes) for process in processes]

    def list_workers(self, token: str = "") -> list[NodeProcess]:
        return [process for process in self._processes_of(token) if not _is_runner(process)]

    def list_runners(self, token: str = "", node: str = "") -> list[NodeProcess]:
        runners = [
            process for process in self._processes_of(token) if _is_runner(process) and "python" in process.command[0]
        ]
        return [process for process in runners if not node or process.node == node]

    def _processes_of(self, token: str) -> list[NodeProcess]:
        return [
            process
            for process in self.list_processes()
            if process.environment.get("KOALA_COMPONENT_TOKEN", "").startswith(token)
        ]

    @staticmethod
    def _make_killer(container: Container, pid: int) -> Callable[[], None]:
        return lambda: (container.run("kill", "-9", str(pid), check=False), None)[1]

    def list_lrm_jobs(self) -> list[str]:
        """Return a line for each job in the queues of the resource managers."""
        queued = [self.heads[c].shell("squeue -h -o '%i %u %j %T'") for c in ("north", "south")]
        return [line for text in (*queued, self.heads["east"].shell("qstat -u '*'")) for line in text.splitlines()]

    def wait_until_idle(self) -> None:
        wait_until(lambda: not self.list_processes(), "every process on the nodes to be gone")
        wait_until(
            lambda: not self.list_lrm_jobs(), f"the resource managers' queues to be empty: {self.list_lrm_jobs()}"
        )
        idle_counts = {name: (size, size, 0) for name, size in self.nodes.items()}

        def read_counts() -> dict[str, tuple[int, int, int]]:
            return {c["name"]: (c["total"], c["idle"], c["used"]) for c in self.list_clusters()}

        wait_until(lambda: read_counts() == idle_counts, f"every node to be idle: {read_counts()}")

    # Faults

    def make_gate(self) -> NodeGate:
        return NodeGate(self.worker_nodes)

    def make_folder(self) -> SharedFolder:
        return SharedFolder(self.heads | {WEST: self.west_head})

    def start_local_job(self, cluster: str, nodes: int) -> LocalUserJob:
        return LocalUserJob(self.heads[cluster], cluster, nodes)

    def kill_agent(self, cluster: str) -> None:
        self.heads[cluster].hold("agent")
        wait_until(lambda: self.get_cluster(cluster)["state"] == "unreachable", "the loss to be noticed")
        self.heads[cluster].release("agent")

    def suspend_agent(self, cluster: str) -> Callable[[], None]:
        self.heads[cluster].shell("kill -STOP $(cat /run/kept/agent)")
        return lambda: (self.heads[cluster].shell("kill -CONT $(cat /run/kept/agent)"), None)[1]

    def close(self) -> None:
        for container in self.containers.values():
            container.close()
        self._pool.shutdown()
        self.http.close()


def _is_runner(process: NodeProcess) -> bool:
    """Tell whether a process is a runner or a process of the resource manager around it."""
    text = " ".join(process.command)
    return "runner.py" in text or "/launch" in text or "slurmstepd" in text or "srun" in text or "qrsh" in text


def _quote(argument: str) -> str:
    return f"'{argument}'" if " " in argument else argument
