"""The token a daemon makes for itself, and how it is found by its own account, and by nobody and nowhere else."""

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
from hypothesis import given
from hypothesis import strategies as st

from koalapy.client.client import Client
from koalapy.model.errors import UsageError
from koalapy.system import local_token as credentials
from koalapy.system.local_token import Registration, check_token, find_token, load_or_make_token, register_directory
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


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.evidence("N2")
@pytest.mark.parametrize(
    "token", ["", " ", "\t", "short", "x" * 15, "a token of many words", "ü" * 20, "x" * 20 + "\n"]
)
def test_a_token_that_is_none_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="token"):
        check_token(token)


@given(token=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=16, max_size=100))
def test_a_long_token_is_taken_as_it_is(token: str) -> None:
    assert check_token(token) == token


def test_the_first_token_is_kept_and_nobody_elses_to_read(tmp_path: Path) -> None:
    os.umask(os.umask(0))  # whatever the umask is
    token, why = load_or_make_token(tmp_path)
    assert (mode(tmp_path / "token"), why) == (0o600, "")
    assert load_or_make_token(tmp_path) == (check_token(token), "")
    assert os.listdir(tmp_path) == ["token"]


@pytest.mark.evidence("A1")
def test_it_is_never_readable_not_even_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    opened = os.open

    def watching(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        descriptor = opened(path, flags, mode, **more)
        if flags & os.O_CREAT:
            seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", watching)
    before = os.umask(0)
    try:
        load_or_make_token(tmp_path)
        Registration(TOKEN, [HERE]).close()
    finally:
        os.umask(before)
    assert seen == [0o600, 0o600]


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
def test_what_is_no_secret_is_replaced_and_said(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / "token")
    token, why = load_or_make_token(tmp_path)
    assert why
    assert token != TOKEN
    assert not (tmp_path / "token").is_symlink()
    assert mode(tmp_path / "token") == 0o600
    assert load_or_make_token(tmp_path) == (token, "")


def test_a_directory_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"cannot write .*/token: No space left on device"):
        load_or_make_token(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_daemon_is_found_by_its_address_while_it_lives(state: Path) -> None:
    daemon, other = (
        Registration(TOKEN, [HERE, ("::1", 8642)]),
        Registration("token-of-the-other", [("127.0.0.1", 9000)]),
    )
    assert (mode(state), {mode(entry) for entry in state.iterdir()}) == (0o700, {0o600})
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
        found = find_token(host, port)
        assert found.token == ""
        assert "its daemons serve at 127.0.0.1:8642, 127.0.0.1:9000, [::1]:8642" in found.reason
    daemon.close()
    assert find_token(*HERE).token == ""
    other.close()
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
def test_what_a_killed_daemon_left_is_shown_to_nobody(state: Path) -> None:
    """Another account may have the port by now."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, TOKEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        assert find_token(*HERE).token == TOKEN
        daemon.kill()
    assert (state / "127.0.0.1:8642").exists()
    found = find_token(*HERE)
    assert (found.token, found.reason) == ("", "the daemon of this account that served at 127.0.0.1:8642 has ended")
    Registration("token-of-the-next", [("127.0.0.1", 9000)]).close()
    assert list(state.iterdir()) == []


def test_the_later_daemon_of_one_address_is_the_one_and_the_earlier_takes_nothing_away() -> None:
    earlier = Registration(TOKEN, [HERE])
    later = Registration("token-of-the-later", [HERE])
    earlier.close()
    assert find_token(*HERE).token == "token-of-the-later"
    later.close()


def test_machines_that_share_a_home_have_registers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Registration(TOKEN, [HERE])
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "another", "", "", "")))
    assert find_token(*HERE).token == ""
    there = Registration("token-of-the-other", [HERE])
    assert find_token(*HERE).token == "token-of-the-other"
    monkeypatch.undo()
    there.close()
    here.close()


def test_it_is_shown_where_the_address_means_the_same_only(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Registration(TOKEN, [HERE])
    monkeypatch.setattr(credentials, "_machine_id", lambda: "another machine with the same home")
    assert find_token(*HERE).token == ""
    daemon.close()


@pytest.mark.evidence("A3")
def test_a_register_that_is_a_link_is_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    state.parent.mkdir(parents=True)
    state.symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="is a symbolic link") as refusal:
        Registration(TOKEN, [HERE])
    assert refusal.value.field == "XDG_STATE_HOME"
    assert list((tmp_path / "real").iterdir()) == []
    assert "is a symbolic link" in find_token(*HERE).reason


@needs(ROOT)
def test_a_register_of_another_account_is_refused(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "127.0.0.1:8642").write_text(json.dumps({"token": TOKEN, "machine": credentials._machine_id()}))
    os.chown(state, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to another account"):
        Registration(TOKEN, [HERE])
    assert find_token(*HERE).token == ""


@pytest.mark.parametrize("entry", ["", "{", "[]", "null", '{"token": 1}', "\x00", "[" * 10_000])
def test_an_entry_that_says_nothing_is_no_error(state: Path, entry: str) -> None:
    state.mkdir(parents=True, mode=0o700)
    (state / "127.0.0.1:8642").write_text(entry)
    (state / "127.0.0.1:8642").chmod(0o600)
    assert find_token(*HERE).token == ""


def test_a_lax_register_is_tightened_but_one_that_others_may_write_is_not_used(state: Path) -> None:
    state.mkdir(parents=True, mode=0o755)
    Registration(TOKEN, [HERE]).close()
    assert mode(state) == 0o700
    state.chmod(0o777)
    with pytest.raises(UsageError, match="may be written by others"):
        Registration(TOKEN, [HERE])


def test_where_the_register_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/ada")
    assert register_directory() == Path("/home/ada/.local/state/koala", NAME)
    monkeypatch.delenv("HOME")
    import pwd

    assert register_directory() == Path(pwd.getpwuid(os.geteuid()).pw_dir, ".local/state/koala", NAME)
    monkeypatch.setattr(os, "geteuid", lambda: 3_999_999)
    assert register_directory() is None
    assert find_token(*HERE).token == ""


def test_many_at_once_never_see_half_an_entry() -> None:
    """Daemons that come and go at one address, and commands that look for it meanwhile."""
    tokens = [f"token-number-{number:020}" for number in range(40)]
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.add(find_token(*HERE).token)

    looking = threading.Thread(target=look)
    looking.start()
    for token in tokens:
        Registration(token, [HERE]).close()
    over.set()
    looking.join()
    assert seen <= {*tokens, ""}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_localhost_is_the_daemon_at_a_loopback_address(state: Path, address: str) -> None:
    """A name could lead anywhere, so that it is asked for at its address."""
    daemon = Registration(TOKEN, [(address, 8642)])
    written = "[::1]" if ":" in address else address
    for host in ("localhost", "LOCALHOST"):
        client = Client(f"http://{host}:8642/", None)
        assert (client.url, client.http.headers["Authorization"]) == (f"http://{written}:8642", f"Bearer {TOKEN}")
    for elsewhere in ("http://localhost:8643", "http://localhost.example:8642", "http://localhost:8642@evil.example"):
        client = Client(elsewhere, None)
        told = elsewhere.replace("localhost:8642@", "")  # what may be a password is told nowhere
        assert (client.url, "Authorization" in client.http.headers) == (told, False)
    daemon.close()
