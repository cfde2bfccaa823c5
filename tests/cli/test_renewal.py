"""Commands that come while their daemon's certificate, by which they know it, is being renewed."""

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


class Served:
    """A daemon's certificate, and who shows it to all that come; ``refused`` counts those that do not want it."""

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
                    # By TLS 1.3 a client's refusal comes with the first that is read.
                    if secured.recv(65536):
                        secured.sendall(OK)
            except OSError:
                self.refused += 1
                self.when_refused()


class Renewing(Trust):
    """The certificate is renewed between the look at the file and the handshake."""

    between: list[Callable[[], None]] = []  # noqa: RUF012

    def create_context(self) -> ssl.SSLContext:
        read = super().create_context()
        if self.between:
            self.between.pop()()
        return read


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def answer(url: str, trust: Trust, timeouts: ClientTimeouts = FAST) -> int:
    return Connection(urlsplit(url), {}, by_proxy=False, trust=trust, timeouts=timeouts).send_request("GET", "/").status


def test_who_has_read_the_certificate_before_looks_again(served: Served) -> None:
    trust = Renewing(pinned=served.certificate.public_path)
    trust.between.append(served.renew)
    with served.listening() as url:
        assert answer(url, trust) == 200
    assert served.refused == 1


def test_who_has_read_the_one_that_is_not_shown_yet_comes_again(served: Served) -> None:
    later = served.authority.issue()
    served.certificate.public_path.write_bytes(later.certificate.read_bytes())

    def show() -> None:
        served.pair.replace_with(later)
        served.certificate.reload_if_changed()

    served.when_refused = show
    with served.listening() as url:
        assert (
            answer(url, Trust(pinned=served.certificate.public_path), replace(FAST, certificate_renewal_s=60.0)) == 200
        )
    assert served.refused == 1


def test_one_that_was_not_renewed_just_now_is_refused_at_once(served: Served) -> None:
    other = served.authority.issue().certificate
    for pinned in (other, None):
        long_ago = time.time() - 2 * DEFAULT_TIMEOUTS.certificate_renewal_s
        os.utime(other, (long_ago, long_ago))
        before = served.refused
        with served.listening() as url, pytest.raises(ssl.SSLCertVerificationError):
            answer(url, Trust(pinned=pinned))
        assert served.refused == before + 1


def test_one_that_stays_another_is_refused(served: Served) -> None:
    """As where somebody else listens, whose certificate it never was."""
    other = served.authority.issue().certificate
    with served.listening() as url, pytest.raises(ssl.SSLCertVerificationError):
        answer(url, Trust(pinned=other))
