"""Run the agents of embedded clusters as child processes, and restart them when they end."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from koalapy.agent.core.handover import write_handover
from koalapy.agent.core.settings import agent_environment
from koalapy.config.settings import Settings
from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.daemon.engine.timeouts import DEFAULT_TIMEOUTS, DaemonTimeouts
from koalapy.daemon.listener.certificate import Certificate
from koalapy.model.request import ClusterName
from koalapy.runner.folders import make_durable_folder
from koalapy.scheduler.events import AgentFailed

log = structlog.get_logger()

T = TypeVar("T")

STOP_GRACE = 5.0
MAX_LINE_SIZE = 4096
"""Bytes."""
MAX_SHOWN_LENGTH = 300
"""Characters of an agent's last error that are reported."""


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """How to start one embedded agent; the daemon's URL is appended to ``command``."""

    cluster: str
    command: Sequence[str]
    environment: Mapping[str, str]
    handover: bytes
    """Written to its standard input, which stays open while the daemon runs."""


class EmbeddedAgents:
    """The agent processes of the embedded clusters."""

    def __init__(
        self,
        processes: Sequence[AgentProcess],
        report_failure: Callable[[str, str], None],
        timeouts: DaemonTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """``report_failure`` is called with a cluster and why its agent does not run, as the text after "its agent"."""
        self._timeouts = timeouts
        self._processes = processes
        self._report_failure = report_failure
        self._keepers: list[asyncio.Task[None]] = []

    def start(self, url: str) -> None:
        self._keepers = [asyncio.create_task(self._keep_running(process, url)) for process in self._processes]

    async def stop(self) -> None:
        """End the agents; the jobs in their clusters go on."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep_running(self, process: AgentProcess, url: str) -> None:
        """Run an agent and start it anew whenever it ends, until cancelled.

        After short runs, the pause doubles each time.
        """
        timeouts = self._timeouts
        pause = timeouts.min_restart_delay_s
        while True:
            started = time.monotonic()
            reason = await _run_agent(process, url, timeouts.last_words_s)
            if time.monotonic() - started >= timeouts.agent_stable_s:
                pause = timeouts.min_restart_delay_s
            log.warning(
                "an embedded agent is down", action="agent-down", cluster=process.cluster, reason=reason, pause=pause
            )
            self._report_failure(process.cluster, f"{reason}; it is started again after {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(timeouts.max_restart_delay_s, 2 * pause)


def build_embedded_agents(
    settings: Settings,
    tokens: Mapping[ClusterName, str | None],
    data_dir: Path,
    umask: int,
    engine: Engine,
    certificate: Certificate | None,
) -> EmbeddedAgents:
    """Return the agents of the configured embedded clusters; ``umask`` is that of their processes."""

    def report_failure(cluster: str, reason: str) -> None:
        engine.post(WorkItem(events=(AgentFailed(cluster, f"its agent {reason}"),)))

    processes = []
    for name in (name for name, section in settings.clusters.items() if section.is_embedded):
        handover = write_handover(
            name, settings, tokens[name] or "", umask, certificate.public_path if certificate else None
        )
        command = [sys.executable, "-m", "koalapy.cli.main", "agent", name, "--embedded"]
        command += ["--directory", str(agent_directory(data_dir, name))]
        processes.append(AgentProcess(name, command, agent_environment(), handover))
    return EmbeddedAgents(processes, report_failure)


def make_agent_tokens(settings: Settings) -> dict[ClusterName, str | None]:
    """Return the token of each cluster's agent: the configured one, or a new one if the agent is embedded."""
    return {
        name: section.token or (secrets.token_urlsafe(24) if section.is_embedded else None)
        for name, section in settings.clusters.items()
    }


def agent_directory(data_dir: Path, cluster: str) -> Path:
    """Return the directory of an embedded cluster's agent."""
    clusters = data_dir / "clusters"
    with contextlib.suppress(OSError):  # the agent reports the error
        make_durable_folder(clusters)
    return clusters / cluster


async def _run_agent(process: AgentProcess, url: str, last_words_s: float) -> str:
    """Run an agent until it ends, and return how it ended or why it could not be started."""
    async with contextlib.AsyncExitStack() as resources:
        try:
            child, handover, errors = await _start_process(
                [*process.command, "--url", url], process.environment, resources
            )
        except OSError as error:
            return f"cannot be started: {error.strerror or error}"
        copying = asyncio.create_task(_copy_errors(errors))
        resources.callback(copying.cancel)
        try:
            handover.write(process.handover)
            code = await child.wait()
        except asyncio.CancelledError:
            await _end_process(child)
            raise
        await asyncio.wait([copying], timeout=last_words_s)
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        last_line = copying.result() if copying.done() else ""
        return f"{how}: {last_line}" if last_line else how


async def _start_process(
    command: Sequence[str], environment: Mapping[str, str], resources: contextlib.AsyncExitStack
) -> tuple[asyncio.subprocess.Process, asyncio.WriteTransport, asyncio.StreamReader]:
    """Start the process; return it with our ends of its standard input and error. Raise ``OSError``.

    asyncio's own pipes are not used: it would wait for their end, and other processes may hold them open.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as child_ends:
        child_stdin, handover_end = _make_socket_pair(child_ends)
        handover, _ = await _connect_pipe(loop.connect_write_pipe(asyncio.BaseProtocol, handover_end), handover_end)
        resources.callback(handover.close)
        child_stderr, errors_end = _make_socket_pair(child_ends)
        errors = asyncio.StreamReader()
        transport, _ = await _connect_pipe(
            loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(errors), errors_end), errors_end
        )
        resources.callback(transport.close)
        child = await asyncio.create_subprocess_exec(
            *command,
            env=dict(environment),
            start_new_session=True,
            stdin=child_stdin.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=child_stderr.fileno(),
        )
    return child, handover, errors


def _make_socket_pair(child_ends: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return the child's end and our end, which belongs to the transport once it has one."""
    child_end, daemon_end = socket.socketpair()
    child_ends.callback(child_end.close)
    return child_end, daemon_end


async def _connect_pipe(connecting: Coroutine[Any, Any, T], daemon_end: socket.socket) -> T:
    """Return the connected transport. If connecting fails, the transport has already closed our end.

    It must not be closed again, since its number may be another file's by then. It is a socket, because uvloop closes
    other files twice.
    """
    try:
        return await connecting
    except BaseException:
        daemon_end.detach()
        raise


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _copy_errors(errors: asyncio.StreamReader) -> str:
    """Copy an agent's standard error to our own line by line, and return its last line."""
    last, partial_line = b"", b""
    while piece := await errors.read(MAX_LINE_SIZE):
        *lines, partial_line = (partial_line + piece).split(b"\n")
        if len(partial_line) >= MAX_LINE_SIZE:
            lines, partial_line = [*lines, partial_line], b""
        for line in lines:
            _write_error_line(line)
            last = line if line.strip() else last
    if partial_line:
        _write_error_line(partial_line)
    text = " ".join((partial_line or last).decode(errors="replace").split())
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:MAX_SHOWN_LENGTH]


def _write_error_line(line: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line + b"\n")


async def _end_process(child: asyncio.subprocess.Process) -> None:
    """Terminate a process and wait for its end. Kill it if it still runs after ``STOP_GRACE`` seconds."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE):
            await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
