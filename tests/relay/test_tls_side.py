"""Pairs of plain and TLS connections: every byte arrives once, in order, and ends arrive as ends."""

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.relay.tls_side import TlsSide, connect_tls
from koalapy.runner.connections import READ, WRITE, LineConnection, Loop, Side, tune_stream
from koalapy.runner.relay_streams import Pair, PipePool
from koalapy.system.certificate_files import load_certificate
from koalapy.system.tls import Trust
from tests.certificates import CertificateAuthority

MAX_TURNS = 5000


def socket_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return tune_stream(one), tune_stream(other)


@dataclass(frozen=True)
class Contexts:
    """The TLS contexts of both sides of a hop."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    folder: Path = tmp_path_factory.mktemp("ca")
    authority = CertificateAuthority(folder)
    files = authority.issue()
    server = load_certificate(files.certificate, files.key).context
    return Contexts(server, Trust(authority.file).create_context())


@dataclass
class Chain:
    """Two relays between two programs, with a hop between the relays."""

    contexts: Contexts | None
    """Of the hop between the relays; None: no TLS."""
    pending: bytes = b""
    """Bytes that the first relay sends before those of the program."""
    max_pipes: int = 2
    loop: Loop = field(default_factory=Loop)
    errors: list[OSError | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = PipePool(self.max_pipes)
        self.client, near = socket_pair()
        self.hop, far_hop = socket_pair()
        far, self.server = socket_pair()
        opener: Side = Side(self.hop)
        taker: Side = Side(far_hop)
        if self.contexts is not None:
            opener = TlsSide(self.hop, self.contexts.client, "127.0.0.1")
            taker = TlsSide(far_hop, self.contexts.server)
        self.pairs = (
            Pair(self.loop, self.pool, (Side(near), opener), (self.pending, b""), on_end=self.errors.append),
            Pair(self.loop, self.pool, (taker, Side(far)), on_end=self.errors.append),
        )
        for pair in self.pairs:
            pair.start()

    def turn(self) -> None:
        self.loop.set_alarm("test", 0.01, lambda: None)
        self.loop.turn()

    def pass_bytes(self, source: socket.socket, target: socket.socket, pieces: list[bytes], expected: int) -> bytes:
        """Send pieces, and return so many bytes that arrive; 0: send the end, too, and return all bytes."""
        received = bytearray()
        waiting = list(pieces)
        has_ended = is_over = False
        for _ in range(MAX_TURNS):
            if is_over or len(received) >= expected > 0:
                return bytes(received)
            with suppress(BlockingIOError):
                while waiting:
                    sent = source.send(waiting[0])
                    waiting[0] = waiting[0][sent:]
                    if not waiting[0]:
                        waiting.pop(0)
            if not waiting and not has_ended and not expected:
                source.shutdown(socket.SHUT_WR)
                has_ended = True
            self.turn()
            with suppress(BlockingIOError):
                while not is_over:
                    data = target.recv(1 << 20)
                    received += data
                    is_over = not data
        raise AssertionError(f"only {len(received)} bytes have arrived")

    def turn_until_ended(self) -> None:
        """Turn until both relays have ended the stream."""
        for _ in range(MAX_TURNS):
            if len(self.errors) == len(self.pairs):
                return
            self.turn()
        raise AssertionError(f"only {len(self.errors)} relays have ended the stream")

    def close(self) -> None:
        for pair in self.pairs:
            pair.close()
        self.pool.close()
        for connection in (self.client, self.server):
            connection.close()
        self.loop.close()


PIECES = st.lists(st.integers(1, 400_000).map(os.urandom), max_size=6)


@given(forth=PIECES, back=PIECES, pending=st.integers(0, 700_000), max_pipes=st.integers(0, 1), tls=st.booleans())
def test_pairs_with_any_pieces_pass_each_byte_once_and_both_ends(
    contexts: Contexts, forth: list[bytes], back: list[bytes], pending: int, max_pipes: int, tls: bool
) -> None:
    first = os.urandom(pending)
    chain = Chain(contexts if tls else None, first, max_pipes)
    assert chain.pass_bytes(chain.client, chain.server, forth, 0) == first + b"".join(forth)
    assert chain.pass_bytes(chain.server, chain.client, back, 0) == b"".join(back)
    chain.turn_until_ended()
    assert chain.errors == [None, None]
    assert all(pair.is_closed for pair in chain.pairs)
    chain.close()


@pytest.fixture(params=[True, False], ids=["tls", "plain"])
def chain(request: pytest.FixtureRequest, contexts: Contexts) -> Iterator[Chain]:
    made = Chain(contexts if request.param else None)
    yield made
    made.close()


def test_pair_with_reset_program_resets_the_other(chain: Chain) -> None:
    assert chain.pass_bytes(chain.client, chain.server, [b"ping"], 4) == b"ping"
    chain.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
    chain.server.close()
    chain.turn_until_ended()
    with pytest.raises(ConnectionResetError):
        chain.client.recv(1)


def test_tls_connection_cut_without_its_end_resets_the_program(contexts: Contexts) -> None:
    chain = Chain(contexts)
    assert chain.pass_bytes(chain.client, chain.server, [b"ping"], 4) == b"ping"
    chain.hop.shutdown(socket.SHUT_RDWR)
    chain.turn_until_ended()
    assert all(isinstance(error, OSError) for error in chain.errors)
    with pytest.raises(ConnectionResetError):
        chain.server.recv(1)
    chain.close()


class RecordingLoop(Loop):
    """A loop that records the events that it waits for last, by file."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, int] = {}

    def watch(self, file: int, callback: Callable[[int], object], events: int = READ) -> None:
        super().watch(file, callback, events)
        self.watched[file] = events


@pytest.mark.parametrize("is_stream", [True, False])
def test_bytes_for_a_peer_that_does_not_answer_tls_wait_for_its_answer(contexts: Contexts, is_stream: bool) -> None:
    """Its connection takes bytes, so a loop that waited for that would never wait."""
    loop, pool, (near, program) = RecordingLoop(), PipePool(), socket_pair()
    with socket.create_server(("127.0.0.1", 0)) as listener, near, program:
        side = connect_tls("127.0.0.1", listener.getsockname()[1], contexts.client, "127.0.0.1")
        if is_stream:
            Pair(loop, pool, (Side(near), side), (b"line\n", b"")).start()
        else:
            LineConnection(loop, side, pool.large, lambda *_: None, lambda *_: None, 100).send(b"line\n")
        while side.events() & WRITE:
            loop.turn()
        assert loop.watched[side.fileno()] == READ
        side.close()
    loop.close()
    pool.close()


def test_stream_connection_has_no_user_timeout(chain: Chain) -> None:
    assert chain.hop.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_pipes_of_ended_streams_are_not_reused_with_bytes_in_them() -> None:
    chain = Chain(None)
    data = bytes(30 << 20)
    with suppress(BlockingIOError):
        while True:
            chain.client.send(data)
    for _ in range(50):
        chain.turn()
    assert chain.pool.open_pipes > 0
    for pair in chain.pairs:
        pair.close(ConnectionResetError())
    further = Chain(None)
    further.pool = chain.pool
    assert chain.pool.open_pipes <= 1
    for made in (chain, further):
        made.close()
    assert chain.pool.open_pipes == 0


def test_stream_with_pauses_leaves_no_pipe_open() -> None:
    chain = Chain(None)
    for _ in range(4):
        assert len(chain.pass_bytes(chain.client, chain.server, [bytes(1 << 20)], 1 << 20)) == 1 << 20
    chain.close()
    assert chain.pool.open_pipes == 0
