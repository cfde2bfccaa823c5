"""Jobs of two accounts on one cluster: neither can read, signal or impersonate the other."""

import json
import os
from pathlib import Path

import pytest

from koalapy.agent.core.settings import AgentTimeouts
from koalapy.agent.core.spool import JournalFolder
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.port import LrmJobState
from koalapy.model.errors import SiteUnavailable
from tests.agent.conftest import FakeDaemon
from tests.signals import until

from .conftest import ALICE, BOB, MappedSite

pytestmark = pytest.mark.processes

PRINT_IDENTITY = ["/bin/sh", "-c", "id -u; id -g; id -G; echo $HOME $USER $LOGNAME; pwd; umask"]


async def start_component(daemon: FakeDaemon, token: str, command: list[str], user: str, **fields: object) -> None:
    await daemon.submit_component(token, local_user=user, **fields)
    await daemon.wait_until(lambda: daemon.status(token).get("state") in ("claimed", "ended"))
    assert daemon.status(token)["state"] == "claimed", daemon.status(token)
    await daemon.open_barrier(command, token)


async def run_as(daemon: FakeDaemon, token: str, command: list[str], user: str, **fields: object) -> str:
    """Run a component as an account and return its output."""
    await start_component(daemon, token, command, user, **fields)
    await daemon.wait_for_state(token, "ended")
    return daemon.output.get(token, b"").decode()


def owner_and_mode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_uid, status.st_mode & 0o777


@pytest.mark.evidence("C1", "K1")
async def test_job_runs_as_its_owner(daemon: FakeDaemon, mapped: MappedSite) -> None:
    lines = (await run_as(daemon, "7.1.0", PRINT_IDENTITY, "alice")).splitlines()
    assert lines[:4] == [str(ALICE.uid), str(ALICE.gid), str(ALICE.gid), "/nonexistent/alice alice alice"]
    assert daemon.status("7.1.0")["program_exit"] == 0
    work = Path(lines[4])
    assert work.parent == mapped.jobs / "alice"
    assert owner_and_mode(work) == (ALICE.uid, 0o700)
    assert owner_and_mode(mapped.settings.directory / "test" / "7.1.0") == (os.geteuid(), 0o700)


@pytest.mark.evidence("K3")
@pytest.mark.parametrize(
    ("user", "reason"),
    [
        ("", "owner has none there"),
        ("mallory", "there is no account mallory on north"),
        ("root", "there is no account root on north"),
    ],
)
async def test_user_without_account_runs_no_job(daemon: FakeDaemon, mapped: MappedSite, user: str, reason: str) -> None:
    await daemon.submit_component("7.1.0", local_user=user)
    status = await daemon.wait_for_state("7.1.0", "ended")
    assert reason in status["error"]
    assert (status["refused"], status["infrastructure"], status["lrm_job"]) == ("unsuitable", False, None)
    assert not [path for path in mapped.jobs.iterdir() if path.is_dir()]


ATTACK = """
base={base}; cat $base/alice/*/* $base/alice/* 2>/dev/null; ls $base $base/alice {spool} 2>/dev/null
kill -9 {pid} 2>/dev/null && echo killed
cat /proc/{pid}/environ 2>/dev/null; cat /proc/{pid}/mem 2>/dev/null
rm -rf $base/alice $base/agent.json 2>/dev/null; mv $base/alice $base/mine 2>/dev/null && echo moved
(echo forged > $base/agent.json) 2>/dev/null && echo forged
id -u
"""


@pytest.mark.evidence("J6", "C16", "K2")
async def test_job_cannot_read_or_signal_others(daemon: FakeDaemon, mapped: MappedSite) -> None:
    gate = mapped.jobs.parent / "gate"
    await start_component(
        daemon, "7.1.0", ["/bin/sh", "-c", f"echo $$; until [ -e {gate} ]; do sleep 0.05; done"], "alice"
    )
    await daemon.wait_until(lambda: bool(daemon.output.get("7.1.0")))
    pid = daemon.output["7.1.0"].decode().strip()
    attack = ATTACK.format(base=mapped.jobs, pid=pid, spool=mapped.settings.directory)
    assert await run_as(daemon, "8.1.0", ["/bin/sh", "-c", attack], "bob") == f"{BOB.uid}\n"
    gate.touch()
    await daemon.wait_for_state("7.1.0", "ended")
    assert daemon.status("7.1.0")["program_exit"] == 0


async def test_process_with_mark_of_another_account_ends_with_its_own_job(
    daemon: FakeDaemon, mapped: MappedSite
) -> None:
    """The mark tells an embedded cluster to which job a process without parents belongs."""
    await start_component(daemon, "7.1.0", ["/bin/sleep", "1000"], "bob")
    await daemon.wait_for_state("7.1.0", "running")
    mark = f"{mapped.component('7.1.0').lrm_job}.0@{mapped.cluster.directory.resolve()}"
    escape = f"setsid env LOCALD_MARK={mark} sh -c 'echo $$ >pid; exec sleep 1000' & "
    escape += "until [ -s pid ]; do sleep 0.05; done; kill -9 $PPID"
    await start_component(daemon, "8.1.0", ["/bin/sh", "-c", escape], "alice")
    await daemon.wait_for_state("8.1.0", "ended")
    pid = (mapped.jobs / "alice" / "work-koala-test-8.1.0" / "pid").read_text().strip()
    await until(lambda: not Path(f"/proc/{pid}").exists())
    assert daemon.status("7.1.0")["state"] == "running"


async def test_snapshot_after_a_failed_one_shows_ended_jobs(
    daemon: FakeDaemon, mapped: MappedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_as(daemon, "7.1.0", ["/bin/true"], "alice")
    lrm = LocalLrm(mapped.cluster, "koala-", folders=mapped.folders)
    with monkeypatch.context() as failing:
        failing.setattr(mapped.folders, "base", mapped.jobs / "agent.json")  # no directory
        with pytest.raises(SiteUnavailable, match="cannot list"):
            await lrm.take_snapshot()
    assert [(job.user, job.state) for job in (await lrm.take_snapshot()).jobs] == [("alice", LrmJobState.ENDED)]
    await lrm.close()


@pytest.mark.evidence("J7", "K6")
async def test_odd_file_in_place_of_result_is_ignored(daemon: FakeDaemon, mapped: MappedSite) -> None:
    spoil = (
        "rm -f runner.log; mkfifo runner.log result.7.json; truncate -s 10G output.0.99; ln -s /etc/shadow output.0.1; "
    )
    spoil += "mkdir result.0.json; kill -9 $PPID"
    await start_component(daemon, "7.1.0", ["/bin/sh", "-c", spoil], "alice")
    status = await daemon.wait_for_state("7.1.0", "ended")
    assert "runner" in status["error"]
    assert not list(mapped.settings.directory.glob("test/7.1.0/output.*"))


@pytest.mark.evidence("K6")
async def test_linked_account_folder_is_not_followed(daemon: FakeDaemon, mapped: MappedSite) -> None:
    """The owner may replace the folder by a link; the agent then acts as the owner and reaches no other files."""
    treasure = mapped.settings.directory.parent / "treasure"
    treasure.mkdir(mode=0o700)
    (treasure / "launch").write_text("kept")
    leave = f"mv {mapped.jobs}/alice {mapped.jobs}/moved; ln -s {treasure} {mapped.jobs}/alice"
    await run_as(daemon, "7.1.0", ["/bin/sh", "-c", leave], "alice")
    await daemon.submit_component("8.1.0", local_user="alice")
    status = await daemon.wait_for_state("8.1.0", "ended")
    assert "alice is not a folder" in status["error"]
    assert status["refused"] == "unknown"
    await daemon.send_command("forget", "7.1.0")
    assert (treasure / "launch").read_text() == "kept"
    assert await run_as(daemon, "9.1.0", ["id", "-u"], "bob") == f"{BOB.uid}\n"


async def test_folder_created_by_other_account_is_not_used(daemon: FakeDaemon, mapped: MappedSite) -> None:
    squatted = mapped.jobs / "alice"
    squatted.mkdir()
    os.chown(squatted, BOB.uid, BOB.gid)
    await daemon.submit_component("7.1.0", local_user="alice")
    status = await daemon.wait_for_state("7.1.0", "ended")
    assert f"alice belongs to another account (uid {BOB.uid})" in status["error"]
    assert not list(squatted.iterdir())


@pytest.mark.evidence("K4")
async def test_removed_account_gets_no_job(daemon: FakeDaemon, mapped: MappedSite) -> None:
    gate = mapped.jobs.parent / "gate"
    hold = ["/bin/sh", "-c", f"until [ -e {gate} ]; do sleep 0.05; done; echo done"]
    await start_component(daemon, "7.1.0", hold, "alice")
    await daemon.wait_for_state("7.1.0", "running")
    del mapped.people["alice"]
    await daemon.submit_component("8.1.0", local_user="alice")
    assert "there is no account alice" in (await daemon.wait_for_state("8.1.0", "ended"))["error"]
    gate.touch()
    assert (await daemon.wait_for_state("7.1.0", "ended"))["program_exit"] == 0
    assert daemon.output["7.1.0"] == b"done\n"


async def test_stopped_job_of_removed_account_ends(daemon: FakeDaemon, mapped: MappedSite) -> None:
    await start_component(daemon, "7.1.0", ["/bin/sleep", "1000"], "alice")
    await daemon.wait_for_state("7.1.0", "running")
    del mapped.people["alice"]
    await daemon.send_command("stop", "7.1.0", reason="enough")
    assert (await daemon.wait_for_state("7.1.0", "ended"))["program_exit"] is None


async def test_results_written_without_agent_are_fetched(daemon: FakeDaemon, mapped: MappedSite) -> None:
    gate = mapped.jobs.parent / "gate"
    hold = ["/bin/sh", "-c", f"until [ -e {gate} ]; do sleep 0.05; done; echo done; exit 3"]
    await daemon.submit_component("7.1.0", local_user="alice")
    await daemon.wait_for_state("7.1.0", "claimed")
    await daemon.open_barrier(hold, "7.1.0")
    await daemon.wait_for_state("7.1.0", "running")
    await mapped.stop()
    gate.touch()
    result = mapped.jobs / "alice" / "work-koala-test-7.1.0" / "result.0.json"
    await until(result.exists)
    await mapped.start()
    assert (await daemon.wait_for_state("7.1.0", "ended"))["program_exit"] == 3
    assert daemon.output["7.1.0"] == b"done\n"


async def test_leftover_account_folder_is_removed(daemon: FakeDaemon, mapped: MappedSite) -> None:
    await run_as(daemon, "7.1.0", ["true"], "alice")
    await mapped.stop()
    stale = mapped.jobs / "alice" / "work-koala-test-1.1.0"
    stale.mkdir()
    os.chown(stale, ALICE.uid, ALICE.gid)
    notes = mapped.jobs / "alice" / "notes"
    notes.touch()
    await mapped.start()
    await until(lambda: not stale.exists())
    assert (mapped.jobs / "alice" / "work-koala-test-7.1.0").exists()
    await daemon.send_command("forget", "7.1.0")
    await until(lambda: not (mapped.jobs / "alice" / "work-koala-test-7.1.0").exists())
    assert notes.exists()


@pytest.mark.evidence("K7")
async def test_stopped_helper_does_not_block_others(
    daemon: FakeDaemon, mapped: MappedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account may stop every process that runs as it."""
    await mapped.restart(AgentTimeouts(account_stall_s=0.5))
    stopper = mapped.jobs.parent / "python"
    stopper.write_text("#!/bin/sh\nkill -STOP $$\n")
    stopper.chmod(0o755)
    folders = mapped.folders
    monkeypatch.setattr(folders, "_python", str(stopper))
    await daemon.submit_component("7.1.0", local_user="alice")
    status = await daemon.wait_for_state("7.1.0", "ended")
    assert "the process of alice has sent nothing for 0.5 s" in status["error"]
    monkeypatch.undo()
    assert await run_as(daemon, "8.1.0", ["id", "-u"], "bob") == f"{BOB.uid}\n"


@pytest.mark.evidence("K7")
@pytest.mark.parametrize(
    "header",
    [
        {"name": "../../stolen", "size": 3},
        {"name": "result.0.json", "size": 1 << 40},
        {"name": "result.1.json", "size": 3},
        {"name": "journal", "size": 3},
        {"name": "runner.log", "size": -1},
        {"name": 7, "size": 3},
        ["name"],
    ],
)
async def test_forged_helper_output_writes_nothing(
    daemon: FakeDaemon, mapped: MappedSite, monkeypatch: pytest.MonkeyPatch, header: object
) -> None:
    await start_component(daemon, "7.1.0", ["/bin/sleep", "1000"], "alice")
    await daemon.wait_for_state("7.1.0", "running")
    files = {path.name: path.read_bytes() for path in (mapped.settings.directory / "test" / "7.1.0").iterdir()}
    helper = mapped.jobs.parent / "python"
    helper.write_text(f"#!/bin/sh\nprintf '%s\\nabc' '{json.dumps(header)}'\n")
    helper.chmod(0o755)
    monkeypatch.setattr(mapped.folders, "_python", str(helper))
    component = mapped.component("7.1.0")
    work = mapped.jobs / "alice" / f"work-{component.name}"
    with pytest.raises(Exception, match=r"or not a log or result file of a runner|invalid message"):
        await mapped.folders.fetch_results("alice", work, component.folder, 1, 1000)
    remaining = {path.name: path.read_bytes() for path in (mapped.settings.directory / "test" / "7.1.0").iterdir()}
    assert set(remaining) == set(files)
    monkeypatch.undo()
    await daemon.send_command("stop", "7.1.0", reason="enough")
    await daemon.wait_for_state("7.1.0", "ended")


async def test_copy_of_result_has_the_time_at_which_the_runner_saved_it(mapped: MappedSite, tmp_path: Path) -> None:
    """So that an agent can tell whether the runner outlived a restart of the agent's machine."""
    work = mapped.jobs / "alice" / "work-test-7.1.0"
    await mapped.folders.make_folder("alice", work, {"result.0.json": b"{}", "runner.log": b"its last line"})
    os.utime(work / "result.0.json", (50, 50))
    await mapped.folders.fetch_results("alice", work, JournalFolder(tmp_path), 1, 1000)
    assert (tmp_path / "result.0.json").stat().st_mtime == 50
    assert (tmp_path / "runner.log").read_text() == "its last line"


async def test_root_agent_runs_no_own_jobs(daemon: FakeDaemon, mapped: MappedSite) -> None:
    answer = await daemon.ask_agent("north", "background", nodes=1, seconds=1)
    assert "runs as root and starts no jobs of its own" in answer["error"]
