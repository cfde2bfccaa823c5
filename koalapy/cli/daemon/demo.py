"""``koala demo``: run one MPI program as a single job on two clusters, from beginning to end."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from koalapy.cli.terminal import tables
from koalapy.client.answers import Attempt, Cluster, Job
from koalapy.client.client import FINAL, Client
from koalapy.client.errors import CliError, Exit

NODES = 6
PROGRAM = ["python", "-m", "koalapy.apps.poisson"]
STEP_TIMEOUT = 120.0
"""Limit in seconds for a step that should take a few seconds."""
END_TIMEOUT = 30.0
"""Limit in seconds for processes to end after a request to stop."""

T = TypeVar("T")


def run_demo(keep: bool) -> int:
    """Run the demonstration; return 0 if the program has verified its result."""
    if os.environ.get("KOALA_CONFIG"):
        raise CliError("the demo uses its own clusters", Exit.USAGE, "unset KOALA_CONFIG")
    directory = Path(tempfile.mkdtemp(prefix="koala-demo-"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    kept = False
    try:
        with _daemon(directory, keep) as url:
            client = Client(url, None)
            _show_grid(client)
            job = _run(client)
            output = b"".join(client.logs(job["id"], False, None)).decode(errors="replace")
            _show_result(job, client.attempts(job["id"], 6), output)
            passed = job["state"] == "succeeded" and _is_checked(output)
            kept = keep
    finally:
        if not kept:
            try:
                _check_nothing_is_left(directory)
            finally:  # also if the message cannot be printed
                shutil.rmtree(directory, ignore_errors=True)
    _print("")
    _print("The program's own check passed." if passed else "The program's own check did not pass.")
    return Exit.OK if passed else Exit.FAILED


def _print(text: str) -> None:
    print(text, flush=True)


def _heading(text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    _print(f"\n{bold}{text}{plain}")


@contextmanager
def _daemon(directory: Path, keep: bool) -> Iterator[str]:
    """Run a separate daemon on a free port for the duration of the block, and yield its URL."""
    started = time.monotonic()
    log = (directory / "daemon.log").open("w")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KOALA_")}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "koalapy.cli.main", "serve", "--port", "0", "--data-dir", str(directory / "data")],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
        start_new_session=True,
    )
    finished = False
    try:
        assert daemon.stdout is not None
        words = daemon.stdout.readline().split()
        if words[:2] != ["koala", "serves"]:
            log_lines = (directory / "daemon.log").read_text().strip().splitlines()
            raise CliError(
                f"the daemon did not start: {log_lines[-1] if log_lines else 'it printed nothing'}", Exit.FAILED
            )
        _print(f"A daemon serves {words[2]} (ready after {time.monotonic() - started:.1f} s, data in {directory})")
        yield words[2]
        finished = True
        if keep:
            _print(f"\nThe daemon goes on: export KOALA_URL={words[2]}\nEnd it with: kill {daemon.pid}")
    finally:
        if not (keep and finished):
            _end(daemon, directory)
        log.close()


def _end(daemon: "subprocess.Popen[str]", directory: Path) -> None:
    daemon.terminate()
    try:
        daemon.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    for pid in _processes_of(directory):
        if f"locald.py\0--dir\0{directory}" in _read(pid, "cmdline"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _is_checked(output: str) -> bool:
    return any(line.startswith("check:") and line.rstrip().endswith("passed") for line in output.splitlines())


def _poll(look: Callable[[], T | None], what: str) -> T:
    end = time.monotonic() + STEP_TIMEOUT
    while (found := look()) is None:
        if time.monotonic() > end:
            raise CliError(f"timeout after {STEP_TIMEOUT:g} s: {what}", Exit.TIMEOUT)
        time.sleep(0.05)
    return found


def _show_grid(client: Client) -> None:
    def ready() -> list[Cluster] | None:
        found = client.clusters()
        return found if all(c["state"] == "usable" and c["idle"] == c["total"] > 0 for c in found) else None

    clusters = _poll(ready, "idle clusters")
    _heading("Two clusters, each with its own resource manager:")
    _print(tables.clusters(clusters))


def _run(client: Client) -> Job:
    """Submit the job, print its progress, and return the ended job."""
    body = {
        "request": {"type": "flexible", "total_size": NODES},
        "command": PROGRAM,
        "name": "poisson",
        "launcher": "openmpi",
    }
    _heading(f"One job of {NODES} nodes, more than either cluster has:")
    _print(f"$ koala submit --flexible {NODES} -- {' '.join(PROGRAM)}")
    job = client.submit(body, f"demo-{os.getpid()}-{time.monotonic_ns()}")
    shown = 0

    def over() -> Job | None:
        nonlocal shown
        now = client.job(job["id"])
        for entry in now["timeline"][shown:]:
            at = tables.seconds_since(now["submitted_at"], entry["at"])
            _print(f"  {at:7.3f} s  {entry['event']:<10} {entry['reason']}".rstrip())
        shown = len(now["timeline"])
        if now["restarts"] > 1:
            raise CliError(f"the job failed repeatedly: {now['reason']}", Exit.FAILED)
        return now if now["state"] in FINAL else None

    return _poll(over, "the job to be over")


def _show_result(job: Job, attempts: list[Attempt], output: str) -> None:
    lines = output.splitlines()
    _heading("What the program printed:")
    _print("\n".join(line for line in lines if not line.startswith("rank ")))
    _heading("Which rank ran where:")
    _print("\n".join(line for line in lines if line.startswith("rank ")))
    _heading("The job and its timeline:")
    _print(tables.job_page(job, attempts))


def _check_nothing_is_left(directory: Path) -> None:
    """Wait until the process table has no process of the demo."""
    end = time.monotonic() + END_TIMEOUT
    while left := _processes_of(directory):
        if time.monotonic() > end:
            pids = ", ".join(str(pid) for pid in left)
            raise CliError(
                f"processes {pids} have not ended within {END_TIMEOUT:g} s", Exit.FAILED, f"they use {directory}"
            )
        time.sleep(0.05)
    _print("\nNothing is left running.")


def _processes_of(directory: Path) -> list[int]:
    """Return the processes with the demo's directory in their environment or command line."""
    needle = str(directory)
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [p for p in pids if p != os.getpid() and needle in _read(p, "cmdline") + _read(p, "environ")]


def _read(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except OSError:
        return ""
