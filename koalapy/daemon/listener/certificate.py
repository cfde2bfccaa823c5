"""Load the daemon's certificate from its files, and reload it without a restart when they change."""

import hashlib
import ssl
from pathlib import Path

import structlog

from koalapy.model.errors import UsageError
from koalapy.runner.folders import replace_file
from koalapy.system.certificate_files import LoadedCertificate, load_certificate, read_stamps, server_context

log = structlog.get_logger()

LOOK_INTERVAL = 2.0
"""Seconds between two checks of the files."""
PUBLIC_FILE = "certificate.pem"
"""File in the data directory with the certificate in use.

Commands and embedded agents of the daemon's account authenticate the daemon by it.
"""
EXPIRY_WARNING = 14 * 86400.0
"""Seconds before the expiry of a certificate from which an alert warns of it."""


class Certificate:
    """The certificate for new connections; every handshake begins with ``context``."""

    def __init__(self, certificate: Path, key: Path, data_dir: Path) -> None:
        """Load the files. Raise ``UsageError`` (``--tls-cert``, ``--tls-key``) if they are unusable."""
        self.path, self._key = certificate, key
        self.public_path = data_dir / PUBLIC_FILE
        """The file with the certificate in use."""
        self.complaint = ""
        """Why changed files are not used; empty if the certificate in use is from the present files."""
        # This context needs a certificate, although every handshake continues with the latest one.
        self.context = server_context()
        self.context.sni_callback = self._show_latest
        self._stamps = read_stamps(self.path, self._key)
        self._use_certificate(load_certificate(certificate, key))

    @property
    def expires_at(self) -> float:
        """Return the expiry of the certificate in use, in seconds since the start of 1970."""
        return self._loaded.expires_at

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 fingerprint of the certificate in use, in hexadecimal."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self._loaded.pem)).hexdigest()

    def reload_if_changed(self) -> None:
        """Reload the files if they have changed. If they are unusable, log why and keep the old certificate."""
        stamps = read_stamps(self.path, self._key)
        if stamps == self._stamps:
            self.complaint = ""
        else:
            try:
                self._use_certificate(load_certificate(self.path, self._key))
            except UsageError as error:
                if error.message != self.complaint:  # Every check tries again, since the files may be half written.
                    log.error(
                        "the old certificate stays", action="certificate-refused", reason=error.message, hint=error.hint
                    )
                self.complaint = error.message
            else:
                log.info("the new certificate is in use", action="certificate-renewed", file=str(self.path))
                self._stamps, self.complaint = stamps, ""

    def _use_certificate(self, loaded: LoadedCertificate) -> None:
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
        self._loaded = loaded

    def _show_latest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._loaded.context
