"""The encrypted tunnel of one transfer between two rsync processes; a separate program.

``tunnel.py connect`` is run by a puller's rsync in place of a connection. Its environment holds the address, the only
certificate to accept, and the descriptor of a pipe from the agent: when that agent dies, the tunnel exits, and so rsync
writes nothing more. ``tunnel.py serve SOCKET KEY SECONDS`` is the source's side: standard input is an accepted
connection, which must use TLS within so many seconds. The numbers are descriptors of the socket of an rsync daemon, and
of a file with certificate and key. Uses the standard library only; an error is one line on standard error.
"""

import contextlib
import os
import select
import signal
import socket
import ssl
import sys

sys.path.append(__file__.rsplit("/", 4)[0])

from koalapy.system.tls import harden_context, pinned_context

HOST, PORT, CERTIFICATE = "KOALA_TUNNEL_HOST", "KOALA_TUNNEL_PORT", "KOALA_TUNNEL_CERTIFICATE"
LIFELINE = "KOALA_TUNNEL_LIFELINE"
CONNECT_TIMEOUT = 10
"""Seconds to connect and to complete the TLS handshake."""
LAST_WORDS_TIMEOUT = 10
"""Seconds for one side to accept the remaining bytes after the other side has ended."""
CHUNK_SIZE = 256 * 1024
"""Bytes read at once."""


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGALRM, _too_late)
    if arguments[0] == "connect":
        address = os.environ[HOST], int(os.environ[PORT])
        return _connect(*address, os.environ[CERTIFICATE], int(os.environ[LIFELINE]))
    return _serve(int(arguments[1]), int(arguments[2]), float(arguments[3]))


def _too_late(_signal: int, _frame: object) -> None:
    raise TimeoutError("no answer in time")


def _connect(host: str, port: int, certificate: str, lifeline: int) -> int:
    """Connect to a source by TLS with its pinned certificate, and relay data to rsync; return the exit code."""
    plain = socket.socket(fileno=0)
    try:
        signal.alarm(CONNECT_TIMEOUT)
        connection = socket.create_connection((host, port))
        secured = wrap_connection(pinned_context(certificate), connection)
        signal.alarm(0)
    except ssl.SSLCertVerificationError:
        print(f"{host}:{port} shows another certificate than its agent announced", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cannot reach {host}:{port} by TLS: {error.strerror or error}", file=sys.stderr)
        return 1
    os.close(1)
    return pump(secured, plain, lifeline)


def _serve(rsync: int, key: int, seconds: float) -> int:
    """Accept a puller's TLS connection within ``seconds``, and relay data to rsync; return the exit code."""
    context = harden_context(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.load_cert_chain(f"/proc/self/fd/{key}")
    context.num_tickets = 0
    os.close(key)
    connection, plain = socket.socket(fileno=0), socket.socket(fileno=rsync)
    connection.setblocking(True)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        secured = wrap_connection(context, connection, is_server=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except OSError:
        return 1
    return pump(secured, plain)


def wrap_connection(context: ssl.SSLContext, connection: socket.socket, *, is_server: bool = False) -> ssl.SSLSocket:
    """Complete the TLS handshake, for a connection that reports a cut as an error. Raise ``OSError``."""
    return context.wrap_socket(connection, server_side=is_server, suppress_ragged_eofs=False)


def pump(secured: ssl.SSLSocket, plain: socket.socket, lifeline: int | None = None) -> int:
    """Copy in both directions until one side ends, then deliver the remaining bytes.

    Return the exit code: 1 if a connection was cut. Exit at once when the other end of the pipe ``lifeline`` is closed.
    """
    secured.setblocking(False)
    plain.setblocking(False)
    inward, outward = bytearray(), bytearray()
    exit_code = 0
    try:
        while _step(secured, plain, inward, outward, lifeline):
            pass
    except OSError:
        exit_code = 1
    signal.alarm(LAST_WORDS_TIMEOUT)
    with contextlib.suppress(OSError):
        plain.setblocking(True)
        plain.sendall(inward)
    with contextlib.suppress(OSError):
        secured.setblocking(True)
        secured.sendall(outward)
        secured.unwrap()
    return exit_code


def _step(
    secured: ssl.SSLSocket, plain: socket.socket, inward: bytearray, outward: bytearray, lifeline: int | None = None
) -> bool:
    """Wait for data and copy it. Return False when one side has ended. Raise ``OSError``."""
    waiting = select.poll()
    # Read only what the other side can accept. Bytes that TLS has buffered are invisible to poll.
    waiting.register(secured, (0 if inward else select.POLLIN) | (select.POLLOUT if outward else 0))
    waiting.register(plain, (0 if outward else select.POLLIN) | (select.POLLOUT if inward else 0))
    if lifeline is not None:
        waiting.register(lifeline, 0)  # poll reports a closed end in any case
    events = waiting.poll(0 if secured.pending() and not inward else None)
    if lifeline is not None and any(descriptor == lifeline for descriptor, _ in events):
        raise SystemExit(1)
    there_goes_on = bool(inward) or _take(secured, inward)
    here_goes_on = bool(outward) or _take(plain, outward)
    _give(plain, inward)
    _give(secured, outward)
    return there_goes_on and here_goes_on


def _take(source: socket.socket, buffer: bytearray) -> bool:
    """Read available bytes. Return False at the end."""
    while len(buffer) < CHUNK_SIZE:
        try:
            data = source.recv(CHUNK_SIZE)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        if not data:
            return False
        buffer += data
    return True


def _give(target: socket.socket, buffer: bytearray) -> None:
    """Send as much of the buffer as the target accepts without blocking, and remove the sent bytes."""
    sent = 0
    with memoryview(buffer) as view:
        while sent < len(view):
            try:
                sent += target.send(view[sent:])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
    del buffer[:sent]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
