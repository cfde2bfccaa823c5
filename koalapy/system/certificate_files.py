"""Load the certificate and the key of a TLS server from their files, and see when these change."""

import os
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from koalapy.model.errors import UsageError
from koalapy.system.files import FOR_OTHERS
from koalapy.system.tls import harden_context

MAX_SIZE = 1024 * 1024
"""Maximum number of bytes that are read from a file."""
GROUP_MAY_READ = 0o040
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\s.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """A certificate with its matching key, as read from their files."""

    context: ssl.SSLContext
    pem: str
    """The server's certificate, without the intermediate ones."""
    expires_at: float


def server_context() -> ssl.SSLContext:
    context = harden_context(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    # Sessions are not resumed, so that each new connection gets the present certificate.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def load_certificate(certificate: Path, key: Path) -> LoadedCertificate:
    """Read a certificate with its key, and test that they fit together. Raise ``UsageError`` if unusable."""
    chain, secret = _read_file(certificate, "--tls-cert"), _read_file(key, "--tls-key")
    leaf = _PEM.search(chain)
    if leaf is None:
        raise _make_error("--tls-cert", certificate, "holds no certificate in PEM", "give a file in PEM, its own first")
    context = server_context()
    # The content is checked and used as it was read, even if the files change. A memory file keeps the key off disks.
    memory = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with open(os.dup(memory), "wb") as file:
            file.write(chain + b"\n" + secret)
        context.load_cert_chain(f"/proc/self/fd/{memory}", password=_refuse_passphrase)
    except _PassphraseNeeded:
        raise _make_error("--tls-key", key, "has a passphrase", "give it without one") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem, hint = f"does not belong to {certificate}", "give the key of that certificate"
        else:
            reason = (error.reason or "it holds none").lower().replace("_", " ")
            problem, hint = f"and {certificate} make no certificate with its key: {reason}", "give both in PEM"
        raise _make_error("--tls-key", key, problem, hint) from None
    finally:
        os.close(memory)

    from cryptography.x509 import load_pem_x509_certificate  # imported here for daemons with TLS only

    try:
        end = load_pem_x509_certificate(leaf[0]).not_valid_after_utc
    except ValueError as error:
        problem = f"holds a certificate that cannot be read: {error}"
        raise _make_error("--tls-cert", certificate, problem, "have another one made") from error
    return LoadedCertificate(context, leaf[0].decode() + "\n", end.timestamp())


def read_stamps(*paths: Path) -> list[tuple[int, ...]]:
    """Return inode, size and times of files, by which changes are detected; empty for a missing file."""
    stamps: list[tuple[int, ...]] = []
    for path in paths:
        try:
            status = path.stat()
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        except OSError:
            stamps.append(())
    return stamps


class _PassphraseNeeded(Exception):
    """The key cannot be read without a passphrase."""


def _refuse_passphrase() -> str:
    raise _PassphraseNeeded


def _read_file(path: Path, field: str) -> bytes:
    """Return the content of a regular file. Raise ``UsageError`` if it is unusable.

    A key must belong to this account or root, and must not be accessible to other accounts. A key of root may be
    readable by its group.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _make_error(field, path, "is not a file", "give a file in PEM")
            is_ours, mode = status.st_uid == os.geteuid(), stat.S_IMODE(status.st_mode)
            if field == "--tls-key" and not is_ours and status.st_uid != 0:
                problem = f"belongs to another account (uid {status.st_uid})"
                raise _make_error(field, path, problem, "give a file of this account's own")
            if field == "--tls-key" and mode & (FOR_OTHERS if is_ours else FOR_OTHERS & ~GROUP_MAY_READ):
                problem = f"may be read by others (mode {mode:04o})"
                raise _make_error(field, path, problem, f"make another key, and chmod 600 {path}")
            return file.read(MAX_SIZE)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise _make_error(field, path, problem, "give a file that this account may read") from error


def _make_error(field: str, path: Path, problem: str, hint: str) -> UsageError:
    return UsageError(f"{path} {problem}", field=field, value=str(path), hint=hint)
