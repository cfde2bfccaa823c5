"""Checks of a head node that look at folders and mounts only, without a process."""

from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.agent.check.files import file_system
from koalapy.agent.check.login import check_logins
from koalapy.agent.core.settings import AgentSettings


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    return AgentSettings("north", "http://127.0.0.1:1", "s3cret", tmp_path / "spool", kind="slurm")


def test_file_system_of_a_path_is_that_of_its_last_mount() -> None:
    mounts = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:21 / /home rw - nfs4 server:/home rw\n"
        r"24 23 0:22 / /home/with\040blank rw shared:3 master:2 - fuse.glusterfs x rw" + "\n"
        "25 23 0:23 / /homes rw - tmpfs x rw\n"
        "26 23 0:23 / /home rw - lustre over rw\n"
    )
    assert file_system(Path("/var/x"), mounts) == "ext4"
    assert file_system(Path("/home/ada"), mounts) == "lustre", "the last mount hides those before"
    assert file_system(Path("/home/with blank/x"), mounts) == "fuse.glusterfs"
    assert file_system(Path("/homes"), mounts) == "tmpfs"
    assert file_system(Path("/x"), "") == "unknown"


def test_login_check_names_the_usable_socket_and_the_refused_folder(settings: AgentSettings, tmp_path: Path) -> None:
    good, bad = tmp_path / "run", tmp_path / "open"
    good.mkdir(mode=0o755)
    bad.mkdir()
    bad.chmod(0o777)
    assert check_logins(settings) == []

    def found(*folders: Path, **more: str) -> tuple[bool, str, bool]:
        (one,) = check_logins(replace(settings, login_sockets=[folder / "a.sock" for folder in folders], **more))
        return one.ok, one.result, bool(one.hint)

    assert found(good, bad) == (True, f"users of this host find the agent at {good}/a.sock", False)
    why = f"{bad} may be written by others than its owner"
    assert found(bad, good) == (True, f"only this account finds the agent, at {good}/a.sock: {why}", True)
    assert found(bad, good, identity="own")[1] == f"users of this host find the agent at {good}/a.sock"
    assert found(bad) == (True, f"nobody can log in here: {why}", True)
    assert list(good.iterdir()) == []
