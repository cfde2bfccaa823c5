"""The daemon's certificate: read from its files, and again when these change, without a restart."""

import asyncio
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
from koalapy.system.private_files import write_private
from koalapy.system.tls import secure

log = structlog.get_logger()

LOOK_INTERVAL = 2.0
"""Seconds between two looks at the files."""
SHOWN = "certificate.pem"
"""In the data directory: the certificate in use, by which this account's own commands and agents know the daemon."""
MAX_SIZE = 1024 * 1024
"""Bytes of a file."""
EXPIRY_WARNING = 14 * 86400.0
"""Seconds before its end from which an alert, and each day the log, say that a certificate expires."""
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\s.+?-----END CERTIFICATE-----", re.DOTALL)
_Stamp = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the files held, and fits together."""

    context: ssl.SSLContext
    certificate: str
    """The daemon's own, in PEM, without those that lead to its authority."""
    expires: datetime


class Certificate:
    """What the daemon shows to those who connect now; ``context`` is what every handshake begins with."""

    def __init__(self, certificate: Path, key: Path, data_dir: Path) -> None:
        """Raises ``UsageError`` (``--tls-cert``, ``--tls-key``) for files that are of no use."""
        self._certificate, self._key, self._data_dir = certificate, key, data_dir
        self._stamp = self._stamp_now()
        self._loaded = _load(certificate, key)
        self._warned, self._complaint = 0.0, ""
        self.context = _context()
        # It needs one of its own, though every handshake goes on with the latest.
        self.context.sni_callback = self._show
        self._take(self._loaded)

    @property
    def shown(self) -> Path:
        """Where the certificate in use stands."""
        return self._data_dir / SHOWN

    @property
    def path(self) -> Path:
        """The file that the certificate in use was read from."""
        return self._certificate

    @property
    def expires_at(self) -> float:
        """The end of the certificate in use, in seconds since the epoch."""
        return self._loaded.expires.timestamp()

    @property
    def complaint(self) -> str:
        """Why files that have changed are not taken up; empty when the certificate in use is theirs."""
        return self._complaint

    async def look_aside(self) -> None:
        """The same for those who must not wait for a file system."""
        await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Take the files up if they have changed; where something is wrong with them the log says so, and all stays."""
        stamp = self._stamp_now()
        if stamp != self._stamp:
            try:
                self._take(_load(self._certificate, self._key))
            except UsageError as error:
                if error.message != self._complaint:  # It is tried again at each look: they may be written just now.
                    log.error(
                        "the old certificate stays", action="certificate-refused", reason=error.message, hint=error.hint
                    )
                self._complaint = error.message
            else:
                log.info("the new certificate is in use", action="certificate-renewed", file=str(self._certificate))
                self._stamp, self._complaint = stamp, ""
        else:
            self._complaint = ""
        self._warn()

    def _take(self, loaded: Loaded) -> None:
        try:
            folder = os.open(self._data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.close(write_private(SHOWN, folder, loaded.certificate))
            finally:
                os.close(folder)
        except OSError as error:
            raise UsageError(
                f"cannot write {self.shown}: {error.strerror}",
                field="--data-dir",
                value=str(self._data_dir),
                hint="see that there is room, and that the directory may be written",
            ) from error
        self._loaded, self._warned = loaded, 0.0
        self._warn()

    def _show(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._loaded.context

    def _warn(self) -> None:
        left = self._loaded.expires.timestamp() - time.time()
        if left < EXPIRY_WARNING and abs(time.time() - self._warned) > 86400.0:
            self._warned = time.time()
            what = "the certificate has expired" if left < 0 else "the certificate expires soon"
            log.warning(
                what,
                action="certificate-expires",
                file=str(self._certificate),
                expires=self._loaded.expires.isoformat(),
            )

    def _stamp_now(self) -> _Stamp:
        """By which it is seen that a file is another, or changed."""
        return tuple(_stamp_of(path) for path in (self._certificate, self._key))


def _stamp_of(path: Path) -> tuple[int, int, int, int]:
    try:
        seen = path.stat()
    except OSError:
        return 0, 0, 0, 0
    return seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def _context() -> ssl.SSLContext:
    context = secure(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    # Nobody goes on with a session of before: who comes now sees what certificate there is now.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def _load(certificate: Path, key: Path) -> Loaded:
    chain = _read(certificate, "--tls-cert", is_key=False)
    secret = _read(key, "--tls-key", is_key=True)
    own = _PEM.search(chain)
    if own is None:
        raise _wrong(
            "--tls-cert", certificate, "holds no certificate in PEM", "give a file in PEM, the daemon's own first"
        )
    context = _context()
    # What was read is what is judged and taken, whatever becomes of the files meanwhile; none of it is on a disk.
    memory = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with open(os.dup(memory), "wb") as file:
            file.write(chain + b"\n" + secret)
        context.load_cert_chain(f"/proc/self/fd/{memory}", password=_no_passphrase)
    except _PassphraseNeeded:
        raise _wrong(
            "--tls-key", key, "has a passphrase, which nobody is here to type", "give it without one"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _wrong(
                "--tls-key", key, f"does not belong to {certificate}", "give the key of that certificate"
            ) from None
        why = (error.reason or "it holds none").lower().replace("_", " ")
        raise _wrong(
            "--tls-key", key, f"and {certificate} make no certificate with its key: {why}", "give both in PEM"
        ) from None
    finally:
        os.close(memory)
    return Loaded(context, own[0].decode() + "\n", _expiry(own[0], certificate))


class _PassphraseNeeded(Exception):
    """A key cannot be read without one."""


def _no_passphrase() -> str:
    raise _PassphraseNeeded


def _expiry(own: bytes, path: Path) -> datetime:
    from cryptography.x509 import load_pem_x509_certificate  # only who speaks TLS pays for it

    try:
        end = load_pem_x509_certificate(own).not_valid_after_utc
    except ValueError as error:
        raise _wrong(
            "--tls-cert", path, f"holds a certificate that cannot be read: {error}", "have another one made"
        ) from error
    return end.astimezone(UTC)


def _read(path: Path, field: str, *, is_key: bool) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            seen = os.fstat(file.fileno())
            if not stat.S_ISREG(seen.st_mode):
                raise _wrong(field, path, "is no file", "give a file in PEM")
            if is_key:
                _keep_secret(path, seen)
            return file.read(MAX_SIZE)
    except OSError as error:
        raise _wrong(
            field, path, f"cannot be read: {error.strerror}", "give a file that this account may read"
        ) from error


def _keep_secret(path: Path, seen: os.stat_result) -> None:
    """``UsageError`` for a key that others may read. One of root's may be for a group to read, which we are in."""
    mode = stat.S_IMODE(seen.st_mode)
    if seen.st_uid not in (0, os.geteuid()):
        raise _wrong(
            "--tls-key", path, f"belongs to another account (uid {seen.st_uid})", "give a file of this account's own"
        )
    for_others = 0o077 if seen.st_uid == os.geteuid() else 0o037
    if mode & for_others:
        raise _wrong(
            "--tls-key", path, f"may be read by others (mode {mode:04o})", f"make another key, and chmod 600 {path}"
        )


def _wrong(field: str, path: Path, what: str, hint: str) -> UsageError:
    return UsageError(f"{path} {what}", field=field, value=str(path), hint=hint)
