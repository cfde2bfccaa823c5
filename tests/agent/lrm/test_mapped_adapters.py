"""Slurm and Grid Engine with jobs of several accounts.

Commands are answered in this process. Real processes of this account work in the folders of the accounts.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.accounts import Account, Accounts, RunAs, SwitchMethod
from koalapy.agent.components import job_folders
from koalapy.agent.components.job_folders import COMMAND, PROGRAM, JobFolders
from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.commands import CommandResult, RunCommand, run_command
from koalapy.agent.lrm.drmaa.control import drmaa_control
from koalapy.agent.lrm.port import LrmJobState, LrmSubmission
from koalapy.agent.lrm.sge.adapter import SgeLrm
from koalapy.agent.lrm.sge.commands import QsubControl, SgeCommands
from koalapy.agent.lrm.slurm.adapter import SlurmLrm
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.model.node_requirement import NodeRequirement

from .sge.conftest import FakeGridEngine
from .sge.conftest import engine as engine
from .slurm.conftest import COLUMNS, FakeSlurm, recorded_queue
from .slurm.conftest import slurm as slurm

KNOWN = {
    "ann": Account("ann", 1500, 1500, (1500,), "/home/ann", "/bin/sh"),
    "ben": Account("ben", 1501, 1501, (1501,), "/home/ben", "/bin/sh"),
}
MAPPED = SiteSettings(identity="mapped")


class FakeSudo:
    """Runs commands of resource managers by a fake, and records them by account."""

    def __init__(self, folder: Path, run_command: RunCommand) -> None:
        self._run_command = run_command
        self._calls: list[str] = []
        program = folder / "sudo"
        program.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')
        program.chmod(0o755)
        files = folder / COMMAND
        files.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {PROGRAM} "$@"\n')
        files.chmod(0o755)

    async def run(self, *argv: str, **options: Any) -> CommandResult:
        if os.path.basename(argv[0]) != "sudo":
            return await self._run_command(*argv, **options)
        sudo, _, _, user, _, *command = argv
        assert argv == (sudo, "-n", "-u", user, "--", *command)
        self._calls.append(f"{user}: {' '.join(command)}")
        return await self._run_command(*command, **options)

    def list_calls(self, program: str) -> list[str]:
        """Return the calls of a program, each with the account before it."""
        return [call for call in self._calls if os.path.basename(call.split()[1]) == program]


@pytest.fixture(autouse=True)
def folders_of_removed_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no name service know the owner of the folders: all belong to the account of the test."""
    monkeypatch.setattr(job_folders, "account_name", str)


def folders_of(tmp_path: Path, run_command: RunCommand = run_command) -> JobFolders:
    for name in KNOWN:
        (tmp_path / "jobs" / name).mkdir(parents=True)
    (tmp_path / "jobs" / "agent.json").touch()
    accounts = Accounts("north", MAPPED, KNOWN.get)
    run_as = RunAs(accounts, SwitchMethod.SUDO, run_command)
    return JobFolders(run_as, tmp_path / "jobs", str(tmp_path / "tools" / "python"))


def make_submission(folders: JobFolders, user: str, name: str = "koala-x-9.1.0") -> LrmSubmission:
    work = folders.folder_path(user, f"work-{name}")
    return LrmSubmission(name, 1, ["/bin/true"], {}, work, work / "runner.log", user=user, secrets=("5ecret",))


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return the folder of the programs of FakeSudo."""
    folder = tmp_path / "tools"
    folder.mkdir()
    return folder


@pytest.fixture
def sudo(slurm: FakeSlurm, tools: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSudo:
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return FakeSudo(tools, slurm.run)


@pytest.fixture
def mapped(sudo: FakeSudo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmLrm:
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    return SlurmLrm(SiteSettings(kind="slurm", identity="mapped"), folders=folders_of(tmp_path, sudo.run))


async def test_slurm_with_unknown_account_is_unavailable_while_it_exists(
    slurm: FakeSlurm, mapped: SlurmLrm, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mapped.take_snapshot()
    slurm.set_answer("squeue", recorded_queue(), errors="squeue: error: Invalid user: ben\n\n", when=COLUMNS)
    with pytest.raises(SiteUnavailable, match="squeue does not know the account ben"):
        await mapped.take_snapshot()
    monkeypatch.delitem(KNOWN, "ben")
    assert "ann" in {job.user for job in (await mapped.take_snapshot()).jobs}


@pytest.mark.processes
async def test_slurm_submits_job_as_its_account(
    slurm: FakeSlurm, sudo: FakeSudo, mapped: SlurmLrm, tmp_path: Path
) -> None:
    work = tmp_path / "jobs" / "ann" / "work-koala-x-9.1.0"
    requirement = NodeRequirement(account="climate")  # Slurm decides whether ann may charge it
    submission = replace(make_submission(mapped._folders, "ann"), requirement=requirement)
    assert await mapped.submit_job(submission) == "171"
    (call,) = sudo.list_calls("sbatch")
    assert " --account=climate " in call
    assert call.startswith(f"ann: {tmp_path}/bin/sbatch --parsable --job-name=koala-x-9.1.0 --chdir={work} ")
    assert sorted(path.name for path in work.iterdir()) == ["launch", "secret.0"]
    assert [path.stat().st_mode & 0o777 for path in sorted(work.iterdir())] == [0o700, 0o600]
    environment = slurm.last_environment("sbatch")
    assert (environment["HOME"], environment["USER"], environment["LOGNAME"]) == ("/home/ann", "ann", "ann")
    assert "5ecret" not in str(environment) + call


@pytest.mark.evidence("K9")
async def test_slurm_find_ignores_jobs_of_other_accounts(slurm: FakeSlurm, mapped: SlurmLrm) -> None:
    name = "koala-x-2.1.0"
    forged = f"167|RUNNING|1500|{name}\n180|RUNNING|1501|{name}\n"
    slurm.set_answer("squeue", forged, when=f"*--name={name}*")
    assert await mapped.find_job(name, "ann") == "167"
    assert await mapped.find_job(name, "ben") == "180"
    assert await mapped.find_job(name) is None


@pytest.mark.evidence("K9")
async def test_slurm_cancels_job_as_its_account_only(slurm: FakeSlurm, sudo: FakeSudo, mapped: SlurmLrm) -> None:
    slurm.set_answer("squeue", "167|RUNNING|1500|koala-x-2.1.0\n", when="*--jobs=167*")
    for user in ("ben", ""):
        with pytest.raises(SiteRejected, match=r"not koala-x-2\.1\.0 of .*: it is not cancelled"):
            await mapped.cancel_job("167", "koala-x-2.1.0", user)
    assert slurm.list_calls("scancel") == []
    await mapped.cancel_job("167", "koala-x-2.1.0", "ann")
    assert [call.split(" ", 1)[0] for call in sudo.list_calls("scancel")] == ["ann:"]


@pytest.mark.evidence("K4")
async def test_submit_as_unknown_account_is_rejected(
    slurm: FakeSlurm, mapped: SlurmLrm, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = make_submission(mapped._folders, "ann")
    monkeypatch.delitem(KNOWN, "ann")
    with pytest.raises(SiteRejected, match="there is no account ann on north"):
        await mapped.submit_job(ready)
    assert slurm.list_calls("sbatch") == []


@pytest.mark.processes
async def test_account_that_lists_names_without_end_is_rejected(
    mapped: SlurmLrm, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / COMMAND).write_text("""#!/bin/sh\nwhile echo '{"name": "work-x", "size": 0}'; do :; done\n""")
    monkeypatch.setattr(job_folders, "MAX_NAMES", 10)
    with pytest.raises(SiteRejected, match="account ann has more than 10 job folders"):
        await mapped._folders.list_names("ann")


async def test_snapshot_names_accounts_of_jobs(
    slurm: FakeSlurm, mapped: SlurmLrm, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = (24, 32, 16, 16, 8192, 16, 96, 256)
    rows = [("201", "RUNNING", "0", "1", "n1", "1501", "None", "koala-x-1.1.0")]
    rows.append(("202", "RUNNING", "0", "1", "n2", "1999", "None", "koala-x-2.1.0"))
    rows.append(("203", "RUNNING", "0", "1", "n2", "1999", "None", "x\nkoala-x-1.1.0"))
    text = "".join("".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) + "\n" for row in rows)
    slurm.set_answer("squeue", text, when="*--Format=*UserID*")
    assert [(job.id, job.user) for job in (await mapped.take_snapshot()).jobs] == [("201", "ben")]


# Grid Engine


@pytest.fixture
def grid_sudo(engine: FakeGridEngine, tools: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSudo:
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    engine.set_answer("qsub", "41\n")
    return FakeSudo(tools, engine.run)


@pytest.fixture
def grid(grid_sudo: FakeSudo, tmp_path: Path) -> SgeLrm:
    folders = folders_of(tmp_path, grid_sudo.run)
    control = QsubControl(SgeCommands(folders.run_as))
    return SgeLrm(SiteSettings(kind="sge", identity="mapped"), control, folders=folders)


@pytest.mark.processes
async def test_grid_engine_submits_job_as_its_account(
    engine: FakeGridEngine, grid: SgeLrm, grid_sudo: FakeSudo, tmp_path: Path
) -> None:
    assert await grid.submit_job(make_submission(grid._folders, "ben")) == "41"
    (call,) = grid_sudo.list_calls("qsub")
    work = tmp_path / "jobs" / "ben" / "work-koala-x-9.1.0"
    assert call.startswith(f"ben: {engine.programs}/qsub -terse -N koala-x-9.1.0 -wd {work} -o {work}/runner.log")
    assert call.endswith(f"-b y -shell n -r n {work}/launch")
    assert os.access(work / "launch", os.X_OK)


@pytest.mark.evidence("K9")
async def test_grid_engine_finds_job_by_name_and_account(engine: FakeGridEngine, grid: SgeLrm) -> None:
    row = (
        "<job_list state='running'><JB_job_number>{0}</JB_job_number><JB_name>koala-x-{0}.1.0</JB_name>"
        "<JB_owner>{1}</JB_owner><state>r</state><queue_name>all.q@h2-1</queue_name></job_list>"
    )
    rows = row.format(7, "ann") + row.format(8, "mallory") + row.format(9, "ben")
    engine.set_answer("qstat", f"<job_info><queue_info>{rows}</queue_info><job_info/></job_info>")
    jobs = (await grid.take_snapshot()).jobs
    assert [(job.id, job.user, job.state) for job in jobs] == [
        ("7", "ann", LrmJobState.RUNNING),
        ("9", "ben", LrmJobState.RUNNING),
    ]
    assert all(" -u * " in call for call in engine.list_calls("qstat") if "-xml" in call)
    assert await grid.find_job("koala-x-7.1.0", "ben") is None
    with pytest.raises(SiteRejected, match="not cancelled"):
        await grid.cancel_job("7", "koala-x-7.1.0", "ben")
    assert engine.list_calls("qdel") == []


@pytest.mark.processes
async def test_rejection_of_qsub_has_its_text(engine: FakeGridEngine, grid: SgeLrm) -> None:
    engine.set_answer("qsub", "Unable to run job: no suitable queues.\nExiting.\n", 1)
    with pytest.raises(SiteRejected, match="qsub: Unable to run job: no suitable queues") as refused:
        await grid.submit_job(make_submission(grid._folders, "ann"))
    assert "qsub -w v" in refused.value.hint


# DRMAA


def test_drmaa_library_of_mapped_cluster_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SiteRejected, match="a DRMAA library cannot submit jobs as accounts of their owners"):
        drmaa_control("/x/libdrmaa.so", folders_of(tmp_path).run_as)
