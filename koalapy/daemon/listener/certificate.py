"""Load the daemon's certificate from its files, and reload it without a restart when they change."""

import os
import re
import ssl
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from koalapy.model.errors import UsageError
from koalapy.runner.atomic_files import replace_file
from koalapy.system.files import FOR_OTHERS
from koalapy.system.tls import require_tls_1_2

log = structlog.get_logger()

LOOK_INTERVAL = 2.0
"""Seconds between two checks of the files."""
PUBLIC_FILE = "certificate.pem"
"""File in the data directory with the certificate in use.

Commands and embedded agents of the daemon's account authenticate the daemon by it.
"""
MAX_SIZE = 1024 * 1024
"""Maximum number of bytes that are read from a file."""
EXPIRY_WARNING = 14 * 86400.0
"""Seconds before the expiry of a certificate from which an alert, and a daily log line, warn of it."""
DAY = 86400.0
GROUP_MAY_READ = 0o040
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\s.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _LoadedCertificate:
    """A certificate with its matching key, as read from their files."""

    context: ssl.SSLContext
    pem: str
    """The daemon's certificate, without the intermediate ones."""
    expires_at: float


class Certificate:
    """The certificate for new connections; every handshake begins with ``context``."""

    def __init__(self, certificate: Path, key: Path, data_dir: Path) -> None:
        """Load the files. Raise ``UsageError`` (``--tls-cert``, ``--tls-key``) if they are unusable."""
        self.path, self._key = certificate, key
        self.public_path = data_dir / PUBLIC_FILE
        """The file with the certificate in use."""
        self.complaint = ""
        """Why changed files are not used; empty if the certificate in use is from the present files."""
        self._warned_at = 0.0
        # This context needs a certificate, although every handshake continues with the latest one.
        self.context = _new_context()
        self.context.sni_callback = self._show_latest
        self._stamps = self._read_stamps()
        self._use_certificate(_load_certificate(certificate, key))

    @property
    def expires_at(self) -> float:
        """Return the expiry of the certificate in use, in seconds since the start of 1970."""
        return self._loaded.expires_at

    def reload_if_changed(self) -> None:
        """Reload the files if they have changed. If they are unusable, log why and keep the old certificate."""
        stamps = self._read_stamps()
        if stamps == self._stamps:
            self.complaint = ""
        else:
            try:
                self._use_certificate(_load_certificate(self.path, self._key))
            except UsageError as error:
                if error.message != self.complaint:  # Every check tries again, since the files may be half written.
                    log.error(
                        "the old certificate stays", action="certificate-refused", reason=error.message, hint=error.hint
                    )
                self.complaint = error.message
            else:
                log.info("the new certificate is in use", action="certificate-renewed", file=str(self.path))
                self._stamps, self.complaint = stamps, ""
        self._warn_of_expiry()

    def _use_certificate(self, loaded: _LoadedCertificate) -> None:
        """Publish a loaded certificate for clients on this host, and use it.

        Raise ``UsageError`` if it cannot be written.
        """
        try:
            replace_file(self.public_path, loaded.pem.encode())
        except OSError as error:
            raise UsageError(
                f"cannot write {self.public_path}: {error.strerror}",
                field="--data-dir",
                value=str(self.public_path.parent),
                hint="see that there is room, and that the directory may be written",
            ) from error
        self._loaded, self._warned_at = loaded, 0.0
        self._warn_of_expiry()

    def _show_latest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._loaded.context

    def _warn_of_expiry(self) -> None:
        """Log once a day that the certificate has expired or expires soon."""
        now = time.time()
        if self.expires_at - now < EXPIRY_WARNING and abs(now - self._warned_at) > DAY:
            self._warned_at = now
            log.warning(
                "the certificate has expired" if self.expires_at < now else "the certificate expires soon",
                action="certificate-expires",
                file=str(self.path),
                expires=datetime.fromtimestamp(self.expires_at, UTC).isoformat(),
            )

    def _read_stamps(self) -> list[tuple[int, ...]]:
        """Return inode, size and times of both files, by which changes are detected; empty for a missing file."""
        stamps: list[tuple[int, ...]] = []
        for path in (self.path, self._key):
            try:
                status = path.stat()
                stamps.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
            except OSError:
                stamps.append(())
        return stamps


def _new_context() -> ssl.SSLContext:
    context = require_tls_1_2(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    # Sessions are not resumed, so that each new connection gets the present certificate.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def _load_certificate(certificate: Path, key: Path) -> _LoadedCertificate:
    """Read a certificate with its key, and test that they fit together. Raise ``UsageError`` if unusable."""
    chain, secret = _read_file(certificate, "--tls-cert"), _read_file(key, "--tls-key")
    leaf = _PEM.search(chain)
    if leaf is None:
        raise _make_error("--tls-cert", certificate, "holds no certificate in PEM", "give a file in PEM, its own first")
    context = _new_context()
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
    return _LoadedCertificate(context, leaf[0].decode() + "\n", end.timestamp())


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
