"""The testbed (``make testbed``) as a world for the same scenarios: real Slurm and Grid Engine, a container a node."""

import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.grid.containers import Container, containers
from tests.grid.world import Folder, Gate, Load, Seen, World, until
from tests.needs import TESTBED

CLUSTERS = {"north": ("slurm", 3), "south": ("slurm", 2), "east": ("sge", 3)}
"""The clusters of the common scenarios. West (Slurm 24.11) is drained but for the tests of test_testbed_current.py."""
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
    """Called /projects/NAME by the submitter, and something else in every cluster."""

    def __init__(self, heads: dict[str, Container]) -> None:
        self._heads, self._name = heads, uuid.uuid4().hex
        self.path = f"/projects/{self._name}"
        for cluster, head in heads.items():
            head.run("mkdir", self._there(cluster), user="koala")

    def _there(self, cluster: str) -> str:
        return f"/shared/{cluster}/{'work' if cluster == 'south' else 'projects'}/{self._name}"

    def read(self, name: str, cluster: str) -> str:
        return self._heads[cluster].run("cat", f"{self._there(cluster)}/{name}")


class LocalUsersJob(Load):
    """Of alice, who knows nothing of koala."""

    def __init__(self, head: Container, cluster: str, nodes: int) -> None:
        self._head, self._kind = head, CLUSTERS[cluster][0]
        if self._kind == "slurm":
            command = ["sbatch", "--parsable", "--nodes", str(nodes), "--output=/dev/null", "--wrap", "sleep 300"]
        else:
            command = ["qsub", "-terse", "-o", "/dev/null", "-j", "y", "-b", "y", "-pe", "koala", str(2 * nodes)]
            command += ["sleep", "300"]
        self.id = head.shell(f"cd /tmp && {' '.join(map(_quoted, command))}", user="alice").strip()
        if self._kind == "slurm":
            until(lambda: "RUNNING" in head.run("squeue", "-h", "-j", self.id, "-o", "%T"), "alice's job to run")
        else:
            until(lambda: " r " in head.shell("qstat -u alice"), "alice's job to run")

    def stop(self) -> None:
        if self._kind == "slurm":
            self._head.run("scancel", self.id)
            until(lambda: not self._head.run("squeue", "-h", "-u", "alice"), "alice's job to be gone")
        else:
            self._head.run("qdel", self.id, user="alice")
            until(lambda: not self._head.shell("qstat -u alice"), "alice's job to be gone")


class Testbed(World):
    """The daemon and the clusters of ``docker-compose.yml``."""

    __test__ = False
    python = "python"
    nodes = {name: size for name, (_, size) in CLUSTERS.items()}  # noqa: RUF012
    six = {"type": "fixed", "components": [{"size": 2, "cluster": name} for name in CLUSTERS]}  # noqa: RUF012

    def __init__(self) -> None:
        known = dict(line.split("=", 1) for line in TESTBED.read_text().splitlines() if "=" in line)
        super().__init__(known["KOALA_URL"], known["KOALA_TOKEN"])
        self.ca_file = Path(known["KOALA_CA_FILE"])
        self.containers = containers()
        self.heads = {name: self.containers[f"{name}-head"] for name in CLUSTERS}
        self.workplaces = [
            self.containers[f"{name}-{number}"] for name, size in self.nodes.items() for number in range(1, size + 1)
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

    def clusters(self) -> list[dict[str, Any]]:
        """Return the clusters of the common scenarios."""
        return [cluster for cluster in super().clusters() if cluster["name"] in CLUSTERS]

    def cluster(self, name: str) -> dict[str, Any]:
        return next(cluster for cluster in super().clusters() if cluster["name"] == name)

    def kill(self) -> None:
        self.containers["daemon"].hold("daemon")

    def end(self) -> int:
        daemon = self.containers["daemon"]
        daemon.shell("touch /run/held/daemon; kill $(cat /run/kept/daemon)")
        until(lambda: not [p for p in daemon.processes() if "serve" in p[2]], "the daemon to end")
        return 0

    # What is really there

    def processes(self) -> list[Seen]:
        """What carries our marks, on every node: looked up in each container."""

        def look(container: Container) -> list[Seen]:
            return [
                Seen(pid, parent, command, environment, container.service, self._killer(container, pid))
                for pid, parent, command, environment in container.processes()
                if "KOALA_COMPONENT_TOKEN" in environment or "runner.py" in " ".join(command)
            ]

        return [seen for found in self._pool.map(look, self.workplaces) for seen in found]

    def workers(self, token: str = "") -> list[Seen]:
        return [p for p in self._of(token) if not _is_runner(p)]

    def runners(self, token: str = "", node: str = "") -> list[Seen]:
        found = [p for p in self._of(token) if _is_runner(p) and "python" in p.command[0]]
        return [p for p in found if not node or p.node == node]

    def _of(self, token: str) -> list[Seen]:
        return [p for p in self.processes() if p.environment.get("KOALA_COMPONENT_TOKEN", "").startswith(token)]

    @staticmethod
    def _killer(container: Container, pid: int) -> Callable[[], None]:
        return lambda: (container.run("kill", "-9", str(pid), check=False), None)[1]

    def lrm_jobs(self) -> list[str]:
        """What the resource managers have in hand of anybody's jobs."""
        queued = [self.heads[c].shell("squeue -h -o '%i %u %j %T'") for c in ("north", "south")]
        return [line for text in (*queued, self.heads["east"].shell("qstat -u '*'")) for line in text.splitlines()]

    def settle(self) -> None:
        until(lambda: not self.processes(), "every process on the nodes to be gone")
        until(lambda: not self.lrm_jobs(), f"the resource managers' queues to be empty: {self.lrm_jobs()}")
        whole = {name: (size, size, 0) for name, size in self.nodes.items()}

        def told() -> dict[str, tuple[int, int, int]]:
            return {c["name"]: (c["total"], c["idle"], c["used"]) for c in self.clusters()}

        until(lambda: told() == whole, f"every node to be idle: {told()}")

    # What may befall it

    def gate(self) -> NodeGate:
        return NodeGate(self.workplaces)

    def folder(self) -> SharedFolder:
        return SharedFolder(self.heads)

    def local_load(self, cluster: str, nodes: int) -> LocalUsersJob:
        return LocalUsersJob(self.heads[cluster], cluster, nodes)

    def kill_agent(self, cluster: str) -> None:
        self.heads[cluster].hold("agent")
        until(lambda: self.cluster(cluster)["state"] == "unreachable", "the loss to be noticed")
        self.heads[cluster].release("agent")

    def suspend_agent(self, cluster: str) -> Callable[[], None]:
        self.heads[cluster].shell("kill -STOP $(cat /run/kept/agent)")
        return lambda: (self.heads[cluster].shell("kill -CONT $(cat /run/kept/agent)"), None)[1]

    def close(self) -> None:
        for container in self.containers.values():
            container.close()
        self._pool.shutdown()
        self.http.close()


def _is_runner(seen: Seen) -> bool:
    """The runner itself, and what the resource manager has around it."""
    text = " ".join(seen.command)
    return "runner.py" in text or "/launch" in text or "slurmstepd" in text or "srun" in text or "qrsh" in text


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word
