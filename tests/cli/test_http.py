"""HTTP of the client, against a scripted server."""

import fcntl
import io
import json
import os
import re
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koalapy.client.client import Client
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import CONNECTION_ERRORS, Connection
from tests.cli.conftest import Koala

Handler = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def serve_peer(*plays: Handler, reads_body: bool = True) -> Iterator[tuple[str, list[bytes]]]:
    """Serve one connection with each handler, called when the request is read; yield the URL and the requests.

    Without ``reads_body`` a handler is called when the head of the request is read.
    """
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def act() -> None:
            for play in plays:
                with listener.accept()[0] as connection:
                    request = b""
                    while not (is_complete(request) if reads_body else b"\r\n\r\n" in request):
                        request += connection.recv(65536)
                    heard.append(request)
                    play(connection)

        thread = threading.Thread(target=act)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
        thread.join(30)
        assert not thread.is_alive()


def is_complete(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


def send_pieces(*pieces: bytes) -> Handler:
    return lambda connection: [connection.sendall(piece) for piece in pieces] and None


def make_connection(url: str, **headers: str) -> Connection:
    return Connection(urlsplit(url), headers, by_proxy=False)


def open_stream(url: str) -> Any:
    return make_connection(url).stream_response("/", query={}, headers=None, timeout=20)


def answer_twice(connection: socket.socket) -> None:
    connection.sendall(OK)
    assert connection.recv(65536)
    connection.sendall(OK)


def test_connection_is_reused_and_reopened_after_close() -> None:
    with serve_peer(answer_twice, send_pieces(OK)) as (url, heard):
        connection = make_connection(url, Authorization="Bearer ä")
        assert [connection.send_request("GET", "/a", query={"n": [1, 2], "b": True}).json() for _ in range(2)] == [
            {},
            {},
        ]
        assert connection._idle[0].sock.recv(1, socket.MSG_PEEK) == b"", "it has been closed by now"
        assert connection.send_request("POST", "/b", body={"ö": "é"}).status == 200
    assert heard[0].splitlines()[0] == b"GET /a?n=1&n=2&b=true HTTP/1.1"
    assert "Authorization: Bearer ä".encode() in heard[0]
    assert heard[1].endswith(json.dumps({"ö": "é"}, ensure_ascii=False).encode())


def test_connection_ends_by_itself_when_its_peer_is_gone() -> None:
    with serve_peer(send_pieces(OK)) as (url, _):
        connection = make_connection(url)
        connection.open_connection()
        peer = connection._idle[0].sock
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        assert connection.send_request("GET", "/").status == 200


def test_connection_with_descriptor_beyond_1024_is_reused() -> None:
    """A workflow tool may have thousands of open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    try:
        with serve_peer(answer_twice) as (url, _):
            connection = make_connection(url)
            connection.open_connection()
            idle = connection._idle[0]
            low = idle.sock.detach()
            idle.sock = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD, 1024))
            os.close(low)
            for _ in range(2):
                assert connection.send_request("GET", "/").status == 200
            assert connection._idle[0] is idle
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_rejection_before_whole_upload_is_read() -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 13\r\n\r\n"

    def refuse(connection: socket.socket) -> None:
        connection.sendall(refusal + b'{"detail":"x"')
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    with serve_peer(refuse, reads_body=False) as (url, _):
        size = 50_000_000
        answer = make_connection(url).send_request(
            "POST", "/", content=io.BytesIO(bytes(size)), headers={"Content-Length": str(size)}
        )
    assert (answer.status, answer.body) == (413, b'{"detail":"x"')


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000,
    ],
)
def test_incomplete_answer_is_connection_error(answer: bytes) -> None:
    with serve_peer(send_pieces(answer), send_pieces(answer), send_pieces(answer)) as (url, _):
        with pytest.raises(CONNECTION_ERRORS):
            make_connection(url).send_request("GET", "/")
        with (
            pytest.raises(CONNECTION_ERRORS),
            make_connection(url).stream_response("/", query={}, headers=None, timeout=20) as (_, _, pieces),
        ):
            list(pieces)
        with pytest.raises(GridError) as error:
            Client(url, "t").get("/")
    assert error.value.code is Exit.UNREACHABLE
    assert "\n" not in str(error.value)


def test_stream_that_ends_with_its_connection_is_incomplete() -> None:
    """A cut connection looks like the end of such a response."""
    with (
        serve_peer(send_pieces(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nhalf")) as (url, _),
        open_stream(url) as (_, _, pieces),
        pytest.raises(CONNECTION_ERRORS, match="no length"),
    ):
        list(pieces)


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=5), st.sampled_from(["chunked", "length"]))
@settings(max_examples=20, deadline=None)
def test_stream_returns_body_in_every_encoding(pieces: list[bytes], form: str) -> None:
    body = b"".join(pieces)
    heads = {"chunked": b"Transfer-Encoding: chunked", "length": b"Content-Length: %d" % len(body)}
    sent = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"] if form == "chunked" else pieces
    speak = send_pieces(b"HTTP/1.1 200 OK\r\n" + heads[form] + b"\r\n\r\n", *sent)
    with serve_peer(speak) as (url, _), open_stream(url) as (status, _, came):
        assert (status, b"".join(came)) == (200, body)


def test_stream_yields_pieces_as_they_arrive() -> None:
    is_read = threading.Event()

    def speak(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        assert is_read.wait(30)
        connection.sendall(b"4\r\nlast\r\n0\r\n\r\n")

    with serve_peer(speak) as (url, _), open_stream(url) as (_, _, pieces):
        assert next(pieces) == b"first"
        is_read.set()
        assert list(pieces) == [b"last"]


def test_proxy_of_environment_is_used_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve_peer(send_pieces(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")) as (url, heard):
        monkeypatch.setenv("https_proxy", url.replace("://", "://me:se%40cret@"))
        with pytest.raises(GridError, match=r"no daemon answers at https://grid\.example"):
            Client("https://grid.example", "token").get("/api")
    assert heard[0].splitlines()[0] == b"CONNECT grid.example:443 HTTP/1.0"
    assert b"Proxy-Authorization: Basic bWU6c2VAY3JldA==" in heard[0]
    assert b"Bearer" not in heard[0]


@pytest.mark.evidence("L1")
def test_token_is_not_sent_unencrypted_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for url in ("http://grid.example:8642", "http://192.0.2.1", "http://localhost.evil.example"):
        with pytest.raises(GridError, match="is not encrypted: others on the network") as refused:
            Client(url, "token")
        assert "use https://" in refused.value.hint


def test_token_is_sent_without_trailing_whitespace() -> None:
    for token in ("a-token\n", "a-token\r\n", " a-token "):
        with serve_peer(send_pieces(OK)) as (url, heard):
            Client(url, token).get("/")
        assert b"Authorization: Bearer a-token\r\n" in heard[0]


@pytest.mark.parametrize(
    "token", ["sec\nret", "sec\rret", "sec ret", "s\0ecret", "secr\x7fet", "secrét", "sec\udcffret", " \n"]
)
def test_token_with_invalid_characters_is_rejected_and_not_printed(
    token: str, koala: Koala, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_option = koala("queue", "--token", token)
    assert (by_option.code, by_option.out) == (Exit.USAGE, "")
    assert by_option.err.startswith(("koala: --token is not a token; ", "koala: --token is blank; "))
    assert "sec" not in by_option.err
    if "\0" not in token:
        for variable, command in (("KOALA_TOKEN", ["queue"]), ("KOALA_AGENT_TOKEN", ["check", "north"])):
            monkeypatch.setenv(variable, token)
            by_variable = koala(*command)
            assert (by_variable.code, by_variable.out) == (Exit.USAGE, "")
            assert by_variable.err == by_option.err.replace("--token", variable)


def test_password_in_url_is_not_printed() -> None:
    client = Client("http://grid:pass-word@127.0.0.1:1/koala", "token")
    with pytest.raises(GridError) as error:
        client.get("/api")
    assert client.url == "http://127.0.0.1:1/koala"
    assert "pass-word" not in f"{error.value!r}{error.value}"


def test_request_without_answer_times_out() -> None:
    timed_out = threading.Event()
    with serve_peer(lambda _: timed_out.wait(30) and None) as (url, _):
        with pytest.raises(TimeoutError):
            make_connection(url).send_request("GET", "/", timeout=0.05)
        timed_out.set()


INVALID_URLS = [
    *("http://h:x", "http://h:99999", "http://[::1", "ftp://h", "http://"),
    *("https://a..b", f"https://{'x' * 300}.example", "https://\udcff", "https://h/\udcff"),
]


@pytest.mark.parametrize("url", INVALID_URLS)
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(GridError, match="is not a URL"):
        Client(url, "token")


@pytest.mark.parametrize(
    "command",
    [
        *(["clusters", action, "\udcff"] for action in ("show", "drain", "resume", "clear")),
        *(["network", "history", *pair] for pair in (("\udcff", "north"), ("north", "\udcff"))),
        ["local-run", "\udcff", "1", "true"],
    ],
)
def test_name_that_is_not_utf8_is_rejected(koala: Koala, command: list[str]) -> None:
    ended = koala(*command)
    assert (ended.code, ended.out) == (Exit.USAGE, "")
    assert ended.err == "koala: the name '\\udcff' is not valid UTF-8; write it in UTF-8\n"


def test_concurrent_requests_get_their_own_answers() -> None:

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.dumps(self.path).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server, ThreadPoolExecutor(8) as pool:
        threading.Thread(target=server.serve_forever).start()
        connection = make_connection(f"http://127.0.0.1:{server.server_port}")
        paths = [f"/{number}" for number in range(400)]
        answers = list(pool.map(lambda path: connection.send_request("GET", path).json(), paths))
        with connection.stream_response("/1", query={}, headers=None, timeout=20) as (_, _, pieces):
            assert connection.send_request("GET", "/2").json() == "/2", "during a stream in the same thread"
            assert b"".join(pieces) == b'"/1"'
        assert len(connection._idle) <= 8
        for idle_connection in connection._idle:
            idle_connection.close()
        server.shutdown()
    assert answers == paths
