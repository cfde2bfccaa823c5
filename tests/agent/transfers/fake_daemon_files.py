"""A stand-in for the daemon's file routes."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeDaemonFiles:
    """Hands out bundles, and keeps what is put; on request it hangs up early, is away, or refuses."""

    def __init__(self) -> None:
        self.bundles: dict[str, bytes] = {}
        self.results: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.cut_after: int | None = None
        """Bytes of a bundle after which the connection breaks, once."""
        self.sent = 0
        self.refuse: tuple[int, str] | None = None
        """Status and words for whoever puts results."""
        self.away = False
        self.answered = threading.Event()
        daemon_files = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                daemon_files.get(self)

            def do_PUT(self) -> None:
                daemon_files.put(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range", "")
        self.requests.append(f"GET {request.path} {asked} {request.headers['Authorization']}")
        content = self.bundles.get(request.path.rsplit("/", 1)[1])
        if self.away:
            request.send_error(503)
            return
        if content is None:
            self._refuse(request, 404, "there is no such bundle")
            return
        first = int(asked.removeprefix("bytes=").removesuffix("-") or 0)
        rest = content[first:]
        request.send_response(206 if first else 200)
        request.send_header("Content-Length", str(len(rest)))
        request.end_headers()
        if self.cut_after is not None:
            rest, self.cut_after = rest[: self.cut_after], None
        self.sent += len(rest)
        request.wfile.write(rest)

    def put(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append(f"PUT {request.path} {request.headers['Authorization']}")
        if self.away or self.refuse:
            self._refuse(request, *(self.refuse or (503, "later")))
            self.answered.set()
            return
        body = b""
        while size := int(request.rfile.readline(), 16):
            body += request.rfile.read(size)
            request.rfile.readline()
        self.results[request.path.rsplit("/", 1)[1]] = body
        request.send_response(204)
        request.end_headers()
        self.answered.set()

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, detail: str) -> None:
        body = f'{{"detail": "{detail}"}}'.encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
        request.close_connection = True
