"""What is read of processes that do not stand still."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from koalapy.agent.lrm.local.processes import MARK, is_below, mark_of
from tests.needs import SMALL_DISKS, needs

pytestmark = pytest.mark.processes

LOOKS = 5_000
LARGE = {f"V{number}": "y" * 60 for number in range(100)}
"""An environment that the kernel shows in pieces, the mark last."""


def test_a_process_that_executes_one_program_after_another_never_loses_its_mark(tmp_path: Path) -> None:
    """Without it what is left of an earlier cluster lived on, and an orphan was ended with another job's node."""
    again = tmp_path / "again.sh"
    again.write_text(f"exec /bin/sh {again}\n")
    started = subprocess.Popen(["/bin/sh", str(again)], env=os.environ | LARGE | {MARK: "7@/x"})
    try:
        assert {mark_of(started.pid) for _ in range(LOOKS)} == {"7@/x"}
    finally:
        started.kill()
        started.wait()
    assert mark_of(started.pid) == ""


def test_a_process_without_a_mark_or_an_environment_has_none() -> None:
    for environment in ({"A": "1"}, {}):
        waits = [sys.executable, "-I", "-c", "print(flush=True); input()"]
        with subprocess.Popen(waits, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
            assert started.stdout is not None
            started.stdout.readline()
            assert mark_of(started.pid) == ""
            started.communicate(b"\n")


def test_one_that_is_over_and_not_waited_for_has_none() -> None:
    started = subprocess.Popen(["true"], env={MARK: "7@/x"})
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
    assert mark_of(started.pid) == ""
    started.wait()


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


def test_where_a_process_belongs_does_not_change_as_its_parent_ends() -> None:
    """A local user's shell that was ended with its command let the command's cancellation be refused as a job's."""
    another = subprocess.Popen(["sleep", "60"])
    try:
        command = [sys.executable, "-c", ENDS_MEANWHILE, str(another.pid)]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    finally:
        another.kill()
        another.wait()
    assert told.stdout.split() == ["True", "False"]


def test_one_that_has_gone_might_have_been_below_anybody() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert is_below(gone.pid, os.getpid())
    assert is_below(0, os.getpid())  # of a namespace that is not ours


@needs(SMALL_DISKS)
def test_what_is_started_in_a_container_from_outside_is_nobodys() -> None:
    """Its parent has the number 0: it was held for a job's, and an agent could submit nothing."""
    module = "koalapy.agent.lrm.local.processes"
    look = f"import os; from {module} import is_below; print(os.getppid(), is_below(os.getpid(), 1))"
    started = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", "echo; read line"]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as container:
        assert container.stdout is not None
        container.stdout.readline()
        (first,) = psutil.Process(container.pid).children()
        entered = ["nsenter", "-t", str(first.pid), "--pid", "--mount", sys.executable, "-c", look]
        told = subprocess.run(entered, capture_output=True, text=True, check=True, timeout=30)
        container.communicate(b"\n")
    assert told.stdout.split() == ["0", "False"]
