"""locald's one loop: clients on a Unix socket, children that end, deadlines. JSON lines, a reply for each request."""

import errno
import json
import os
import selectors
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from koalapy.agent.lrm.local.jobs import JobTable, LocalJob, RequestRejected
from koalapy.agent.lrm.local.journal import Journal
from koalapy.agent.lrm.local.processes import is_below
from koalapy.agent.lrm.local.runs import Deadlines, Runs
from koalapy.system.login_socket import peer_of

_MAX_LINE = 4 << 20
_MAX_UNSENT = 64 << 20
_NOT_FOR_JOBS = ("submit", "cancel", "node", "shutdown", "keep")
"""What no program orders that runs on the cluster itself."""
_UNTOLD = 1
"""With which a runner ends whose result nobody took."""
_OWED_FOR = 7 * 86400.0
"""Seconds."""
_BUSY_READING = 1 << 16
"""Bytes not yet read by a client that make its notices of change wait."""
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_ACCEPT_RETRY_DELAY = 0.5
"""Seconds until somebody is let in again for whom there was no room."""
_NOTICE_INTERVAL = 0.01
"""Seconds between two notices of change."""


class ClientConnection:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.is_of_a_job = is_below(peer_of(connection).pid, os.getpid())
        """Whether it belongs to a program that runs here: all that those start stays below us."""
        self.attached: list[LocalJob] = []
        """Jobs that end when the client goes."""
        self.received = bytearray()
        self.unsent = bytearray()
        self.watching = False
        self.notified = 0
        """The table's ``seq`` of which this client has been notified."""

    def receive(self) -> list[bytes] | None:
        """Whole lines that have arrived; None when the client is gone or its line is too long."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self.received += data
        if not data or len(self.received) > _MAX_LINE:
            return None
        *lines, rest = self.received.split(b"\n")
        self.received = rest
        return [bytes(line) for line in lines if line.strip()]

    def send(self, message: dict[str, Any]) -> None:
        self.unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"

    def flush(self) -> bool:
        """Send what the socket takes; False when the client is gone or takes nothing any more."""
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        except BlockingIOError:
            return len(self.unsent) <= _MAX_UNSENT
        except OSError:
            return False
        return True


class Server:
    """Answers clients and moves the queue on."""

    _runs: Runs

    def __init__(
        self,
        jobs: JobTable,
        deadlines: Deadlines,
        journal: Journal,
        listener: socket.socket,
        *,
        facts: dict[str, Any],
        linger: float,
    ) -> None:
        self._jobs = jobs
        self._deadlines = deadlines
        self._journal = journal
        self._listener = listener
        self._facts = facts
        self._linger = linger
        self._clients: set[ClientConnection] = set()
        self._waiting: defaultdict[LocalJob, list[tuple[ClientConnection, Any]]] = defaultdict(list)
        self._journalled = jobs.seq
        self._key = ""
        self._owed_until = 0.0
        """Until when an agent may come for results that runners could not tell: only by our key are they theirs."""
        self._stopping = self._done = self._terminated = False
        self._operations: dict[str, Callable[[ClientConnection, dict[str, Any]], dict[str, Any] | None]] = {
            "hello": self._hello,
            "submit": self._submit,
            "cancel": self._cancel,
            "find": self._find,
            "wait": self._wait,
            "list": self._list,
            "watch": self._watch,
            "node": self._node,
            "shutdown": self._shutdown,
            "keep": self._keep,
        }

    def run(self, runs: Runs) -> None:
        """Serve until told to end, or idle for the linger time."""
        self._runs = runs
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._alarm = socket.socketpair()
        for end in (self._wakeup, self._alarm):
            end.setblocking(False)
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._listener.setblocking(False)
        self._listen()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_signal)
        while True:
            self._advance()
            if self._done:
                break
            for key, _ in self._selector.select(self._deadlines.timeout()):
                key.data()
            self._deadlines.run_due()

    def release(self) -> None:
        """Close everything, here only: a forked process must not touch what epoll watches for the other."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for client in self._clients:
            client.connection.close()
        for end in (self._listener, self._wakeup, self._alarm):
            end.close()
        self._journal.close()

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = True

    def _on_signal(self) -> None:
        with suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        self._runs.reap()
        if self._terminated and not self._stopping:
            self._stop_everything()

    def _listen(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # gone again, or no file descriptor left for it
            if error.errno in _NO_RESOURCES:  # it would be tried all the time
                self._selector.unregister(self._listener)
                self._deadlines.set("listen", _ACCEPT_RETRY_DELAY, self._listen)
            return
        client = ClientConnection(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_client(client))

    def _on_client(self, client: ClientConnection) -> None:
        lines = client.receive()
        if lines is None:
            self._drop(client)
            return
        for line in lines:
            self._answer(client, line)

    def _drop(self, client: ClientConnection) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        if client.attached:
            self._deadlines.set(client, 0.0, lambda: self._end_attached(client))

    def _end_attached(self, client: ClientConnection) -> None:
        for job in client.attached:
            self._end_job(job, "who ran it has gone")

    def _answer(self, client: ClientConnection, line: bytes) -> None:
        reply: dict[str, Any] | None
        request: Any = None
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or request.get("op") not in list(self._operations):
                raise RequestRejected(f"op: an object with one of {', '.join(self._operations)} is needed")
            if client.is_of_a_job and request["op"] in _NOT_FOR_JOBS:
                raise RequestRejected(f"op: {request['op']} is not for programs that run on the cluster itself")
            reply = self._operations[request["op"]](client, request)
        except RequestRejected as error:
            reply = {"error": str(error), "kind": error.kind}
        except (ValueError, RecursionError) as error:
            reply = {"error": f"no JSON: {error}", "kind": "rejected"}
        if reply is not None:
            id = request.get("id") if isinstance(request, dict) else None
            client.send(reply if id is None else {"id": id, **reply})

    def _hello(self, _: ClientConnection, __: dict[str, Any]) -> dict[str, Any]:
        return self._facts

    def _keep(self, _: ClientConnection, request: dict[str, Any]) -> dict[str, Any]:
        """The key of the agents of this cluster: the first that any of them had, as long as we live."""
        if not isinstance(offered := request.get("key"), str) or not offered:
            raise RequestRejected("key: a string is needed")
        self._key = self._key or offered
        return {"key": self._key}

    def _submit(self, client: ClientConnection, request: dict[str, Any]) -> dict[str, Any]:
        """``attached``: the job ends when this client goes, however that happens."""
        if self._stopping:
            raise RequestRejected("the cluster is shutting down", "unavailable")
        if type(attached := request.get("attached", False)) is not bool:
            raise RequestRejected(f"attached: true or false is needed, not {attached!r}")
        job = self._jobs.submit(request)
        try:
            self._journal.submitted(job)
        except OSError as error:
            self._jobs.end(job)
            raise RequestRejected(f"the journal cannot be written: {error}", "unavailable") from error
        if attached:
            client.attached.append(job)
        return {"job": str(job.id)}

    def _cancel(self, _: ClientConnection, request: dict[str, Any]) -> dict[str, Any]:
        job = self._jobs.job(request.get("job"))
        if job is None:
            raise RequestRejected(f"job: there is no {request.get('job')!r}", "unknown")
        if job.name != request.get("name"):
            raise RequestRejected(f"name: job {job.id} is not {request.get('name')!r}")
        self._end_job(job, "cancelled")
        return {"state": job.state}

    def _end_job(self, job: LocalJob, reason: str) -> None:
        if job.state == "queued":
            job.reason = reason
            self._jobs.end(job)
        elif job.state == "running":
            self._runs.stop(job, reason)

    def _find(self, _: ClientConnection, request: dict[str, Any]) -> dict[str, Any]:
        name = request.get("name")
        job = self._jobs.newest(name) if isinstance(name, str) else self._jobs.job(request.get("job"))
        return {"job": None} if job is None else job.record()

    def _wait(self, client: ClientConnection, request: dict[str, Any]) -> dict[str, Any] | None:
        """Answered when the job has ended."""
        job = self._jobs.job(request.get("job"))
        if job is None or job.state == "ended":
            return {"job": None} if job is None else job.record()
        self._waiting[job].append((client, request.get("id")))
        return None

    def _list(self, _: ClientConnection, request: dict[str, Any]) -> dict[str, Any]:
        """All active jobs, and those that ended after ``ended_since`` with names of ``ended_prefix``."""
        since, prefix = request.get("ended_since", 0), request.get("ended_prefix", "")
        if type(since) is not int or not isinstance(prefix, str):
            raise RequestRejected("ended_since: a whole number; ended_prefix: a string")
        if prefix:  # an agent
            self._owed_until = 0.0
        ended = (job for job in self._jobs.ended_since(since) if job.name.startswith(prefix))
        nodes = self._jobs.nodes
        return {
            "seq": self._jobs.seq,
            "total": len(nodes),
            "idle": len(self._jobs.idle_nodes()),
            "out": {node.address: node.state for node in nodes if node.state != "up"},
            "jobs": [job.record() for job in (*self._jobs.active, *ended)],
        }

    def _watch(self, client: ClientConnection, _: dict[str, Any]) -> dict[str, Any]:
        client.watching = True
        client.notified = self._jobs.seq
        return {"seq": client.notified}

    def _node(self, _: ClientConnection, request: dict[str, Any]) -> dict[str, Any]:
        node = self._jobs.node(request.get("node"))
        states = {"drain": "drain", "down": "down", "resume": "up"}
        wanted = request.get("state")
        if not isinstance(wanted, str) or wanted not in states:
            raise RequestRejected(f"state: one of {', '.join(states)}, not {wanted!r}")
        node.state = states[wanted]
        self._jobs.seq += 1
        if wanted == "down":
            self._runs.fail_node(node)
        return {"node": node.name, "state": node.state}

    def _shutdown(self, _: ClientConnection, request: dict[str, Any]) -> dict[str, Any]:
        active = len(self._jobs.active)
        shared = bool(request.get("if_alone")) and len(self._clients) > 1
        if (request.get("if_idle") and active) or shared:
            return {"shutdown": False, "jobs": active}
        self._stop_everything()
        return {"shutdown": True, "jobs": active}

    def _stop_everything(self) -> None:
        self._stopping = True
        for job in [*self._jobs.queue, *self._jobs.running.values()]:
            self._end_job(job, "the cluster is shut down")

    def _advance(self) -> None:
        """Everything that follows from what has just happened."""
        while not self._stopping and (job := self._jobs.start_next()):
            self._runs.start(job)
        self._write_ends()
        self._notify_watchers()
        for client in list(self._clients):
            self._flush(client)
        self._done = self._done or (self._stopping and not self._jobs.active)
        if self._clients or self._jobs.active:
            self._deadlines.drop("linger")
        elif "linger" not in self._deadlines:
            self._deadlines.set("linger", self._linger, self._on_linger)

    def _on_linger(self) -> None:
        if time.monotonic() < self._owed_until and self._journal.is_there:
            self._deadlines.set("linger", self._linger, self._on_linger)
        else:
            self._done = True

    def _write_ends(self) -> None:
        for job in reversed(self._jobs.ended_since(self._journalled)):
            self._journal.ended(job)
            if self._key and job.exit_code == _UNTOLD:
                self._owed_until = time.monotonic() + _OWED_FOR
            for client, id in self._waiting.pop(job, ()):
                client.send({"id": id, **job.record()})
        self._journalled = self._jobs.seq
        if self._journal.is_long:
            with suppress(OSError):  # it merely stays long
                self._journal.rewrite(self._jobs.remembered())

    def _notify_watchers(self) -> None:
        if "notice" in self._deadlines:
            return
        seq = self._jobs.seq
        unaware = [client for client in self._clients if client.watching and client.notified != seq]
        for client in unaware:
            if len(client.unsent) < _BUSY_READING:
                client.notified = seq
                client.send({"changed": seq})
        if unaware:
            self._deadlines.set("notice", _NOTICE_INTERVAL, lambda: None)

    def _flush(self, client: ClientConnection) -> None:
        if not client.flush():
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        key = self._selector.get_key(client.connection)
        if key.events != events:
            self._selector.modify(client.connection, events, key.data)
