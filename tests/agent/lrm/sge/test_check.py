"""``koala check`` of Grid Engine."""

import os
import socket
from pathlib import Path

import pytest

from koalapy.agent.lrm.port import Finding
from koalapy.agent.lrm.sge.adapter import SgeLrm

from .conftest import FakeGridEngine, RememberingControl


@pytest.fixture
def lrm(engine: FakeGridEngine, control: RememberingControl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SgeLrm:
    cell = tmp_path / "root" / "default" / "common"
    cell.mkdir(parents=True)
    (cell / "bootstrap").touch()
    monkeypatch.setenv("SGE_ROOT", str(tmp_path / "root"))
    monkeypatch.delenv("SGE_CELL", raising=False)
    engine.set_answer("qstat -help", "SGE 8.1.9\nusage: qstat\n")
    engine.set_answer("qconf -ss", f"{socket.gethostname()}\n")
    return engine.make_lrm(control)


async def find_failures(lrm: SgeLrm) -> list[Finding]:
    failed = [finding for finding in await lrm.check_setup() if not finding.ok]
    assert all(finding.hint and "\n" not in finding.result for finding in failed)
    return failed


async def test_check_of_healthy_cluster_passes(lrm: SgeLrm) -> None:
    assert not await find_failures(lrm)
    text = " ".join(finding.result for finding in await lrm.check_setup())
    for phrase in ("SGE 8.1.9", "9999 slots, 2 on each node", "all.q", "4, all up", "remembers"):
        assert phrase in text


async def test_check_without_commands_fails(lrm: SgeLrm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = await find_failures(lrm)
    assert "qstat is not on" in finding.result


async def test_check_without_root_fails(lrm: SgeLrm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGE_ROOT")
    (finding,) = await find_failures(lrm)
    assert (finding.subject, finding.result) == ("SGE_ROOT", "not set")


@pytest.mark.parametrize(
    ("command", "answer", "code", "problem"),
    [
        ("qconf -sql", "error: commlib error: got select error (Connection refused)\n", 1, "commlib error"),
        ("qconf -ss", "elsewhere\n", 0, "is not among elsewhere"),
        ("qconf -sconf", "qmaster_params    none\nexecd_params  ENABLE_FORCED_QDEL=true\n", 0, "hold their nodes"),
        ("qconf -sp koala", "nope is not a parallel environment\n", 1, "there is no parallel environment koala"),
        ("qconf -sp koala", "allocation_rule 2\ncontrol_slaves FALSE\n", 0, "cannot start processes on further nodes"),
        ("qconf -sp koala", "allocation_rule $fill_up\ncontrol_slaves TRUE\n", 0, "does not give whole nodes"),
        ("qconf -sp koala", "allocation_rule 1\ncontrol_slaves TRUE\n", 0, "4 queue instances would be shared"),
        ("qselect", "", 1, "does not offer the parallel environment"),
    ],
)
async def test_check_names_problem(
    lrm: SgeLrm, engine: FakeGridEngine, command: str, answer: str, code: int, problem: str
) -> None:
    engine.set_answer(command, answer, code)
    (finding,) = await find_failures(lrm)
    assert problem in finding.result


async def test_check_names_nodes_that_are_down(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("troubled.xml")
    (nodes,) = [finding for finding in await lrm.check_setup() if finding.subject == "nodes"]
    assert (nodes.ok, nodes.result) == (True, "4, of which 2 are down: h2-1 (d), h2-3 (u)")


async def test_find_programs_bypasses_wrapper(
    lrm: SgeLrm, engine: FakeGridEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The wrapper of Debian takes ten times as long as the program that it starts."""
    root = Path(os.environ["SGE_ROOT"])
    engine.set_answer("arch", "lx-amd64\n")
    programs = root / "bin" / "lx-amd64"
    programs.mkdir(parents=True)
    (programs / "qstat").symlink_to("/bin/true")
    assert not await find_failures(lrm)
    arch, *others = engine.paths
    assert arch == f"{root}/util/arch"
    assert {os.path.dirname(path) for path in others} == {str(programs)}
