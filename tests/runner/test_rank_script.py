"""The script that starts a rank with one command and one environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from koalapy.runner.exec_guard import LAUNCHER, REFUSAL, SCRIPT_VARIABLE, write_rank_script

pytestmark = pytest.mark.processes

PRINT = [sys.executable, "-I", "-S", "-c", "import os, sys; print([sys.argv[1:], dict(os.environ), os.getcwd()])"]


def run_script(
    folder: Path, command: list[str], environment: dict[str, str], arguments: tuple[str, ...], **brought: str
) -> "subprocess.CompletedProcess[bytes]":
    folder.mkdir(exist_ok=True)
    path = write_rank_script(str(folder), command, environment, "/opt/mpi", os.getcwd())
    return subprocess.run(
        ["/bin/sh", path, *arguments], env=brought, capture_output=True, check=False, input=b"of the head"
    )


@pytest.mark.evidence("P4")
@pytest.mark.parametrize("script_arguments", [(), LAUNCHER])
def test_rank_script_runs_command_in_own_environment(tmp_path: Path, script_arguments: tuple[str, ...]) -> None:
    command = ["a b", "it's", '"$HOME"', "", "*", ":", "line\nbreak", "x=y", "ü", "$(id)"]
    rank_environment = {"A": "it's\n$mine", "BASH_FUNC_module%%": "() { :; }", "OMPI_MCA_pmix": "mine"}
    result = run_script(
        tmp_path / "run",
        [*PRINT, *command],
        rank_environment,
        script_arguments,
        PMIX_RANK="3",
        OMPI_MCA_pmix="head's",
        PMIX_NAMESPACE="x;$(touch evil)\n",
        LD_LIBRARY_PATH="/head",
        OMPI_MCA_mca_base_component_path="/head",
        PYTHONSTARTUP="/head",
        OPAL_PREFIX="/head",
    )
    assert result.stderr == b""
    arguments, environment, folder = eval(result.stdout)
    assert arguments == command
    assert {k: v for k, v in environment.items() if k != "LC_CTYPE"} == {
        **rank_environment,
        "PMIX_RANK": "3",
        "OPAL_PREFIX": "/opt/mpi",
    }
    assert folder == os.getcwd()


@pytest.mark.parametrize("arguments", [("id",), ("/bin/sh", "-c", "id"), (*LAUNCHER, "id"), LAUNCHER[:2], ("", "", "")])
def test_rank_script_rejects_other_command(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run_script(tmp_path, PRINT, {}, arguments)
    assert (result.returncode, result.stdout, result.stderr.decode()) == (126, b"", f"{REFUSAL}\n")


@pytest.mark.evidence("P6")
def test_rank_script_keeps_standard_input(tmp_path: Path) -> None:
    assert run_script(tmp_path, ["cat"], {"PATH": os.environ["PATH"]}, LAUNCHER).stdout == b""


def test_rank_script_runs_program_with_equals_sign(tmp_path: Path) -> None:
    program = tmp_path / "a=b"
    program.write_text('#!/bin/sh\necho "ran $1"\n')
    program.chmod(0o755)
    assert run_script(tmp_path, [str(program), "x"], {}, ()).stdout == b"ran x\n"


def test_rank_script_is_private_to_account(tmp_path: Path) -> None:
    path = write_rank_script(str(tmp_path), ["true"], {SCRIPT_VARIABLE: "/elsewhere"}, "/opt/mpi", "/")
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert "/elsewhere" not in Path(path).read_text()


def test_write_rank_script_follows_no_link(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text("keep")
    (run := tmp_path / "run").mkdir()
    (run / "koala-rank.new").symlink_to(target)
    path = write_rank_script(str(run), ["true"], {}, "/opt/mpi", "/")
    assert target.read_text() == "keep"
    assert not Path(path).is_symlink()
