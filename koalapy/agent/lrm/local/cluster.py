"""Where an embedded cluster is, how its locald is started, and a plain blocking connection to it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from koalapy.agent.core.settings import OPEN_MPI, inherited
from koalapy.agent.lrm.local.processes import MARK
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

_LOCALD = Path(__file__).with_name("locald.py")
_CANNOT_RUN = 2
_HELD_BY_ANOTHER = 3
REQUEST_TIMEOUT = 30.0
"""Seconds that locald has to answer."""


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """An embedded cluster: ``nodes`` nodes at addresses ``network``.1 and so on; its locald lives in ``directory``."""

    directory: Path
    name: str
    nodes: int
    network: str = "127.0.1"
    preload: Path | None = None
    """Python file that locald runs without starting an interpreter; see ``locald``."""
    linger: float = 30.0
    """Seconds without clients and jobs after which locald ends."""
    kill_grace: float = 1.0
    """Seconds between SIGTERM and SIGKILL."""
    start_timeout: float = 15.0
    """Seconds until a locald that does not answer is an error."""

    @property
    def addresses(self) -> list[str]:
        """Those of its nodes, by their numbers."""
        return [f"{self.network}.{number}" for number in range(1, self.nodes + 1)]

    def start(self) -> None:
        """Start the cluster's locald unless it runs; returns when it answers. Raises ``SiteError``."""
        environment = inherited(prefixes=OPEN_MPI) | {MARK: f"@{self.directory.resolve()}"}
        try:
            done = subprocess.run(
                self._command(),
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
        if done.returncode == _CANNOT_RUN:
            raise SiteRejected(
                f"cluster {self.name}: {done.stderr.decode(errors='replace').strip()}", fault=SiteFault.SITE
            )
        if done.returncode > 0 and done.returncode != _HELD_BY_ANOTHER:
            raise SiteUnavailable(f"cluster {self.name}: locald: {done.stderr.decode(errors='replace').strip()}")

    def socket_path(self) -> str:
        """Where its locald listens, or did; raises ``SiteUnavailable`` when none has been started.

        That may be in its directory though its file is gone or names another place, as after the directory was moved.
        """
        default = self.directory / "locald.sock"
        try:
            path = str(json.loads((self.directory / "locald.json").read_bytes())["socket"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if default.exists():
                return str(default)
            raise SiteUnavailable(f"cluster {self.name}: locald does not run: {error}") from error
        return str(default) if not os.path.exists(path) and default.exists() else path

    def matches(self, hello: dict[str, Any]) -> bool:
        """Whether the locald that says so runs this cluster, and not one from before the settings were changed."""
        told = hello["cluster"], hello["nodes"], hello.get("network", self.network)
        return told == (self.name, self.nodes, self.network)

    def raise_mismatch(self, hello: dict[str, Any]) -> NoReturn:
        """Raises ``SiteRejected``: the directory is in use by a cluster of other settings."""
        raise SiteRejected(
            f"cluster {self.name} of {self.nodes} nodes at {self.network}: {self.directory} is held by cluster "
            f"{hello['cluster']} of {hello['nodes']} nodes at {hello.get('network', self.network)}",
            hint="end its jobs and agents first",
            fault=SiteFault.SITE,
        )

    def connect(self) -> "LocalConnection":
        """A connection to its locald, which is started if it does not run. Raises ``SiteError``."""
        deadline = time.monotonic() + self.start_timeout
        while True:
            try:
                if connection := self._greet():
                    return connection
            except (SiteUnavailable, OSError) as error:
                if time.monotonic() >= deadline:
                    raise SiteUnavailable(f"cluster {self.name}: locald does not answer: {error}") from error
            self.start()
            time.sleep(0.01)  # another one may just be letting go of the directory

    def reach(self) -> "LocalConnection":
        """A connection to its locald as it is, for those who only use the cluster. Raises ``SiteError``.

        While it does not run they wait for its agent to start it: they do not know its network, nor how it is set.
        """
        deadline = time.monotonic() + self.start_timeout
        while True:
            try:
                with contextlib.ExitStack() as unfit:
                    connection = unfit.enter_context(LocalConnection(self.socket_path()))
                    connection.request("hello")  # one that is dying still takes connections
                    unfit.pop_all()
                    return connection
            except (SiteUnavailable, OSError) as error:
                if time.monotonic() >= deadline:
                    raise SiteUnavailable(
                        f"cluster {self.name}: locald does not answer: {error}", hint="its agent starts it: see its log"
                    ) from error
            time.sleep(0.05)

    def stop(self, *, if_idle: bool = False) -> bool:
        """Shut its locald down with all its jobs and wait until it is gone; False when it is busy and ``if_idle``."""
        try:
            with LocalConnection(self.socket_path()) as connection:
                if not connection.request("shutdown", if_idle=if_idle)["shutdown"]:
                    return False
                connection.wait_for_end()
        except (SiteUnavailable, OSError):  # it does not run, or has just ended
            pass
        return True

    def _greet(self) -> "LocalConnection | None":
        """A connection to the locald that runs; None when that was one of other settings, without work, now gone."""
        with contextlib.ExitStack() as unfit:
            connection = unfit.enter_context(LocalConnection(self.socket_path()))
            hello = connection.request("hello")  # one that is dying still takes connections
            if self.matches(hello):
                unfit.pop_all()
                return connection
            if not connection.request("shutdown", if_idle=True, if_alone=True)["shutdown"]:
                self.raise_mismatch(hello)
            connection.wait_for_end()
        return None

    def _command(self) -> list[str]:
        options = {
            "--dir": self.directory.resolve(),
            "--cluster": self.name,
            "--nodes": self.nodes,
            "--network": self.network,
            "--linger": self.linger,
            "--kill-grace": self.kill_grace,
            "--preload": self.preload,
        }
        given = [text for key, value in options.items() if value is not None for text in (key, str(value))]
        return [sys.executable, "-I", "-S", str(_LOCALD), *given]


class LocalConnection:
    """One request at a time, blocking."""

    def __init__(self, path: str) -> None:
        """Raises ``OSError`` when nothing listens there."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
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
        """Readable when a reply to ``send`` is there."""
        return self._socket.fileno()

    def request(self, operation: str, **fields: object) -> dict[str, Any]:
        """Ask and wait for the reply, for so long as one may take. Raises ``SiteError``."""
        self._socket.settimeout(REQUEST_TIMEOUT)
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
        """The next line from locald, once there is one. Raises ``SiteError``."""
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

    def wait_for_end(self) -> None:
        """Until locald closes the connection."""
        with contextlib.suppress(OSError):
            while self._lines.readline():
                pass


def raise_error(reply: dict[str, Any]) -> NoReturn:
    """Raise the ``SiteError`` that a reply of locald stands for."""
    kind, message = reply.get("kind"), str(reply["error"])
    if kind == "unavailable":
        raise SiteUnavailable(message, value=kind)
    raise SiteRejected(message, value=kind, fault=SiteFault.LIMIT if kind == "limit" else SiteFault.UNKNOWN)
