"""Run the workload in a temporary folder: to find the points, or with one crash."""

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos import victims
from tests.crash.grid import Outcome, run_crash
from tests.crash.interposer import Crash, Point


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield an empty folder with a path short enough for sockets; end all its processes, and remove it."""
    with tempfile.TemporaryDirectory(prefix="koala-crash-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        finally:
            victims.kill_all(Path(folder))


def record_points() -> Counter[Point]:
    """Return the points that the workload reaches, with their counts. Raise ``RuntimeError`` after a violation."""
    with temporary_folder() as folder:
        outcome = run_crash(folder)
    if outcome.violations:
        raise RuntimeError(f"the run without a crash has violations: {outcome.violations}")
    return outcome.points


def interrupt(crash: Crash, *, keep: bool = False) -> Outcome:
    """Run the workload with one crash; ``keep``: keep the folder after a violation."""
    folder = Path(tempfile.mkdtemp(prefix="koala-crash-", dir="/tmp"))
    try:
        outcome = run_crash(folder, crash)
    finally:
        victims.kill_all(folder)
    if outcome.violations and keep:
        print(f"see {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome
