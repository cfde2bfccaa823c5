"""locald's one loop: clients on a Unix socket, children that end, deadlines. JSON lines, a reply for each request."""

import errno
import json
import selectors
import signal
import socket
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from koalapy.agents.lrm.local.jobs import Book, Job, Rejected
from koalapy.agents.lrm.local.journal import Journal
from koalapy.agents.lrm.local.runs import Deadlines, Runs

_LONGEST_LINE = 4 << 20
_MOST_UNSENT = 64 << 20
_BUSY_READING = 1 << 16
"""Bytes not yet read by a client that make its notices of change wait."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_PAUSE = 0.5
"""Seconds until somebody is let in again for whom there was no room."""
_NOTICE_GAP = 0.01
"""Seconds between two notices of change."""


class Client:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.received = bytearray()
        self.unsent = bytearray()
        self.watching = False
        self.told = 0
        """The book's ``seq`` of which this client has been told."""

    def receive(self) -> list[bytes] | None:
        """Whole lines that have arrived; None when the client is gone or its line is too long."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self.received += data
        if not data or len(self.received) > _LONGEST_LINE:
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
            return len(self.unsent) <= _MOST_UNSENT
        except OSError:
            return False
        return True


class Server:
    """Answers clients and moves the queue on."""

    _runs: Runs

    def __init__(
        self,
        book: Book,
        deadlines: Deadlines,
        journal: Journal,
        listener: socket.socket,
        *,
        facts: dict[str, Any],
        linger: float,
    ) -> None:
        self._book = book
        self._deadlines = deadlines
        self._journal = journal
        self._listener = listener
        self._facts = facts
        self._linger = linger
        self._clients: set[Client] = set()
        self._waiting: defaultdict[Job, list[tuple[Client, Any]]] = defaultdict(list)
        self._journalled = book.seq
        self._stopping = self._done = self._terminated = False
        self._operations: dict[str, Callable[[Client, dict[str, Any]], dict[str, Any] | None]] = {
            "hello": self._hello,
            "submit": self._submit,
            "cancel": self._cancel,
            "find": self._find,
            "wait": self._wait,
            "list": self._list,
            "watch": self._watch,
            "node": self._node,
            "shutdown": self._shutdown,
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
            if error.errno in _NO_ROOM:  # it would be tried all the time
                self._selector.unregister(self._listener)
                self._deadlines.set("listen", _PAUSE, self._listen)
            return
        client = Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_client(client))

    def _on_client(self, client: Client) -> None:
        lines = client.receive()
        if lines is None:
            self._drop(client)
            return
        for line in lines:
            self._answer(client, line)

    def _drop(self, client: Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()

    def _answer(self, client: Client, line: bytes) -> None:
        reply: dict[str, Any] | None
        request: Any = None
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or request.get("op") not in list(self._operations):
                raise Rejected(f"op: an object with one of {', '.join(self._operations)} is needed")
            reply = self._operations[request["op"]](client, request)
        except Rejected as error:
            reply = {"error": str(error), "kind": error.kind}
        except (ValueError, RecursionError) as error:
            reply = {"error": f"no JSON: {error}", "kind": "rejected"}
        if reply is not None:
            id = request.get("id") if isinstance(request, dict) else None
            client.send(reply if id is None else {"id": id, **reply})

    def _hello(self, _: Client, __: dict[str, Any]) -> dict[str, Any]:
        return self._facts

    def _submit(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        if self._stopping:
            raise Rejected("the cluster is shutting down", "unavailable")
        job = self._book.submit(request)
        try:
            self._journal.submitted(job)
        except OSError as error:
            self._book.end(job)
            raise Rejected(f"the journal cannot be written: {error}", "unavailable") from error
        return {"job": str(job.id)}

    def _cancel(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        job = self._book.job(request.get("job"))
        if job is None:
            raise Rejected(f"job: there is no {request.get('job')!r}", "unknown")
        if job.name != request.get("name"):
            raise Rejected(f"name: job {job.id} is not {request.get('name')!r}")
        self._end_job(job, "cancelled")
        return {"state": job.state}

    def _end_job(self, job: Job, reason: str) -> None:
        if job.state == "queued":
            job.reason = reason
            self._book.end(job)
        elif job.state == "running":
            self._runs.stop(job, reason)

    def _find(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        name = request.get("name")
        job = self._book.newest(name) if isinstance(name, str) else self._book.job(request.get("job"))
        return {"job": None} if job is None else job.record()

    def _wait(self, client: Client, request: dict[str, Any]) -> dict[str, Any] | None:
        """Answered when the job has ended."""
        job = self._book.job(request.get("job"))
        if job is None or job.state == "ended":
            return {"job": None} if job is None else job.record()
        self._waiting[job].append((client, request.get("id")))
        return None

    def _list(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        """All active jobs, and those that ended after ``ended_since`` with names of ``ended_prefix``."""
        since, prefix = request.get("ended_since", 0), request.get("ended_prefix", "")
        if type(since) is not int or not isinstance(prefix, str):
            raise Rejected("ended_since: a whole number; ended_prefix: a string")
        ended = (job for job in self._book.ended_since(since) if job.name.startswith(prefix))
        nodes = self._book.nodes
        return {
            "seq": self._book.seq,
            "total": len(nodes),
            "idle": len(self._book.idle_nodes()),
            "out": {node.address: node.state for node in nodes if node.state != "up"},
            "jobs": [job.record() for job in (*self._book.active, *ended)],
        }

    def _watch(self, client: Client, _: dict[str, Any]) -> dict[str, Any]:
        client.watching = True
        client.told = self._book.seq
        return {"seq": client.told}

    def _node(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        node = self._book.node(request.get("node"))
        states = {"drain": "drain", "down": "down", "resume": "up"}
        wanted = request.get("state")
        if not isinstance(wanted, str) or wanted not in states:
            raise Rejected(f"state: one of {', '.join(states)}, not {wanted!r}")
        node.state = states[wanted]
        self._book.seq += 1
        if wanted == "down":
            self._runs.fail_node(node)
        return {"node": node.name, "state": node.state}

    def _shutdown(self, _: Client, request: dict[str, Any]) -> dict[str, Any]:
        active = len(self._book.active)
        shared = bool(request.get("if_alone")) and len(self._clients) > 1
        if (request.get("if_idle") and active) or shared:
            return {"shutdown": False, "jobs": active}
        self._stop_everything()
        return {"shutdown": True, "jobs": active}

    def _stop_everything(self) -> None:
        self._stopping = True
        for job in [*self._book.queue, *self._book.running.values()]:
            self._end_job(job, "the cluster is shut down")

    def _advance(self) -> None:
        """Everything that follows from what has just happened."""
        while not self._stopping and (job := self._book.start_next()):
            self._runs.start(job)
        self._write_ends()
        self._tell_watchers()
        for client in list(self._clients):
            self._flush(client)
        self._done = self._done or (self._stopping and not self._book.active)
        if self._clients or self._book.active:
            self._deadlines.drop("linger")
        elif "linger" not in self._deadlines:
            self._deadlines.set("linger", self._linger, self._on_linger)

    def _on_linger(self) -> None:
        self._done = True

    def _write_ends(self) -> None:
        for job in reversed(self._book.ended_since(self._journalled)):
            self._journal.ended(job)
            for client, id in self._waiting.pop(job, ()):
                client.send({"id": id, **job.record()})
        self._journalled = self._book.seq
        if self._journal.is_long:
            with suppress(OSError):  # it merely stays long
                self._journal.rewrite(self._book.remembered())

    def _tell_watchers(self) -> None:
        if "notice" in self._deadlines:
            return
        seq = self._book.seq
        unaware = [client for client in self._clients if client.watching and client.told != seq]
        for client in unaware:
            if len(client.unsent) < _BUSY_READING:
                client.told = seq
                client.send({"changed": seq})
        if unaware:
            self._deadlines.set("notice", _NOTICE_GAP, lambda: None)

    def _flush(self, client: Client) -> None:
        if not client.flush():
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        key = self._selector.get_key(client.connection)
        if key.events != events:
            self._selector.modify(client.connection, events, key.data)
