"""Trust of clients in certificates, and explanations of errors."""

import ast
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

import koalapy
from koalapy.daemon.listener.certificate import Certificate
from koalapy.model.errors import UsageError
from koalapy.system.certificate_files import load_certificate
from koalapy.system.tls import Trust, explain_tls_error, harden_context, pinned_context
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
def test_invalid_certificate_is_rejected_with_hint(tmp_path: Path, hosts: list[str], days: float, told: str) -> None:
    authority = CertificateAuthority(tmp_path)
    pair = authority.issue(hosts, days)
    served = Certificate(pair.certificate, pair.key, tmp_path).context
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        fetch_certificate(served, Trust(authority.file).create_context())
    assert (explanation := explain_tls_error(refused.value, "127.0.0.1")) is not None
    assert explanation[0] == told
    assert explanation[1]


@pytest.mark.evidence("L2")
def test_certificate_of_other_authority_is_rejected(tmp_path: Path) -> None:
    authority, other_authority = CertificateAuthority(tmp_path), CertificateAuthority(tmp_path / "other")
    pair, sibling = authority.issue(), authority.issue()
    served = Certificate(pair.certificate, pair.key, tmp_path).context
    assert (
        fetch_certificate(served, pinned_context(pair.certificate.read_text()), "whatever")
        == pair.certificate.read_text()
    )
    for trust in (
        Trust(other_authority.file),
        Trust(),
        Trust(pinned=sibling.certificate),
        Trust(pinned=other_authority.file),
    ):
        with pytest.raises(ssl.SSLCertVerificationError) as refused:
            fetch_certificate(served, trust.create_context())
        assert (explanation := explain_tls_error(refused.value, "127.0.0.1")) is not None
        assert "--ca-file" in explanation[1]


def test_expired_pinned_certificate_is_accepted(tmp_path: Path) -> None:
    pair = CertificateAuthority(tmp_path).issue(["grid.example.org"], days=-1.0)
    served = Certificate(pair.certificate, pair.key, tmp_path)
    assert (
        fetch_certificate(served.context, Trust(pinned=served.public_path).create_context())
        == pair.certificate.read_text()
    )


def test_invalid_authority_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"\xff\x00")
    (tmp_path / "empty").touch()
    for name, reason in [
        ("none", "none: No such file"),
        ("junk", "contains no certificates"),
        ("empty", "no certificates"),
    ]:
        with pytest.raises(UsageError, match=reason) as refused:
            Trust(tmp_path / name).check_files()
        assert (refused.value.field, refused.value.value) == ("--ca-file", str(tmp_path / name))


def test_shared_authorities_are_limited(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    pair = authority.issue()
    served = Certificate(pair.certificate, pair.key, tmp_path).context
    authorities = Trust(authority.file).shared_authorities()
    assert fetch_certificate(served, Trust(authorities=authorities).create_context()) == pair.certificate.read_text()
    with pytest.raises(ssl.SSLCertVerificationError):
        fetch_certificate(served, Trust(authorities=authorities).create_context(), "grid.example.org")
    many = tmp_path / "many.pem"
    many.write_text(authority.file.read_text() * 50)
    assert [Trust(path).shared_authorities() for path in (many, tmp_path / "none", None)] == ["", "", ""]


OP_IGNORE_UNEXPECTED_EOF = 0x80
"""SSL_OP_IGNORE_UNEXPECTED_EOF of OpenSSL 3, which Debian 12's Python sets in each context."""


def connect_in_memory(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.MemoryBIO]:
    """Establish a TLS connection that has passed one message. Return the client's side and its input."""
    to_server, from_server, to_client, from_client = (ssl.MemoryBIO() for _ in range(4))
    sides = (
        (client.wrap_bio(to_client, from_client, server_hostname="127.0.0.1"), from_client, to_server),
        (server.wrap_bio(to_server, from_server, server_side=True), from_server, to_client),
    )
    for _ in range(3):
        for side, output, peer_input in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
            peer_input.write(output.read())
    sides[1][0].write(b"ping")
    to_client.write(from_server.read())
    assert sides[0][0].read(10) == b"ping"
    return sides[0][0], to_client


@pytest.mark.evidence("L2")
@pytest.mark.parametrize("is_pinned", [False, True])
def test_context_with_cut_connection_raises_error(tmp_path: Path, is_pinned: bool) -> None:
    authority = CertificateAuthority(tmp_path)
    files = authority.issue()
    server = load_certificate(files.certificate, files.key).context
    trust = Trust(pinned=files.certificate) if is_pinned else Trust(authority.file)
    side, side_input = connect_in_memory(server, trust.create_context())
    side_input.write_eof()
    with pytest.raises(ssl.SSLError):
        side.read(10)


def test_harden_context_clears_option_that_accepts_cut_connections() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.options |= OP_IGNORE_UNEXPECTED_EOF
    assert not harden_context(context).options & OP_IGNORE_UNEXPECTED_EOF


def test_each_context_of_the_product_is_hardened() -> None:
    """Read the source, since a context that is not hardened works as well until a connection is cut."""
    makers = {"SSLContext", "create_default_context", "_create_unverified_context"}
    others = []
    for path in Path(koalapy.__file__).parent.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        hardened = {id(call.args[0]) for call in calls if ast.unparse(call.func).endswith("harden_context")}
        others += [
            f"{path.name}:{call.lineno}"
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr in makers and id(call) not in hardened
        ]
    assert not others
