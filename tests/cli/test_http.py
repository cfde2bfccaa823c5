"""HTTP as the command line speaks it, against a peer that plays a script."""

import io
import json
import re
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
from koalapy.client.errors import CliError, Exit
from koalapy.client.http import CONNECTION_ERRORS, Connection
from tests.cli.conftest import Koala

Play = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def peer(*plays: Play, reads_body: bool = True) -> Iterator[tuple[str, list[bytes]]]:
    """Serve one connection for each play, which is called when the request is read; yield the URL and the requests.

    Without ``reads_body`` a play is called when the head of the request is read.
    """
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def act() -> None:
            for play in plays:
                with listener.accept()[0] as connection:
                    told = b""
                    while not (is_whole(told) if reads_body else b"\r\n\r\n" in told):
                        told += connection.recv(65536)
                    heard.append(told)
                    play(connection)

        thread = threading.Thread(target=act)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
        thread.join(30)
        assert not thread.is_alive()


def is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


def says(*pieces: bytes) -> Play:
    return lambda connection: [connection.sendall(piece) for piece in pieces] and None


def connection_to(url: str, **headers: str) -> Connection:
    return Connection(urlsplit(url), headers, by_proxy=False)


def stream(url: str) -> Any:
    return connection_to(url).stream_response("/", query={}, headers=None, timeout=20)


def test_a_connection_is_kept_and_opened_again_when_the_peer_has_closed_it() -> None:
    def twice(connection: socket.socket) -> None:
        connection.sendall(OK)
        assert connection.recv(65536)
        connection.sendall(OK)

    with peer(twice, says(OK)) as (url, heard):
        connection = connection_to(url, Authorization="Bearer ä")
        assert [connection.send_request("GET", "/a", query={"n": [1, 2], "b": True}).json() for _ in range(2)] == [
            {},
            {},
        ]
        assert connection._idle[0].sock.recv(1, socket.MSG_PEEK) == b"", "it has been closed by now"
        assert connection.send_request("POST", "/b", body={"ö": "é"}).status == 200
    assert heard[0].splitlines()[0] == b"GET /a?n=1&n=2&b=true HTTP/1.1"
    assert "Authorization: Bearer ä".encode() in heard[0]
    assert heard[1].endswith(json.dumps({"ö": "é"}, ensure_ascii=False).encode())


def test_a_refusal_that_comes_before_all_was_sent_is_heard() -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 13\r\n\r\n"

    def refuse(connection: socket.socket) -> None:
        connection.sendall(refusal + b'{"detail":"x"')
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    with peer(refuse, reads_body=False) as (url, _):
        size = 50_000_000
        answer = connection_to(url).send_request(
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
def test_what_is_no_whole_answer_is_no_answer(answer: bytes) -> None:
    with peer(says(answer), says(answer), says(answer)) as (url, _):
        with pytest.raises(CONNECTION_ERRORS):
            connection_to(url).send_request("GET", "/")
        with (
            pytest.raises(CONNECTION_ERRORS),
            connection_to(url).stream_response("/", query={}, headers=None, timeout=20) as (_, _, pieces),
        ):
            list(pieces)
        with pytest.raises(CliError) as error:
            Client(url, "t").get("/")
    assert error.value.code is Exit.UNREACHABLE
    assert "\n" not in str(error.value)


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=5), st.sampled_from(["chunked", "length", "close"]))
@settings(max_examples=20, deadline=None)
def test_a_stream_is_what_was_sent(pieces: list[bytes], form: str) -> None:
    body = b"".join(pieces)
    heads = {"chunked": b"Transfer-Encoding: chunked", "length": b"Content-Length: %d" % len(body), "close": b"A: b"}
    sent = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"] if form == "chunked" else pieces
    speak = says(b"HTTP/1.1 200 OK\r\n" + heads[form] + b"\r\n\r\n", *sent)
    with peer(speak) as (url, _), stream(url) as (status, _, came):
        assert (status, b"".join(came)) == (200, body)


def test_pieces_come_as_they_are_sent() -> None:
    seen = threading.Event()

    def speak(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        assert seen.wait(30)
        connection.sendall(b"4\r\nlast\r\n0\r\n\r\n")

    with peer(speak) as (url, _), stream(url) as (_, _, pieces):
        assert next(pieces) == b"first"
        seen.set()
        assert list(pieces) == [b"last"]


def test_proxies_are_asked_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with peer(says(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")) as (url, heard):
        monkeypatch.setenv("https_proxy", url.replace("://", "://me:se%40cret@"))
        with pytest.raises(CliError, match=r"no daemon answers at https://grid\.example"):
            Client("https://grid.example", "token").get("/api")
    assert heard[0].splitlines()[0] == b"CONNECT grid.example:443 HTTP/1.0"
    assert b"Proxy-Authorization: Basic bWU6c2VAY3JldA==" in heard[0]
    assert b"Bearer" not in heard[0]


@pytest.mark.evidence("L1")
def test_no_token_goes_to_another_machine_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for url in ("http://grid.example:8642", "http://192.0.2.1", "http://localhost.evil.example"):
        with pytest.raises(CliError, match="is not encrypted: others on the network") as refused:
            Client(url, "token")
        assert "use https://" in refused.value.hint


def test_a_token_is_shown_without_the_end_of_its_file() -> None:
    for token in ("a-token\n", "a-token\r\n", " a-token "):
        with peer(says(OK)) as (url, heard):
            Client(url, token).get("/")
        assert b"Authorization: Bearer a-token\r\n" in heard[0]


@pytest.mark.parametrize(
    "token", ["sec\nret", "sec\rret", "sec ret", "s\0ecret", "secr\x7fet", "secrét", "sec\udcffret", " \n"]
)
def test_a_token_that_no_header_takes_is_refused_and_told_nowhere(
    token: str, koala: Koala, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = koala("queue", "--token", token)
    assert (given.code, given.out) == (Exit.USAGE, "")
    assert given.err.startswith(("koala: --token is not a token; ", "koala: --token is blank; "))
    assert "sec" not in given.err
    if "\0" not in token:
        for variable, command in (("KOALA_TOKEN", ["queue"]), ("KOALA_AGENT_TOKEN", ["check", "north"])):
            monkeypatch.setenv(variable, token)
            told = koala(*command)
            assert (told.code, told.out) == (Exit.USAGE, "")
            assert told.err == given.err.replace("--token", variable)


def test_a_password_in_a_url_is_told_nowhere() -> None:
    client = Client("http://grid:pass-word@127.0.0.1:1/koala", "token")
    with pytest.raises(CliError) as error:
        client.get("/api")
    assert client.url == "http://127.0.0.1:1/koala"
    assert "pass-word" not in f"{error.value!r}{error.value}"


def test_an_answer_that_does_not_come_in_time_is_none() -> None:
    done = threading.Event()
    with peer(lambda _: done.wait(30) and None) as (url, _):
        with pytest.raises(TimeoutError):
            connection_to(url).send_request("GET", "/", timeout=0.05)
        done.set()


NO_URLS = [
    *("http://h:x", "http://h:99999", "http://[::1", "ftp://h", "http://"),
    *("https://a..b", f"https://{'x' * 300}.example", "https://\udcff", "https://h/\udcff"),
]


@pytest.mark.parametrize("url", NO_URLS)
def test_a_url_that_is_none_is_told(url: str) -> None:
    with pytest.raises(CliError, match="is not a URL"):
        Client(url, "token")


@pytest.mark.parametrize(
    "command",
    [
        *(["clusters", action, "\udcff"] for action in ("show", "drain", "resume", "clear")),
        *(["network", "history", *pair] for pair in (("\udcff", "north"), ("north", "\udcff"))),
        ["local-run", "\udcff", "1", "true"],
    ],
)
def test_a_name_that_no_url_takes_is_refused_in_one_line(koala: Koala, command: list[str]) -> None:
    ended = koala(*command)
    assert (ended.code, ended.out) == (Exit.USAGE, "")
    assert ended.err == "koala: the name '\\udcff' is not valid UTF-8; write it in UTF-8\n"


def test_questions_of_several_threads_each_get_their_own_answer() -> None:
    """The answer to one had been read as that to another, or both were told that nobody answers."""

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            told = json.dumps(self.path).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server, ThreadPoolExecutor(8) as pool:
        threading.Thread(target=server.serve_forever).start()
        connection = connection_to(f"http://127.0.0.1:{server.server_port}")
        paths = [f"/{number}" for number in range(400)]
        found = list(pool.map(lambda path: connection.send_request("GET", path).json(), paths))
        with connection.stream_response("/1", query={}, headers=None, timeout=20) as (_, _, pieces):
            assert connection.send_request("GET", "/2").json() == "/2", "while another is under way in the same thread"
            assert b"".join(pieces) == b'"/1"'
        assert len(connection._idle) <= 8
        for kept in connection._idle:
            kept.close()
        server.shutdown()
    assert found == paths
