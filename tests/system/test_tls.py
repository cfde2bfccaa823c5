"""Whom those trust who ask a daemon, and what they are told when they do not."""

import ssl
from pathlib import Path

import pytest

from koalapy.daemon.listener.certificate import Certificate
from koalapy.model.errors import UsageError
from koalapy.system.tls import Trust, explain_tls_error, pinned_context
from tests.certificates import CertificateAuthority
from tests.daemon.test_certificate import fetch_certificate


@pytest.mark.evidence("L2")
@pytest.mark.parametrize(
    ("hosts", "days", "told"),
    [
        (["127.0.0.1"], -1.0, "its certificate has expired"),
        (["grid.example.org"], 90.0, "its certificate is not for 127.0.0.1"),
        (["127.0.0.2"], 90.0, "its certificate is not for 127.0.0.1"),
    ],
)
def test_a_certificate_that_is_not_the_right_one_is_refused_with_the_way_out(
    tmp_path: Path, hosts: list[str], days: float, told: str
) -> None:
    authority = CertificateAuthority(tmp_path)
    pair = authority.issue(hosts, days)
    served = Certificate(pair.certificate, pair.key, tmp_path).context
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        fetch_certificate(served, Trust(authority.file).create_context())
    assert (found := explain_tls_error(refused.value, "127.0.0.1")) is not None
    assert found[0] == told
    assert found[1]


@pytest.mark.evidence("L2")
def test_one_by_another_authority_is_refused_and_so_is_every_other_where_one_is_pinned(tmp_path: Path) -> None:
    authority, other = CertificateAuthority(tmp_path), CertificateAuthority(tmp_path / "other")
    pair, sibling = authority.issue(), authority.issue()
    served = Certificate(pair.certificate, pair.key, tmp_path).context
    assert (
        fetch_certificate(served, pinned_context(pair.certificate.read_text()), "whatever")
        == pair.certificate.read_text()
    )
    for trust in (Trust(other.file), Trust(), Trust(pinned=sibling.certificate), Trust(pinned=other.file)):
        with pytest.raises(ssl.SSLCertVerificationError) as refused:
            fetch_certificate(served, trust.create_context())
        assert (found := explain_tls_error(refused.value, "127.0.0.1")) is not None
        assert "--ca-file" in found[1]


def test_a_pinned_one_is_known_also_when_it_has_expired(tmp_path: Path) -> None:
    pair = CertificateAuthority(tmp_path).issue(["grid.example.org"], days=-1.0)
    served = Certificate(pair.certificate, pair.key, tmp_path)
    assert (
        fetch_certificate(served.context, Trust(pinned=served.public_path).create_context())
        == pair.certificate.read_text()
    )


def test_a_file_of_authorities_that_is_of_no_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"\xff\x00")
    (tmp_path / "empty").touch()
    for name, why in [
        ("none", "none: No such file"),
        ("junk", "contains no certificates"),
        ("empty", "no certificates"),
    ]:
        with pytest.raises(UsageError, match=why) as refused:
            Trust(tmp_path / name).check_files()
        assert (refused.value.field, refused.value.value) == ("--ca-file", str(tmp_path / name))


def test_other_errors_are_told_by_those_who_know_them() -> None:
    assert explain_tls_error(ConnectionRefusedError("no"), "127.0.0.1") is None
    assert explain_tls_error(ValueError("no"), "127.0.0.1") is None


def test_others_are_told_of_few_authorities_only(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    pair = authority.issue()
    served = Certificate(pair.certificate, pair.key, tmp_path).context
    told = Trust(authority.file).shared_authorities()
    assert fetch_certificate(served, Trust(authorities=told).create_context()) == pair.certificate.read_text()
    with pytest.raises(ssl.SSLCertVerificationError):
        fetch_certificate(served, Trust(authorities=told).create_context(), "grid.example.org")
    many = tmp_path / "many.pem"
    many.write_text(authority.file.read_text() * 50)
    assert [Trust(path).shared_authorities() for path in (many, tmp_path / "none", None)] == ["", "", ""]
