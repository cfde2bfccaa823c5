"""The command as a process of its own: exit codes, signals, pipes, completion."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from koalapy.client.client import Client
from koalapy.system.local_token import Registration
from tests.cli.conftest import TOKEN, Server

pytestmark = pytest.mark.processes

BEARER = f"Bearer {TOKEN}"
KOALA = [sys.executable, "-m", "koalapy.cli.main"]


def environment(url: str, **more: str) -> dict[str, str]:
    own = {"KOALA_URL": url, "KOALA_TOKEN": TOKEN}
    return {k: v for k, v in os.environ.items() if not k.startswith("KOALA_")} | own | more


def run(url: str, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*KOALA, *arguments], capture_output=True, text=True, timeout=60, env=environment(url, **more)
    )


def test_exit_codes_and_errors_of_a_process(server: Server) -> None:
    submitted = run(server.url, "submit", "--flexible", "2", "--wait", "--", "exit", "7")
    assert (submitted.returncode, submitted.stdout) == (7, "so far\n")
    missing = run(server.url, "show", "9")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert missing.stderr == "koala: there is no job 9; see koala queue --all\n"


def test_a_proxy_is_not_asked_about_this_machine(server: Server) -> None:
    done = run(server.url, "clusters", HTTP_PROXY="http://127.0.0.1:1", http_proxy="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [["logs", "-f", "1"], ["submit", "--flexible", "2", "--wait", "--", "start", "x"]])
def test_an_interrupt_says_that_the_job_goes_on(server: Server, command: list[str]) -> None:
    run(server.url, "submit", "--flexible", "2", "--", "start", "x")
    process = subprocess.Popen(
        [*KOALA, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(server.url)
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"x"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    job = 1 if command[0] == "logs" else 2
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == f"koala: job {job} goes on; cancel with: koala cancel {job}"
    assert server.service.records[job].state == "running"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(server: Server, unbuffered: str) -> None:
    more = environment(server.url, PYTHONUNBUFFERED=unbuffered)
    for command in (["clusters"], ["queue", "--json"], ["--version"], ["--help"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([*KOALA, *command], stdout=full, stderr=subprocess.PIPE, timeout=60, env=more)
        said = b"koala: cannot write the output: no space left on device\n"
        assert (done.returncode, done.stderr) == (1, said)


def test_output_of_a_job_that_cannot_be_written_is_one_line_too(server: Server) -> None:
    run(server.url, "submit", "--flexible", "2", "--", "echo", "hello")
    for command in (["logs", "1"], ["logs", "-f", "1"], ["submit", "--flexible", "2", "--wait", "--", "echo", "x"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*KOALA, *command], stdout=full, stderr=subprocess.PIPE, timeout=60, env=environment(server.url)
            )
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(b"koala: cannot write the output: ")
        assert b"Traceback" not in done.stderr
    with open("/dev/full", "wb") as full:
        missing = subprocess.run([*KOALA, "show", "9"], stderr=full, timeout=60, env=environment(server.url))
    assert missing.returncode == 3


def test_a_demo_whose_output_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*KOALA, "demo"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
            env=environment("", TMPDIR=str(tmp_path)),
        )
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert list(tmp_path.glob("koala-demo-*")) == []


@pytest.mark.parametrize("was_there", [False, True])
def test_a_daemon_that_cannot_say_where_it_serves_leaves_no_folder_that_was_not_there(
    tmp_path: Path, was_there: bool
) -> None:
    data = tmp_path / "a" / "data"
    if was_there:
        data.mkdir(parents=True, mode=0o700)
    command = [*KOALA, "serve", "--port", "0", "--data-dir", str(data)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120, env=environment(""))
    assert done.returncode == 1
    assert b"koala: cannot write the output: no space left on device\n" in done.stderr
    assert data.exists() == was_there
    assert not was_there or (data / "koala.db").exists()


def test_output_that_was_closed_holds_up_nothing(server: Server) -> None:
    words = " ".join([*KOALA, "submit", "--flexible", "2", "--", "start", "x"])
    done = subprocess.run(["sh", "-c", f"{words} >&- 2>&- <&-"], timeout=60, env=environment(server.url))
    assert (done.returncode, len(server.service.records)) == (0, 1)
    nothing = subprocess.run(
        ["sh", "-c", f"{' '.join(KOALA)} submit -f - <&-"],
        stderr=subprocess.PIPE,
        timeout=60,
        env=environment(server.url),
    )
    assert nothing.stderr.startswith(b"koala: standard input contains no job; ")
    missing = subprocess.run(
        ["sh", "-c", f"{' '.join(KOALA)} show 9 2>&-"], stdout=subprocess.PIPE, timeout=60, env=environment(server.url)
    )
    assert (missing.returncode, missing.stdout) == (3, b"")


def test_a_reader_that_goes_away_is_no_error_to_complain_of(server: Server) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*KOALA, "clusters"], stdout=writing, stderr=subprocess.PIPE, timeout=60, env=environment(server.url)
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_something_else_on_the_port_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "healthz").write_text("hello")
    web = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert web.stdout is not None
        port = web.stdout.readline().split(" port ")[1].split()[0]
        done = run(f"http://127.0.0.1:{port}", "queue")
        assert (done.returncode, done.stderr.count("\n")) == (5, 1)
        assert "not from a koala daemon" in done.stderr
    finally:
        web.terminate()
        web.communicate(timeout=60)


def test_shells_complete_commands() -> None:
    done = run("", "", _KOALA_COMPLETE="bash_complete", COMP_WORDS="koala su", COMP_CWORD="1")
    assert done.stdout.split() == ["plain,submit"]


def test_help_names_the_exit_codes() -> None:
    done = run("", "--help")
    assert done.returncode == 0
    assert "5 daemon unreachable" in " ".join(done.stdout.split())


def test_no_proxy_is_shown_the_token_of_this_accounts_own_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    daemon = Registration(TOKEN, [("192.0.2.9", 8642)])
    own, given = Client("http://192.0.2.9:8642", None), Client("http://192.0.2.9:8642", TOKEN)
    elsewhere, encrypted = Client("http://192.0.2.10:8642", None), Client("https://192.0.2.10:8642", TOKEN)
    daemon.close()
    assert [client.http.headers.get("Authorization") for client in (own, given, elsewhere)] == [BEARER, BEARER, None]
    assert [client.http.by_proxy for client in (own, given, elsewhere, encrypted)] == [False, False, False, True]


def test_a_daemon_that_is_refused_its_port_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    done = run(server.url, "serve", "--port", str(server.port), "--data-dir", str(tmp_path / "a" / "data"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"koala: cannot listen on 127.0.0.1:{server.port}: Address already in use; give ")
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run("", "serve", "--host", "\udcff", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert (done.returncode, done.stdout) == (2, "")
    hint = "give an address of this machine, such as 127.0.0.1"
    assert done.stderr == f"koala: --host is '\\udcff', which is not a host name; {hint}\n"
    assert list(tmp_path.iterdir()) == []
