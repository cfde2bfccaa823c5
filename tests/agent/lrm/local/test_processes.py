"""Marks and ancestors of processes that exec or end during the check."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from koalapy.agent.lrm.local.processes import MARK, is_below, read_mark
from tests.needs import SMALL_DISKS, needs

pytestmark = pytest.mark.processes

READS = 5_000
LARGE = {f"V{number}": "y" * 60 for number in range(100)}
"""An environment that the kernel returns in parts, with the mark in the last one."""


def test_read_mark_during_exec_returns_the_mark(tmp_path: Path) -> None:
    again = tmp_path / "again.sh"
    again.write_text(f"exec /bin/sh {again}\n")
    process = subprocess.Popen(["/bin/sh", str(again)], env=os.environ | LARGE | {MARK: "7@/x"})
    try:
        assert {read_mark(process.pid) for _ in range(READS)} == {"7@/x"}
    finally:
        process.kill()
        process.wait()
    assert read_mark(process.pid) == ""


def test_read_mark_without_mark_returns_empty() -> None:
    for environment in ({"A": "1"}, {}):
        waits = [sys.executable, "-I", "-c", "print(flush=True); input()"]
        with subprocess.Popen(waits, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert read_mark(process.pid) == ""
            process.communicate(b"\n")


def test_read_mark_of_zombie_returns_empty() -> None:
    process = subprocess.Popen(["true"], env={MARK: "7@/x"})
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_mark(process.pid) == ""
    process.wait()


ENDS_MEANWHILE = """
import os, subprocess, sys
from koalapy.agent.lrm.local import processes
processes.adopt_orphans()
look = processes._parent_of
for ancestor in (os.getpid(), int(sys.argv[1])):
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    def ending(pid):
        if pid == parent.pid:
            parent.kill()
            parent.wait()
        return look(pid)
    processes._parent_of = ending
    try:
        print(processes.is_below(child, ancestor))
    finally:
        os.kill(child, 9)
"""


def test_is_below_while_the_parent_ends_is_right() -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        command = [sys.executable, "-c", ENDS_MEANWHILE, str(stranger.pid)]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    finally:
        stranger.kill()
        stranger.wait()
    assert result.stdout.split() == ["True", "False"]


def test_is_below_of_ended_process_is_true() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert is_below(gone.pid, os.getpid())
    assert is_below(0, os.getpid())  # in another namespace


@needs(SMALL_DISKS)
def test_is_below_of_process_entered_into_container_is_false() -> None:
    """The parent of such a process has the ID 0."""
    module = "koalapy.agent.lrm.local.processes"
    look = f"import os; from {module} import is_below; print(os.getppid(), is_below(os.getpid(), 1))"
    started = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", "echo; read line"]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as container:
        assert container.stdout is not None
        container.stdout.readline()
        (first,) = psutil.Process(container.pid).children()
        entered = ["nsenter", "-t", str(first.pid), "--pid", "--mount", sys.executable, "-c", look]
        result = subprocess.run(entered, capture_output=True, text=True, check=True, timeout=30)
        container.communicate(b"\n")
    assert result.stdout.split() == ["0", "False"]
