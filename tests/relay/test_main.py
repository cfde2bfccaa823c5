"""Configuration files and certificates of hub and heads."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from koalapy.model.errors import UsageError
from koalapy.relay.head import Head
from koalapy.relay.main import ServerContext, TlsFiles, run_head, run_hub
from tests.certificates import CertificateAuthority, CertificateFiles

HUB = {"listen": "127.0.0.1:0", "control": "/nowhere/hub.sock"}
HEAD = {**HUB, "cluster": "north", "hub": "grid.example.org:8643"}


def write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "relay.yaml"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("run", "values", "message"),
    [
        (run_hub, {}, "listen: it is missing"),
        (run_hub, HUB, "tls is missing: give certificate and key"),
        (run_hub, {**HUB, "without_tls": True, "prot": 1}, "prot"),
        (run_hub, {**HUB, "without_tls": True, "limits": {"streams": 0}}, "limits.streams"),
        (run_hub, {**HUB, "without_tls": True, "listen": "8643"}, "8643 is not an address with a port"),
        (run_hub, {**HUB, "without_tls": True, "listen": "192.0.2.77:8643"}, "cannot listen at 192.0.2.77:8643"),
        (run_hub, {**HUB, "tls": {"certificate": "/nowhere/c", "key": "/nowhere/k"}}, "cannot load the certificate"),
        (run_hub, {**HUB, "without_tls": True}, "cannot listen at /nowhere/hub.sock"),
        (run_head, HEAD, "tls is missing: give certificate and key, which may be self-signed"),
        (run_head, {**HEAD, "without_tls": True, "listen_for_heads": "127.0.0.1:0"}, "tls is missing"),
        (run_head, {**HEAD, "without_tls": True, "hub": "grid"}, "grid is not an address with a port"),
    ],
)
def test_relay_with_invalid_configuration_names_the_fault(
    tmp_path: Path, run: Any, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koalapy.relay.main.forbid_dumps", lambda: None)
    monkeypatch.setattr("koalapy.relay.main.raise_file_limit", lambda count: count)
    with pytest.raises(UsageError, match=message) as raised:
        run(write(tmp_path, values))
    assert message in str(raised.value)


def load(files: CertificateFiles) -> ServerContext:
    return ServerContext(TlsFiles(certificate=files.certificate, key=files.key))


def test_server_context_loads_renewed_files_and_keeps_the_last_valid_ones(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    files = authority.issue()
    context = load(files)
    first = context()
    assert context() is first
    files.replace_with(authority.issue())
    os.utime(files.certificate, (1, 1))
    second = context()
    assert second is not first
    assert context.certificate.strip() == files.certificate.read_text().strip()
    files.certificate.write_text("damaged")
    assert context() is second


def test_head_keeps_the_certificate_that_other_heads_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = list[Head]()
    monkeypatch.setattr("koalapy.relay.main.forbid_dumps", lambda: None)
    monkeypatch.setattr("koalapy.relay.main.raise_file_limit", lambda count: count)
    monkeypatch.setattr("koalapy.relay.main._run", lambda _, head, *__: heads.append(head))
    authority = CertificateAuthority(tmp_path)
    files = authority.issue()
    tls = {"certificate": str(files.certificate), "key": str(files.key)}
    run_head(write(tmp_path, {**HEAD, "tls": tls, "ca_file": str(authority.file)}))
    (head,) = heads
    assert head._peer_context is not None
    context, certificate = head._peer_context(), head.describe()["certificate"]
    files.replace_with(authority.issue())
    os.utime(files.certificate, (1, 1))
    assert head._peer_context() is context
    assert head.describe()["certificate"] == certificate
    head.close()


def test_server_context_with_chain_offers_the_first_certificate_only(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    files = authority.issue()
    own = files.certificate.read_text()
    files.certificate.write_text(own + authority.file.read_text())
    assert load(files).certificate.strip() == own.strip()


def test_server_context_with_foreign_key_names_the_files(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    certificate, key = authority.issue().certificate, authority.issue().key
    with pytest.raises(UsageError, match="cannot load the certificate"):
        load(CertificateFiles(certificate, key))


def test_server_context_rejects_key_that_others_may_read(tmp_path: Path) -> None:
    files = CertificateAuthority(tmp_path).issue()
    files.key.chmod(0o644)
    with pytest.raises(UsageError, match=r"cannot load the certificate .* may be read by others"):
        load(files)
