"""What the check of a head node says of accounts, tried for real."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.agent.accounts.accounts import SwitchMethod
from koalapy.agent.check.accounts import check_accounts
from koalapy.agent.check.node import CHECKED, TrialOutput, _not_the_same, check_runner
from koalapy.agent.core.settings import RUNNER, AgentSettings
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.agent.lrm.port import Finding

from .conftest import People, folders_of, settings_of

pytestmark = pytest.mark.processes


@pytest.fixture
def settings(tmp_path: Path, open_path: Path) -> AgentSettings:
    return settings_of(AgentSettings("north", "http://127.0.0.1:1", "t", tmp_path / "spool"), open_path)


async def looked(
    settings: AgentSettings, people: People, user: str, way: SwitchMethod = SwitchMethod.SETUID
) -> dict[str, Finding]:
    folders = folders_of(settings, people, way)
    folders.prepare()
    return {finding.subject: finding for finding in await check_accounts(settings, folders, user)}


@pytest.mark.evidence("K11")
async def test_an_account_is_tried(settings: AgentSettings, people: People) -> None:
    found = await looked(settings, people, "alice")
    assert all(finding.ok for finding in found.values()), found
    assert found["an account"].result == "alice is uid 64101, of the groups 64101"
    assert "made, filled and emptied as alice" in found["an account's folder"].result
    assert settings.accounts_directory is not None
    assert not list((settings.accounts_directory / "alice").iterdir())


async def test_nobody_need_be_tried(settings: AgentSettings, people: People) -> None:
    found = await looked(settings, people, "")
    assert all(finding.ok for finding in found.values())
    assert "--user ACCOUNT" in found["an account"].hint


async def test_an_account_that_is_none_is_told(settings: AgentSettings, people: People) -> None:
    assert "there is no account mallory" in (await looked(settings, people, "mallory"))["an account"].result


async def test_a_folder_that_accounts_cannot_pass_through_to_is_told(
    settings: AgentSettings, people: People, open_path: Path
) -> None:
    (open_path / "closed").mkdir(mode=0o700)
    closed = replace(settings, stage_directory=open_path / "closed" / "jobs")
    found = await looked(closed, people, "alice")
    assert found["accounts' folders"].hint.startswith(f"chmod o+x {open_path}/closed")
    assert not found["an account's folder"].ok


async def test_who_may_act_for_nobody_is_told(settings: AgentSettings, people: People) -> None:
    (found,) = (await looked(settings, people, "alice", SwitchMethod.NONE)).values()
    assert not found.ok
    assert "CAP_SETUID" in found.hint


@pytest.mark.evidence("K11")
async def test_a_rule_of_sudo_that_is_missing_is_told(
    settings: AgentSettings, people: People, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\n[ "$2" = -l ] || exit 9\necho "sudo: a password is required" >&2; exit 1\n')
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = await looked(replace(settings, kind="slurm"), people, "alice", SwitchMethod.SUDO)
    assert found["sudo for sbatch"] == Finding(
        "sudo for sbatch",
        False,
        "sudo: a password is required",
        "add sbatch to the agent's rules, with NOPASSWD: see docs/clusters.md, Whose processes",
    )


async def test_a_job_of_the_account_is_tried_on_a_node(settings: AgentSettings, people: People, tmp_path: Path) -> None:
    settings = replace(settings, environment={"PATH": "/usr/local/bin:/usr/bin:/bin"})
    folders = folders_of(settings, people)
    folders.prepare()
    cluster = LocalCluster(tmp_path / "locald", "north", 1, preload=RUNNER)
    lrm = LocalLrm(cluster, "koala-", folders=folders)
    try:
        await lrm.open()
        found = await check_runner(settings, lrm, folders, "alice")
        assert (found.subject, found.ok) == (CHECKED, True), found
        said = TrialOutput("koala-python 3.11.2\nkoala-uid 99\nkoala-runner north-1\n", "north-1")
        assert "runs as uid 99" in await _not_the_same(said, folders, "alice")
    finally:
        await lrm.close()
        cluster.stop()
