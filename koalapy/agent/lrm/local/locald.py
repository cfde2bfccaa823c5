"""locald: the resource manager of one embedded cluster, a process that outlives its clients.

``python -I -S locald.py --dir DIR --cluster NAME --nodes N --network 127.0.1`` locks the directory, detaches itself and
returns when it answers. Exit codes: 0 answers, 2 cannot run as asked, 3
another one holds the directory. Nodes are ``NAME-1`` to ``NAME-N`` at ``127.0.1.1`` and so on.

Its parent is a keeper process: when locald is killed, the keeper ends every process that locald and its runners leave,
and holds the directory's lock until none is left.
"""

import argparse
import errno
import fcntl
import gc
import json
import os
import re
import signal
import socket
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # -I leaves out the directory of our own package
    sys.path.append(str(Path(__file__).resolve().parents[4]))

from koalapy.agent.lrm.local.jobs import JobTable, LocalJob, LocalNode, RequestRejected
from koalapy.agent.lrm.local.processes import (
    CANNOT_RUN,
    HELD_BY_ANOTHER,
    LOCK_FILE,
    SOCKET_NAME,
    adopt_orphans,
    end_children,
    is_below,
    redirect_streams,
)
from koalapy.agent.lrm.local.runs import Preloaded, Runs, Spawner
from koalapy.runner.connections import LineConnection, Loop, Side
from koalapy.runner.folders import make_durable_folder, short_socket_path
from koalapy.system.process import forbid_dumps, get_peer

RUNNER_GRACE_S = 3.0
"""Seconds that runners of a killed locald have to end their programs and themselves before they are killed."""
MAX_NODES = 254
"""Addresses of the last octet."""
_MAX_LINE_BYTES = 4 << 20
_MAX_UNSENT_BYTES = 64 << 20
_FORBIDDEN_FOR_JOBS = ("submit", "cancel", "shutdown", "keep", "reserve", "unreserve")
"""Operations that programs on the cluster itself may not request."""
_RESULT_UNDELIVERED = 1
"""Exit code of a runner after no agent has received its result."""
_KEY_RETENTION_S = 7 * 86400.0
_MAX_PENDING_BYTES = 1 << 16
"""Bytes that a client has not read yet, beyond which its notices of change wait."""
_MAX_ACCOUNTING_BYTES = 64 << 20
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_ACCEPT_RETRY_S = 0.5
_NOTICE_INTERVAL_S = 0.01
_MAX_CLOCK_ERROR_S = 60.0
"""Seconds after which the clock is read again, which may have been set, for reservations that begin or end."""


class Accounting:
    """A file of the starts and ends of all jobs, one JSON object a line, which is evidence of what ran on the nodes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._write({"begin": time.time()})  # all jobs of earlier processes have ended

    def note_start(self, job: LocalJob) -> None:
        nodes = [node.name for node in job.nodes]
        self._write({"job": str(job.id), "name": job.name, "user": job.user, "nodes": nodes, "begin": time.time()})

    def note_end(self, job: LocalJob) -> None:
        self._write({"job": str(job.id), "end": time.time(), "exit_code": job.exit_code, "reason": job.reason})

    def _write(self, entry: dict[str, Any]) -> None:
        """Append a line. Begin a new file when it is large; a full disk loses lines, and nothing else."""
        with suppress(OSError):
            with open(self._path, "a", encoding="utf-8") as file:
                if "job" not in entry and file.tell():
                    file.write("\n")  # a loss of power may have cut the last line
                file.write(json.dumps(entry) + "\n")
                is_large = file.tell() > _MAX_ACCOUNTING_BYTES
            if is_large:
                os.replace(self._path, f"{self._path}.old")


class Client(LineConnection):
    """A connection of a client. It is a program of a job if it descends from locald, as all their processes do."""

    is_watching = False
    notified_seq = 0
    """The ``seq`` of the job table in the last notice to this client."""

    def __init__(self, connection: socket.socket, server: "Server") -> None:
        connection.setblocking(False)
        self.is_from_job = is_below(get_peer(connection).pid, os.getpid())
        self.attached_jobs: list[LocalJob] = []
        """Jobs that end when the client disconnects."""
        super().__init__(
            server.loop,
            Side(connection),
            server.buffer,
            lambda _, line: server.answer(self, line),
            lambda _, __: server.drop_client(self),
            _MAX_LINE_BYTES,
            _MAX_UNSENT_BYTES,
        )

    @property
    def is_behind(self) -> bool:
        """Whether the client has not read so much yet that notices of change wait."""
        return len(self._outgoing) > _MAX_PENDING_BYTES

    def send_message(self, message: dict[str, Any]) -> None:
        self.send(json.dumps(message, separators=(",", ":")).encode() + b"\n")


class Server:
    """Answers clients and advances the queue."""

    def __init__(
        self,
        jobs: JobTable,
        runs: Runs,
        loop: Loop,
        listener: socket.socket,
        directory: Path,
        *,
        settings: dict[str, Any],
        linger_s: float,
    ) -> None:
        """``settings``: the reply to ``hello``; ``linger_s``: seconds without clients and jobs until it ends."""
        self._jobs, self._runs, self.loop, self._listener = jobs, runs, loop, listener
        self._directory, self._settings, self._linger_s = directory, settings, linger_s
        self.buffer = memoryview(bytearray(1 << 16))
        self._clients: set[Client] = set()
        self._waiting: defaultdict[LocalJob, list[tuple[Client, Any]]] = defaultdict(list)
        """Clients that wait for a job's end, with the ids of their requests."""
        self._accounting = Accounting(directory / "accounting")
        self._processed_seq = 0
        """The ``seq`` of the job table up to which ended jobs were processed."""
        self._key = ""
        self._key_needed_until = 0.0
        """When to forget the key: until then an agent needs it to accept results that runners could not deliver."""
        self._is_stopping = self._is_done = self._is_terminated = False
        self._operations: dict[str, Callable[[Client, dict[str, Any]], dict[str, Any] | None]] = {
            "hello": lambda _, __: self._settings,
            "submit": self._submit_job,
            "cancel": self._cancel_job,
            "find": self._find_job,
            "wait": self._wait_for_job,
            "list": self._list_jobs,
            "watch": self._watch,
            "shutdown": self._shut_down,
            "keep": self._keep_key,
            "reserve": self._reserve_nodes,
            "unreserve": self._release_reservation,
        }
        self._signal_reader, self._signal_writer = socket.socketpair()
        for end in (self._signal_reader, self._signal_writer, listener):
            end.setblocking(False)

    def run(self) -> None:
        """Serve until a client or SIGTERM ends the cluster, or until it was unused for ``linger_s`` seconds."""

        def terminate(*_: object) -> None:
            self._is_terminated = True

        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, terminate)
        self.listen()
        self.loop.watch(self._signal_reader.fileno(), self._handle_signals)
        self._advance()
        while not self._is_done:
            self.loop.turn()
            self._advance()

    def release(self) -> None:
        """Close everything in this process only: a forked one must not change what epoll watches for the other."""
        signal.set_wakeup_fd(-1)
        self.loop.close()
        for client in self._clients:
            client.side.close()
        for end in (self._listener, self._signal_reader, self._signal_writer):
            end.close()

    def _handle_signals(self, _: int) -> None:
        """Collect ended processes after a signal. After SIGTERM, stop all jobs, so that the server ends."""
        with suppress(BlockingIOError):
            while self._signal_reader.recv(4096):
                pass
        self._runs.reap()
        if self._is_terminated and not self._is_stopping:
            self._stop_all_jobs()

    def listen(self) -> None:
        """Accept clients from now on."""
        self.loop.watch(self._listener.fileno(), self.accept_client)

    def accept_client(self, _: int) -> None:
        """Accept a waiting client. If no file descriptor is left, stop listening for a while."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # gone again, or no resources left
            if error.errno in _NO_RESOURCES:  # the selector would report the listener all the time
                self.loop.forget(self._listener.fileno())
                self.loop.set_alarm("listen", _ACCEPT_RETRY_S, self.listen)
            return
        self._clients.add(Client(connection, self))

    def drop_client(self, client: Client) -> None:
        """End the jobs that are attached to a client that has disconnected."""
        self._clients.discard(client)

        def end_attached() -> None:
            for job in client.attached_jobs:
                self._end_job(job, "its client disconnected")

        if client.attached_jobs:
            self.loop.set_alarm(f"client {id(client)}", 0.0, end_attached)

    def answer(self, client: Client, line: bytes) -> None:
        """Execute a request line and send the reply, or the error if the request is rejected."""
        reply: dict[str, Any] | None
        request: Any = None
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or request.get("op") not in list(self._operations):
                raise RequestRejected(f"op: must be one of {', '.join(self._operations)}")
            if client.is_from_job and request["op"] in _FORBIDDEN_FOR_JOBS:
                raise RequestRejected(f"op: programs on the cluster may not request {request['op']}")
            reply = self._operations[request["op"]](client, request)
        except RequestRejected as error:
            reply = {"error": str(error), "kind": error.kind}
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError) as error:
            reply = {"error": f"not understood: {error}", "kind": "rejected"}
        if reply is not None:
            id = request.get("id") if isinstance(request, dict) else None
            client.send_message(reply if id is None else {"id": id, **reply})

    def _keep_key(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        """Return the key of the cluster's agents: the first one that an agent offered to this process."""
        if not isinstance(key := request.get("key"), str) or not key:
            raise RequestRejected("key: must be a string")
        self._key = self._key or key
        return {"key": self._key}

    def _submit_job(self, client: Client, request: dict[str, Any]) -> dict[str, Any]:
        """Queue a job; an ``attached`` one ends when its client disconnects."""
        if self._is_stopping:
            raise RequestRejected("the cluster is shutting down", "unavailable")
        if type(attached := request.get("attached", False)) is not bool:
            raise RequestRejected(f"attached: must be true or false, not {attached!r}")
        job = self._jobs.submit_job(request)
        if attached:
            client.attached_jobs.append(job)
        return {"job": str(job.id)}

    def _cancel_job(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        """Cancel a job if its number and name agree; raise ``RequestRejected`` otherwise."""
        job = self._jobs.find_job(request.get("job"))
        if job is None:
            raise RequestRejected(f"job: there is no job {request.get('job')!r} on this cluster", "unknown")
        if job.name != request.get("name"):
            raise RequestRejected(
                f"name: job {job.id} has the name {job.name!r}, not {request.get('name')!r}: nothing was cancelled"
            )
        self._end_job(job, "cancelled")
        return {"state": job.state}

    def _reserve_nodes(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        """Reserve nodes and return their addresses; those of an existing reservation of that name."""
        return {"nodes": self._jobs.reserve_nodes(request).nodes}

    def _release_reservation(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        self._jobs.release_reservation(request.get("name"))
        return {}

    def _end_job(self, job: LocalJob, reason: str) -> None:
        """Remove a queued job, or stop a running one. Ignore an ended one."""
        if job.state == "queued":
            job.reason = reason
            self._jobs.end_job(job)
        elif job.state == "running":
            self._runs.stop_job(job, reason)

    def _find_job(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a name's newest job, or of the job with an id; ``{"job": None}`` without one."""
        name = request.get("name")
        job = self._jobs.newest_job(name) if isinstance(name, str) else self._jobs.find_job(request.get("job"))
        return {"job": None} if job is None else job.as_record()

    def _wait_for_job(self, client: Client, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the job's record, or None to answer when it ends."""
        job = self._jobs.find_job(request.get("job"))
        if job is None or job.state == "ended":
            return {"job": None} if job is None else job.as_record()
        self._waiting[job].append((client, request.get("id")))
        return None

    def _list_jobs(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        """Return reservations, active jobs, and those with a prefix in their name that ended after ``ended_since``."""
        since, prefix = request.get("ended_since", 0), request.get("ended_prefix", "")
        if type(since) is not int or not isinstance(prefix, str):
            raise RequestRejected("ended_since must be a whole number, ended_prefix a string")
        if prefix:  # the client is an agent, which has the results now
            self._key_needed_until = 0.0
        ended = (job for job in self._jobs.jobs_ended_since(since) if job.name.startswith(prefix))
        return {
            "seq": self._jobs.seq,
            "total": len(self._jobs.nodes),
            "idle": len(self._jobs.idle_nodes()),
            "jobs": [job.as_record() for job in (*self._jobs.active_jobs, *ended)],
            "reservations": [asdict(reservation) for reservation in self._jobs.reservations.values()],
        }

    def _watch(self, client: Client, _: dict[str, Any]) -> dict[str, Any]:
        """Notify a client of changes of the job table from now on; return the number of the last change."""
        client.is_watching = True
        client.notified_seq = self._jobs.seq
        return {"seq": client.notified_seq}

    def _shut_down(self, _: Client, __: dict[str, Any]) -> dict[str, Any]:
        """End the server, unless it has jobs or other clients."""
        is_used = bool(self._jobs.active_jobs) or len(self._clients) > 1
        if not is_used:
            self._stop_all_jobs()
        return {"shutdown": not is_used}

    def _stop_all_jobs(self) -> None:
        """Stop all jobs and accept no others; the server ends when they have ended."""
        self._is_stopping = True
        for job in [*self._jobs.queue, *self._jobs.running.values()]:
            self._end_job(job, "the cluster is shut down")

    def _advance(self) -> None:
        """Start queued jobs, record ended ones, send replies and notices, and decide whether the server may end."""
        if (seconds := self._jobs.next_change_s()) is not None:
            self.loop.set_alarm("reservation", min(seconds, _MAX_CLOCK_ERROR_S), lambda: None)
        while not self._is_stopping and (job := self._jobs.start_next_job()):
            self._report_ended_jobs()  # first the jobs that had its nodes
            self._accounting.note_start(job)
            self._runs.start_job(job)
        self._report_ended_jobs()
        self._notify_watchers()
        self._is_done = self._is_done or (self._is_stopping and not self._jobs.active_jobs)
        if self._clients or self._jobs.active_jobs:
            self.loop.cancel_alarm("linger")
        elif not self.loop.has_alarm("linger"):
            self.loop.set_alarm("linger", self._linger_s, self._end_if_unused)

    def _end_if_unused(self) -> None:
        """End the server, or wait longer if an agent may still need the key for undelivered results."""
        if time.monotonic() < self._key_needed_until and self._directory.exists():
            self.loop.set_alarm("linger", self._linger_s, self._end_if_unused)
        else:
            self._is_done = True

    def _report_ended_jobs(self) -> None:
        """Note the end of jobs, and reply to clients that wait for it."""
        for job in reversed(self._jobs.jobs_ended_since(self._processed_seq)):
            if job.nodes:
                self._accounting.note_end(job)
            if self._key and job.exit_code == _RESULT_UNDELIVERED:
                self._key_needed_until = time.monotonic() + _KEY_RETENTION_S
            for client, id in self._waiting.pop(job, ()):
                client.send_message({"id": id, **job.as_record()})
        self._processed_seq = self._jobs.seq

    def _notify_watchers(self) -> None:
        """Notify watching clients of changes of the job table, at most once per interval."""
        if self.loop.has_alarm("notice"):
            return
        seq = self._jobs.seq
        unaware = [client for client in self._clients if client.is_watching and client.notified_seq != seq]
        for client in unaware:
            if not client.is_behind:
                client.notified_seq = seq
                client.send_message({"changed": seq})
        if unaware:
            self.loop.set_alarm("notice", _NOTICE_INTERVAL_S, lambda: None)


def main() -> int:
    """Start locald; return its exit code in this process, and in the detached ones when they end."""
    options = _parse_options()
    directory = options.dir.resolve()
    forbid_dumps()
    os.umask(0o077)
    make_durable_folder(directory)
    lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return HELD_BY_ANOTHER
    try:
        return _start(options, directory, lock)
    except (ImportError, OSError) as error:
        print(f"locald: {error}", file=sys.stderr)
        return CANNOT_RUN


def _parse_options() -> argparse.Namespace:
    """Parse and check the command line; exit with an error if the number of nodes or the network is invalid."""
    parser = argparse.ArgumentParser(prog="locald", description="The resource manager of one embedded cluster.")
    parser.add_argument("--dir", type=Path, required=True, help="directory of its socket, lock and log")
    parser.add_argument("--cluster", required=True, help="name of the cluster")
    parser.add_argument("--nodes", type=int, required=True, help=f"number of nodes, at most {MAX_NODES}")
    parser.add_argument("--network", required=True, help="first three octets of the nodes' addresses: 127.0.1")
    parser.add_argument("--preload", help="Python file whose main(args) is run without starting an interpreter")
    parser.add_argument("--linger", type=float, default=30.0, help="seconds without clients and jobs before it ends")
    parser.add_argument("--kill-grace", type=float, default=1.0, help="seconds between SIGTERM and SIGKILL")
    options = parser.parse_args()
    if not 1 <= options.nodes <= MAX_NODES:
        parser.error(f"--nodes: must be 1 to {MAX_NODES}, not {options.nodes}")
    if not re.fullmatch(r"127(\.(25[0-5]|2[0-4]\d|1?\d?\d)){2}", options.network):
        parser.error(f"--network: must be three octets, the first of them 127, not {options.network!r}")
    return options


def _start(options: argparse.Namespace, directory: Path, lock: int) -> int:
    """Load everything that may fail, fork the keeper and locald, and return when locald answers. Raise ``OSError``."""
    nodes = [LocalNode(f"{options.cluster}-{k}", f"{options.network}.{k}") for k in range(1, options.nodes + 1)]
    listener = _bind_socket(directory)
    preloaded = Preloaded(options.preload) if options.preload else None
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        number = os.read(reader, 16)
        if not number:
            raise OSError(f"it ended while it started; see {directory / 'locald.log'}")
        os.ftruncate(lock, 0)
        os.pwrite(lock, number + b"\n", 0)
        return 0
    os.setsid()
    os.chdir("/")
    redirect_streams(str(directory / "locald.log"), 0o600)
    adopt_orphans()
    if pid := os.fork():
        listener.close()
        os.write(writer, str(pid).encode())
        os.close(writer)
        return _run_keeper(pid)
    os.close(reader)
    os.close(writer)
    adopt_orphans()  # a fork does not inherit that
    # Forks of the preloaded program keep the lock, so that the next locald starts after their end.
    spawner = Spawner(preloaded, lambda: server.release())
    base_env = {key: value for key, value in os.environ.items() if not key.startswith("LOCALD_")}
    jobs, loop = JobTable(nodes, int(time.time() * 100), str(directory / "reservations.json")), Loop()
    runs = Runs(jobs, spawner, loop, str(directory), base_env, options.kill_grace)
    settings = {"cluster": options.cluster, "nodes": options.nodes, "network": options.network}
    server = Server(jobs, runs, loop, listener, directory, settings=settings, linger_s=options.linger)

    gc.freeze()
    try:
        server.run()
    finally:
        end_children()
        (directory / SOCKET_NAME).unlink(missing_ok=True)
        server.release()  # last: clients take the end of their connections for the end of everything
    return 0


def _run_keeper(locald: int) -> int:
    """Wait until locald ends, then end the processes that it left. This process holds the lock until it ends."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.waitpid(locald, 0)
    end_children(grace_s=RUNNER_GRACE_S)
    return 0


def _bind_socket(directory: Path) -> socket.socket:
    """Return a socket that listens in the directory; another account cannot connect."""
    path = directory / SOCKET_NAME
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_socket_path(path) as short_path:
        listener.bind(short_path)
    listener.listen(128)
    return listener


if __name__ == "__main__":
    sys.exit(main())
