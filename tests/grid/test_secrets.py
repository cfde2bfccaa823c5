"""Secrets appear in no process listing, log, answer or world-readable file."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx2
import psutil
import pytest

from koalapy.agent.lrm.local.processes import read_environment
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until
from tests.needs import ROOT, needs

pytestmark = [pytest.mark.processes, pytest.mark.grid]

SECRET = f"the-secret-{token_hex(4)}-of"
"""A prefix of all secrets of this test, to distinguish them from those of other tests on this machine."""
CONFIGURED = {
    "KOALA_TOKENS": json.dumps([{"token": f"{SECRET}-users", "user": "ada", "role": "admin"}]),
    "KOALA_CLUSTERS": json.dumps({"north": {"nodes": 2, "token": f"{SECRET}-north"}, "south": {"nodes": 2}}),
    "PGPASSWORD": f"{SECRET}-the-database",
}
WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all") if ROOT.is_met else ()
"""A prefix that runs a command without capabilities, since root could read everything."""
DEBUG_LOGGING = """
import structlog
usual = structlog.make_filtering_bound_logger
structlog.make_filtering_bound_logger = lambda level: usual(0)
"""
"""A module that makes daemon, agents and resource managers log all levels."""
SECRET_PATTERN = re.compile(r"\b[0-9a-f]{48,}\b|\b[A-Za-z0-9_-]{40,}\b")
"""A text as long as the shortest generated secret."""


class UnprivilegedGrid(EmbeddedGrid):
    @property
    def koala_command(self) -> list[str]:
        return [*WITHOUT_CAPABILITIES, *super().koala_command]


@dataclass(frozen=True, slots=True)
class BusyGrid:
    """A grid with a running job, and its secrets."""

    grid: EmbeddedGrid
    job: int
    user_token: str
    """A token that was created for another user."""

    @property
    def secrets(self) -> list[str]:
        admin_token = (self.grid.directory / "token").read_text().strip()
        return [admin_token, self.user_token, SECRET]

    def log(self) -> str:
        return (self.grid.directory.parent / "daemon.log").read_text()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusyGrid]:
    folder = tmp_path_factory.mktemp("chatty")
    (folder / "sitecustomize.py").write_text(DEBUG_LOGGING)
    grid = UnprivilegedGrid(tmp_path_factory.mktemp("grid") / "data", PYTHONPATH=str(folder), **CONFIGURED)
    gate = grid.make_gate()
    two = {"type": "fixed", "components": [{"cluster": "north", "size": 2}, {"cluster": "south", "size": 1}]}
    try:
        grid.start()
        user_token = grid.http.post("/api/v1/tokens", json={"user": "bea", "role": "user"}).json()["token"]
        fields = submit_job_with_files(grid, tmp_path_factory.mktemp("sent"))
        job = grid.submit(two, *gate.hold, environment={"KEY_OF_THE_JOB": f"{SECRET}-the-job"}, **fields)
        grid.wait_for_state(job, "running")
        yield BusyGrid(grid, job, user_token)
        gate.open()
        assert grid.wait_for_end(job)["state"] == "succeeded"
    finally:
        close_grid(grid)


def submit_job_with_files(grid: EmbeddedGrid, folder: Path) -> dict[str, Any]:
    """Run a job with collected results and one with staged files, and return the fields of the latter."""
    script = folder / "run.sh"
    script.write_text("#!/bin/sh\nmkdir out && echo made > out/result\n")
    script.chmod(0o755)
    sent = ["--stage", str(script), "--collect", "out/*", "--launcher", "processes", "--wait"]
    result = grid.run_koala("submit", "--fixed", "north:1,south:1", *sent, "--", "./run.sh")
    assert result.returncode == 0, result.stderr
    ident = grid.http.get("/api/v1/jobs").json()["jobs"][0]["id"]
    return {"bundle": grid.get_job(ident)["bundle"]}


@pytest.mark.evidence("A4", "C11")
@needs(ROOT)
def test_processes_expose_no_secret(busy: BusyGrid) -> None:
    """Check the view of root, too. Only the processes of a job contain its variables."""
    looked = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        text = (command + b"\0" + read_environment(int(process.name))).decode(errors="replace")
        is_the_jobs = f"KOALA_JOB={busy.job}\0" in text and str(busy.grid.directory) in text
        leaks = [line for line in text.split("\0") if any(secret in line for secret in busy.secrets)]
        assert [line for line in leaks if not is_the_jobs or not line.startswith("KEY_OF_THE_JOB=")] == []
        looked += str(busy.grid.directory) in text
    assert looked >= 5


@pytest.mark.evidence("A4", "J1")
def test_processes_have_no_secret_like_text(busy: BusyGrid) -> None:
    for process in busy.grid.list_processes():
        texts = [*process.command, *(f"{name}={value}" for name, value in process.environment.items())]
        long_words = [
            long_word
            for line in texts
            for long_word in SECRET_PATTERN.findall(line)
            if line[:5] != "PATH=" and long_word not in os.environ
        ]
        leaks = [
            long_word
            for long_word in long_words
            if long_word not in " ".join(os.environ.values()) and long_word not in str(busy.grid.directory)
        ]
        assert leaks == [], process.command


@pytest.mark.evidence("A8", "C11")
def test_logs_contain_no_secret(busy: BusyGrid) -> None:
    grid = busy.grid
    headers = {"Authorization": f"Bearer {SECRET}-a-guess"}
    with httpx2.Client(base_url=grid.url, headers=headers, timeout=60.0) as stranger:
        refused = stranger.get("/api/v1/jobs")
    assert refused.status_code == 401
    assert SECRET not in refused.text
    grid.http.post("/api/v1/jobs", json={"command": [f"{SECRET}-a-command"]})
    assert grid.run_koala("clusters", "--token", f"{SECRET}-a-command-line").returncode == 4
    log = busy.log()
    assert "level='debug'" in log or "level='info'" in log
    for secret in busy.secrets:
        assert not re.findall(f".*{re.escape(secret)}.*", log)
    for log_file in grid.directory.rglob("*.log"):
        assert not [secret for secret in busy.secrets if secret in log_file.read_text(errors="replace")], log_file


@pytest.mark.evidence("A8")
def test_answers_contain_no_secret(busy: BusyGrid) -> None:
    api = busy.grid.http
    paths = [path for path in api.get("/openapi.json").json()["paths"] if "{" not in path]
    paths += [
        "/docs",
        f"/api/v1/jobs/{busy.job}/timeline",
        f"/api/v1/jobs/{busy.job}/explain",
        "/api/v1/clusters/north",
    ]
    secrets = [*busy.secrets[:2], *re.findall(rf"{SECRET}-[\w-]+", " ".join(CONFIGURED.values()))]
    read = 0
    for path in paths:
        with api.stream("GET", path) as answer:
            if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                continue  # an endless stream that only announces changes
            answer.read()
        assert not [secret for secret in secrets if secret in answer.text], path
        read += answer.status_code == 200
    assert read > 10


@pytest.mark.evidence("A5", "C12")
def test_files_are_unreadable_for_others(busy: BusyGrid) -> None:
    """Check the data directory and the account's directory of daemons while a job runs."""
    looked, open_to_others = 0, []
    for top in (busy.grid.directory, busy.grid.state / "koala"):
        for folder, _, files in os.walk(top):
            for path in [Path(folder), *(Path(folder, name) for name in files)]:
                try:
                    status = path.lstat()
                except FileNotFoundError:
                    continue
                looked += 1
                if not stat.S_ISLNK(status.st_mode) and stat.S_IMODE(status.st_mode) & 0o077:
                    open_to_others.append((oct(status.st_mode), str(path.relative_to(top))))
    assert open_to_others == []
    assert looked > 40


@pytest.mark.evidence("A9")
def test_process_memory_is_unreadable_for_same_account(busy: BusyGrid) -> None:
    """Read the memory and environment of each process; the kernel flag that prevents this also prevents core dumps."""

    def may_read(pid: int) -> bool:
        command = [*WITHOUT_CAPABILITIES, "head", "-c", "1", f"/proc/{pid}/mem", f"/proc/{pid}/environ"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
        return "Permission denied" not in result

    unprotected = subprocess.Popen([*WITHOUT_CAPABILITIES, "cat"], stdin=subprocess.PIPE)
    try:
        wait_until(lambda: may_read(unprotected.pid), "the memory of an unprotected process to be readable")
    finally:
        unprotected.communicate(timeout=60)
    assert busy.grid.daemon is not None
    runners = busy.grid.list_runners(f"{busy.job}.")
    assert len(runners) == 3
    ours = [busy.grid.daemon.pid, *(busy.grid.find_agent(name).pid for name in ("north", "south"))]
    assert [
        psutil.Process(pid).cmdline() for pid in [*ours, *(argument.pid for argument in runners)] if may_read(pid)
    ] == []


@pytest.mark.evidence("A8")
def test_error_of_unreachable_database_hides_password(tmp_path: Path) -> None:
    secret = CONFIGURED["PGPASSWORD"]
    environment = {**os.environ, "KOALA_DATABASE": f"postgresql+psycopg://koala:{secret}@127.0.0.1:1/koala"}
    serve = [sys.executable, "-m", "koalapy.cli.main", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    result = subprocess.run(serve, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert "127.0.0.1" in result.stderr
    assert secret not in result.stdout + result.stderr
