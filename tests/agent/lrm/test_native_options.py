"""Native options that would hide jobs from the agent."""

import shlex
from pathlib import Path

import pytest

from koalapy.agent.accounts import Accounts, RunAs
from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.drmaa.adapter import DrmaaLrm
from koalapy.agent.lrm.drmaa.control import DrmaaControl
from koalapy.agent.lrm.sge.adapter import SgeLrm
from koalapy.agent.lrm.sge.commands import QsubControl, SgeCommands
from koalapy.agent.lrm.slurm.adapter import SlurmLrm
from koalapy.model.errors import SiteRejected


def make_slurm(text: str) -> None:
    SlurmLrm(SiteSettings(kind="slurm", native_specification=text))


def make_sge(text: str) -> None:
    commands = SgeCommands(RunAs(Accounts("", SiteSettings())))
    SgeLrm(SiteSettings(kind="sge", native_specification=text), QsubControl(commands))


def make_drmaa(text: str, fanout: str) -> None:
    settings = SiteSettings(kind="drmaa", native_specification=text, fanout=fanout)  # type: ignore[arg-type]
    DrmaaLrm(settings, DrmaaControl(None), Path("/nonexistent"))


@pytest.mark.parametrize(
    "text",
    [
        "--clusters=south",
        "--clusters south",
        "-M south",
        "-Msouth",
        "-vM south",
        "--qos=low --cluster-constraint=big",
        "--array=1-3",
        "--arr=1-3",
        "-a 1-3",
        "--wait",
        "-W",
        "--test-only",
        "--job-name=mine",
        "-J mine",
        "--partition=big",
        "-p big",
        "-pbig",
    ],
)
def test_slurm_with_option_that_moves_jobs_is_rejected(text: str) -> None:
    with pytest.raises(SiteRejected, match="native_specification has -") as caught:
        make_slurm(text)
    assert (caught.value.value in shlex.split(text), caught.value.fault) == (True, "site")
    assert caught.value.hint.startswith("leave it out")


@pytest.mark.parametrize(
    "text",
    ["--qos=low", "--mem=4G", "--constraint=big", "-C Max", "--exclude=n1", "-wn1", "--wait-all-nodes=1", "-Aphysics"],
)
def test_slurm_with_other_options_is_accepted(text: str) -> None:
    make_slurm(text)


@pytest.mark.parametrize("text", ["-q all.q@north", "-masterq all.q", "-pe mpi 4", "-t 1-3", "-sync y", "-N x", "-@ f"])
def test_grid_engine_with_option_that_moves_jobs_is_rejected(text: str) -> None:
    with pytest.raises(SiteRejected, match="native_specification has -"):
        make_sge(text)


def test_grid_engine_with_other_options_is_accepted() -> None:
    make_sge("-P grid -l h_vmem=4G -M ann@example.org")


@pytest.mark.parametrize(
    ("fanout", "text"),
    [
        ("srun", "-M south"),
        ("srun", "-N {nodes} --clusters=south"),
        ("none", "--clusters=south"),
        ("qrsh", "-sync y -q all.q"),
    ],
)
def test_drmaa_with_option_that_moves_jobs_is_rejected(fanout: str, text: str) -> None:
    with pytest.raises(SiteRejected, match="native_specification has -"):
        make_drmaa(text, fanout)


@pytest.mark.parametrize(
    ("fanout", "text"), [("srun", "-n {nodes} -p big"), ("none", "-M ann@example.org -t 1"), ("qrsh", "-q all.q")]
)
def test_drmaa_with_other_options_is_accepted(fanout: str, text: str) -> None:
    make_drmaa(text, fanout)
