"""The command as a process: exit codes, signals, pipes, completion."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from koalapy.client.client import Client
from koalapy.daemon.backup import UNFINISHED
from koalapy.system.local_token import Registration
from tests.cli.conftest import TOKEN, Server

pytestmark = pytest.mark.processes

BEARER = f"Bearer {TOKEN}"
KOALA = [sys.executable, "-m", "koalapy.cli.main"]


def make_environment(url: str, **changes: str) -> dict[str, str]:
    variables = {"KOALA_URL": url, "KOALA_TOKEN": TOKEN}
    return {k: v for k, v in os.environ.items() if not k.startswith("KOALA_")} | variables | changes


def run_koala(url: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*KOALA, *arguments], capture_output=True, text=True, timeout=60, env=make_environment(url, **variables)
    )


def test_process_exits_with_code_of_job_or_error(server: Server) -> None:
    submitted = run_koala(server.url, "submit", "--flexible", "2", "--wait", "--", "exit", "7")
    assert (submitted.returncode, submitted.stdout) == (7, "so far\n")
    missing = run_koala(server.url, "show", "9")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert missing.stderr == "koala: there is no job 9; see koala history\n"


def test_proxy_is_not_used_for_this_machine(server: Server) -> None:
    result = run_koala(server.url, "clusters", HTTP_PROXY="http://127.0.0.1:1", http_proxy="http://127.0.0.1:1")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", [["logs", "-f", "1"], ["submit", "--flexible", "2", "--wait", "--", "start", "x"]])
def test_interrupt_says_that_job_continues(server: Server, command: list[str]) -> None:
    run_koala(server.url, "submit", "--flexible", "2", "--", "start", "x")
    process = subprocess.Popen(
        [*KOALA, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=make_environment(server.url)
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"x"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    job = 1 if command[0] == "logs" else 2
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == f"koala: job {job} goes on; cancel with: koala cancel {job}"
    assert server.service.records[job].state == "running"


@pytest.mark.parametrize("batch", [False, True])
def test_interrupted_submission_names_its_key(tmp_path: Path, batch: bool) -> None:
    (tmp_path / "jobs.yaml").write_text("request: {type: flexible, total_size: 1}\ncommand: [x]\n---\ncommand: [y]\n")
    options = ["-f", str(tmp_path / "jobs.yaml")] if batch else ["--", "x"]
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        process = subprocess.Popen(
            [*KOALA, "submit", "--flexible", "1", *options],
            stderr=subprocess.PIPE,
            env=make_environment(f"http://127.0.0.1:{daemon.getsockname()[1]}"),
        )
        with daemon.accept()[0] as connection:
            assert connection.recv(4) == b"POST"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"koala: the job may have been submitted; repeat it with --idempotency-key " in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_full_disk_is_one_error_line(server: Server, unbuffered: str) -> None:
    variables = make_environment(server.url, PYTHONUNBUFFERED=unbuffered)
    for command in (["clusters"], ["queue", "--json"], ["--version"], ["--help"]):
        with open("/dev/full", "wb") as full:
            result = subprocess.run([*KOALA, *command], stdout=full, stderr=subprocess.PIPE, timeout=60, env=variables)
        message = b"koala: cannot write the output: no space left on device\n"
        assert (result.returncode, result.stderr) == (1, message)


def test_job_output_to_full_disk_is_one_error_line(server: Server) -> None:
    run_koala(server.url, "submit", "--flexible", "2", "--", "echo", "hello")
    for command in (["logs", "1"], ["logs", "-f", "1"], ["submit", "--flexible", "2", "--wait", "--", "echo", "x"]):
        with open("/dev/full", "wb") as full:
            result = subprocess.run(
                [*KOALA, *command], stdout=full, stderr=subprocess.PIPE, timeout=60, env=make_environment(server.url)
            )
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1].startswith(b"koala: cannot write the output: ")
        assert b"Traceback" not in result.stderr
    with open("/dev/full", "wb") as full:
        missing = subprocess.run([*KOALA, "show", "9"], stderr=full, timeout=60, env=make_environment(server.url))
    assert missing.returncode == 3


def test_demo_with_full_output_removes_its_folder(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*KOALA, "demo"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
            env=make_environment("", TMPDIR=str(tmp_path)),
        )
    assert (result.returncode, result.stderr.count(b"\n")) == (1, 1)
    assert list(tmp_path.glob("koala-demo-*")) == []


@pytest.mark.parametrize("was_there", [False, True])
def test_serve_with_full_output_removes_new_folder(tmp_path: Path, was_there: bool) -> None:
    data = tmp_path / "a" / "data"
    if was_there:
        data.mkdir(parents=True, mode=0o700)
    command = [*KOALA, "serve", "--port", "0", "--data-dir", str(data)]
    with open("/dev/full", "wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120, env=make_environment(""))
    assert result.returncode == 1
    assert b"koala: cannot write the output: no space left on device\n" in result.stderr
    assert data.exists() == was_there
    assert not was_there or (data / "koala.db").exists()


def test_closed_standard_streams_do_not_stop_command(server: Server) -> None:
    command = " ".join([*KOALA, "submit", "--flexible", "2", "--", "start", "x"])
    result = subprocess.run(["sh", "-c", f"{command} >&- 2>&- <&-"], timeout=60, env=make_environment(server.url))
    assert (result.returncode, len(server.service.records)) == (0, 1)
    nothing = subprocess.run(
        ["sh", "-c", f"{' '.join(KOALA)} submit -f - <&-"],
        stderr=subprocess.PIPE,
        timeout=60,
        env=make_environment(server.url),
    )
    assert nothing.stderr.startswith(b"koala: standard input contains no job; ")
    missing = subprocess.run(
        ["sh", "-c", f"{' '.join(KOALA)} show 9 2>&-"],
        stdout=subprocess.PIPE,
        timeout=60,
        env=make_environment(server.url),
    )
    assert (missing.returncode, missing.stdout) == (3, b"")


def test_closed_pipe_exits_without_message(server: Server) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [*KOALA, "clusters"], stdout=writing, stderr=subprocess.PIPE, timeout=60, env=make_environment(server.url)
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, b"")


def test_other_server_on_port_is_reported(tmp_path: Path) -> None:
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
        result = run_koala(f"http://127.0.0.1:{port}", "queue")
        assert (result.returncode, result.stderr.count("\n")) == (5, 1)
        assert "not from a koala daemon" in result.stderr
    finally:
        web.terminate()
        web.communicate(timeout=60)


def test_completion_in_process_offers_submit() -> None:
    result = run_koala("", "", _KOALA_COMPLETE="bash_complete", COMP_WORDS="koala su", COMP_CWORD="1")
    assert result.stdout.split() == ["plain,submit"]


def test_help_lists_exit_codes() -> None:
    result = run_koala("", "--help")
    assert result.returncode == 0
    assert "5 daemon unreachable" in " ".join(result.stdout.split())


def test_token_of_own_daemon_is_not_sent_to_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    daemon = Registration(TOKEN, [("192.0.2.9", 8642)])
    without_token, with_token = Client("http://192.0.2.9:8642", None), Client("http://192.0.2.9:8642", TOKEN)
    elsewhere, encrypted = Client("http://192.0.2.10:8642", None), Client("https://192.0.2.10:8642", TOKEN)
    daemon.close()
    assert [client.http.headers.get("Authorization") for client in (without_token, with_token, elsewhere)] == [
        BEARER,
        BEARER,
        None,
    ]
    assert [client.http.by_proxy for client in (without_token, with_token, elsewhere, encrypted)] == [
        False,
        False,
        False,
        True,
    ]


def test_serve_on_used_port_creates_no_folder(server: Server, tmp_path: Path) -> None:
    result = run_koala(server.url, "serve", "--port", str(server.port), "--data-dir", str(tmp_path / "a" / "data"))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"koala: cannot listen on 127.0.0.1:{server.port}: Address already in use; give ")
    assert list(tmp_path.iterdir()) == []


def test_serve_with_invalid_host_is_rejected(tmp_path: Path) -> None:
    result = run_koala("", "serve", "--host", "\udcff", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert (result.returncode, result.stdout) == (2, "")
    hint = "give an address of this machine, such as 127.0.0.1"
    assert result.stderr == f"koala: --host is '\\udcff', which is not a host name; {hint}\n"
    assert list(tmp_path.iterdir()) == []


def test_serve_after_killed_restore_is_rejected(tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).touch()
    tmp_path.chmod(0o700)
    result = run_koala("", "serve", "--port", "0", "--data-dir", str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"koala: koala restore was interrupted while it replaced the data in {tmp_path}; ")
    assert [path.name for path in tmp_path.iterdir()] == [UNFINISHED]


INTERRUPTED_IMPORT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[0]:
            os.kill(os.getpid(), signal.SIGINT)

sys.argv = sys.argv[1:]
sys.meta_path.insert(0, Finder())
from koalapy.cli.__main__ import main
main()
"""
"""A command that interrupts itself when it imports the module of its first argument."""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("koalapy.cli.startup", "queue"),
        ("koalapy.cli.main", "queue"),
        ("click", "queue"),
        ("koalapy.cli.jobs.queue", "queue"),
        ("koalapy.client.client", "queue"),
        ("koalapy.cli.jobs.submit", "submit --flexible 1 -- hostname"),
        ("koalapy.client.logins", "queue"),
        ("koalapy.daemon.main", "serve"),
        ("pydantic", "serve"),
        ("koalapy.agent.main", "agent north"),
        ("koalapy.cli.terminal.manual", "--man"),
    ],
)
def test_interrupt_during_import_exits_without_traceback(tmp_path: Path, module: str, command: str) -> None:
    environment = make_environment("http://127.0.0.1:1", KOALA_TOKEN="", HOME=str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module, *command.split()],
        capture_output=True,
        timeout=60,
        env=environment,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


PRINT_MODULES = """
import sys
from koalapy.cli.__main__ import main
sys.stdout, modules = open("/dev/null", "w"), sys.__stdout__
try:
    main()
finally:
    print(*sys.modules, sep="\\n", file=modules, flush=True)
"""
"""A command that prints the modules that it has imported in place of its output."""
SLOW_MODULES = {
    *("annotated_types", "difflib", "encodings.idna", "httpx2", "pydantic", "rich", "typing_extensions", "yaml"),
    *("asyncio", "drmaa", "fastapi", "matplotlib", "numpy", "sqlalchemy", "structlog", "urllib.request"),
    *("koalapy.cli.jobs.waiting", "koalapy.cli.terminal.screen"),
    *("koalapy.client.logins", "koalapy.model.cluster", "koalapy.model.disk", "koalapy.model.job"),
    *("koalapy.model.job_search", "koalapy.model.job_spec", "koalapy.model.notification"),
}
"""Modules that a command imports only if it needs them. They would double its processor time."""
OF_OPTIONS = {"koalapy.model.job_spec"}
"""The module that defines the options of a job."""
OF_WATCHED_TABLES = {"annotated_types", "typing_extensions", *(n for n in SLOW_MODULES if n.startswith("koalapy."))}
"""What commands with drains and alerts may import, too."""


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("clusters", OF_WATCHED_TABLES),
        ("queue", set()),
        ("queue --json --state queued", set()),
        ("cancel 1", set()),
        ("hold 1", set()),
        ("submit --flexible 1 -- hostname", OF_OPTIONS),
    ],
)
def test_command_imports_no_slow_module(server: Server, command: str, needed: set[str]) -> None:
    run_koala(server.url, "submit", "--flexible", "2", "--", "start", "x")
    result = subprocess.run(
        [sys.executable, "-c", PRINT_MODULES, *command.split()],
        capture_output=True,
        text=True,
        timeout=60,
        env=make_environment(server.url),
    )
    modules = set(result.stdout.split())
    assert "koalapy.client.client" in modules, result.stderr
    assert SLOW_MODULES & modules == needed & modules
