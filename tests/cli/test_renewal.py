"""Connections while the daemon's certificate is renewed."""

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from koalapy.client.http import Connection
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.daemon.listener.certificate import Certificate
from koalapy.system.tls import Trust
from tests.certificates import CertificateAuthority, CertificateFiles
from tests.cli.conftest import FAST
from tests.cli.test_http import OK


class TlsServer:
    """A TLS server with a renewable certificate. ``refused`` counts clients that reject the certificate."""

    def __init__(self, directory: Path) -> None:
        self.authority = CertificateAuthority(directory / "authority")
        self.pair: CertificateFiles = self.authority.issue()
        self.certificate = Certificate(self.pair.certificate, self.pair.key, directory)
        self.refused = 0
        self.when_refused: Callable[[], object] = lambda: None

    def renew(self) -> None:
        self.pair.replace_with(self.authority.issue())
        self.certificate.reload_if_changed()

    @contextmanager
    def listening(self) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=self._serve, args=[listener])
            thread.start()
            try:
                yield f"https://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join(30)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with self.certificate.context.wrap_socket(plain, server_side=True) as secured:
                    # In TLS 1.3 the client's rejection arrives with the first read.
                    if secured.recv(65536):
                        secured.sendall(OK)
            except OSError:
                self.refused += 1
                self.when_refused()


class RenewingTrust(Trust):
    """A trust that renews the certificate between reading its file and the handshake."""

    between: list[Callable[[], None]] = []  # noqa: RUF012

    def create_context(self) -> ssl.SSLContext:
        read = super().create_context()
        if self.between:
            self.between.pop()()
        return read


@pytest.fixture
def tls_server(tmp_path: Path) -> TlsServer:
    return TlsServer(tmp_path)


def request_status(url: str, trust: Trust, timeouts: ClientTimeouts = FAST) -> int:
    return Connection(urlsplit(url), {}, by_proxy=False, trust=trust, timeouts=timeouts).send_request("GET", "/").status


def test_client_reads_renewed_certificate_again(tls_server: TlsServer) -> None:
    trust = RenewingTrust(pinned=tls_server.certificate.public_path)
    trust.between.append(tls_server.renew)
    with tls_server.listening() as url:
        assert request_status(url, trust) == 200
    assert tls_server.refused == 1


def test_client_retries_until_new_certificate_is_served(tls_server: TlsServer) -> None:
    later = tls_server.authority.issue()
    tls_server.certificate.public_path.write_bytes(later.certificate.read_bytes())

    def show() -> None:
        tls_server.pair.replace_with(later)
        tls_server.certificate.reload_if_changed()

    tls_server.when_refused = show
    with tls_server.listening() as url:
        assert (
            request_status(
                url, Trust(pinned=tls_server.certificate.public_path), replace(FAST, certificate_renewal_s=60.0)
            )
            == 200
        )
    assert tls_server.refused == 1


def test_wrong_certificate_without_renewal_is_rejected_at_once(tls_server: TlsServer) -> None:
    other_certificate = tls_server.authority.issue().certificate
    for pinned in (other_certificate, None):
        long_ago = time.time() - 2 * DEFAULT_TIMEOUTS.certificate_renewal_s
        os.utime(other_certificate, (long_ago, long_ago))
        refused_before = tls_server.refused
        with tls_server.listening() as url, pytest.raises(ssl.SSLCertVerificationError):
            request_status(url, Trust(pinned=pinned))
        assert tls_server.refused == refused_before + 1


def test_certificate_that_stays_wrong_is_rejected(tls_server: TlsServer) -> None:
    other_certificate = tls_server.authority.issue().certificate
    with tls_server.listening() as url, pytest.raises(ssl.SSLCertVerificationError):
        request_status(url, Trust(pinned=other_certificate))
