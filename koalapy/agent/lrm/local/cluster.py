"""Start an embedded cluster's locald, talk to it over a blocking connection, and run commands as its local users.

Light to import, since ``koala local-run`` does.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from koalapy.agent.lrm.local.processes import CANNOT_RUN, HELD_BY_ANOTHER, LOCK_FILE, SOCKET_NAME
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable
from koalapy.runner.folders import short_socket_path

REQUEST_TIMEOUT_S = 30.0
CONNECT_INTERVAL_S = 0.05
OUTPUT_INTERVAL_S = 0.1
"""Seconds between two looks at the output file of ``koala local-run``."""
INTERRUPTED_EXIT_CODE = 130
_LOCALD = Path(__file__).with_name("locald.py")


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """An embedded cluster of ``nodes`` nodes at the addresses ``network``.1, ``network``.2 and so on."""

    directory: Path
    """Where locald has its socket, lock, log and journal."""
    name: str
    nodes: int
    network: str = "127.0.1"
    preload: Path | None = None
    """Python file that locald runs without starting an interpreter."""
    linger: float = 30.0
    """Seconds without clients and jobs after which locald ends."""
    kill_grace: float = 1.0
    """Seconds between SIGTERM and SIGKILL."""
    start_timeout: float = 15.0
    """Seconds for which locald may not answer before that is an error."""

    @property
    def addresses(self) -> list[str]:
        return [f"{self.network}.{number}" for number in range(1, self.nodes + 1)]

    @property
    def start_command(self) -> list[str]:
        """Return the command that starts locald with the options of this cluster."""
        options = {
            "--dir": self.directory.resolve(),
            "--cluster": self.name,
            "--nodes": self.nodes,
            "--network": self.network,
            "--linger": self.linger,
            "--kill-grace": self.kill_grace,
            "--preload": self.preload,
        }
        arguments = [text for key, value in options.items() if value is not None for text in (key, str(value))]
        return [sys.executable, "-I", "-S", str(_LOCALD), *arguments]

    def start(self) -> None:
        """Start locald unless one holds the directory, and wait until it answers. Raise ``SiteError``.

        One that holds the directory may still be starting or ending: try to connect, and call this again.
        """
        if self._is_held():
            return
        # Imported here: koala local-run starts no locald.
        from koalapy.agent.core.settings import OPEN_MPI_PREFIXES, inherited_environment

        environment = inherited_environment(prefixes=OPEN_MPI_PREFIXES)
        try:
            locald = subprocess.run(
                self.start_command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                timeout=self.start_timeout,
                start_new_session=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SiteUnavailable(f"cluster {self.name}: locald does not start: {error}") from error
        message = locald.stderr.decode(errors="replace").strip()
        if locald.returncode == CANNOT_RUN:
            raise SiteRejected(f"cluster {self.name}: {message}", fault=SiteFault.SITE)
        if locald.returncode > 0 and locald.returncode != HELD_BY_ANOTHER:
            raise SiteUnavailable(f"cluster {self.name}: locald: {message}")

    def _is_held(self) -> bool:
        """Return whether a locald or a keeper has the directory's lock."""
        try:
            with (self.directory / LOCK_FILE).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def connect(self) -> "LocalConnection":
        """Wait until locald answers, and return a connection to it. Raise ``SiteError``.

        It does not start locald: users of the cluster do not know its network and other settings, its agent does.
        """
        deadline = time.monotonic() + self.start_timeout
        while True:
            try:
                with contextlib.ExitStack() as on_failure:
                    connection = on_failure.enter_context(LocalConnection(self.directory))
                    connection.request("hello")  # one that is ending still accepts connections
                    on_failure.pop_all()
                    return connection
            except (SiteUnavailable, OSError) as error:
                if time.monotonic() >= deadline:
                    hint = "its agent starts locald: see the agent's log"
                    text = f"cluster {self.name}: locald does not answer: {error}"
                    raise SiteUnavailable(text, hint=hint) from error
            time.sleep(CONNECT_INTERVAL_S)

    def stop_if_unused(self) -> None:
        """Shut locald down and wait until it is gone, unless it has jobs or other clients."""
        with contextlib.suppress(SiteUnavailable, OSError), LocalConnection(self.directory) as connection:
            if connection.request("shutdown")["shutdown"]:
                connection.receive()  # raises ``SiteUnavailable`` at the end


class LocalConnection:
    """A blocking connection to locald with one request at a time."""

    def __init__(self, directory: Path) -> None:
        """Connect to the locald of a cluster's directory; raise ``OSError`` if none listens there."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_socket_path(directory / SOCKET_NAME) as path:
                self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> "LocalConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def request(self, operation: str, **fields: object) -> dict[str, Any]:
        """Send a request and return the reply. Raise ``SiteError``."""
        self._socket.settimeout(REQUEST_TIMEOUT_S)
        try:
            self.send(operation, **fields)
            return self.receive()
        finally:
            self._socket.settimeout(None)

    def send(self, operation: str, **fields: object) -> None:
        try:
            self._socket.sendall(json.dumps({"op": operation, **fields}).encode() + b"\n")
        except OSError as error:
            raise SiteUnavailable(f"locald does not listen: {error}") from error

    def receive(self) -> dict[str, Any]:
        """Wait for the next reply or notice. Raise ``SiteError``."""
        try:
            line = self._lines.readline()
        except OSError as error:
            raise SiteUnavailable(f"locald does not answer: {error}") from error
        if not line:
            raise SiteUnavailable("locald has ended")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise_error(reply)
        return reply


def raise_error(reply: dict[str, Any]) -> NoReturn:
    """Raise the ``SiteError`` that a reply of locald describes."""
    kind, message = reply.get("kind"), str(reply["error"])
    if kind == "unavailable":
        raise SiteUnavailable(message, value=kind)
    raise SiteRejected(message, value=kind, fault=SiteFault.LIMIT if kind == "limit" else SiteFault.UNKNOWN)


def run_as_local_user(
    cluster: LocalCluster, nodes: int, argv: Sequence[str], user: str, env: Mapping[str, str], cwd: Path
) -> int:
    """Run a command on each of so many nodes, with its output on stdout. Raise ``SiteError``.

    Return its exit code, or 130 after SIGINT or SIGTERM. The command ends with this process.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)
    with cluster.connect() as connection:
        folder = cluster.directory.resolve() / "local-run"
        folder.mkdir(exist_ok=True)
        output_path = folder / f"{os.getpid()}.out"
        output_path.touch()
        try:
            with output_path.open("rb") as output:
                job = connection.request(
                    "submit",
                    name=f"{Path(argv[0]).name}-{os.getpid()}",
                    user=user,
                    nodes=nodes,
                    argv=list(argv),
                    env=dict(env),
                    cwd=str(cwd),
                    output=str(output_path),
                    attached=True,
                )["job"]
                connection.send("wait", job=job)
                while not select.select([connection], [], [], OUTPUT_INTERVAL_S)[0]:
                    _copy_output(output)
                record = connection.receive()
                _copy_output(output)
        except KeyboardInterrupt:  # the job ends with the connection
            return INTERRUPTED_EXIT_CODE
        finally:
            output_path.unlink(missing_ok=True)
    if record["lost"]:
        print(f"lost: {record['reason']}", file=sys.stderr)
    return 1 if record["exit_code"] is None else int(record["exit_code"])


def _copy_output(output: BinaryIO) -> None:
    shutil.copyfileobj(output, sys.stdout.buffer)
    sys.stdout.buffer.flush()
