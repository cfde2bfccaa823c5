"""The local token of a daemon, which only its account on its machine can find."""

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from koalapy.client.client import Client
from koalapy.model.errors import UsageError
from koalapy.system import local_token as credentials
from koalapy.system.local_token import (
    Registration,
    check_token,
    find_token,
    is_start_registered,
    load_or_make_token,
    register_directory,
    register_start,
)
from tests.needs import ROOT, needs

TOKEN = "a-token-for-tests"
NAME = f"daemons-{os.uname().nodename}"
HERE = ("127.0.0.1", 8642)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = register_directory()
    assert directory is not None
    return directory


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.evidence("N2")
@pytest.mark.parametrize(
    "token", ["", " ", "\t", "short", "x" * 15, "a token of many words", "ü" * 20, "x" * 20 + "\n"]
)
def test_check_token_rejects_weak_tokens(token: str) -> None:
    with pytest.raises(ValueError, match="token"):
        check_token(token)


@pytest.mark.evidence("A1")
def test_local_token_file_is_created_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    opened = os.open

    def watching(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        descriptor = opened(path, flags, mode, **options)
        if flags & os.O_CREAT:
            modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", watching)
    old_umask = os.umask(0)
    try:
        load_or_make_token(tmp_path)
        Registration(TOKEN, [HERE]).close()
    finally:
        os.umask(old_umask)
    assert modes == [0o600, 0o600]


def lax(path: Path) -> None:
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o644)


def torn(path: Path) -> None:
    path.write_text(TOKEN[:5])
    path.chmod(0o600)


def empty(path: Path) -> None:
    path.touch(0o600)


def binary(path: Path) -> None:
    path.write_bytes(b"\xff" * 32)
    path.chmod(0o600)


def link(path: Path) -> None:
    (path.parent / "elsewhere").write_text(f"{TOKEN}\n")
    (path.parent / "elsewhere").chmod(0o600)
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("spoil", [lax, torn, empty, binary, link, pipe])
def test_local_token_of_invalid_file_is_replaced(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / "token")
    token, reason = load_or_make_token(tmp_path)
    assert reason
    assert token != TOKEN
    assert not (tmp_path / "token").is_symlink()
    assert mode_of(tmp_path / "token") == 0o600
    assert load_or_make_token(tmp_path) == (token, "")


def test_local_token_with_full_disk_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"cannot write .*/token: No space left on device"):
        load_or_make_token(tmp_path)
    assert os.listdir(tmp_path) == []


def test_find_token_of_running_daemon_by_address(state: Path) -> None:
    daemon, other_daemon = (
        Registration(TOKEN, [HERE, ("::1", 8642)]),
        Registration("token-of-the-other", [("127.0.0.1", 9000)]),
    )
    assert (mode_of(state), {mode_of(entry) for entry in state.iterdir()}) == (0o700, {0o600})
    assert find_token(*HERE).token == TOKEN
    assert find_token("0:0:0:0:0:0:0:1", 8642).token == TOKEN
    assert find_token("127.0.0.1", 9000).token == "token-of-the-other"
    for host, port in [
        ("127.0.0.1", 8643),
        ("localhost", 8642),
        ("127.0.0.2", 8642),
        ("evil.example", 8642),
        ("", 0),
        ("../token", 1),
    ]:
        result = find_token(host, port)
        assert result.token == ""
        assert "its daemons serve at 127.0.0.1:8642, 127.0.0.1:9000, [::1]:8642" in result.reason
    daemon.close()
    assert find_token(*HERE).token == ""
    other_daemon.close()
    assert list(state.iterdir()) == []


KILLED = """
import os, sys
from koalapy.client.client import Client
from koalapy.system.local_token import Registration
registration = Registration(sys.argv[1], [("127.0.0.1", 8642)])
print("registered", flush=True)
sys.stdin.read()
"""


@pytest.mark.evidence("A2")
@pytest.mark.processes
def test_find_token_of_killed_daemon_returns_none(state: Path) -> None:
    """Another account may use the port now."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, TOKEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        assert find_token(*HERE).token == TOKEN
        daemon.kill()
    assert (state / "127.0.0.1:8642").exists()
    result = find_token(*HERE)
    assert (result.token, result.reason) == ("", "the daemon of this account that served at 127.0.0.1:8642 has ended")
    Registration("token-of-the-next", [("127.0.0.1", 9000)]).close()
    assert list(state.iterdir()) == []


def test_find_token_on_shared_home_depends_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    local = Registration(TOKEN, [HERE])
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "another", "", "", "")))
    assert find_token(*HERE).token == ""
    remote = Registration("token-of-the-other", [HERE])
    assert find_token(*HERE).token == "token-of-the-other"
    monkeypatch.undo()
    remote.close()
    local.close()


@pytest.mark.evidence("A3")
def test_register_as_link_is_rejected(state: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    state.parent.mkdir(parents=True)
    state.symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="is a symbolic link") as refusal:
        Registration(TOKEN, [HERE])
    assert refusal.value.field == "XDG_STATE_HOME"
    assert list((tmp_path / "real").iterdir()) == []
    assert "is a symbolic link" in find_token(*HERE).reason


@needs(ROOT)
def test_register_of_other_account_is_rejected(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "127.0.0.1:8642").write_text(json.dumps({"token": TOKEN, "machine": credentials._machine_id()}))
    os.chown(state, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to another account"):
        Registration(TOKEN, [HERE])
    assert find_token(*HERE).token == ""


@pytest.mark.parametrize("entry", ["", "{", "[]", "null", '{"token": 1}', "\x00", "[" * 10_000])
def test_find_token_ignores_invalid_entry(state: Path, entry: str) -> None:
    state.mkdir(parents=True, mode=0o700)
    (state / "127.0.0.1:8642").write_text(entry)
    (state / "127.0.0.1:8642").chmod(0o600)
    assert find_token(*HERE).token == ""


def test_register_directory_follows_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/ada")
    assert register_directory() == Path("/home/ada/.local/state/koala", NAME)
    monkeypatch.delenv("HOME")
    import pwd

    assert register_directory() == Path(pwd.getpwuid(os.geteuid()).pw_dir, ".local/state/koala", NAME)
    monkeypatch.setattr(os, "geteuid", lambda: 3_999_999)
    assert register_directory() is None
    assert find_token(*HERE).token == ""


def test_find_token_during_registrations_is_consistent() -> None:
    """Daemons start and end at one address while a command searches for it."""
    tokens = [f"token-number-{number:020}" for number in range(40)]
    tokens_read: set[str] = set()
    is_done = threading.Event()

    def look() -> None:
        while not is_done.is_set():
            tokens_read.add(find_token(*HERE).token)

    looking = threading.Thread(target=look)
    looking.start()
    for token in tokens:
        Registration(token, [HERE]).close()
    is_done.set()
    looking.join()
    assert tokens_read <= {*tokens, ""}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_client_of_localhost_uses_loopback_address(state: Path, address: str) -> None:
    """A name could be resolved to any host, so the client uses the address."""
    daemon = Registration(TOKEN, [(address, 8642)])
    written = "[::1]" if ":" in address else address
    for host in ("localhost", "LOCALHOST"):
        client = Client(f"http://{host}:8642/", None)
        assert (client.url, client.http.headers["Authorization"]) == (f"http://{written}:8642", f"Bearer {TOKEN}")
    for elsewhere in ("http://localhost:8643", "http://localhost.example:8642", "http://localhost:8642@evil.example"):
        client = Client(elsewhere, None)
        expected_url = elsewhere.replace("localhost:8642@", "")  # a possible password is removed
        assert (client.url, f"Bearer {TOKEN}" in client.http.headers.values()) == (expected_url, False)
    daemon.close()


def test_register_start_lasts_until_end_of_block(state: Path) -> None:
    with register_start(8642):
        assert is_start_registered(8642)
        assert not is_start_registered(8643)
        Registration(TOKEN, [HERE]).close()  # removes entries of daemons that were killed
        assert is_start_registered(8642)
    assert (is_start_registered(8642), os.listdir(state)) == (False, [])


def test_register_start_of_second_daemon_keeps_entry_of_first() -> None:
    with register_start(8642):
        with register_start(8642):
            pass
        assert is_start_registered(8642)


@pytest.mark.parametrize("content", [b"", b"another-boot 1", b"\xff" * 9])
def test_start_on_another_machine_is_not_registered(state: Path, content: bytes) -> None:
    with register_start(8642):
        (state / ".starting-8642").write_bytes(content)
        assert not is_start_registered(8642)


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_register_start_with_folder_open_to_others_does_nothing(state: Path, mode: int) -> None:
    state.mkdir(parents=True)
    state.chmod(mode)
    with register_start(8642):
        assert is_start_registered(8642) == (mode == 0o755)


def test_register_start_with_replaced_or_missing_entry_leaves_the_other(state: Path) -> None:
    entry = state / ".starting-9"
    with register_start(9):
        entry.unlink()
    with register_start(9):
        entry.unlink()
        entry.write_text("of another daemon")
    assert entry.read_text() == "of another daemon"
