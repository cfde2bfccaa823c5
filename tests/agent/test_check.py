"""What the check of a head node finds and misses, each with the way out."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.agent.check.cluster import Expected, check_cluster
from koalapy.agent.check.node import CHECKED
from koalapy.agent.core.settings import AgentSettings, AgentTimeouts
from koalapy.agent.lrm.port import Finding, Lrm, LrmJobState, LrmSubmission
from koalapy.model.errors import SiteRejected, SiteUnavailable
from tests.agent.memory_lrm import MemoryLrm

pytestmark = pytest.mark.processes

SHORT = AgentTimeouts(trial_node_s=0.05, trial_output_s=0.05, trial_poll_s=0.01)
NOBODY = "http://127.0.0.1:1"


class Looked(MemoryLrm):
    """A resource manager that has something to say."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__()
        self.findings = findings
        self.closed = False

    async def check_setup(self) -> Sequence[Finding]:
        return self.findings

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def bin_(tmp_path: Path) -> Path:
    folder = tmp_path / "prefix" / "bin"
    folder.mkdir(parents=True)
    return folder


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def mpirun(folder: Path, version: str = "mpirun (Open MPI) 4.1.4") -> Path:
    return program(folder / "mpirun", f"echo '{version}'")


@pytest.fixture
def settings(tmp_path: Path, bin_: Path) -> AgentSettings:
    return AgentSettings(
        "north",
        NOBODY,
        "s3cret",
        tmp_path / "agent" / "spool",
        environment={"PATH": f"{bin_}"},
        kind="slurm",
        runner_host="localhost",
    )


async def found(
    settings: AgentSettings,
    what: str,
    expected: Expected | None = None,
    lrm: Lrm | None = None,
    timeouts: AgentTimeouts = SHORT,
) -> Finding:
    findings = await check_cluster(settings, expected or Expected(4), lambda: lrm or MemoryLrm(), timeouts=timeouts)
    return next(finding for finding in findings if finding.subject == what)


async def test_the_resource_manager_speaks_for_itself_and_first(settings: AgentSettings) -> None:
    lrm = Looked(Finding("controller", True, "answers"), Finding("partition", False, "none", "make one"))
    findings = await check_cluster(settings, Expected(4), lambda: lrm, timeouts=SHORT)
    assert findings[:2] == list(lrm.findings)
    assert lrm.opened == 1
    assert lrm.closed


async def test_one_that_cannot_be_opened_though_nothing_seems_wrong(settings: AgentSettings) -> None:
    lrm = Looked(Finding("controller", True, "answers"))
    lrm.unopened = SiteUnavailable("the library is busy", hint="wait")
    assert await found(settings, "resource manager", lrm=lrm) == Finding(
        "resource manager", False, "the library is busy", "wait"
    )
    said = Finding("library", False, "it is busy", "wait")
    lrm.findings = (said,)
    findings = await check_cluster(settings, Expected(4), lambda: lrm, timeouts=SHORT)
    assert [finding for finding in findings if finding.subject in ("resource manager", "library")] == [said]


async def test_one_for_which_a_package_is_missing(settings: AgentSettings) -> None:
    def make() -> Lrm:
        raise SiteRejected("there is no drmaa", hint="pip install drmaa")

    findings = await check_cluster(settings, Expected(4), make, timeouts=SHORT)
    assert findings[0] == Finding("resource manager", False, "there is no drmaa", "pip install drmaa")
    assert len(findings) > 4


# Open MPI


async def test_open_mpi_is_found_on_the_path_of_programs(settings: AgentSettings, bin_: Path) -> None:
    path = mpirun(bin_)
    assert await found(settings, "Open MPI") == Finding("Open MPI", True, f"4.1.4 ({path})")


async def test_a_prefix_goes_before_the_path(settings: AgentSettings, bin_: Path, tmp_path: Path) -> None:
    mpirun(bin_)
    other = tmp_path / "other" / "bin"
    other.mkdir(parents=True)
    path = mpirun(other, "mpirun (Open MPI) 5.0.6rc1\n\nReport bugs")
    expected = Expected(5, mpi_prefix=str(tmp_path / "other"))
    assert await found(settings, "Open MPI", expected) == Finding("Open MPI", True, f"5.0.6rc1 ({path})")


async def test_another_series_than_the_configuration_says(settings: AgentSettings, bin_: Path) -> None:
    path = mpirun(bin_)
    assert await found(settings, "Open MPI", Expected(5)) == Finding(
        "Open MPI",
        False,
        f"4.1.4 ({path}), but clusters.north.mpi.series is 5",
        "set clusters.north.mpi.series to 4, or clusters.north.mpi.prefix to where series 5 is",
    )


async def test_an_mpirun_of_another_make(settings: AgentSettings, bin_: Path) -> None:
    path = mpirun(bin_, "HYDRA build details:\n Version: 4.1")
    seen = await found(settings, "Open MPI")
    assert (seen.ok, seen.result) == (False, f"{path} is no Open MPI")
    assert "clusters.north.mpi.prefix" in seen.hint


async def test_no_open_mpi_at_all(settings: AgentSettings) -> None:
    seen = await found(replace(settings, kind="local"), "Open MPI", Expected(4, mpi_prefix="/nowhere"))
    assert (seen.ok, seen.result) == (False, "/nowhere/bin/mpirun was not found")


@pytest.mark.parametrize("lrm", ["slurm", "sge", "drmaa"])
async def test_open_mpi_is_needed_on_nodes_and_not_on_their_head(settings: AgentSettings, lrm: str) -> None:
    seen = await found(replace(settings, kind=lrm), "Open MPI", Expected(4, mpi_prefix="/nowhere"))
    assert (seen.ok, seen.result) == (True, "/nowhere/bin/mpirun was not found on this host, where it is not needed")
    assert "see that the nodes have it" in seen.hint
    seen = await found(replace(settings, kind=lrm, modules=["no-such-module"]), "Open MPI", Expected(4))
    assert not seen.ok


async def test_modules_that_cannot_be_loaded(settings: AgentSettings) -> None:
    seen = await found(replace(settings, modules=["no-such-module"]), "Open MPI", Expected(4, "/nowhere"))
    assert not seen.ok


# Python, folders, address


class Node(MemoryLrm):
    """Runs the jobs it is given on a node, which has a Python of its own."""

    def __init__(self, python: str) -> None:
        super().__init__()
        self.python = python
        self.given: list[LrmSubmission] = []

    async def submit_job(self, submission: LrmSubmission) -> str:
        self.given.append(submission)
        job = await super().submit_job(submission)
        with submission.output.open("w") as output:
            command = [self.python, *submission.argv[1:]]
            subprocess.run(command, stdout=output, stderr=output, check=False)  # noqa: ASYNC221
        self.jobs[job] = replace(self.jobs[job], state=LrmJobState.ENDED, nodes=("n7",))
        return job


VERSION = ".".join(map(str, sys.version_info[:3]))
OTHER_PYTHON = "set clusters.north.python to a Python 3.9 or newer that the nodes have"


async def test_the_runner_is_tried_on_a_node_under_the_python_there(settings: AgentSettings, tmp_path: Path) -> None:
    node = Node(sys.executable)
    before = sorted(os.walk(tmp_path))
    seen = await found(settings, CHECKED, lrm=node)
    host = socket.gethostname()
    assert seen == Finding(CHECKED, True, f"{VERSION} ({settings.python} on {host}), which runs the runner")
    (given,) = node.given
    assert (given.nodes, given.environment) == (1, settings.environment)
    assert sorted(os.walk(tmp_path)) == before
    assert [job for job, _ in node.cancelled] == ["1"], "nothing of it is left"


async def test_check_runner_with_least_nodes_tries_a_job_of_so_many(settings: AgentSettings) -> None:
    node = Node(sys.executable)
    node.smallest = 2
    assert (await found(settings, CHECKED, lrm=node)).ok
    assert [submission.nodes for submission in node.given] == [2]


async def test_a_trial_that_is_over_is_seen_to_be_however_late(settings: AgentSettings) -> None:
    seen = await found(settings, CHECKED, lrm=Node(sys.executable), timeouts=replace(SHORT, trial_node_s=0.0))
    assert seen.result.endswith(", which runs the runner")


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("echo koala-python 3.8.18", "PYTHON is 3.8.18 on n7, older than 3.9", OTHER_PYTHON),
        ("echo hello", "PYTHON is none on n7: hello", OTHER_PYTHON),
        ("exit 3", "PYTHON is none on n7: no answer", OTHER_PYTHON),
        (
            "echo koala-python 3.9.2; echo NotImplementedError: setsid",
            "the runner does not run on n7 under 3.9.2: NotImplementedError: setsid",
            f"correct what it says, or {OTHER_PYTHON}",
        ),
    ],
)
async def test_a_node_on_which_it_does_not_run(
    settings: AgentSettings, bin_: Path, text: str, problem: str, hint: str
) -> None:
    """Nothing was tried there: what the head node's Python could do was taken for what the nodes' can."""
    seen = await found(settings, CHECKED, lrm=Node(str(program(bin_ / "python", text))))
    assert seen == Finding(CHECKED, False, problem.replace("PYTHON", settings.python), hint)


async def test_an_embedded_clusters_nodes_are_this_host(settings: AgentSettings, bin_: Path) -> None:
    node = Node(sys.executable)
    local = replace(settings, kind="local")
    expected = Finding(CHECKED, True, f"{VERSION} ({settings.python} on this host), which runs the runner")
    assert await found(local, CHECKED, lrm=node) == expected
    assert node.given == []
    seen = await found(replace(local, python="/nowhere"), CHECKED)
    assert (seen.ok, seen.result) == (False, "cannot run /nowhere: No such file or directory")


async def test_where_no_node_is_free_it_is_tried_here_which_is_said(settings: AgentSettings) -> None:
    lrm = MemoryLrm()
    seen = await found(settings, CHECKED, lrm=lrm)
    assert seen.ok
    assert seen.result.endswith("on this host), which runs the runner; no node was free within 0.05 s to try it on")
    assert seen.hint == "look again when there is one"
    assert [job for job, _ in lrm.cancelled] == ["1"]


async def test_a_resource_manager_that_does_not_take_the_trial(settings: AgentSettings) -> None:
    lrm = MemoryLrm()
    lrm.refusal = SiteRejected("no account", hint="set one")
    assert await found(settings, CHECKED, lrm=lrm) == Finding(CHECKED, False, "no account", "set one")


async def test_a_directory_that_can_be_made_is_not_made(settings: AgentSettings, tmp_path: Path) -> None:
    before = sorted(os.walk(tmp_path))
    seen = await found(settings, "agent's directory")
    assert seen.ok
    assert str(settings.directory) in seen.result
    assert sorted(os.walk(tmp_path)) == before
    assert "shared" in seen.hint, "this test runs on a local disk"
    local = await found(replace(settings, kind="local"), "agent's directory")
    assert local == Finding("agent's directory", True, str(settings.directory))


async def test_a_directory_that_cannot_be_made(settings: AgentSettings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen = await found(replace(settings, directory=tmp_path / "file" / "spool"), "agent's directory")
    assert not seen.ok
    assert seen.result == f"{tmp_path}/file/spool cannot be made: Not a directory"
    seen = await found(replace(settings, directory=Path("/proc/1")), "agent's directory")
    assert not seen.ok
    assert seen.result.startswith("/proc/1 cannot be written to: ")


@pytest.mark.parametrize(
    ("host", "lrm", "problem"),
    [
        ("127.0.0.1", "local", ""),
        ("127.0.0.1", "slurm", "127.0.0.1 is for this host only: the nodes cannot reach it"),
        ("localhost", "sge", "localhost is for this host only: the nodes cannot reach it"),
        ("0.0.0.0", "local", "0.0.0.0 stands for every address: the nodes cannot reach it"),
        ("203.0.113.7", "slurm", "cannot listen on 203.0.113.7: Cannot assign requested address"),
        ("", "slurm", f"no way from here leads to {NOBODY}"),
    ],
)
async def test_the_address_for_runners(settings: AgentSettings, host: str, lrm: str, problem: str) -> None:
    seen = await found(replace(settings, runner_host=host, kind=lrm), "runner address")
    hint = "set clusters.north.runner_address to one that the nodes reach"
    assert seen == Finding("runner address", not problem, problem or host, hint if problem else "")


async def test_folders_that_programs_are_promised(settings: AgentSettings, tmp_path: Path) -> None:
    expected = Expected(4, folders={"scratch": str(tmp_path), "home": "/nowhere"})
    assert await found(settings, "scratch folder", expected) == Finding("scratch folder", True, str(tmp_path))
    assert await found(settings, "home folder", expected) == Finding(
        "home folder", False, "there is no /nowhere here", "make it, or correct clusters.north.home"
    )


async def test_no_daemon(settings: AgentSettings) -> None:
    seen = await found(settings, "daemon")
    assert not seen.ok
    assert seen.result.startswith(f"no daemon answers at {NOBODY} (")
    for url in ("nonsense", "http://[::1", ""):
        assert not (await found(replace(settings, url=url), "daemon")).ok


async def test_nothing_is_left_behind(settings: AgentSettings, tmp_path: Path) -> None:
    seen = sorted(os.walk(tmp_path))
    await check_cluster(settings, Expected(4), MemoryLrm, timeouts=SHORT)
    assert sorted(os.walk(tmp_path)) == seen


# Files


async def test_rsync_or_the_lack_of_it(settings: AgentSettings, bin_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "install rsync on this host: without it no files come from other clusters, and none go there"
    monkeypatch.setenv("PATH", str(bin_))
    assert await found(settings, "rsync") == Finding(
        "rsync", False, "cannot run rsync: No such file or directory", hint
    )
    program(bin_ / "rsync", "echo nonsense")
    assert await found(settings, "rsync") == Finding("rsync", False, "rsync is none: nonsense", hint)
    program(bin_ / "rsync", "echo 'rsync  version 3.2.7  protocol version 31'")
    assert await found(settings, "rsync") == Finding("rsync", True, "3.2.7")


async def test_replica_directories_are_read(settings: AgentSettings, tmp_path: Path) -> None:
    none = await found(settings, "replica directories")
    assert none.ok
    assert "clusters.north.replica_directories" in none.hint
    both = replace(settings, replica_directories=[tmp_path, Path("/nowhere")])
    findings = await check_cluster(both, Expected(4), MemoryLrm, timeouts=SHORT)
    assert [f for f in findings if f.subject == "replica directory"] == [
        Finding("replica directory", True, str(tmp_path)),
        Finding(
            "replica directory",
            False,
            "/nowhere cannot be read: No such file or directory",
            "make it readable, or correct clusters.north.replica_directories",
        ),
    ]


async def test_the_folder_for_stages_is_written_to(settings: AgentSettings, tmp_path: Path) -> None:
    assert (await found(settings, "stage directory")).ok
    (tmp_path / "file").write_text("")
    seen = await found(replace(settings, stage_directory=tmp_path / "file" / "stages"), "stage directory")
    assert seen.result == f"{tmp_path}/file/stages cannot be made: Not a directory"
    assert seen.hint.startswith("set clusters.north.stage_directory to another")
