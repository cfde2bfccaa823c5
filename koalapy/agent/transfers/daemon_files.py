"""The daemon's file routes for agents: bundles of the users' files, and the results of jobs. Blocking, for threads.

``retry_transfer`` repeats their calls.
"""

import asyncio
import http.client
import io
import json
import tarfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

import structlog

from koalapy.agent.core.settings import AgentTimeouts
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.system.files import open_owner_only
from koalapy.system.tls import SYSTEM_TRUST, Trust, explain_tls_error

log = structlog.get_logger()

IO_TIMEOUT = 60.0
"""Seconds for the daemon to send or accept the next bytes."""
SCAN_TIMEOUT = 900.0
"""Seconds for the daemon to find results in its archives."""
CHUNK_SIZE = 1024 * 1024
MAX_ERROR_LENGTH = 2000
BUSY_TIMEOUT = 60.0
"""Seconds of retries while the daemon answers and cannot serve; an unreachable daemon is awaited without limit."""


class DaemonBusy(SiteUnavailable):
    """The daemon answers, but cannot serve the request now."""


@dataclass(slots=True)
class DaemonFiles:
    """The daemon's file routes, for one agent. ``url`` changes when a standby daemon takes over.

    All methods block. They raise ``SiteUnavailable`` if the daemon cannot be reached, ``SiteRejected`` if it rejects
    the request, ``OSError`` for local files.
    """

    url: str
    cluster: str
    token: str
    trust: Trust = SYSTEM_TRUST

    def fetch_archive(
        self, resource: str, ident: str, path: Path, stop: threading.Event, progress: Callable[[int], None]
    ) -> None:
        """Download a bundle (``bundles``), or results of other jobs (``inputs``), or the rest if the file exists.

        Call ``progress`` with the size so far.
        """
        timeout = SCAN_TIMEOUT if resource == "inputs" else IO_TIMEOUT
        with open(path, "ab", opener=open_owner_only) as file, closing(self._connection(timeout)) as connection:
            received = file.tell()
            headers = {"Range": f"bytes={received}-"} if received else {}
            with _errors("cannot be reached", connection):
                connection.request("GET", self._path(resource, ident), headers=self._headers(headers))
            answer = _answer(connection)
            if answer.status == 416:
                return
            _check(answer)
            if answer.status != 206 and received:
                file.truncate(0)
                file.seek(0)
            _copy_body(answer, connection, file, stop, progress)

    def put_results(self, token: str, write: Callable[[tarfile.TarFile], None], stop: threading.Event) -> None:
        """Upload an archive while ``write`` creates it, until ``stop`` is set."""
        headers = self._headers({"Transfer-Encoding": "chunked", "Content-Type": "application/x-tar"})
        with closing(self._connection()) as connection:
            with _errors("cannot be reached", connection):
                connection.putrequest("PUT", self._path("results", token))
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders()
            body = _Chunks(connection, stop)
            # A daemon that rejects large results closes the connection early; its answer gives the reason.
            with suppress(_BodyRejected):
                with tarfile.open(fileobj=body, mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK_SIZE) as archive:
                    write(archive)
                body.send(b"0\r\n\r\n")
            _check(_answer(connection))

    def _connection(self, timeout: float = IO_TIMEOUT) -> http.client.HTTPConnection:
        """Return a connection to the daemon that is not yet open; raise ``SiteUnavailable`` without the TLS files."""
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            try:
                context = self.trust.create_context()
            except OSError as error:
                raise SiteUnavailable(f"the daemon cannot be reached: {error}") from error
            return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
        return http.client.HTTPConnection(host, port, timeout=timeout)

    def _path(self, resource: str, ident: str) -> str:
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base}/api/v1/agents/{quote(self.cluster, safe='')}/{resource}/{quote(ident, safe='')}"

    def _headers(self, headers: dict[str, str]) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", "Connection": "close", **headers}


class _BodyRejected(Exception):
    """The daemon closed the connection before the end of the body."""


class _Chunks(io.RawIOBase):
    """A request body in chunks, of unknown length."""

    def __init__(self, connection: http.client.HTTPConnection, stop: threading.Event) -> None:
        self._connection, self._stop = connection, stop

    def write(self, data: Any) -> int:
        if self._stop.is_set():
            raise SiteUnavailable("the agent is stopping")
        size = len(data)
        self.send(b"%x\r\n%b\r\n" % (size, data))
        return size

    def send(self, data: bytes) -> None:
        try:
            self._connection.send(data)
        except OSError as error:
            raise _BodyRejected from error


@contextmanager
def _errors(problem: str, connection: http.client.HTTPConnection) -> Iterator[None]:
    """Raise ``SiteUnavailable`` with this problem in place of errors of the connection."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        tls_problem = explain_tls_error(error, connection.host)
        raise SiteUnavailable(
            f"the daemon {problem}: {f'{tls_problem[0]}: {tls_problem[1]}' if tls_problem else error}"
        ) from error


def _answer(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """Return the daemon's answer, whatever its status. Raise ``SiteUnavailable`` without one."""
    with _errors("does not answer", connection):
        return connection.getresponse()


def _copy_body(
    answer: http.client.HTTPResponse,
    connection: http.client.HTTPConnection,
    file: BinaryIO,
    stop: threading.Event,
    progress: Callable[[int], None],
) -> None:
    """Append the body of an answer to a file until ``stop`` is set; call ``progress`` with the file's size so far.

    Raise ``SiteUnavailable`` if the connection breaks.
    """
    while not stop.is_set():
        with _errors("sends no more data", connection):
            data = answer.read(CHUNK_SIZE)
        if not data:
            break
        file.write(data)
        progress(file.tell())
    if answer.length:
        raise SiteUnavailable("the daemon closed the connection within a file")


def _check(answer: http.client.HTTPResponse) -> None:
    """Raise ``DaemonBusy`` if the daemon may accept a retry, ``SiteRejected`` for other errors in its answer."""
    if answer.status < 300:
        return
    detail = _error_text(answer)
    text = detail or f"{answer.status} {answer.reason}"
    is_missing = answer.status == HTTPStatus.NOT_FOUND
    # A proxy answers 404 by itself while the daemon restarts.
    if answer.status >= 500 or answer.status in (408, 425, 429) or (is_missing and not detail):
        raise DaemonBusy(f"the daemon answers: {text}")
    raise SiteRejected(text if is_missing else f"the daemon rejects it: {text}", value=answer.status)


def _error_text(answer: http.client.HTTPResponse) -> str:
    """Return the detail of a problem+json body; empty for another body."""
    try:
        problem: Any = json.loads(answer.read(MAX_ERROR_LENGTH))
        return str(problem.get("detail") or "")
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        return ""


async def retry_transfer(
    transfer: Callable[[], Awaitable[None]],
    timeouts: AgentTimeouts,
    token: str,
    *,
    is_counted: Callable[[SiteUnavailable], bool],
    max_wait_s: Callable[[], float],
) -> None:
    """Repeat a transfer of a component's files, with growing pauses, until it succeeds.

    Raise its ``SiteUnavailable`` after ``max_wait_s`` seconds of pauses that ``is_counted``, and other errors at once.
    """
    pause, waited = timeouts.transfer_retry_s, 0.0
    while True:
        try:
            return await transfer()
        except SiteUnavailable as error:
            if is_counted(error):
                if waited >= max_wait_s():
                    raise
                waited += pause
            log.info("transfer cut", action="transfer-cut", token=token, reason=error.message)
        await asyncio.sleep(pause)
        pause = min(timeouts.max_transfer_retry_s, 2 * pause)
