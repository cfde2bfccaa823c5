"""Accounts that jobs may run as, and commands that run as them."""

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import koalapy.agent.accounts as module
from koalapy.agent.accounts import (
    Account,
    AccountProcess,
    Accounts,
    RunAs,
    SwitchMethod,
    account_environment,
    account_name,
)
from koalapy.agent.components import job_folders
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.main import _check_identity
from koalapy.agent.transfers.stages import ComponentFiles
from koalapy.config.settings import ClusterSection
from koalapy.model.errors import SiteRejected, SiteUnavailable, UsageError
from koalapy.runner.processes import processor_ticks

ALICE = Account("alice", 64_101, 64_101, (64_101, 64_200), "/home/alice", "/bin/sh")
MAPPED = SiteSettings(identity="mapped")


def make_accounts(settings: SiteSettings = MAPPED, **entries: Account) -> Accounts:
    return Accounts("north", settings, entries.get)


def test_find_account_of_user_returns_it() -> None:
    mapped = make_accounts(alice=ALICE)
    mapped.admit("alice")
    assert mapped.find_account_blocking("alice") == ALICE
    assert mapped.account_for("alice") == "alice"


@pytest.mark.evidence("C1", "K3")
@pytest.mark.parametrize(
    ("user", "account", "reason"),
    [
        ("bob", None, "there is no account bob on north"),
        ("bob", ALICE, "there is no account bob on north"),
        ("root", Account("root", 0, 0, (0,), "/root", "/bin/sh"), "uid 0 is below min_uid"),
        ("munge", Account("munge", 101, 101, (101,), "/", "/bin/sh"), "uid 101 is below min_uid"),
        ("wheel", Account("wheel", 64_102, 0, (0,), "/", "/bin/sh"), "its group is root"),
        ("gone", Account("gone", 64_103, 64_103, (), "/", "/usr/sbin/nologin"), "it is closed"),
        ("gone", Account("gone", 64_103, 64_103, (), "/", "/bin/false"), "it is closed"),
        ("", ALICE, "owner has none there"),
        ("64101", ALICE, "is not a valid account name"),
        ("-u", ALICE, "is not a valid account name"),
        ("../alice", ALICE, "is not a valid account name"),
        ("alice bob", ALICE, "is not a valid account name"),
        ("alice\n", ALICE, "is not a valid account name"),
        ("#0", ALICE, "is not a valid account name"),
        ("ALICE", ALICE, "there is no account ALICE"),
        ("a" * 65, ALICE, "is not a valid account name"),
    ],
)
def test_find_account_of_unsuitable_account_is_rejected(user: str, account: Account | None, reason: str) -> None:
    entries = {user: account} if account is not None else {}
    with pytest.raises(SiteRejected, match=reason) as error:
        make_accounts(**entries).find_account_blocking(user)
    assert error.value.fault == "unsuitable"
    assert error.value.hint


def test_find_account_of_the_agent_is_rejected() -> None:
    mapped = make_accounts(koala=Account("koala", 64_101, 64_101, (), "/", "/bin/sh"))
    mapped.own_uid = 64_101
    with pytest.raises(SiteRejected, match="agent's own account"):
        mapped.find_account_blocking("koala")


def test_find_account_with_lower_min_uid_returns_it() -> None:
    low = Account("dave", 501, 501, (501,), "/home/dave", "/bin/sh")
    assert make_accounts(SiteSettings(identity="mapped", min_uid=500), dave=low).find_account_blocking("dave") == low


def test_find_account_without_name_service_is_unavailable() -> None:
    def fail(name: str) -> Account | None:
        raise OSError("no answer")

    with pytest.raises(SiteUnavailable, match="cannot look up the account alice"):
        Accounts("north", MAPPED, fail).find_account_blocking("alice")


@pytest.mark.evidence("K10")
def test_own_cluster_rejects_other_accounts() -> None:
    own_accounts = make_accounts(SiteSettings(identity="own"), alice=ALICE)
    for user in ("", account_name(os.geteuid())):
        assert own_accounts.account_for(user) == ""
        own_accounts.admit(own_accounts.account_for(user))
    with pytest.raises(SiteRejected, match="not as 'alice'"):
        own_accounts.admit(own_accounts.account_for("alice"))


def test_service_cluster_ignores_accounts() -> None:
    service = make_accounts(SiteSettings(), alice=ALICE)
    assert service.account_for("alice") == ""
    service.admit("")
    with pytest.raises(SiteRejected, match="runs jobs as one account"):
        service.find_account_blocking("alice")


# Commands


@pytest.mark.evidence("K5")
def test_build_command_with_setpriv_drops_all_capabilities() -> None:
    command = RunAs(make_accounts(alice=ALICE), SwitchMethod.SETUID).build_command(ALICE, ["sbatch", "x"])
    assert command[0].endswith("/setpriv")
    assert command[1:7] == ["--reuid", "64101", "--regid", "64101", "--groups", "64101,64200"]
    assert command[7:] == ["--inh-caps", "-all", "--ambient-caps", "-all", "--", "sbatch", "x"]


@pytest.mark.evidence("K5")
def test_build_command_with_sudo_names_the_program(tmp_path: Path) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    command = RunAs(make_accounts(alice=ALICE), SwitchMethod.SUDO).build_command(
        ALICE, ["sbatch", "--parsable"], str(tmp_path)
    )
    assert command[0].endswith("/sudo")
    assert command[1:] == ["-n", "-u", "alice", "--", str(program), "--parsable"]


def test_build_command_without_method_is_rejected() -> None:
    with pytest.raises(SiteRejected, match="cannot run anything as other accounts") as error:
        RunAs(make_accounts(alice=ALICE), SwitchMethod.NONE).build_command(ALICE, ["sbatch"])
    assert error.value.fault == "site"


def test_account_environment_replaces_variables_of_the_agent() -> None:
    names = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/zsh"}
    assert account_environment(ALICE, {**names, "TMPDIR": "/x", "PATH": "/bin"}) == {
        "HOME": "/home/alice",
        "USER": "alice",
        "LOGNAME": "alice",
        "SHELL": "/bin/sh",
        "PATH": "/bin",
    }


def test_drop_capabilities_with_capabilities_uses_setpriv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1503)
    monkeypatch.setattr(module, "_may_change_account", lambda: True)
    options = ["--inh-caps", "-all", "--ambient-caps", "-all", "--"]
    assert module.drop_capabilities("rsync", "-x")[1:] == [*options, "rsync", "-x"]
    monkeypatch.setattr(module, "_may_change_account", lambda: False)
    assert module.drop_capabilities("rsync", "-x") == ["rsync", "-x"]


def start_process(script: str, now: Callable[[], float] = time.monotonic) -> AccountProcess:
    return AccountProcess(["sh", "-c", script], {"PATH": os.environ["PATH"]}, "alice", 30.0, now)


@pytest.mark.processes
def test_account_process_without_temporary_folder_reports_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with start_process("echo it is full >&2; exit 3") as process, pytest.raises(SiteRejected, match="as alice: it is"):
        process.finish()


@pytest.mark.processes
@pytest.mark.parametrize("script", ["yes", "echo; exec sleep 1000"])
def test_account_process_with_bytes_after_its_answer_is_rejected(script: str) -> None:
    with start_process(script) as process, pytest.raises(SiteRejected, match="alice has sent an invalid message"):
        process.finish()


@pytest.mark.processes
def test_account_process_that_trickles_is_unavailable() -> None:
    """Each read takes 29 s, less than the timeout of one. Full chunks allow some more pauses than short ones."""
    times = count(0.0, 29.0)
    with start_process("yes", lambda: next(times)) as process:
        content = process.open_content(1 << 30)
        with pytest.raises(SiteUnavailable, match=r"the process of alice is too slow: it made 72\d\d s of pauses"):
            content.read()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ticks", "is_closing", "error"),
    [
        (count(), False, "the process of alice is too slow: it made 6 s of pauses"),
        (repeat(7), False, "the process of alice has sent nothing for 0.02 s"),
        (count(), True, "the process of alice has sent nothing for 0.02 s"),
    ],
)
def test_silent_account_process_stalls_unless_it_uses_processor_time(
    monkeypatch: pytest.MonkeyPatch, ticks: Iterator[int], is_closing: bool, error: str
) -> None:
    """The removal of a very large folder and the search of one are silent. All pauses together have a limit."""
    monkeypatch.setattr(module, "processor_ticks", lambda _: next(ticks))
    times, script = count(0.0, 3.0), ["sleep", "1000"]
    process = AccountProcess(
        script, {"PATH": os.environ["PATH"]}, "alice", 0.02, lambda: next(times), lambda: is_closing
    )
    with process, pytest.raises(SiteUnavailable, match=error):
        process.finish()


@pytest.mark.processes
def test_processor_ticks_include_children_that_have_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with start_process(f"'{sys.executable}' -c '{burn}'; echo; exec sleep 1000") as process:
        assert process.read_some(1)
        assert processor_ticks(process._process.pid) > 20


@pytest.mark.processes
async def test_run_without_sudo_rule_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in {"sudo": "echo 'sudo: a password is required' >&2\nexit 1", "sbatch": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run_as = RunAs(make_accounts(alice=ALICE), SwitchMethod.SUDO)
    with pytest.raises(SiteRejected, match="does not let this agent run sbatch as alice: a password") as error:
        await run_as.run("alice", "sbatch", environment=dict(os.environ))
    assert error.value.fault == "site"
    assert "Job accounts" in error.value.hint


@pytest.mark.processes
async def test_run_with_failed_command_returns_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in {"sudo": 'shift 4\n exec "$@"', "sbatch": "echo 'sbatch: error: no' >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = await RunAs(make_accounts(alice=ALICE), SwitchMethod.SUDO).run(
        "alice", "sbatch", environment=dict(os.environ)
    )
    assert (answer.code, answer.errors) == (1, "sbatch: error: no\n")


def test_stages_of_mapped_cluster_are_outside_account_folders(tmp_path: Path) -> None:
    settings = AgentSettings(
        "north", "http://x", "t", tmp_path / "spool", identity="mapped", stage_directory=Path("/s")
    )
    assert settings.stages == tmp_path / "spool-stages"
    assert (settings.accounts_directory, settings.address_file) == (Path("/s"), Path("/s/agent.json"))


def test_list_accounts_with_foreign_folders_looks_up_each_owner_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any account of the host may make folders of any names."""
    lookups: list[int] = []

    def find_name(uid: int) -> str:
        lookups.append(uid)
        return "alice"

    monkeypatch.setattr(job_folders, "account_name", find_name)
    folders = JobFolders(RunAs(make_accounts(), SwitchMethod.NONE), tmp_path)
    for name in ("alice", *(f"x{number}" for number in range(100))):
        (tmp_path / name).mkdir()
    assert [folders.list_accounts(), folders.list_accounts()] == [{"alice"}, {"alice"}]
    assert lookups == [os.geteuid()] * 2
    monkeypatch.setattr(job_folders, "account_name", str)  # the owner was removed
    assert len(folders.list_accounts()) == 101
    shutil.rmtree(tmp_path)
    with pytest.raises(SiteUnavailable, match="cannot list"):  # else the jobs of all accounts would count as ended
        folders.list_accounts()


async def test_leftovers_of_accounts_are_sought_in_a_thread() -> None:
    """While the name service hangs, the agent serves."""
    threads: list[threading.Thread] = []

    def list_accounts() -> frozenset[str]:
        threads.append(threading.current_thread())
        return frozenset()

    files = SimpleNamespace(_folders=SimpleNamespace(list_accounts=list_accounts))
    await ComponentFiles.remove_leftovers(cast(ComponentFiles, files))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


# Configuration


@pytest.mark.parametrize(
    ("uid", "changes", "field"),
    [
        (1500, {"stage_directory": None}, "stage_directory"),
        (0, {"replica_directories": ["/data"]}, "replica_directories"),
    ],
)
def test_check_identity_of_unsuitable_mapped_agent_fails(
    uid: int, changes: dict[str, object], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    section = ClusterSection(**{"kind": "slurm", "identity": "mapped", "stage_directory": "/s", **changes})  # type: ignore[arg-type]
    settings = AgentSettings("north", "http://x", "t", tmp_path, identity="mapped", stage_directory=Path("/s"))
    with pytest.raises(UsageError) as error:
        _check_identity("north", settings, section)
    assert error.value.field == f"clusters.north.{field}"
    assert error.value.hint
