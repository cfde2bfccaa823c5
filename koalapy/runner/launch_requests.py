"""Where mpirun's launch agents hand over what they were asked to start."""

from __future__ import annotations

import os
from collections.abc import Callable

from koalapy.runner.link import Loop

LAUNCH_SHELL, LAUNCH_SCRIPT = "/bin/sh", "koala-launch"
LAUNCH_AGENT = """\
trap 'exit 0' TERM
host=$1; shift; folder=${0%/*}
{ printf '%s\\n' "$*" > "$folder/$host.command" && echo "$host" > "$folder/requests"; } 2>/dev/null || exit 1
{ read -r code message < "$folder/$host.answer"; } 2>/dev/null || exit 1
[ "$code" = 0 ] || echo "$message" >&2
exit "$code"
"""


def is_launch_agent(words: list[str]) -> bool:
    """Whether a command is that of a launch agent of ours, for whomever."""
    return words[:1] == [LAUNCH_SHELL] and words[1:2] != [] and words[1].endswith(f"/{LAUNCH_SCRIPT}")


class LaunchRequests:
    """Where the launch agents that mpirun starts hand in (host, command), and learn how that ended.

    Pipes in a folder, so that a launch agent is a shell script without any child: mpirun starts one for each node, all
    at once. Like the ssh it stands for, it lives as long as what it started.
    """

    def __init__(self, loop: Loop, folder: str, hosts: list[str], asked: Callable[[str, str], None]) -> None:
        self._loop, self._folder, self._asked = loop, folder, asked
        with open(f"{folder}/{LAUNCH_SCRIPT}", "w", encoding="ascii") as file:
            file.write(LAUNCH_AGENT)
        self._requests = self._pipe("requests")
        self._answers = {host: self._pipe(f"{host}.answer") for host in hosts}
        self._rest = b""
        loop.watch(self._requests, self._ready)

    @property
    def agent(self) -> str:
        return f"{LAUNCH_SHELL} {self._folder}/{LAUNCH_SCRIPT}"

    def words(self, host: str) -> list[str]:
        """Return the first words of the launch agent for a host."""
        return [LAUNCH_SHELL, f"{self._folder}/{LAUNCH_SCRIPT}", host]

    def answer(self, host: str, error: str = "") -> None:
        """What was asked for that host has ended, or could not be started."""
        os.write(self._answers[host], f"{1 if error else 0} {error[:1000]}\n".encode())

    def close(self) -> None:
        """Whoever waits still is let go: without an answer, as when we are killed, mpirun would speak of a firewall."""
        self._loop.forget(self._requests)
        os.close(self._requests)
        for host, file in self._answers.items():
            self.answer(host)
            os.close(file)

    def _pipe(self, name: str) -> int:
        os.mkfifo(f"{self._folder}/{name}", 0o600)
        return os.open(f"{self._folder}/{name}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _ready(self, _events: int) -> None:
        *hosts, self._rest = (self._rest + os.read(self._requests, 65536)).split(b"\n")
        for host in map(os.fsdecode, hosts):
            with open(f"{self._folder}/{host}.command", encoding="utf-8") as file:
                self._asked(host, file.read().rstrip("\n"))
