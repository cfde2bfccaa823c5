"""Findings of ``koala check`` on a head node, each with a hint if something is missing."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.agent.check import head_node
from koalapy.agent.check.head_node import (
    Expected,
    _check_folder,
    _check_shared_folder,
    check_cluster,
    check_logins,
    file_system_type,
)
from koalapy.agent.check.trial import TRIAL_SUBJECT, _check_base_folder
from koalapy.agent.core.settings import AgentSettings, AgentTimeouts
from koalapy.agent.lrm.port import Finding, Lrm, LrmJobState, LrmSubmission
from koalapy.agent.main import check_host
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.model.job_sizes import JobSizes
from tests.agent.memory_lrm import MemoryLrm

processes = pytest.mark.processes
SHORT = AgentTimeouts(trial_node_s=0.05, trial_output_s=0.05, trial_poll_s=0.01)
CLOSED_URL = "http://127.0.0.1:1"


class FindingsLrm(MemoryLrm):
    """A resource manager that returns these findings from its check."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__()
        self.findings = findings
        self.closed = False

    async def check_setup(self) -> Sequence[Finding]:
        return self.findings

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "prefix" / "bin"
    folder.mkdir(parents=True)
    return folder


def write_program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def write_mpirun(folder: Path, version: str = "mpirun (Open MPI) 4.1.4") -> Path:
    return write_program(folder / "mpirun", f"echo '{version}'")


@pytest.fixture
def settings(tmp_path: Path, bin_folder: Path) -> AgentSettings:
    return AgentSettings(
        "north",
        CLOSED_URL,
        "s3cret",
        tmp_path / "agent" / "spool",
        environment={"PATH": f"{bin_folder}"},
        kind="slurm",
        runner_host="localhost",
    )


async def run_check(
    settings: AgentSettings, expected: Expected | None = None, lrm: Lrm | None = None, timeouts: AgentTimeouts = SHORT
) -> list[Finding]:
    return await check_cluster(settings, expected or Expected(4), lambda: lrm or MemoryLrm(), timeouts=timeouts)


async def check_subject(
    settings: AgentSettings,
    subject: str,
    expected: Expected | None = None,
    lrm: Lrm | None = None,
    timeouts: AgentTimeouts = SHORT,
) -> Finding:
    findings = await run_check(settings, expected, lrm, timeouts)
    return next(finding for finding in findings if finding.subject == subject)


@processes
async def test_check_cluster_returns_findings_of_the_lrm_first(settings: AgentSettings) -> None:
    lrm = FindingsLrm(Finding("controller", True, "answers"), Finding("partition", False, "none", "make one"))
    findings = await run_check(settings, lrm=lrm)
    assert findings[:2] == list(lrm.findings)
    assert lrm.opened == 1
    assert lrm.closed


@processes
async def test_check_cluster_with_unopened_lrm_reports_it_once(settings: AgentSettings) -> None:
    lrm = FindingsLrm(Finding("controller", True, "answers"))
    lrm.open_error = SiteUnavailable("the library is busy", hint="wait")
    assert await check_subject(settings, "resource manager", lrm=lrm) == Finding(
        "resource manager", False, "the library is busy", "wait"
    )
    library = Finding("library", False, "it is busy", "wait")
    lrm.findings = (library,)
    findings = await run_check(settings, lrm=lrm)
    assert [finding for finding in findings if finding.subject in ("resource manager", "library")] == [library]


@processes
async def test_check_cluster_with_missing_package_reports_it(settings: AgentSettings) -> None:
    def make() -> Lrm:
        raise SiteRejected("there is no drmaa", hint="pip install drmaa")

    findings = await check_cluster(settings, Expected(4), make, timeouts=SHORT)
    assert findings[0] == Finding("resource manager", False, "there is no drmaa", "pip install drmaa")
    assert len(findings) > 4


# Open MPI


@processes
@pytest.mark.parametrize(
    ("kind", "mpirun", "expected", "ok", "result", "hint"),
    [
        ("slurm", "mpirun (Open MPI) 4.1.4", Expected(4), True, "4.1.4 (BIN/mpirun)", ""),
        (
            "slurm",
            "mpirun (Open MPI) 4.1.4",
            Expected(5),
            False,
            "4.1.4 (BIN/mpirun), but clusters.north.mpi.series is 5",
            "set clusters.north.mpi.series to 4, or clusters.north.mpi.prefix to the folder of series 5",
        ),
        (
            "slurm",
            "HYDRA build details:\n Version: 4.1",
            Expected(4),
            False,
            "BIN/mpirun is not Open MPI",
            "install it, load a module with it, or set clusters.north.mpi.prefix to its folder",
        ),
        *(
            (
                kind,
                "mpirun (Open MPI) 4.1.4",
                Expected(4, mpi_prefix="/nowhere"),
                True,
                "/nowhere/bin/mpirun was not found on this host, where it is not needed",
                "see that the nodes have it; if not, install it, load a module with it, or set "
                "clusters.north.mpi.prefix to its folder",
            )
            for kind in ("slurm", "sge", "drmaa")
        ),
        (
            "local",
            "mpirun (Open MPI) 4.1.4",
            Expected(4, mpi_prefix="/nowhere"),
            False,
            "/nowhere/bin/mpirun was not found",
            "install it, load a module with it, or set clusters.north.mpi.prefix to its folder",
        ),
    ],
)
async def test_open_mpi_of_programs_is_checked(
    settings: AgentSettings,
    bin_folder: Path,
    kind: str,
    mpirun: str,
    expected: Expected,
    ok: bool,
    result: str,
    hint: str,
) -> None:
    write_mpirun(bin_folder, mpirun)
    finding = await check_subject(replace(settings, kind=kind), "Open MPI", expected)
    assert finding == Finding("Open MPI", ok, result.replace("BIN", str(bin_folder)), hint)


@processes
async def test_open_mpi_with_prefix_ignores_the_path(settings: AgentSettings, bin_folder: Path, tmp_path: Path) -> None:
    write_mpirun(bin_folder)
    prefix = tmp_path / "other"
    (prefix / "bin").mkdir(parents=True)
    path = write_mpirun(prefix / "bin", "mpirun (Open MPI) 5.0.6rc1\n\nReport bugs")
    finding = await check_subject(settings, "Open MPI", Expected(5, mpi_prefix=str(prefix)))
    assert finding == Finding("Open MPI", True, f"5.0.6rc1 ({path})")


@processes
async def test_modules_that_cannot_be_loaded_fail(settings: AgentSettings) -> None:
    settings = replace(settings, modules=["no-such-module"])
    for expected in (Expected(4), Expected(4, "/nowhere")):
        assert not (await check_subject(settings, "Open MPI", expected)).ok


# Python, folders, address


class NodeLrm(MemoryLrm):
    """A resource manager that runs each job at once, with this Python."""

    def __init__(self, python: str) -> None:
        super().__init__()
        self.python = python

    async def submit_job(self, submission: LrmSubmission) -> str:
        job = await super().submit_job(submission)
        with submission.output.open("w") as output:
            command = [self.python, *submission.argv[1:]]
            subprocess.run(command, stdout=output, stderr=output, check=False)  # noqa: ASYNC221
        self.jobs[job] = replace(self.jobs[job], state=LrmJobState.ENDED, nodes=("n7",))
        return job


VERSION = ".".join(map(str, sys.version_info[:3]))
PYTHON_HINT = "set clusters.north.python to a Python 3.9 or newer that the nodes have"


@processes
async def test_check_runner_runs_a_job_with_the_nodes_python(settings: AgentSettings, tmp_path: Path) -> None:
    node = NodeLrm(sys.executable)
    files = sorted(os.walk(tmp_path))
    finding = await check_subject(settings, TRIAL_SUBJECT, lrm=node)
    text = f"{VERSION} ({settings.python} on {socket.gethostname()}), which runs the runner"
    assert finding == Finding(TRIAL_SUBJECT, True, text)
    (submission,) = node.submissions
    assert (submission.nodes, submission.environment) == (1, settings.environment)
    assert sorted(os.walk(tmp_path)) == files
    assert [job for job, _ in node.cancelled] == ["1"]


@processes
async def test_check_runner_submits_the_smallest_job(settings: AgentSettings) -> None:
    node = NodeLrm(sys.executable)
    node.job_sizes = (JobSizes(2),)
    assert (await check_subject(settings, TRIAL_SUBJECT, lrm=node)).ok
    assert [submission.nodes for submission in node.submissions] == [2]


@processes
@pytest.mark.parametrize(
    ("script", "problem", "hint"),
    [
        ("echo koala-python 3.8.18", "PYTHON is 3.8.18 on n7, older than 3.9", PYTHON_HINT),
        ("echo hello", "PYTHON does not run as Python on n7: hello", PYTHON_HINT),
        ("exit 3", "PYTHON does not run as Python on n7: no output", PYTHON_HINT),
        (
            "echo koala-python 3.9.2; echo NotImplementedError: setsid",
            "the runner does not run on n7 under 3.9.2: NotImplementedError: setsid",
            f"correct what the error says, or {PYTHON_HINT}",
        ),
    ],
)
async def test_check_runner_with_unusable_python_fails(
    settings: AgentSettings, bin_folder: Path, script: str, problem: str, hint: str
) -> None:
    finding = await check_subject(
        settings, TRIAL_SUBJECT, lrm=NodeLrm(str(write_program(bin_folder / "python", script)))
    )
    assert finding == Finding(TRIAL_SUBJECT, False, problem.replace("PYTHON", settings.python), hint)


@processes
async def test_check_runner_on_embedded_cluster_uses_this_host(settings: AgentSettings) -> None:
    node = NodeLrm(sys.executable)
    local = replace(settings, kind="local")
    expected = Finding(TRIAL_SUBJECT, True, f"{VERSION} ({settings.python} on this host), which runs the runner")
    assert await check_subject(local, TRIAL_SUBJECT, lrm=node) == expected
    assert node.submissions == []
    finding = await check_subject(replace(local, python="/nowhere"), TRIAL_SUBJECT)
    assert (finding.ok, finding.result) == (False, "cannot run /nowhere: No such file or directory")


@processes
async def test_check_runner_without_free_node_uses_this_host(settings: AgentSettings) -> None:
    lrm = MemoryLrm()
    finding = await check_subject(settings, TRIAL_SUBJECT, lrm=lrm)
    assert finding.ok
    text = "on this host), which runs the runner; no node was free within 0.05 s to try it on"
    assert finding.result.endswith(text)
    assert finding.hint == "check again when a node is free"
    assert [job for job, _ in lrm.cancelled] == ["1"]


@processes
async def test_check_runner_with_rejected_job_reports_the_reason(settings: AgentSettings) -> None:
    lrm = MemoryLrm()
    lrm.submit_rejection = SiteRejected("no account", hint="set one")
    assert await check_subject(settings, TRIAL_SUBJECT, lrm=lrm) == Finding(
        TRIAL_SUBJECT, False, "no account", "set one"
    )


@processes
async def test_check_directory_does_not_make_it(settings: AgentSettings, tmp_path: Path) -> None:
    files = sorted(os.walk(tmp_path))
    finding = await check_subject(settings, "agent's directory")
    assert finding.ok
    assert str(settings.directory) in finding.result
    assert sorted(os.walk(tmp_path)) == files
    assert "shared" in finding.hint, "this test runs on a local disk"
    local = await check_subject(replace(settings, kind="local"), "agent's directory")
    assert local == Finding("agent's directory", True, str(settings.directory))


@processes
async def test_check_directory_that_cannot_be_made_fails(settings: AgentSettings, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = await check_subject(replace(settings, directory=tmp_path / "file" / "spool"), "agent's directory")
    assert (finding.ok, finding.result) == (False, f"{tmp_path}/file/spool cannot be made: Not a directory")
    finding = await check_subject(replace(settings, directory=Path("/proc/1")), "agent's directory")
    assert not finding.ok
    assert finding.result.startswith("/proc/1 cannot be written to: ")
    finding = await check_subject(replace(settings, stage_directory=tmp_path / "file" / "stages"), "stage directory")
    assert finding.result == f"{tmp_path}/file/stages cannot be made: Not a directory"
    assert finding.hint.startswith("set clusters.north.stage_directory to another")


@processes
@pytest.mark.parametrize(
    ("host", "kind", "problem"),
    [
        ("127.0.0.1", "local", ""),
        ("127.0.0.1", "slurm", "127.0.0.1 is for this host only: the nodes cannot reach it"),
        ("localhost", "sge", "localhost is for this host only: the nodes cannot reach it"),
        ("0.0.0.0", "local", "0.0.0.0 stands for every address: the nodes cannot reach it"),
        ("203.0.113.7", "slurm", "cannot listen on 203.0.113.7: Cannot assign requested address"),
        ("", "slurm", f"this host has no route to {CLOSED_URL}"),
    ],
)
async def test_check_runner_address_that_nodes_cannot_reach_fails(
    settings: AgentSettings, host: str, kind: str, problem: str
) -> None:
    finding = await check_subject(replace(settings, runner_host=host, kind=kind), "runner address")
    hint = "set clusters.north.runner_address to one that the nodes reach"
    assert finding == Finding("runner address", not problem, problem or host, hint if problem else "")


@processes
async def test_check_folders_of_programs_that_are_missing_fails(settings: AgentSettings, tmp_path: Path) -> None:
    expected = Expected(4, folders={"scratch": str(tmp_path), "home": "/nowhere"})
    findings = await run_check(settings, expected)
    assert Finding("scratch folder", True, str(tmp_path)) in findings
    hint = "make it, or correct clusters.north.home"
    assert Finding("home folder", False, "there is no /nowhere here", hint) in findings


def test_check_of_folders_that_cannot_be_reached_fails(settings: AgentSettings) -> None:
    """As below a folder that this account may not enter."""
    path = Path("/", "x" * 300, "in")
    findings = [
        _check_folder("north", "scratch", str(path)),
        _check_shared_folder(settings, "stage directory", path, "give another", "give a shared one"),
        _check_base_folder(path),
    ]
    assert [(finding.ok, "File name too long" in finding.result) for finding in findings] == [(False, True)] * 3


def test_check_of_host_without_temporary_folder_has_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def find_nothing(*_: object, **__: object) -> list[Finding]:
        return []

    monkeypatch.setattr(head_node, "check_cluster", find_nothing)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    (tmp_path / "koala.yaml").write_text("clusters: {north: {kind: slurm}}")
    findings = check_host("north", CLOSED_URL, tmp_path / "koala.yaml", tmp_path / "agent", "s3cret", None)
    assert [finding.subject for finding in findings] == ["configuration"]


@processes
async def test_check_daemon_without_daemon_fails(settings: AgentSettings) -> None:
    finding = await check_subject(settings, "daemon")
    assert not finding.ok
    assert finding.result.startswith(f"no daemon answers at {CLOSED_URL} (")
    for url in ("nonsense", "http://[::1", ""):
        assert not (await check_subject(replace(settings, url=url), "daemon")).ok


# Files


@processes
async def test_check_rsync_that_is_missing_or_broken_fails(
    settings: AgentSettings, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "install rsync on this host: files are sent to and from other clusters with it"
    monkeypatch.setenv("PATH", str(bin_folder))
    assert await check_subject(settings, "rsync") == Finding(
        "rsync", False, "cannot run rsync: No such file or directory", hint
    )
    write_program(bin_folder / "rsync", "echo nonsense")
    problem = "rsync --version prints no version: nonsense"
    assert await check_subject(settings, "rsync") == Finding("rsync", False, problem, hint)
    write_program(bin_folder / "rsync", "echo 'rsync  version 3.2.7  protocol version 31'")
    old = await check_subject(settings, "rsync")
    assert old.ok
    assert old.result.startswith("3.2.7, older than 3.4: make sure that its package has the fixes of CVE-2024-12084")
    write_program(bin_folder / "rsync", "echo 'rsync  version 3.4.0  protocol version 32'")
    assert await check_subject(settings, "rsync") == Finding("rsync", True, "3.4.0")


@processes
async def test_check_replica_directory_that_is_missing_fails(settings: AgentSettings, tmp_path: Path) -> None:
    finding = await check_subject(settings, "replica directories")
    assert finding.ok
    assert "clusters.north.replica_directories" in finding.hint
    findings = await run_check(replace(settings, replica_directories=[tmp_path, Path("/nowhere")]))
    assert [f for f in findings if f.subject == "replica directory"] == [
        Finding("replica directory", True, str(tmp_path)),
        Finding(
            "replica directory",
            False,
            "/nowhere cannot be read: No such file or directory",
            "make it readable, or correct clusters.north.replica_directories",
        ),
    ]


def test_file_system_type_is_that_of_the_last_mount() -> None:
    mounts = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:21 / /home rw - nfs4 server:/home rw\n"
        r"24 23 0:22 / /home/with\040blank rw shared:3 master:2 - fuse.glusterfs x rw" + "\n"
        "25 23 0:23 / /homes rw - tmpfs x rw\n"
        "26 23 0:23 / /home rw - lustre over rw\n"
    )
    assert file_system_type(Path("/var/x"), mounts) == "ext4"
    assert file_system_type(Path("/home/ada"), mounts) == "lustre", "the last mount hides earlier ones"
    assert file_system_type(Path("/home/with blank/x"), mounts) == "fuse.glusterfs"
    assert file_system_type(Path("/homes"), mounts) == "tmpfs"
    assert file_system_type(Path("/x"), "") == "unknown"


def test_check_logins_names_usable_and_rejected_sockets(settings: AgentSettings, tmp_path: Path) -> None:
    private, writable = tmp_path / "private", tmp_path / "writable"
    private.mkdir(mode=0o755)
    writable.mkdir()
    writable.chmod(0o777)
    assert check_logins(settings) == []

    def check(*folders: Path, identity: str = "service") -> tuple[bool, str, bool]:
        sockets = [folder / "a.sock" for folder in folders]
        (finding,) = check_logins(replace(settings, login_sockets=sockets, identity=identity))
        return finding.ok, finding.result, bool(finding.hint)

    all_users = f"users of this host log in at {private}/a.sock"
    assert check(private, writable) == (True, all_users, False)
    reason = f"{writable} may be written by others than its owner"
    assert check(writable, private) == (True, f"only this account can log in, at {private}/a.sock: {reason}", True)
    assert check(writable, private, identity="own")[1] == all_users
    assert check(writable) == (True, f"users cannot log in on this host: {reason}", True)
    assert list(private.iterdir()) == []
