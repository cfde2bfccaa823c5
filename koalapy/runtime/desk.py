"""Where mpirun's launch agents hand over what they were asked to start."""

from __future__ import annotations

import os
from collections.abc import Callable

from koalapy.runtime.link import Loop

LAUNCH_AGENT = """\
host=$1; shift; desk=${0%/*}
printf '%s\\n' "$*" > "$desk/$host.command" && echo "$host" > "$desk/requests" || exit 1
read -r code message < "$desk/$host.answer" || exit 1
[ "$code" = 0 ] || echo "$message" >&2
exit "$code"
"""


class Desk:
    """Where the launch agents that mpirun starts hand in (host, command) and wait for the answer.

    Pipes in a folder of our own, so that a launch agent is a shell script without any child: mpirun starts one for
    each node, all at once.
    """

    def __init__(self, loop: Loop, hosts: list[str], asked: Callable[[str, str], None]) -> None:
        self._loop, self._asked = loop, asked
        self.folder = f"{os.environ.get('TMPDIR', '/tmp')}/koala-{os.getpid()}-{os.urandom(4).hex()}"
        os.mkdir(self.folder, 0o700)
        with open(f"{self.folder}/launch", "w", encoding="ascii") as file:
            file.write(LAUNCH_AGENT)
        self._requests = self._pipe("requests")
        self._answers = {host: self._pipe(f"{host}.answer") for host in hosts}
        self._rest = b""
        loop.watch(self._requests, self._ready)

    @property
    def agent(self) -> str:
        return f"/bin/sh {self.folder}/launch"

    def answer(self, host: str, error: str = "") -> None:
        os.write(self._answers[host], f"{1 if error else 0} {error[:1000]}\n".encode())

    def close(self) -> None:
        self._loop.forget(self._requests)
        for file in (self._requests, *self._answers.values()):
            os.close(file)
        for name in os.listdir(self.folder):
            os.unlink(f"{self.folder}/{name}")
        os.rmdir(self.folder)

    def _pipe(self, name: str) -> int:
        os.mkfifo(f"{self.folder}/{name}", 0o600)
        return os.open(f"{self.folder}/{name}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _ready(self, _events: int) -> None:
        *hosts, self._rest = (self._rest + os.read(self._requests, 65536)).split(b"\n")
        for host in map(os.fsdecode, hosts):
            with open(f"{self.folder}/{host}.command", encoding="utf-8") as file:
                self._asked(host, file.read().rstrip("\n"))
