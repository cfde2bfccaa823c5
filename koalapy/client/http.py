"""HTTP for the client: persistent connections to one daemon, with whole or streamed responses.

It uses ``http.client``, since importing a larger library takes longer than most commands run.
"""

import http.client
import json
import select
import socket
import ssl
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.system.tls import SYSTEM_TRUST, Trust

CHUNK_SIZE = 64 * 1024
"""Bytes that are read or sent in one call."""
CONNECT_TIMEOUT = 20.0
"""Limit in seconds for opening a connection."""
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds, and tries, after which a system that has these options ends a connection whose peer or network is gone."""
RENEWAL_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Pauses in seconds between connection attempts while the daemon replaces its certificate."""
CONNECTION_ERRORS = (OSError, http.client.HTTPException)
"""Errors of a daemon that does not respond or closes the connection early."""
Seconds = float | None
Json = dict[str, Any]
"""A JSON object of a request or response: the fields of ``/openapi.json``, with times as texts in ISO 8601."""
PORTS = {"http": 80, "https": 443}


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON, or raise ``ValueError``."""
        return json.loads(self.body)


class Connection:
    """A thread-safe pool of connections to the daemon at a URL: one per concurrent request, reused afterwards."""

    def __init__(
        self,
        url: SplitResult,
        headers: Mapping[str, str],
        *,
        by_proxy: bool,
        trust: Trust = SYSTEM_TRUST,
        timeouts: ClientTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """``by_proxy``: connect through the proxy of the environment, if any, by a tunnel that hides the content.

        Raise ``ValueError`` for an invalid URL.
        """
        host, port = url.hostname or "", url.port or PORTS[url.scheme]
        proxy = None
        if by_proxy:
            from urllib.request import getproxies, proxy_bypass  # slow to import

            proxy = None if proxy_bypass(host) else getproxies().get(url.scheme)
        self.by_proxy, self.trust, self._timeouts = by_proxy, trust, timeouts
        self.headers = _credential_header(url, "Authorization") | dict(headers)
        """Headers of every request, with those of a user name and password in the URL."""
        self._base = url.path.rstrip("/")
        self._idle = deque[http.client.HTTPConnection]()
        self._new = partial(_create_connection, url.scheme, host, port, trust)
        if proxy is None:
            return
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        create_proxy_connection = partial(
            _create_connection,
            url.scheme,
            via.hostname or "",
            via.port or PORTS["http"],
            trust,
            http.client.HTTPConnection,
        )
        self._new = partial(
            _create_tunnel, create_proxy_connection, host, port, _credential_header(via, "Proxy-Authorization")
        )

    def send_request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        content: Readable | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Seconds = None,
    ) -> Answer:
        """Send a request with a JSON ``body`` or file ``content``; return the response. Raise ``CONNECTION_ERRORS``."""
        with self._open_request(method, path, query, body, content, headers, timeout) as answer:
            return Answer(answer.status, answer.headers, answer.read())

    @contextmanager
    def stream_response(
        self, path: str, *, query: Mapping[str, Any], headers: Mapping[str, str] | None, timeout: Seconds
    ) -> Iterator[tuple[int, http.client.HTTPMessage, Iterator[bytes]]]:
        """Yield status, headers and the pieces of a streamed response. Raise ``CONNECTION_ERRORS``."""
        with self._open_request("GET", path, query, None, None, headers, timeout) as answer:
            yield answer.status, answer.headers, _read_pieces(answer)

    @contextmanager
    def _open_request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: object,
        content: Readable | None,
        headers: Mapping[str, str] | None,
        timeout: Seconds,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield its response, with the body still to be read. Raise ``CONNECTION_ERRORS``.

        Keep the connection for later requests if the block read the whole body; otherwise close it.
        """
        values = {name: str(v).lower() if isinstance(v, bool) else v for name, v in (query or {}).items()}
        parameters = urlencode(values, doseq=True)
        payload = None if body is None else json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        lines = {**self.headers, **(headers or {})}
        if payload is not None:
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        elif method != "GET":
            lines.setdefault("Content-Length", "0")
            # This header shows the daemon that the request was not forged by a web page.
            lines.setdefault("X-Requested-With", "koala")
        is_over, connection = False, self._take_connection()
        try:
            connection.sock.settimeout(timeout)
            connection.putrequest(method, f"{self._base}{path}{'?' if parameters else ''}{parameters}")
            for name, value in lines.items():
                connection.putheader(name, value.encode())
            connection.endheaders()
            # The daemon may reject the request before it has read the body; its response explains more than EPIPE.
            with suppress(BrokenPipeError, ConnectionResetError):
                if payload:
                    connection.send(payload)
                while content is not None and (piece := content.read(CHUNK_SIZE)):
                    connection.send(piece)
            answer = connection.getresponse()
            with answer:
                yield answer
                is_over = answer.isclosed()
        finally:
            if is_over and connection.sock is not None:
                self._idle.append(connection)
            else:
                connection.close()

    def open_connection(self) -> None:
        """Make sure that there is a connection. Raise ``CONNECTION_ERRORS`` if the daemon cannot be reached."""
        self._idle.append(self._take_connection())

    def _take_connection(self) -> http.client.HTTPConnection:
        """Return an idle connection that the daemon has not closed or written to, or a new one."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread has taken it
                break
            poll = select.poll()  # select.select fails for descriptors from 1024 on
            poll.register(connection.sock, select.POLLIN)
            if not poll.poll(0):
                return connection
            connection.close()
        for pause in RENEWAL_PAUSES:
            began = time.time()
            try:
                return self._open_connection()
            except ssl.SSLCertVerificationError:
                # The certificate file may have been replaced between reading it and the handshake. Nothing was sent.
                if not self.trust.was_renewed(began - self._timeouts.certificate_renewal_s):
                    raise
            self._timeouts.sleep(pause)
        return self._open_connection()

    def _open_connection(self) -> http.client.HTTPConnection:
        """Connect to the daemon, through the proxy if there is one. Raise ``CONNECTION_ERRORS``."""
        opened = self._new()
        try:
            opened.connect()
            # Some requests, such as uploads, have no time limit.
            opened.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if option := getattr(socket, name, None):
                    opened.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        except BaseException:
            opened.close()
            raise
        return opened


class _ClearConnection(http.client.HTTPConnection):
    """A connection without TLS and tunnel. It passes an ASCII host as bytes, for which Python imports no codec."""

    def connect(self) -> None:
        if self.host.isascii():
            address: Any = self.host.encode(), self.port
            self.sock = socket.create_connection(address, self.timeout)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            super().connect()


def _create_connection(
    scheme: str, host: str, port: int, trust: Trust, create_clear: type[http.client.HTTPConnection] = _ClearConnection
) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT, context=trust.create_context())
    return create_clear(host, port, timeout=CONNECT_TIMEOUT)


def _create_tunnel(
    via: Callable[[], http.client.HTTPConnection], host: str, port: int, headers: Mapping[str, str]
) -> http.client.HTTPConnection:
    """Create a connection by a proxy from ``via``, with a tunnel to the daemon at ``host``."""
    opened = via()
    opened.set_tunnel(host, port, headers=headers)
    return opened


def _credential_header(url: SplitResult, header: str) -> dict[str, str]:
    """Return the authentication header for the user name and password of a URL, if any."""
    if url.username is None:
        return {}
    user_and_password = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {header: f"Basic {b64encode(user_and_password.encode()).decode()}"}


def _read_pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the pieces of a response as they arrive. Raise ``CONNECTION_ERRORS`` if the response is incomplete.

    A response without a length that ends with its connection may have been cut; the daemon sends none.
    """
    if answer.length is None:
        if not answer.chunked:
            raise http.client.HTTPException("the response has no length: a proxy has removed it")
        while piece := answer.read1(CHUNK_SIZE):
            yield piece
        return
    while remaining := answer.length:
        piece = answer.read(min(CHUNK_SIZE, remaining))
        if len(piece) < min(CHUNK_SIZE, remaining):
            raise http.client.IncompleteRead(piece, remaining - len(piece))
        yield piece
