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
from koalapy.client.client import FINAL, Client
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.client.tables import seconds_since

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
        raise GridError("KOALA_CONFIG is set, but the demo starts its own clusters", Exit.USAGE, "unset KOALA_CONFIG")
    directory = Path(tempfile.mkdtemp(prefix="koala-demo-"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    is_kept = False
    try:
        with _run_daemon(directory, keep) as url:
            client = Client(url, None)
            _show_grid(client)
            job = _run_job(client)
            output = b"".join(piece for piece, _ in client.follow_output(job["id"])).decode(errors="replace")
            _show_result(job, client.attempts(job["id"], 6), output)
            checks = [line for line in output.splitlines() if line.startswith("check:")]
            passed = job["state"] == "succeeded" and any(check.rstrip().endswith("passed") for check in checks)
            is_kept = keep
    finally:
        if not is_kept:
            try:
                _check_nothing_is_left(directory)
            finally:  # also if the message cannot be printed
                shutil.rmtree(directory, ignore_errors=True)
    _print_line("")
    _print_line("The program's own check passed." if passed else "The program's own check did not pass.")
    return Exit.OK if passed else Exit.FAILED


def _print_line(text: str) -> None:
    print(text, flush=True)


def _print_heading(text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    _print_line(f"\n{bold}{text}{plain}")


@contextmanager
def _run_daemon(directory: Path, keep: bool) -> Iterator[str]:
    """Run a separate daemon on a free port for the duration of the block, and yield its URL."""
    started = time.monotonic()
    log = (directory / "daemon.log").open("w")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KOALA_")}
    data = str(directory / "data")
    # An empty configuration: not the installed one.
    daemon = subprocess.Popen(
        [sys.executable, "-m", "koalapy.cli.main", "serve", "--port", "0", "--data-dir", data, "--config", os.devnull],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
        start_new_session=True,
    )
    finished = False
    try:
        assert daemon.stdout is not None
        announcement = daemon.stdout.readline().split()
        if announcement[:2] != ["koala", "serves"]:
            log_lines = (directory / "daemon.log").read_text().strip().splitlines()
            raise GridError(
                f"the daemon did not start: {log_lines[-1] if log_lines else 'it printed nothing'}", Exit.FAILED
            )
        _print_line(
            f"A daemon serves {announcement[2]} (ready after {time.monotonic() - started:.1f} s, data in {directory})"
        )
        yield announcement[2]
        finished = True
        if keep:
            _print_line(f"\nThe daemon goes on: export KOALA_URL={announcement[2]}\nEnd it with: kill {daemon.pid}")
    finally:
        if not (keep and finished):
            _end_processes(daemon, directory)
        log.close()


def _end_processes(daemon: "subprocess.Popen[str]", directory: Path) -> None:
    """Stop the daemon, by force after ``END_TIMEOUT`` seconds, and the resource managers of its clusters."""
    daemon.terminate()
    try:
        daemon.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    for pid in _processes_of(directory):
        if f"locald.py\0--dir\0{directory}" in _read_process_file(pid, "cmdline"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _poll_until(look: Callable[[], T | None], goal: str) -> T:
    """Call ``look`` until it returns a result, and return that. Raise ``GridError`` after ``STEP_TIMEOUT`` seconds.

    ``goal``: the awaited result, as text for the error.
    """
    end = time.monotonic() + STEP_TIMEOUT
    while (result := look()) is None:
        if time.monotonic() > end:
            raise GridError(f"the demo waited {STEP_TIMEOUT:g} s in vain for: {goal}", Exit.TIMEOUT)
        time.sleep(0.05)
    return result


def _show_grid(client: Client) -> None:
    """Wait until all clusters are usable and idle, then print them."""

    clusters: list[Json] = []

    def has_idle_clusters() -> bool | None:
        clusters[:] = client.clusters()
        return all(c["state"] == "usable" and c["idle"] == c["total"] > 0 for c in clusters) or None

    try:
        _poll_until(has_idle_clusters, "idle clusters")
    except GridError as error:
        states = [f"{c['name']} is {c['state']} with {c['idle']} of {c['total']} nodes idle" for c in clusters]
        raise GridError(f"{error.message}; {'; '.join(states)}", error.code) from None
    _print_heading("Two clusters, each with its own resource manager:")
    _print_line(tables.clusters_table(clusters))


def _run_job(client: Client) -> Json:
    """Submit the job, print its progress, and return the ended job."""
    body = {
        "request": {"type": "flexible", "total_size": NODES},
        "command": PROGRAM,
        "name": "poisson",
        "launcher": "openmpi",
    }
    _print_heading(f"One job of {NODES} nodes, more than either cluster has:")
    _print_line(f"$ koala submit --flexible {NODES} -- {' '.join(PROGRAM)}")
    job = client.submit(body, f"demo-{os.getpid()}-{time.monotonic_ns()}")
    printed_count = 0

    def get_ended_job() -> Json | None:
        """Print new entries of the timeline. Return the job if it has ended, otherwise None."""
        nonlocal printed_count
        now = client.job(job["id"])
        for entry in now["timeline"][printed_count:]:
            elapsed = seconds_since(now["submitted_at"], entry["at"])
            _print_line(f"  {elapsed:7.3f} s  {entry['event']:<10} {entry['reason']}".rstrip())
        printed_count = len(now["timeline"])
        if now["restarts"] > 1:
            raise GridError(f"the job failed repeatedly: {now['reason']}", Exit.FAILED)
        return now if now["state"] in FINAL else None

    return _poll_until(get_ended_job, "the job to be over")


def _show_result(job: Json, attempts: list[Json], output: str) -> None:
    """Print the output of the program, the nodes of its ranks, and the timeline of the job."""
    lines = output.splitlines()
    _print_heading("What the program printed:")
    _print_line("\n".join(line for line in lines if not line.startswith("rank ")))
    _print_heading("Which rank ran where:")
    _print_line("\n".join(line for line in lines if line.startswith("rank ")))
    _print_heading("The job and its timeline:")
    _print_line(tables.job_page(job, attempts))


def _check_nothing_is_left(directory: Path) -> None:
    """Wait until the process table has no process of the demo."""
    end = time.monotonic() + END_TIMEOUT
    while remaining := _processes_of(directory):
        if time.monotonic() > end:
            pids = ", ".join(str(pid) for pid in remaining)
            raise GridError(
                f"processes {pids} have not ended within {END_TIMEOUT:g} s",
                Exit.FAILED,
                f"end them with kill, then remove {directory}",
            )
        time.sleep(0.05)
    _print_line("\nNothing is left running.")


def _processes_of(directory: Path) -> list[int]:
    """Return the processes with the demo's directory in their environment or command line."""
    needle = str(directory)
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [
        p
        for p in pids
        if p != os.getpid() and needle in _read_process_file(p, "cmdline") + _read_process_file(p, "environ")
    ]


def _read_process_file(pid: int, file_name: str) -> str:
    """Return the text of ``/proc/PID/FILE``; empty if the process has ended or is not accessible."""
    try:
        return Path(f"/proc/{pid}/{file_name}").read_text(errors="replace")
    except OSError:
        return ""
