"""A Slurm of shell scripts on a PATH of its own: each command says what a test has put into its file."""

import json
import os
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

ANSWERS = Path(__file__).with_name("answers")


COLUMNS = "*--Format=*"
"""The calls by which squeue is asked for columns."""


def column_line(
    name: str,
    id: str,
    nodes: str = "",
    wants: str = "3",
    state: str = "RUNNING",
    status: str = "0",
    reason: str = "None",
    user: str = "1500",
) -> str:
    """Return a line as squeue prints it: longer values are cut."""
    return f"{id:24}{state:32}{status:16}{wants:16}{nodes:8192.8192}{user:16}{reason:96}{name:256.256}\n"


def recorded_queue(ids: Collection[int] = (166, 167, 168, 169), **changes: str) -> str:
    """Return the recorded jobs of these numbers in columns; ``changes`` are columns that differ from the recording."""
    jobs = [job for job in json.loads((ANSWERS / "squeue-22.05.json").read_bytes())["jobs"] if job["job_id"] in ids]
    return "".join(
        column_line(
            **{
                "name": job["name"],
                "id": str(job["job_id"]),
                "nodes": job["nodes"],
                "wants": str(job["node_count"]),
                "state": job["job_state"],
                "status": str(job["exit_code"]),
                "reason": job["state_reason"],
                "user": str(job["user_id"]),
                **changes,
            }
        )
        for job in jobs
    )


class FakeSlurm:
    """Each command's answer; the arguments and the environment of every call are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def says(self, command: str, output: str | bytes, *, errors: str = "", code: int = 0, when: str = "*") -> None:
        """From now on, for calls whose arguments fit the shell pattern ``when``; the last one said that fits counts."""
        number = len(list(self._folder.glob(f"{command}.*.out")))
        (self._folder / f"{command}.{number}.out").write_bytes(output.encode() if isinstance(output, str) else output)
        cases = self._folder / f"{command}.cases"
        before = cases.read_text() if cases.exists() else ""
        said = f'cat "$0.{number}.out"; printf %s {shlex.quote(errors)} >&2; exit {code}'
        cases.write_text(f'case "$*" in {when.replace(" ", chr(92) + " ")}) {said};; esac\n' + before)
        script = self._folder / command
        script.write_text('#!/bin/sh\necho "$*" >> "$0.log"; env > "$0.env"\n. "$0.cases"\n')
        script.chmod(0o755)

    def dies(self, command: str) -> None:
        """Killed by a signal from now on."""
        script = self._folder / command
        script.write_text('#!/bin/sh\necho "$*" >> "$0.log"\nkill -9 $$\n')
        script.chmod(0o755)

    def calls(self, command: str) -> list[str]:
        """Arguments of the calls so far."""
        log = self._folder / f"{command}.log"
        return log.read_text().splitlines() if log.exists() else []

    def environment(self, command: str) -> dict[str, str]:
        """Of the last call."""
        lines = (self._folder / f"{command}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """The cluster of the 22.05 recording, seen by ``koala``, who is user 1500 there."""
    fake = FakeSlurm(tmp_path / "bin")
    # Not the whole /usr/bin: there may be a real Slurm.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cat", "env", "sleep"):
        (tools / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{tools}")
    monkeypatch.setattr(os, "getuid", lambda: 1500)
    fake.says("sinfo", (ANSWERS / "sinfo-22.05.json").read_bytes())
    fake.says("sinfo", "main*|up|1-infinite\nother|up|1-infinite\n", when="*%P*")
    fake.says("sinfo", "slurm-wlm 22.05.8\n", when="--version")
    fake.says("squeue", "")
    fake.says("squeue", recorded_queue(), when=COLUMNS)
    fake.says("sbatch", "171\n")
    fake.says("scancel", "")
    fake.says("sacct", "", errors="Slurm accounting storage is disabled\n", code=1)
    fake.says("srun", "")
    return fake
