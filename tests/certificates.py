"""A private certificate authority, and certificates that it signs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class CertificateFiles:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path

    def replace_with(self, renewed: "CertificateFiles") -> None:
        """Replace the certificate, then the key, as a renewal does."""
        for current, replacement in ((self.certificate, renewed.certificate), (self.key, renewed.key)):
            fresh = current.with_suffix(".new")
            fresh.touch(mode=0o600)
            fresh.write_bytes(replacement.read_bytes())
            fresh.rename(current)


class CertificateAuthority:
    """A certificate authority; clients that trust it read ``file``."""

    def __init__(self, folder: Path, name: str = "an authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, _common_name(name)
        self._key = generate_private_key(SECP256R1())
        self._issued_count = 0
        builder = _start_certificate(self._name, self._key.public_key(), 365.0).issuer_name(self._name)
        self_signed = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(self_signed.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(self, hosts: Sequence[str] = LOOPBACK, days: float = 90.0, passphrase: bytes = b"") -> CertificateFiles:
        """Return the files of a certificate for hosts that expires in ``days`` days, or expired if it is negative."""
        self._issued_count += 1
        key = generate_private_key(SECP256R1())
        builder = _start_certificate(_common_name(hosts[0]), key.public_key(), days).issuer_name(self._name)
        alternative_names = x509.SubjectAlternativeName([_host_name(host) for host in hosts])
        signed = builder.add_extension(alternative_names, critical=False).sign(self._key, hashes.SHA256())
        pair = CertificateFiles(self._folder / f"{self._issued_count}.pem", self._folder / f"{self._issued_count}.key")
        pair.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        encryption: KeySerializationEncryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        pair.key.touch(mode=0o600)
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        return pair


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _start_certificate(name: x509.Name, key: object, days: float) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=400)).not_valid_after(now + timedelta(days=days))
    return builder.public_key(key)  # type: ignore[arg-type]
