"""No secret is where others may come upon it: not in processes, logs and answers, nor in files for all to read."""

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
"""By this all are known that are given here; others may be played on this machine at the same time."""
CONFIGURED = {
    "KOALA_TOKENS": json.dumps([{"token": f"{SECRET}-users", "user": "ada", "role": "admin"}]),
    "KOALA_CLUSTERS": json.dumps({"north": {"nodes": 2, "token": f"{SECRET}-north"}, "south": {"nodes": 2}}),
    "PGPASSWORD": f"{SECRET}-the-database",
}
WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all") if ROOT.is_met else ()
"""As any account runs a daemon: root's could look into what is closed to all."""
CHATTY = """
import structlog
usual = structlog.make_filtering_bound_logger
structlog.make_filtering_bound_logger = lambda level: usual(0)
"""
"""Daemon, agents and resource managers say everything that they ever say."""
LONG = re.compile(r"\b[0-9a-f]{48,}\b|\b[A-Za-z0-9_-]{40,}\b")
"""What looks like one of the secrets that are made here, none of which is shorter."""


class Unprivileged(EmbeddedGrid):
    @property
    def koala_command(self) -> list[str]:
        return [*WITHOUT_CAPABILITIES, *super().koala_command]


@dataclass(frozen=True, slots=True)
class Busy:
    """A daemon with a job under way."""

    grid: EmbeddedGrid
    job: int
    made: str
    """A token that was made for somebody."""

    @property
    def secrets(self) -> list[str]:
        own = (self.grid.directory / "token").read_text().strip()
        return [own, self.made, SECRET]

    def log(self) -> str:
        return (self.grid.directory.parent / "daemon.log").read_text()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    folder = tmp_path_factory.mktemp("chatty")
    (folder / "sitecustomize.py").write_text(CHATTY)
    grid = Unprivileged(tmp_path_factory.mktemp("grid") / "data", PYTHONPATH=str(folder), **CONFIGURED)
    gate = grid.make_gate()
    two = {"type": "fixed", "components": [{"cluster": "north", "size": 2}, {"cluster": "south", "size": 1}]}
    try:
        grid.start()
        made = grid.http.post("/api/v1/tokens", json={"user": "bea", "role": "user"}).json()["token"]
        more = files(grid, tmp_path_factory.mktemp("sent"))
        job = grid.submit(two, *gate.hold, environment={"KEY_OF_THE_JOB": f"{SECRET}-the-job"}, **more)
        grid.wait_for_state(job, "running")
        yield Busy(grid, job, made)
        gate.open()
        assert grid.wait_for_end(job)["state"] == "succeeded"
    finally:
        close_grid(grid)


def files(grid: EmbeddedGrid, folder: Path) -> dict[str, Any]:
    """Let a job bring something back, and another have what was sent along with it."""
    script = folder / "run.sh"
    script.write_text("#!/bin/sh\nmkdir out && echo made > out/result\n")
    script.chmod(0o755)
    sent = ["--stage", str(script), "--collect", "out/*", "--launcher", "processes", "--wait"]
    done = grid.run_koala("submit", "--fixed", "north:1,south:1", *sent, "--", "./run.sh")
    assert done.returncode == 0, done.stderr
    ident = grid.http.get("/api/v1/jobs").json()["jobs"][0]["id"]
    return {"bundle": grid.get_job(ident)["bundle"]}


@pytest.mark.evidence("A4", "C11")
@needs(ROOT)
def test_no_process_shows_a_secret_to_anybody(busy: Busy) -> None:
    """Not even to root, but for the job's own variables in its own processes."""
    looked = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        text = (command + b"\0" + read_environment(int(process.name))).decode(errors="replace")
        is_the_jobs = f"KOALA_JOB={busy.job}\0" in text and str(busy.grid.directory) in text
        found = [line for line in text.split("\0") if any(secret in line for secret in busy.secrets)]
        assert [line for line in found if not is_the_jobs or not line.startswith("KEY_OF_THE_JOB=")] == []
        looked += str(busy.grid.directory) in text
    assert looked >= 5


@pytest.mark.evidence("A4", "J1")
def test_no_process_of_ours_has_what_looks_like_a_secret(busy: Busy) -> None:
    for seen in busy.grid.list_processes():
        said = [*seen.command, *(f"{name}={value}" for name, value in seen.environment.items())]
        words = [word for line in said for word in LONG.findall(line) if line[:5] != "PATH=" and word not in os.environ]
        told = [
            word for word in words if word not in " ".join(os.environ.values()) and word not in str(busy.grid.directory)
        ]
        assert told == [], seen.command


@pytest.mark.evidence("A8", "C11")
def test_no_log_tells_a_secret(busy: Busy) -> None:
    grid = busy.grid
    shown = {"Authorization": f"Bearer {SECRET}-a-guess"}
    with httpx2.Client(base_url=grid.url, headers=shown, timeout=60.0) as stranger:
        refused = stranger.get("/api/v1/jobs")
    assert refused.status_code == 401
    assert SECRET not in refused.text
    grid.http.post("/api/v1/jobs", json={"command": [f"{SECRET}-a-command"]})
    assert grid.run_koala("clusters", "--token", f"{SECRET}-a-command-line").returncode == 4
    log = busy.log()
    assert "level='debug'" in log or "level='info'" in log
    for secret in busy.secrets:
        assert not re.findall(f".*{re.escape(secret)}.*", log)
    for kept in grid.directory.rglob("*.log"):
        assert not [secret for secret in busy.secrets if secret in kept.read_text(errors="replace")], kept


@pytest.mark.evidence("A8")
def test_no_answer_tells_a_secret(busy: Busy) -> None:
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
                continue  # it has no end, and tells only that there is something to be asked for
            answer.read()
        assert not [secret for secret in secrets if secret in answer.text], path
        read += answer.status_code == 200
    assert read > 10


@pytest.mark.evidence("A5", "C12")
def test_no_file_is_for_others_to_read(busy: Busy) -> None:
    """Below the data directory, and where the account keeps its daemons, while a job is under way."""
    looked, open_to_others = 0, []
    for top in (busy.grid.directory, busy.grid.state / "koala"):
        for folder, _, files in os.walk(top):
            for path in [Path(folder), *(Path(folder, name) for name in files)]:
                try:
                    seen = path.lstat()
                except FileNotFoundError:
                    continue
                looked += 1
                if not stat.S_ISLNK(seen.st_mode) and stat.S_IMODE(seen.st_mode) & 0o077:
                    open_to_others.append((oct(seen.st_mode), str(path.relative_to(top))))
    assert open_to_others == []
    assert looked > 40


@pytest.mark.evidence("A9")
def test_nobody_looks_into_the_memory_of_daemon_agents_and_runners(busy: Busy) -> None:
    """Nor are cores dumped: by the same mark of the kernel. Asked by the same account."""

    def may_read(pid: int) -> bool:
        asked = [*WITHOUT_CAPABILITIES, "head", "-c", "1", f"/proc/{pid}/mem", f"/proc/{pid}/environ"]
        told = subprocess.run(asked, capture_output=True, text=True, timeout=60).stderr
        return "Permission denied" not in told

    other = subprocess.Popen([*WITHOUT_CAPABILITIES, "cat"], stdin=subprocess.PIPE)
    try:
        wait_until(lambda: may_read(other.pid), "what is not closed to be open")
    finally:
        other.communicate(timeout=60)
    assert busy.grid.daemon is not None
    runners = busy.grid.list_runners(f"{busy.job}.")
    assert len(runners) == 3
    ours = [busy.grid.daemon.pid, *(busy.grid.find_agent(name).pid for name in ("north", "south"))]
    assert [psutil.Process(pid).cmdline() for pid in [*ours, *(one.pid for one in runners)] if may_read(pid)] == []


@pytest.mark.evidence("A8")
def test_a_database_that_does_not_answer_is_told_without_its_password(tmp_path: Path) -> None:
    secret = CONFIGURED["PGPASSWORD"]
    environment = {**os.environ, "KOALA_DATABASE": f"postgresql+psycopg://koala:{secret}@127.0.0.1:1/koala"}
    serve = [sys.executable, "-m", "koalapy.cli.main", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(serve, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "127.0.0.1" in done.stderr
    assert secret not in done.stdout + done.stderr
