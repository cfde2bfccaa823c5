"""``koala check`` with real accounts."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.agent.accounts import SwitchMethod
from koalapy.agent.check.trial import TRIAL_SUBJECT, check_accounts, check_runner, describe_wrong_account
from koalapy.agent.core.settings import RUNNER, AgentSettings
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.agent.lrm.port import Finding
from tests.agent.lrm.conftest import stop_locald

from .conftest import HostAccounts, make_folders, make_mapped_settings

pytestmark = pytest.mark.processes


@pytest.fixture
def settings(tmp_path: Path, open_path: Path) -> AgentSettings:
    return make_mapped_settings(AgentSettings("north", "http://127.0.0.1:1", "t", tmp_path / "spool"), open_path)


async def run_check(
    settings: AgentSettings, people: HostAccounts, user: str, method: SwitchMethod = SwitchMethod.SETUID
) -> dict[str, Finding]:
    folders = make_folders(settings, people, method)
    folders.prepare_base()
    return {finding.subject: finding for finding in await check_accounts(settings, folders, user)}


@pytest.mark.evidence("K11")
async def test_check_accounts_with_account_makes_its_folder(
    settings: AgentSettings, host_accounts: HostAccounts
) -> None:
    findings = await run_check(settings, host_accounts, "alice")
    assert all(finding.ok for finding in findings.values()), findings
    assert findings["account"].result == "alice has uid 64101 and the groups 64101"
    assert "made, filled and emptied as alice" in findings["account folder"].result
    assert settings.accounts_directory is not None
    assert not list((settings.accounts_directory / "alice").iterdir())


async def test_check_accounts_without_user_passes(settings: AgentSettings, host_accounts: HostAccounts) -> None:
    findings = await run_check(settings, host_accounts, "")
    assert all(finding.ok for finding in findings.values())
    assert "--user ACCOUNT" in findings["account"].hint


async def test_check_accounts_with_unknown_account_fails(settings: AgentSettings, host_accounts: HostAccounts) -> None:
    assert "there is no account mallory" in (await run_check(settings, host_accounts, "mallory"))["account"].result


async def test_check_accounts_below_closed_folder_fails(
    settings: AgentSettings, host_accounts: HostAccounts, open_path: Path
) -> None:
    (open_path / "closed").mkdir(mode=0o700)
    closed = replace(settings, stage_directory=open_path / "closed" / "jobs")
    findings = await run_check(closed, host_accounts, "alice")
    assert findings["account folders"].hint.startswith(f"chmod o+x {open_path}/closed")
    assert not findings["account folder"].ok


async def test_check_accounts_without_switch_method_fails(settings: AgentSettings, host_accounts: HostAccounts) -> None:
    (finding,) = (await run_check(settings, host_accounts, "alice", SwitchMethod.NONE)).values()
    assert not finding.ok
    assert "CAP_SETUID" in finding.hint


@pytest.mark.evidence("K11")
async def test_check_accounts_without_sudo_rule_fails(
    settings: AgentSettings, host_accounts: HostAccounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\n[ "$2" = -l ] || exit 9\necho "sudo: a password is required" >&2; exit 1\n')
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    findings = await run_check(replace(settings, kind="slurm"), host_accounts, "alice", SwitchMethod.SUDO)
    assert findings["sudo for sbatch"] == Finding(
        "sudo for sbatch",
        False,
        "sudo: a password is required",
        "add sbatch to the agent's rules, with NOPASSWD: see docs/clusters.md, Job accounts",
    )


async def test_check_runner_runs_a_job_of_the_account(
    settings: AgentSettings, host_accounts: HostAccounts, tmp_path: Path
) -> None:
    settings = replace(settings, environment={"PATH": "/usr/local/bin:/usr/bin:/bin"})
    folders = make_folders(settings, host_accounts)
    folders.prepare_base()
    cluster = LocalCluster(tmp_path / "locald", "north", 1, preload=RUNNER)
    lrm = LocalLrm(cluster, "koala-", folders=folders)
    try:
        await lrm.open()
        finding = await check_runner(settings, lrm, folders, "alice")
        assert (finding.subject, finding.ok) == (TRIAL_SUBJECT, True), finding
        output = "koala-python 3.11.2\nkoala-uid 99\nkoala-runner north-1\n"
        assert "runs as uid 99" in await describe_wrong_account(output, folders, "alice")
    finally:
        await lrm.close()
        stop_locald(cluster)
