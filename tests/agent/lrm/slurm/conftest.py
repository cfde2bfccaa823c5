"""A fake Slurm that answers commands in this process."""

import json
import os
import shlex
import shutil
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.commands import CommandResult
from koalapy.agent.lrm.slurm.adapter import SlurmLrm
from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.system.clock import SYSTEM_CLOCK, Clock

ANSWERS = Path(__file__).with_name("answers")


COLUMNS = "*--Format=*"
"""Calls of squeue for columns."""


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
    """Answers Slurm's commands in place of ``commands.run``, and keeps the arguments and the environment of calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._answers: dict[str, list[tuple[str, CommandResult]]] = {}
        self._calls: dict[str, list[str]] = {}
        self._environments: dict[str, dict[str, str]] = {}

    def make_lrm(self, *, options: tuple[str, ...] = (), clock: Clock = SYSTEM_CLOCK, **settings: object) -> SlurmLrm:
        """Return an adapter of this cluster."""
        site_settings = SiteSettings(kind="slurm", native_specification=shlex.join(options), **settings)  # type: ignore[arg-type]
        return SlurmLrm(site_settings, folders=JobFolders.for_own_account(self.run), clock=clock)

    def set_answer(
        self, command: str, output: str | bytes, *, errors: str = "", code: int = 0, when: str = "*"
    ) -> None:
        """Set the answer to calls that match the shell pattern ``when``. The latest matching answer counts."""
        answer = CommandResult(code, output.encode() if isinstance(output, str) else output, errors)
        self._answers.setdefault(command, []).insert(0, (when, answer))
        program = self._folder / command
        program.touch()
        program.chmod(0o755)

    def kill_command(self, command: str) -> None:
        """End all calls of a command by a signal."""
        self.set_answer(command, "", code=-9)

    def list_calls(self, command: str) -> list[str]:
        """Return the arguments of the calls so far."""
        return self._calls.get(command, [])

    def last_environment(self, command: str) -> dict[str, str]:
        """Return the environment of the last call."""
        return self._environments[command]

    async def run(
        self, *argv: str, environment: Mapping[str, str] | None = None, stdin: bytes = b"", timeout: float = 0.0
    ) -> CommandResult:
        """Answer a command, or reject it as ``commands.run`` does when it is not installed."""
        if environment is None or shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise SiteRejected(f"cannot run {argv[0]}: No such file or directory", fault=SiteFault.SITE)
        command, arguments = os.path.basename(argv[0]), " ".join(argv[1:])
        self._calls.setdefault(command, []).append(arguments)
        self._environments[command] = dict(environment)
        fitting = (answer for when, answer in self._answers[command] if fnmatchcase(arguments, when))
        return next(fitting, CommandResult(0, b"", ""))


def partition_lines(*names: str, share: str = "NO") -> str:
    """Return the answer of ``scontrol show partition --oneliner``, shortened."""
    fields = f"AllowAccounts=ALL ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED OverSubscribe={share}"
    return "".join(f"PartitionName={name} AllowGroups=ALL {fields} State=UP\n" for name in names)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Return the cluster of the 22.05 recording, as seen by user ``koala`` with uid 1500."""
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(os, "getuid", lambda: 1500)
    fake.set_answer("sinfo", (ANSWERS / "sinfo-22.05.json").read_bytes())
    fake.set_answer("sinfo", "main*|up|1-infinite\nother|up|1-infinite\n", when="*%P*")
    fake.set_answer("sinfo", "slurm-wlm 22.05.8\n", when="--version")
    fake.set_answer("squeue", "")
    fake.set_answer("squeue", recorded_queue(), when=COLUMNS)
    fake.set_answer("sbatch", "171\n")
    fake.set_answer("scancel", "")
    fake.set_answer("sacct", "", errors="Slurm accounting storage is disabled\n", code=1)
    fake.set_answer("srun", "")
    fake.set_answer("scontrol", partition_lines("main", "other", "gpu"), when="show partition *")
    fake.set_answer("scontrol", "No reservations in the system\n", when="show reservation*")
    return fake
