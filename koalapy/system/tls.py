"""Verify the certificate of a daemon, and explain TLS errors.

Standard library only, since the command line imports it.
"""

import re
import ssl
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult

from koalapy.model.errors import UsageError

CA_FILE = "KOALA_CA_FILE"
"""The variable that names a file with certificates of authorities, like ``--ca-file``."""
MAX_SHARED_LENGTH = 8192
"""Characters of authorities' certificates that are passed on to clients."""
# X509_V_ERR_... of OpenSSL:
_EXPIRED, _NOT_YET_VALID, _OTHER_HOST, _OTHER_ADDRESS = 10, 9, 62, 64
_UNKNOWN_AUTHORITY = (2, 7, 18, 19, 20, 21, 24, 26, 27)
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
_TOO_OLD = ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "WRONG_SSL_VERSION")
_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL."""
_OP_IGNORE_UNEXPECTED_EOF = 0x80
"""SSL_OP_IGNORE_UNEXPECTED_EOF of OpenSSL 3."""


def harden_context(context: ssl.SSLContext) -> ssl.SSLContext:
    """Let a context speak TLS 1.2 or later only and report a cut connection as an error; return the context.

    Every context of koalapy passes through here: OpenSSL's configuration may allow older versions, and some Pythons
    (3.8, 3.9 and Debian 12's 3.11.2) let data that was cut count as complete.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options &= ~_OP_IGNORE_UNEXPECTED_EOF
    return context


def pinned_context(certificate: str) -> ssl.SSLContext:
    """Create a client context that accepts one certificate (PEM) and no other, for any host name and time."""
    context = harden_context(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    return context


def is_this_machine(host: str) -> bool:
    """Return whether a host is ``localhost`` or a loopback address. Ask no resolver."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def split_urls(text: str) -> list[str]:
    """Return the URLs of a setting: one, or several with commas between."""
    return [url.strip() for url in text.split(",") if url.strip()]


def without_password(url: str) -> str:
    """Return a URL, valid or not, without user name and password."""
    return re.sub(r"//[^/]*@", "//", url)


def check_encrypted(url: SplitResult) -> None:
    """Raise ``UsageError`` if a token would be sent over a network unencrypted."""
    if url.scheme != "https" and not is_this_machine(url.hostname or ""):
        raise UsageError(
            f"{url.geturl()} is not encrypted: others on the network could read your token",
            field="--url",
            value=url.geturl(),
            hint="use https://; see docs/security.md, Encryption in transit",
        )


@dataclass(frozen=True, slots=True)
class Trust:
    """The certificates by which a client recognizes a daemon; by default those that this machine trusts."""

    ca_file: Path | None = None
    """Certificates of authorities, one of which must have signed the daemon's, for the host of the URL."""
    pinned: Path | None = None
    """The certificate that the daemon must show, whatever its issuer, host name and validity."""
    authorities: str = ""
    """The content of a ``ca_file`` (PEM)."""

    def create_context(self) -> ssl.SSLContext:
        """Create the context of one connection from the files as they are now. Raise ``OSError``."""
        if self.pinned is not None:
            return pinned_context(_read_certificates(self.pinned))
        authorities = self.authorities if self.ca_file is None else _read_certificates(self.ca_file)
        return harden_context(ssl.create_default_context(cadata=authorities or None))

    def was_renewed(self, since: float) -> bool:
        """Return whether the pinned certificate was replaced at or after a time (seconds since 1970)."""
        with suppress(OSError):
            return self.pinned is not None and self.pinned.stat().st_mtime >= since
        return False

    def shared_authorities(self) -> str:
        """Return the certificates of ``ca_file`` for clients to trust, or nothing if there are too many."""
        try:
            text = "" if self.ca_file is None else _read_certificates(self.ca_file)
        except OSError:
            return ""
        return text if len(text) <= MAX_SHARED_LENGTH else ""

    def check_files(self) -> None:
        """Raise ``UsageError`` if the certificates cannot be read."""
        try:
            self.create_context()
        except OSError as error:
            raise UsageError(
                f"cannot read the certificates of authorities: {error.strerror or error}",
                field="--ca-file",
                value=str(self.ca_file),
                hint=f"give a file in PEM format with --ca-file or {CA_FILE}",
            ) from error


SYSTEM_TRUST = Trust()
"""Trust the authorities that this machine trusts."""


def _read_certificates(path: Path) -> str:
    """Return the content of a PEM file with certificates. Raise ``OSError`` if it has none or cannot be read."""
    try:
        text = path.read_text(encoding="ascii")
        harden_context(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)).load_verify_locations(cadata=text)
    except OSError as error:
        if isinstance(error, ssl.SSLError):
            raise OSError(f"{path} contains no certificates in PEM format") from error
        raise OSError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise OSError(f"{path} contains no certificates in PEM format") from error
    return text


def explain_tls_error(error: BaseException, host: str) -> tuple[str, str] | None:
    """Return why the TLS handshake with a host failed, and a hint; None for any other error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_rejected_certificate(error, host)
    if not isinstance(error, ssl.SSLError):
        return None
    reason = error.reason or ""
    if reason in _NO_TLS:
        return (
            "the server there does not speak TLS",
            "use http:// if it is on this machine, or check which program listens there",
        )
    if reason in _TOO_OLD:
        return "the server does not speak TLS 1.2 or later", "update the server"
    return f"the TLS handshake failed: {reason.lower().replace('_', ' ') or error}", "see the daemon's log"


def _explain_rejected_certificate(error: ssl.SSLCertVerificationError, host: str) -> tuple[str, str]:
    """Return why a client rejected a daemon's certificate, and a hint about what to do."""
    code = error.verify_code
    if code == _EXPIRED:
        return "its certificate has expired", "renew it; the daemon loads the new files by itself"
    if code == _NOT_YET_VALID:
        return "its certificate is not valid yet", "correct the clock of this machine or of the daemon's"
    if code in (_OTHER_HOST, _OTHER_ADDRESS):
        return (
            f"its certificate is not for {host}",
            "use a host name that the certificate names, or have this one added to it",
        )
    if code in _UNKNOWN_AUTHORITY:
        return (
            "its certificate is signed by an authority that this machine does not trust",
            f"give the authority's certificate with --ca-file or {CA_FILE}",
        )
    return f"its certificate is rejected: {error.verify_message}", "replace the certificate"
