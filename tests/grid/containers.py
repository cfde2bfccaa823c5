"""The containers of the testbed, with a helper process in each that runs commands and lists processes."""

import json
import subprocess
import threading
from dataclasses import dataclass, field
from typing import Any

PROJECT = "koalapy"

# Runs in the container while its standard input is open, and answers each request with one line of JSON.
HELPER_PROGRAM = r"""
import json, os, subprocess, sys

def text(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().decode(errors="replace")

def processes():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = text(pid, "stat").rpartition(")")[2].split()[:2]
            environment = dict(e.split("=", 1) for e in text(pid, "environ").split("\0") if "=" in e)
            command = text(pid, "cmdline").split("\0")[:-1]
        except OSError:
            continue
        if state not in "ZX":
            found.append([int(pid), int(parent), command, environment])
    return found

for line in sys.stdin:
    argv = json.loads(line)
    if argv:
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        answer = [done.returncode, done.stdout, done.stderr]
    else:
        answer = processes()
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Container:
    """A container of the testbed and its service."""

    name: str
    service: str
    _helper: "subprocess.Popen[str] | None" = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, argv: list[str]) -> Any:
        with self._lock:
            if self._helper is None or self._helper.poll() is not None:
                self._helper = subprocess.Popen(
                    ["docker", "exec", "-i", self.name, "python3", "-u", "-c", HELPER_PROGRAM],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            assert self._helper.stdin is not None
            assert self._helper.stdout is not None
            self._helper.stdin.write(json.dumps(argv) + "\n")
            self._helper.stdin.flush()
            answer = self._helper.stdout.readline()
        if not answer:
            raise AssertionError(f"container {self.service} does not answer")
        return json.loads(answer)

    def list_processes(self) -> list[tuple[int, int, list[str], dict[str, str]]]:
        """Return process id, parent, command line and environment of each process."""
        return [tuple(entry) for entry in self.ask([])]

    def run(self, *argv: str, user: str = "root", check: bool = True) -> str:
        """Run a command and return its standard output."""
        if user != "root":
            home = ["env", f"HOME=/home/{user}", f"USER={user}", f"LOGNAME={user}"]
            argv = ("setpriv", "--reuid", user, "--regid", user, "--init-groups", *home, *argv)
        code, out, errors = self.ask(list(argv))
        assert code == 0 or not check, f"{self.service}: {argv}: {out}{errors}"
        return str(out)

    def shell(self, script: str, **options: Any) -> str:
        return self.run("sh", "-c", script, **options)

    def kill(self, service: str) -> None:
        """Kill a service, which is started again at once unless it is held."""
        self.shell(f"kill -9 $(cat /run/kept/{service})")

    def hold(self, service: str) -> None:
        """Kill a service and prevent its restart."""
        self.shell(f"touch /run/held/{service}; kill -9 $(cat /run/kept/{service})")

    def release(self, service: str) -> None:
        """Allow the restart of a service."""
        self.run("rm", "-f", f"/run/held/{service}")

    def close(self) -> None:
        if self._helper is not None and self._helper.stdin is not None:
            self._helper.stdin.close()
            self._helper.wait(timeout=20)


def list_containers() -> dict[str, Container]:
    """Return the containers of the testbed by service."""
    listing = subprocess.run(
        [
            "docker",
            "ps",
            "--filter",
            f"label=com.docker.compose.project={PROJECT}",
            "--format",
            '{{.Names}} {{.Label "com.docker.compose.service"}}',
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {service: Container(name, service) for name, service in map(str.split, listing.splitlines())}


def change_network(action: str, container: Container, address: str = "") -> None:
    """``disconnect`` a container from the network between clusters and daemon, or ``connect`` it again."""
    options = ["--ip", address, "--alias", container.service] if address else []
    subprocess.run(["docker", "network", action, *options, f"{PROJECT}_grid", container.name], check=True)
