"""TLS as those have it who ask a daemon: whom they trust, and what it means when it does not come about.

Standard library only, as the command line needs it, too.
"""

import ssl
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult

from koalapy.model.errors import UsageError

CA_FILE = "KOALA_CA_FILE"
"""The variable that names a file with the certificates of authorities, beside ``--ca-file``."""
MAX_TOLD_LENGTH = 8192
"""Characters."""
_EXPIRED, _EARLY, _OTHER_HOST, _OTHER_ADDRESS = 10, 9, 62, 64
"""X509_V_ERR_… of OpenSSL, as are these:"""
_UNKNOWN_AUTHORITY = (2, 7, 18, 19, 20, 21, 24, 26, 27)
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
_TOO_OLD = ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "WRONG_SSL_VERSION")
_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL."""


def secure(context: ssl.SSLContext) -> ssl.SSLContext:
    """The context, which speaks nothing older than TLS 1.2; without OpenSSL's configuration it might."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def pinned(certificate: str) -> ssl.SSLContext:
    """Trusts one certificate (PEM), which the other side must show itself, and no other."""
    context = secure(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False  # It may be known by any name: it is this one.
    context.load_verify_locations(cadata=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    return context


def is_this_machine(host: str) -> bool:
    """By its name or address alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def check_encrypted(url: SplitResult) -> None:
    """``UsageError`` where a token would go over a network in clear."""
    if url.scheme != "https" and not is_this_machine(url.hostname or ""):
        raise UsageError(
            f"{url.geturl()} is not encrypted: a token would go there for all to read",
            field="--url",
            value=url.geturl(),
            hint="use https://; see docs/security.md, Encryption in transit",
        )


@dataclass(frozen=True, slots=True)
class Trust:
    """By what a daemon is known: a certificate of its own, an authority's, or those that this machine trusts."""

    ca_file: Path | None = None
    """Certificates of authorities, one of which must have signed the daemon's, for the host that is asked."""
    pinned: Path | None = None
    """The very certificate that the daemon must show, whoever signed it, for whatever host and time."""
    authorities: str = ""
    """As those of ``ca_file``, but told and not read."""

    def context(self) -> ssl.SSLContext:
        """Of one connection: the files are read anew, as both may change. ``OSError`` when they cannot be."""
        if self.pinned is not None:
            return pinned(_certificates(self.pinned))
        # TLS 1.2 or later, with the host's name verified.
        told = self.authorities if self.ca_file is None else _certificates(self.ca_file)
        return secure(ssl.create_default_context(cadata=told or None))

    def was_renewed(self, since: float) -> bool:
        """Whether the daemon has put another certificate in place of the one that is pinned, since a moment."""
        with suppress(OSError):
            return self.pinned is not None and self.pinned.stat().st_mtime >= since
        return False

    def told(self) -> str:
        """The certificates of ``ca_file`` for others who are to trust the same, if there are few of them."""
        try:
            text = "" if self.ca_file is None else _certificates(self.ca_file)
        except OSError:
            return ""
        return text if len(text) <= MAX_TOLD_LENGTH else ""

    def check(self) -> None:
        """``UsageError`` when the file that was given is of no use."""
        try:
            self.context()
        except OSError as error:
            raise UsageError(
                f"no certificates of authorities can be read: {error.strerror or error}",
                field="--ca-file",
                value=str(self.ca_file),
                hint=f"give a file in PEM, with --ca-file or {CA_FILE}",
            ) from error


OF_THIS_MACHINE = Trust()
"""Whom this machine trusts."""


def _certificates(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except OSError as error:
        if isinstance(error, ssl.SSLError):
            raise OSError(f"{path} holds no certificates in PEM") from error
        raise OSError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise OSError(f"{path} holds no certificates in PEM") from error
    return text


def refusal(error: BaseException, host: str) -> tuple[str, str] | None:
    """Why TLS with a host has not come about, and the way out; None when that is not what went wrong."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrust(error, host)
    if not isinstance(error, ssl.SSLError):
        return None
    reason = error.reason or ""
    if reason in _NO_TLS:
        return (
            "what answers there speaks no TLS",
            "ask by http://, if it is on this machine; else see what listens there",
        )
    if reason in _TOO_OLD:
        return "it speaks no TLS of version 1.2 or later", "bring what answers there up to date"
    return f"TLS failed: {reason.lower().replace('_', ' ') or error}", "see what the daemon's log says"


def _distrust(error: ssl.SSLCertVerificationError, host: str) -> tuple[str, str]:
    code = error.verify_code
    if code == _EXPIRED:
        return "its certificate has expired", "have it renewed: the daemon takes the new files up by itself"
    if code == _EARLY:
        return "its certificate is not valid yet", "set this machine's clock right, or the daemon's"
    if code in (_OTHER_HOST, _OTHER_ADDRESS):
        return f"its certificate is not for {host}", "ask by a name that it is for, or have that one put into it"
    if code in _UNKNOWN_AUTHORITY:
        return (
            "its certificate is signed by nobody who is trusted here",
            f"give the authority's certificate with --ca-file or {CA_FILE}",
        )
    return f"its certificate is refused: {error.verify_message}", "have another one made"
