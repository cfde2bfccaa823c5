"""Certificates as sites have them: an authority of one's own, and what it signs."""

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
class Pair:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path

    def replace_with(self, other: "Pair") -> None:
        """As a renewal does: one file after the other."""
        for mine, new in ((self.certificate, other.certificate), (self.key, other.key)):
            fresh = mine.with_suffix(".new")
            fresh.touch(mode=0o600)
            fresh.write_bytes(new.read_bytes())
            fresh.rename(mine)


class Authority:
    """Signs what it is asked to; ``file`` is for those who trust it."""

    def __init__(self, folder: Path, name: str = "an authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, _name(name)
        self._key = generate_private_key(SECP256R1())
        self._made = 0
        built = _builder(self._name, self._key.public_key(), 365.0).issuer_name(self._name)
        own = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(self, hosts: Sequence[str] = LOOPBACK, days: float = 90.0, passphrase: bytes = b"") -> Pair:
        """A certificate for hosts that expires in so many days, or has expired so many ago."""
        self._made += 1
        key = generate_private_key(SECP256R1())
        built = _builder(_name(hosts[0]), key.public_key(), days).issuer_name(self._name)
        names = x509.SubjectAlternativeName([_general(host) for host in hosts])
        signed = built.add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{self._made}.pem", self._folder / f"{self._made}.key")
        pair.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        locked: KeySerializationEncryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        pair.key.touch(mode=0o600)
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
        return pair


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(name: x509.Name, key: object, days: float) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=400)).not_valid_after(now + timedelta(days=days))
    return builder.public_key(key)  # type: ignore[arg-type]
