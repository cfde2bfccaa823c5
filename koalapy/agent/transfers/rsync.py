"""rsync as the puller's side runs it: its command line, and what it means when it ends."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from koalapy.agent.accounts.accounts import plain
from koalapy.agent.transfers.encryption import through_tunnel
from koalapy.agent.transfers.exports import RSYNC, Route

IO_TIMEOUT = 30
"""Seconds without a byte after which a transfer counts as cut."""
TICK = 0.25
"""Seconds between two looks at how far it is."""
FIRST_TICK = 0.02
"""The same until the first bytes have come: how long that took is no sign of how fast the link is."""
MAX_ERROR_LENGTH = 4000
"""Bytes that are kept of what it says, the last ones: there is a line for each of very many files, maybe."""
OURS = re.compile(r"\[(receiver|generator)\]|\[(receiver|generator)=", re.IGNORECASE)
NO_SPACE = ("No space left on device", "Disk quota exceeded", "File too large")
READ_ONLY = ("Read-only file system", "Permission denied")


class RsyncMissing(Exception):
    """There is none on this host."""


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    errors: str

    @property
    def reason(self) -> str:
        """The line that says why, for people."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        reasons = [line for line in lines if not line.startswith("rsync error:")]
        if self.code < 0:
            return f"rsync was killed by signal {-self.code}"
        return next(iter(reasons or lines), f"rsync ended with {self.code}").removeprefix("rsync: ")

    @property
    def local_error(self) -> str:
        """Why nothing can be written here; empty when that is not what went wrong."""
        for line in self.errors.splitlines():
            if any(word in line for word in NO_SPACE) or (
                OURS.search(line) and any(word in line for word in READ_ONLY)
            ):
                return line.strip().removeprefix("rsync: ")
        return ""


def command(route: Route, folder: Path, program: str = RSYNC) -> list[str]:
    """Pull what a ticket is for into a folder, and go on with what is there of it already.

    Names of single files are given by standard input, where none of their characters has a meaning.
    """
    options = ["--append", "--times", "--perms", "--chmod=u=rwX,go=", "--no-motd"]
    options += [f"--timeout={IO_TIMEOUT}", "--contimeout=10"]
    options += ["--recursive"] if route.kind == "folder" else ["--from0", "--files-from=-"]
    host = f"[{route.host}]" if ":" in route.host else route.host
    return [program, *options, f"rsync://{route.user}@{host}:{route.port}/{route.module}/", f"{folder}/"]


async def pull(route: Route, name: str, folder: Path, tick: Callable[[], bool], program: str = RSYNC) -> Outcome:
    """Run rsync to its end, ``tick`` being called all the while, which says whether anything has come;
    ``RsyncMissing``. Killed when cancelled."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "RSYNC_PASSWORD": route.password}
    if route.certificate:
        environment |= through_tunnel(route.host, route.port, route.certificate)
    try:
        process = await asyncio.create_subprocess_exec(
            *plain(*command(route, folder, program)),
            env=environment,
            cwd="/",
            start_new_session=True,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise RsyncMissing(error.strerror) from error
    talking = asyncio.create_task(_talk(process, f"./{name}\0".encode()))
    try:
        pause = FIRST_TICK
        while True:
            done, _ = await asyncio.wait((talking,), timeout=pause)
            pause = TICK if tick() else min(TICK, 1.1 * pause)
            if done:
                break
        errors = talking.result()
        return Outcome(process.returncode or 0, errors.decode(errors="replace"))
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.gather(talking, return_exceptions=True)


async def _talk(process: asyncio.subprocess.Process, names: bytes) -> bytes:
    """Tell it what to pull, and hear whole lines of what it complains of at last, until it has ended."""
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(names)
    process.stdin.close()
    kept = b""
    while data := await process.stderr.read(MAX_ERROR_LENGTH):
        kept += data
        if len(kept) > MAX_ERROR_LENGTH:
            kept = kept[-MAX_ERROR_LENGTH:].partition(b"\n")[2]
    await process.wait()
    return kept


def kill_orphans(folder: Path) -> list[int]:
    """Kill what an agent that is gone has left pulling into a folder, and return what was told to end.

    Two writers at once would spoil the file.
    """
    target, found = os.fsencode(f"{folder}/"), []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            if os.path.basename(words[0]) == RSYNC.encode() and any(word.startswith(target) for word in words[1:]):
                os.kill(int(entry), signal.SIGKILL)
                found.append(int(entry))
        except (OSError, ProcessLookupError):
            continue
    return found


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
