"""The daemon's certificate: valid, invalid and replaced files."""

import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from koalapy.daemon.listener.certificate import Certificate
from koalapy.model.errors import UsageError
from koalapy.system.tls import Trust, pinned_context
from tests.certificates import CertificateAuthority, CertificateFiles
from tests.needs import ROOT, needs


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "authority")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    return path


def fetch_certificate(served: ssl.SSLContext, trust: ssl.SSLContext, host: str = "127.0.0.1") -> str:
    """Return the certificate of a TLS handshake in PEM. Raise ``ssl.SSLError`` if the handshake fails."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.wrap_bio(to_client, to_server, server_hostname=host)
    server = served.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    der = client.getpeercert(binary_form=True)
    assert der is not None
    return ssl.DER_cert_to_PEM_cert(der)


def text_of(pair: CertificateFiles) -> str:
    return pair.certificate.read_text()


def test_certificate_is_accepted_with_authority_or_itself_trusted(
    authority: CertificateAuthority, data_dir: Path
) -> None:
    pair = authority.issue()
    served = Certificate(pair.certificate, pair.key, data_dir)
    assert fetch_certificate(served.context, Trust(authority.file).create_context()) == text_of(pair)
    assert fetch_certificate(served.context, Trust(authority.file).create_context(), "localhost") == text_of(pair)
    assert fetch_certificate(
        served.context, Trust(pinned=served.public_path).create_context(), "grid.example.org"
    ) == text_of(pair)
    assert served.public_path.stat().st_mode & 0o777 == 0o600


@pytest.mark.evidence("L6")
def test_certificate_after_file_change_is_used_for_new_connections(
    authority: CertificateAuthority, data_dir: Path
) -> None:
    pair, renewed = authority.issue(), authority.issue()
    first = text_of(pair)
    served = Certificate(pair.certificate, pair.key, data_dir)
    trust = Trust(authority.file).create_context()
    assert fetch_certificate(served.context, trust) == first
    pair.replace_with(renewed)
    assert fetch_certificate(served.context, trust) == first
    served.reload_if_changed()
    assert fetch_certificate(served.context, trust) == text_of(renewed) == served.public_path.read_text()
    with pytest.raises(ssl.SSLCertVerificationError):
        fetch_certificate(served.context, pinned_context(first))


def test_certificate_with_broken_files_logs_once_and_stays(
    authority: CertificateAuthority, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, renewed = authority.issue(), authority.issue()
    first, key = text_of(pair), pair.key.read_text()
    served = Certificate(pair.certificate, pair.key, data_dir)
    pair.certificate.write_text(text_of(renewed))
    for _ in range(3):
        served.reload_if_changed()
    output = capsys.readouterr().out
    assert output.count("the old certificate stays") == 1
    assert "does not belong to" in output
    assert key.splitlines()[1] not in output
    assert (
        fetch_certificate(served.context, Trust(authority.file).create_context())
        == first
        == served.public_path.read_text()
    )
    pair.key.unlink()
    served.reload_if_changed()
    assert "cannot be read: No such file" in capsys.readouterr().out
    pair.replace_with(renewed)
    served.reload_if_changed()
    assert fetch_certificate(served.context, Trust(authority.file).create_context()) == text_of(renewed)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_certificate_key_readable_by_others_is_rejected(
    mode: int, authority: CertificateAuthority, data_dir: Path
) -> None:
    pair = authority.issue()
    pair.key.chmod(mode)
    with pytest.raises(UsageError, match=f"may be read by others .mode 0{mode:o}") as refused:
        Certificate(pair.certificate, pair.key, data_dir)
    assert refused.value.field == "--tls-key"


@needs(ROOT)
def test_certificate_key_of_another_account_is_rejected(authority: CertificateAuthority, data_dir: Path) -> None:
    pair = authority.issue()
    os.chown(pair.key, 1234, -1)
    with pytest.raises(UsageError, match=r"belongs to another account \(uid 1234\)"):
        Certificate(pair.certificate, pair.key, data_dir)


def test_certificate_with_unusable_files_is_rejected_with_reason(
    authority: CertificateAuthority, data_dir: Path
) -> None:
    pair, other_pair, locked = authority.issue(), authority.issue(), authority.issue(passphrase=b"word")
    junk = data_dir / "junk"
    junk.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    junk.chmod(0o600)
    os.mkfifo(data_dir / "pipe", mode=0o600)
    for certificate, key, field, reason in [
        (pair.certificate, other_pair.key, "--tls-key", "does not belong to"),
        (locked.certificate, locked.key, "--tls-key", "has a passphrase"),
        (pair.key, pair.key, "--tls-cert", "holds no certificate in PEM"),
        (junk, pair.key, "--tls-key", "make no certificate with its key"),
        (pair.certificate, junk, "--tls-key", "make no certificate with its key"),
        (data_dir / "none", pair.key, "--tls-cert", "cannot be read: No such file"),
        (pair.certificate, data_dir / "none", "--tls-key", "cannot be read: No such file"),
        (pair.certificate, data_dir / "pipe", "--tls-key", "is not a file"),
        (data_dir, pair.key, "--tls-cert", "cannot be read: Is a directory"),
    ]:
        with pytest.raises(UsageError, match=reason) as refused:
            Certificate(certificate, key, data_dir)
        assert (refused.value.field, bool(refused.value.hint)) == (field, True)


@pytest.mark.evidence("L4")
@pytest.mark.processes
def test_certificate_context_rejects_tls_older_than_1_2(authority: CertificateAuthority, data_dir: Path) -> None:
    pair = authority.issue()
    served = Certificate(pair.certificate, pair.key, data_dir)
    for context in (
        served.context,
        Trust(authority.file).create_context(),
        Trust(pinned=served.public_path).create_context(),
    ):
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == (ssl.CERT_NONE if context is served.context else ssl.CERT_REQUIRED)
    script = "from koalapy.system.tls import SYSTEM_TRUST; print(SYSTEM_TRUST.create_context().minimum_version.name)"
    bare = {**os.environ, "OPENSSL_CONF": "/dev/null"}
    minimum = subprocess.run([sys.executable, "-c", script], env=bare, capture_output=True, text=True, check=True)
    assert minimum.stdout.strip() == "TLSv1_2", "whatever this machine has as its default"
    old = Trust(authority.file).create_context()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        fetch_certificate(served.context, old)
