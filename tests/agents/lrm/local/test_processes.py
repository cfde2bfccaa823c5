"""What is read of processes that do not stand still."""

import os
import subprocess
import sys
from pathlib import Path

from koalapy.agents.lrm.local.processes import MARK, mark_of

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
