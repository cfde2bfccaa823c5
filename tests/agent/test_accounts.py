"""Who may run something on a cluster, and who may not: whatever is not known to be a person's account."""

import os
from pathlib import Path

import pytest

import koalapy.agent.accounts as module
from koalapy.agent.accounts import Account, Accounts, RunAs, SwitchMethod, account_environment, account_name
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.main import _check_identity
from koalapy.config.settings import ClusterSection
from koalapy.model.errors import SiteRejected, SiteUnavailable, UsageError

ALICE = Account("alice", 64_101, 64_101, (64_101, 64_200), "/home/alice", "/bin/sh")
MAPPED = SiteSettings(identity="mapped")


def accounts(settings: SiteSettings = MAPPED, **known: Account) -> Accounts:
    return Accounts("north", settings, known.get)


def test_a_persons_account_is_found() -> None:
    found = accounts(alice=ALICE)
    found.admit("alice")
    assert found.find_account_blocking("alice") == ALICE
    assert found.account_for("alice") == "alice"


@pytest.mark.evidence("C1", "K3")
@pytest.mark.parametrize(
    ("user", "account", "why"),
    [
        ("bob", None, "there is no account bob on north"),
        ("bob", ALICE, "there is no account bob on north"),
        ("root", Account("root", 0, 0, (0,), "/root", "/bin/sh"), "uid 0 is a system account's"),
        ("munge", Account("munge", 101, 101, (101,), "/", "/bin/sh"), "uid 101 is a system account's"),
        ("wheel", Account("wheel", 64_102, 0, (0,), "/", "/bin/sh"), "its group is root's"),
        ("gone", Account("gone", 64_103, 64_103, (), "/", "/usr/sbin/nologin"), "it is closed"),
        ("gone", Account("gone", 64_103, 64_103, (), "/", "/bin/false"), "it is closed"),
        ("", ALICE, "nobody said which that is"),
        ("64101", ALICE, "is no name of an account"),
        ("-u", ALICE, "is no name of an account"),
        ("../alice", ALICE, "is no name of an account"),
        ("alice bob", ALICE, "is no name of an account"),
        ("alice\n", ALICE, "is no name of an account"),
        ("#0", ALICE, "is no name of an account"),
        ("ALICE", ALICE, "there is no account ALICE"),
        ("a" * 65, ALICE, "is no name of an account"),
    ],
)
def test_nobody_else_gets_anything(user: str, account: Account | None, why: str) -> None:
    known = {user: account} if account is not None else {}
    with pytest.raises(SiteRejected, match=why) as refused:
        accounts(**known).find_account_blocking(user)
    assert refused.value.fault == "unsuitable"
    assert refused.value.hint


def test_the_agents_own_account_is_nobodys() -> None:
    own = accounts(koala=Account("koala", 64_101, 64_101, (), "/", "/bin/sh"))
    own.own_uid = 64_101
    with pytest.raises(SiteRejected, match="agent's own account"):
        own.find_account_blocking("koala")


def test_who_counts_as_a_person_is_the_sites_to_say() -> None:
    low = Account("dave", 501, 501, (501,), "/home/dave", "/bin/sh")
    assert accounts(SiteSettings(identity="mapped", min_uid=500), dave=low).find_account_blocking("dave") == low


def test_a_name_service_that_does_not_answer_is_asked_again() -> None:
    def away(name: str) -> Account | None:
        raise OSError("no answer")

    with pytest.raises(SiteUnavailable, match="cannot look up the account alice"):
        Accounts("north", MAPPED, away).find_account_blocking("alice")


@pytest.mark.evidence("K10")
def test_an_own_cluster_runs_jobs_as_its_agent_alone() -> None:
    own = accounts(SiteSettings(identity="own"), alice=ALICE)
    for mine in ("", account_name(os.geteuid())):
        assert own.account_for(mine) == (mine if mine == "" else "")
        own.admit(own.account_for(mine))
    with pytest.raises(SiteRejected, match="and not as 'alice'"):
        own.admit(own.account_for("alice"))


def test_a_service_cluster_is_told_nothing_by_an_account() -> None:
    service = accounts(SiteSettings(), alice=ALICE)
    assert service.account_for("alice") == ""
    service.admit("")
    with pytest.raises(SiteRejected, match="runs jobs as one account"):
        service.find_account_blocking("alice")


# What is run


@pytest.mark.evidence("K5")
def test_privileges_are_dropped_for_good() -> None:
    command = RunAs(accounts(alice=ALICE), SwitchMethod.SETUID).build_command(ALICE, ["sbatch", "x"])
    assert command[0].endswith("/setpriv")
    assert command[1:7] == ["--reuid", "64101", "--regid", "64101", "--groups", "64101,64200"]
    assert command[7:] == ["--inh-caps", "-all", "--ambient-caps", "-all", "--", "sbatch", "x"]


@pytest.mark.evidence("K5")
def test_sudo_is_asked_for_the_program_itself_and_for_no_password(tmp_path: Path) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    command = RunAs(accounts(alice=ALICE), SwitchMethod.SUDO).build_command(
        ALICE, ["sbatch", "--parsable"], str(tmp_path)
    )
    assert command[0].endswith("/sudo")
    assert command[1:] == ["-n", "-u", "alice", "--", str(program), "--parsable"]


def test_who_may_act_for_nobody_says_so() -> None:
    with pytest.raises(SiteRejected, match="may act for nobody") as refused:
        RunAs(accounts(alice=ALICE), SwitchMethod.NONE).build_command(ALICE, ["sbatch"])
    assert refused.value.fault == "site"


def test_nothing_of_the_agents_own_environment_is_handed_on() -> None:
    own = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/zsh", "TMPDIR": "/x", "PATH": "/bin"}
    assert account_environment(ALICE, own) == {
        "HOME": "/home/alice",
        "USER": "alice",
        "LOGNAME": "alice",
        "SHELL": "/bin/sh",
        "PATH": "/bin",
    }


def test_what_speaks_with_other_sites_has_none_of_the_agents_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1503)
    monkeypatch.setattr(module, "_may_change_account", lambda: True)
    assert module.drop_capabilities("rsync", "-x")[1:] == [
        "--inh-caps",
        "-all",
        "--ambient-caps",
        "-all",
        "--",
        "rsync",
        "-x",
    ]
    monkeypatch.setattr(module, "_may_change_account", lambda: False)
    assert module.drop_capabilities("rsync", "-x") == ["rsync", "-x"]


@pytest.mark.processes
async def test_a_rule_that_is_missing_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    sudo.chmod(0o755)
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asking = RunAs(accounts(alice=ALICE), SwitchMethod.SUDO)
    with pytest.raises(SiteRejected, match="does not let this agent run sbatch as alice: a password") as refused:
        await asking.run("alice", "sbatch", environment=dict(os.environ))
    assert refused.value.fault == "site"
    assert "Whose processes" in refused.value.hint


@pytest.mark.processes
async def test_output_of_a_program_is_not_taken_for_sudos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, does in {"sudo": 'shift 4\n exec "$@"', "sbatch": "echo 'sbatch: error: no' >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = await RunAs(accounts(alice=ALICE), SwitchMethod.SUDO).run("alice", "sbatch", environment=dict(os.environ))
    assert (answer.code, answer.errors) == (1, "sbatch: error: no\n")


def test_stages_of_a_mapped_cluster_are_made_ready_where_no_account_comes(tmp_path: Path) -> None:
    settings = AgentSettings(
        "north", "http://x", "t", tmp_path / "spool", identity="mapped", stage_directory=Path("/s")
    )
    assert settings.stages == tmp_path / "spool-stages"
    assert (settings.accounts_directory, settings.address_file) == (Path("/s"), Path("/s/agent.json"))


# What an agent's configuration must say


@pytest.mark.parametrize(
    ("uid", "more", "field"),
    [
        (1500, {"stage_directory": None}, "stage_directory"),
        (0, {"replica_directories": ["/data"]}, "replica_directories"),
    ],
)
def test_an_agent_that_cannot_act_for_many_does_not_start(
    uid: int, more: dict[str, object], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    section = ClusterSection(**{"kind": "slurm", "identity": "mapped", "stage_directory": "/s", **more})  # type: ignore[arg-type]
    own = AgentSettings("north", "http://x", "t", tmp_path, identity="mapped", stage_directory=Path("/s"))
    with pytest.raises(UsageError) as refused:
        _check_identity("north", own, section)
    assert refused.value.field == f"clusters.north.{field}"
    assert refused.value.hint
