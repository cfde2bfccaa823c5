"""A fake Grid Engine that answers commands in this process, and a control that records calls."""

import asyncio
import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.commands import CommandResult
from koalapy.agent.lrm.port import DrmaaEnding, Finding, JobControl, LrmSubmission
from koalapy.agent.lrm.sge.adapter import SgeLrm
from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from tests.virtual_time import VirtualTimeLoop

from .test_qstat import ANSWERS

COMMAND_DURATION_S = 0.01
OWNER = pwd.getpwuid(os.geteuid()).pw_name


class FakeGridEngine:
    """Answers Grid Engine's commands in place of ``run_command``, and records them."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder
        folder.mkdir()
        for name in ("qstat", "qconf", "qselect", "qacct", "qdel", "qhost", "qsub"):
            (folder / name).touch()
            (folder / name).chmod(0o755)
        self.paths: list[str] = []
        """Paths of the called programs."""
        self._calls: list[str] = []
        self._answers: dict[str, tuple[str, int]] = {}
        self._hanging: dict[str, asyncio.Event] = {}
        self.set_answer("qconf -sp koala", (ANSWERS / "environment.txt").read_text())
        self.set_answer("qconf -sql", "all.q\n")
        self.set_answer("qconf -spl", "koala\n")
        self.set_answer("qconf -sm", "sgeadmin\n")
        self.set_answer("qconf -sconf", "#global:\nqmaster_params               ENABLE_FORCED_QDEL=true\n")
        self.set_answer("qselect", "".join(f"all.q@h2-{n}\n" for n in (1, 2, 3, 4)))
        self.show_recording("idle.xml")

    def make_lrm(self, control: JobControl, clock: Clock = SYSTEM_CLOCK, **settings: Any) -> SgeLrm:
        """Return an adapter of this cluster."""
        site_settings = SiteSettings(kind="sge", queue="all.q", **settings)
        return SgeLrm(site_settings, control, folders=JobFolders.for_own_account(self.run), clock=clock)

    def set_answer(self, command: str, text: str, code: int = 0) -> None:
        """Set the answer to a command with these arguments, or to all calls of a program without own answers."""
        self._answers[command] = text, code

    def block_command(self, command: str) -> Callable[[], None]:
        """Make a command wait until the returned function is called."""
        released = self._hanging[command] = asyncio.Event()
        return released.set

    async def run(
        self, *argv: str, environment: Mapping[str, str] | None = None, stdin: bytes = b"", timeout: float = 0.0
    ) -> CommandResult:
        """Answer a command, or reject it as ``commands.run`` does when it is not installed."""
        if isinstance(loop := asyncio.get_running_loop(), VirtualTimeLoop):
            loop.jump(COMMAND_DURATION_S)
        self.paths.append(argv[0])
        name = os.path.basename(argv[0])
        call = " ".join((name, *argv[1:]))
        self._calls.append(call)
        if name in self._hanging:
            await self._hanging[name].wait()
        if not (self.programs / name).exists() and name not in self._answers:
            raise SiteRejected(f"cannot run {argv[0]}: No such file or directory", fault=SiteFault.SITE)
        text, code = self._answers.get(call) or self._answers.get(name, (f"{name}: nothing to say\n", 1))
        return CommandResult(code, text.encode(), "")

    def show_recording(self, recorded: str, **changes: str) -> None:
        """Set a recorded answer of qstat, with the jobs of koala owned by this account."""
        text = (ANSWERS / recorded).read_text().replace(">koala</JB_owner>", f">{OWNER}</JB_owner>")
        for old, new in changes.items():
            text = text.replace(old, new)
        self.set_answer("qstat", text)

    def add_accounting(
        self, job: str, name: str, failed: str, exit_status: int, host: str = "h2-1", *, asked_by: str = ""
    ) -> None:
        """Add an accounting record of a job, which is queried by its number or by ``asked_by``."""
        fields = f"hostname {host}\njobnumber {job}\nowner {OWNER}\njobname {name}\n"
        fields += f"failed {failed}\nexit_status {exit_status}\n"
        command = f"qacct -o {OWNER} -j {asked_by or job}"
        earlier_text, _ = self._answers.get(command, ("", 0))
        self.set_answer(command, f"{earlier_text}=====\n{fields}ru_wallclock 5s\ncategory -pe koala 2\n")

    def list_calls(self, command: str) -> list[str]:
        return [call for call in self._calls if call.startswith(command)]


class RememberingControl(JobControl):
    """Records submissions and cancellations."""

    def __init__(self) -> None:
        self.native: list[list[str]] = []
        self.cancelled: list[str] = []
        self.endings: dict[str, DrmaaEnding] = {}
        self.problem = ""
        self.rejection: Exception | None = None

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        if self.rejection is not None:
            raise self.rejection
        self.native.append(list(native))
        return "7"

    async def cancel_job(self, job: str, user: str = "") -> None:
        self.cancelled.append(job)

    def reported_ending(self, job: str) -> DrmaaEnding | None:
        return self.endings.get(job)

    async def submit_error(self) -> str:
        return self.problem

    async def check_setup(self, nodes: int = 1) -> Sequence[Finding]:
        return [Finding("control", True, "remembers")]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGridEngine:
    engine = FakeGridEngine(tmp_path / "engine")
    monkeypatch.setenv("PATH", f"{engine.programs}:{os.environ['PATH']}")
    monkeypatch.delenv("SGE_ROOT", raising=False)
    return engine


@pytest.fixture
def control() -> RememberingControl:
    return RememberingControl()
