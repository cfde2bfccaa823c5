"""The event loop of locald and the runner: alarms, a listener without descriptors, programs that may not be killed."""

import errno
import os
import socket
from pathlib import Path
from typing import cast

import pytest

from koalapy.agent.lrm.local.jobs import JobTable, LocalJob, LocalNode
from koalapy.agent.lrm.local.locald import Server
from koalapy.agent.lrm.local.runs import Runs, Spawner
from koalapy.runner.connections import Loop


def test_turn_skips_alarms_that_earlier_calls_change() -> None:
    loop, calls = Loop(), list[str]()

    def again() -> None:
        calls.append("again")

    def first() -> None:
        calls.append("first")
        loop.set_alarm("moved", 0.0, again)
        loop.cancel_alarm("cancelled")

    loop.set_alarm("first", 0.0, first)
    loop.set_alarm("moved", 0.0, again)
    loop.set_alarm("cancelled", 0.0, lambda: calls.append("cancelled"))
    loop.turn()
    assert calls == ["first"]
    loop.turn()
    assert calls == ["first", "again"]


def test_turn_with_alarm_in_a_month_handles_files() -> None:
    loop, calls = Loop(), list[int]()
    reader, writer = socket.socketpair()
    with reader, writer:
        loop.watch(reader.fileno(), calls.append)
        loop.set_alarm("walltime", 30 * 86_400.0, lambda: None)
        writer.send(b"x")
        loop.turn()
    loop.close()
    assert len(calls) == 1


class FullSocket(socket.socket):
    """A listener in a process that has no free file descriptor."""

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")


def test_server_without_descriptors_stops_listening_for_a_while(tmp_path: Path) -> None:
    loop = Loop()
    with FullSocket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        server = Server(JobTable([]), cast(Runs, None), loop, listener, tmp_path, settings={}, linger_s=1.0)
        server.listen()
        client.connect(str(tmp_path / "socket"))
        loop.turn()
        assert loop.has_alarm("listen")
        loop.turn()  # not ready until then
        assert not loop.has_alarm("listen")
    server.release()


def test_stop_job_whose_program_has_another_account_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as ``koala local-run sudo PROGRAM``."""

    class NoSpawner(Spawner):
        def spawn(self, job: LocalJob, environment: dict[str, str], secret: str = "") -> int:
            return 1 << 30

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    node, loop = LocalNode("north-1", "127.0.1.1"), Loop()
    job = LocalJob(1, "job", "ann", 1, state="running", nodes=[node])
    runs = Runs(JobTable([node]), NoSpawner(None, lambda: None), loop, "/north", {})
    monkeypatch.setattr(os, "killpg", refuse)
    monkeypatch.setattr(os, "kill", refuse)
    runs.start_job(job)
    runs.stop_job(job, "cancelled")
    assert job.reason == "cancelled"
    assert loop.has_alarm("1.0@/north"), "it is killed later"
    loop.close()
