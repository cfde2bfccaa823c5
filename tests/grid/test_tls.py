"""A daemon with TLS, its agents and commands, and clients that do not trust it."""

import json
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from koalapy.system.tls import Trust
from tests.certificates import CertificateAuthority, CertificateFiles
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.grid]
AGENT_TOKEN = "the-secret-of-south"


class TlsGrid(EmbeddedGrid):
    """A grid with TLS; the agent of south is started separately and trusts the private authority."""

    def __init__(self, directory: Path, authority: CertificateAuthority, pair: CertificateFiles) -> None:
        clusters = {"north": {"nodes": 2}, "south": {"nodes": 2, "token": AGENT_TOKEN, "embedded": False}}
        tls = {"certificate": str(pair.certificate), "key": str(pair.key)}
        super().__init__(directory, KOALA_CLUSTERS=json.dumps(clusters), KOALA_TLS=json.dumps(tls))
        self.ca_file, self.pair = authority.file, pair
        self.agents: list[subprocess.Popen[bytes]] = []

    def start_agent(self, url: str, log: Path, directory: Path, **environment: str) -> "subprocess.Popen[bytes]":
        with log.open("wb") as out:
            self.agents.append(
                subprocess.Popen(
                    [*self.koala_command, "agent", "south", "--url", url, "--directory", str(directory)],
                    env=self.environment | {"KOALA_AGENT_TOKEN": AGENT_TOKEN} | environment,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )
        return self.agents[-1]

    def as_another(self, *arguments: str, url: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run koala as another account with the daemon's token; it finds no daemon by itself."""
        environment = self.environment | {"XDG_STATE_HOME": "/nowhere", "KOALA_TOKEN": self.admin_token} | environment
        return subprocess.run(
            [*self.koala_command, arguments[0], "--url", url or self.url, *arguments[1:]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, authority: CertificateAuthority) -> Iterator[TlsGrid]:
    path = tmp_path_factory.mktemp("grid")
    grid = TlsGrid(path / "data", authority, authority.issue())
    url = grid.launch_daemon()
    grid.start_agent(url, path / "agent.log", path / "outside", KOALA_CA_FILE=str(authority.file))
    grid.connect(url)
    yield grid
    for agent in grid.agents:
        agent.terminate()
        agent.wait(timeout=60)
    close_grid(grid)


def served(url: str, trust: Trust) -> str:
    """Return the certificate that the daemon presents."""
    parts = urlsplit(url)
    with (
        socket.create_connection((parts.hostname, parts.port), timeout=30) as plain,
        trust.create_context().wrap_socket(plain, server_hostname=parts.hostname) as secured,
    ):
        der = secured.getpeercert(binary_form=True)
        assert der is not None
        return ssl.DER_cert_to_PEM_cert(der)


@pytest.mark.evidence("L1")
def test_commands_of_same_account_trust_daemon_without_option(grid: TlsGrid) -> None:
    assert grid.url.startswith("https://127.0.0.1:")
    plain_url = grid.url.replace("https", "http")
    for url in (grid.url, plain_url, plain_url.replace("127.0.0.1", "localhost")):
        result = subprocess.run(
            [
                *grid.koala_command,
                "submit",
                "--flexible",
                "4",
                "--launcher",
                "processes",
                "--wait",
                "--",
                "echo",
                "hello",
            ],
            env=grid.environment | {"KOALA_URL": url},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (result.returncode, result.stdout.count("hello\n")) == (0, 4), result.stderr


@pytest.mark.evidence("L2", "C7")
def test_commands_of_another_account_need_its_authority(
    grid: TlsGrid, authority: CertificateAuthority, tmp_path: Path
) -> None:
    assert grid.as_another("clusters", "--ca-file", str(authority.file)).returncode == 0
    by_name = grid.url.replace("127.0.0.1", "localhost")
    assert grid.as_another("clusters", KOALA_CA_FILE=str(authority.file), url=by_name).returncode == 0
    other_authority = CertificateAuthority(tmp_path, "another")
    for ca_file, error in [
        ("", "an authority that this machine does not trust"),
        (str(other_authority.file), "an authority that this machine does not trust"),
    ]:
        refused = grid.as_another("clusters", KOALA_CA_FILE=ca_file)
        assert (refused.returncode, refused.stdout) == (5, "")
        assert error in refused.stderr
        assert "--ca-file or KOALA_CA_FILE" in refused.stderr
    missing = grid.as_another("clusters", "--ca-file", str(tmp_path / "none"))
    assert (missing.returncode, "none: No such file or directory" in missing.stderr) == (2, True)


def test_command_without_tls_is_rejected_with_hint(grid: TlsGrid) -> None:
    refused = grid.as_another("submit", "--flexible", "2", "--", "x" * 30_000, url=grid.url.replace("https", "http"))
    assert refused.stderr == "koala: this port speaks TLS; ask by https://\n"


@pytest.mark.evidence("L2")
@pytest.mark.parametrize(
    ("scheme", "error"),
    [("https", "signed by an authority that this machine does not trust"), ("http", "this port speaks TLS")],
)
def test_agent_without_trust_reports_reason_as_check_does(
    grid: TlsGrid, tmp_path: Path, scheme: str, error: str
) -> None:
    url, log = grid.url.replace("https", scheme), tmp_path / "log"
    stranger = grid.start_agent(url, log, tmp_path / "agent")
    wait_until(lambda: error in log.read_text(), "it to say why")
    stranger.terminate()
    stranger.wait(timeout=60)
    assert AGENT_TOKEN not in log.read_text()
    result = subprocess.run(
        [*grid.koala_command, "check", "south", "--url", url, "--directory", str(tmp_path / "agent"), "--json"],
        env=grid.environment | {"KOALA_AGENT_TOKEN": AGENT_TOKEN},
        capture_output=True,
        text=True,
        timeout=60,
    )
    (daemon,) = [finding for finding in json.loads(result.stdout)["findings"] if finding["what"] == "daemon"]
    assert error in daemon["found"]
    assert daemon["ok"] is False


@pytest.mark.evidence("L6")
def test_renewed_certificate_is_served_during_open_stream(
    grid: TlsGrid, authority: CertificateAuthority, tmp_path: Path
) -> None:
    gate = grid.make_gate()
    job = grid.submit({"type": "flexible", "total_size": 2}, *gate.hold)
    following = subprocess.Popen(
        [*grid.koala_command, "logs", str(job), "--follow"],
        env=grid.environment | {"KOALA_URL": grid.url},
        stdout=subprocess.PIPE,
        text=True,
    )
    heard = threading.Thread(target=lambda: lines.extend(following.stdout or ()))
    lines: list[str] = []
    heard.start()
    grid.wait_for_state(job, "running")
    trust = Trust(authority.file)
    first_certificate, renewed = served(grid.url, trust), authority.issue()
    grid.pair.replace_with(renewed)
    wait_until(lambda: served(grid.url, trust) != first_certificate, "the new certificate to be shown")
    assert served(grid.url, trust) == renewed.certificate.read_text()
    grid.pair.key.write_text("broken")
    log = grid.directory.parent / "daemon.log"
    wait_until(lambda: "the old certificate stays" in log.read_text(), "the report of the broken file")
    assert served(grid.url, trust) == renewed.certificate.read_text()
    gate.open()
    heard.join(60)
    assert following.wait(timeout=60) == 0
    assert lines == ["done\n", "done\n"]
    assert grid.run_koala("queue").returncode == 0, "whoever comes now is shown the new one, which the register has"
    grid.kill_agent("north")
    wait_until(lambda: grid.get_cluster("north")["state"] == "usable", "the next agent to know the daemon by it")


def test_tls_client_of_plain_daemon_gets_hint(grid: TlsGrid) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        refused = grid.as_another("clusters", url=f"https://127.0.0.1:{listener.getsockname()[1]}")
        answering.join(60)
    assert refused.returncode == 5
    assert "the server there does not speak TLS; use http://" in refused.stderr


def read_rejection(tmp_path: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KOALA_")}
    result = subprocess.run(
        [
            *EmbeddedGrid(tmp_path).koala_command,
            "serve",
            "--port",
            "0",
            "--data-dir",
            str(tmp_path / "data"),
            *arguments,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert not (tmp_path / "data" / "koala.db").exists()
    return result.stderr


@pytest.mark.evidence("L1", "C7")
def test_daemon_on_public_address_without_tls_is_rejected(tmp_path: Path) -> None:
    pair = CertificateAuthority(tmp_path / "authority").issue()
    for host in ("0.0.0.0", "::"):
        error = read_rejection(tmp_path, "--host", host)
        assert error.startswith(
            f"koala: --host is {host}, which other machines reach: without TLS they would send tokens unencrypted; "
        )
        assert "--tls-cert" in error
        assert "--behind-proxy" in error
    assert "--tls-cert is given without --tls-key" in read_rejection(tmp_path, "--tls-cert", str(pair.certificate))
    assert "--tls-key is given without --tls-cert" in read_rejection(
        tmp_path, "--host", "0.0.0.0", "--tls-key", str(pair.key)
    )
    assert "'proxy' is neither an IP address" in read_rejection(tmp_path, "--behind-proxy", "127.0.0.1,proxy")
    pair.key.chmod(0o644)
    error = read_rejection(tmp_path, "--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    assert "may be read by others" in error
