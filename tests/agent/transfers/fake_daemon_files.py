"""A fake of the daemon's file routes."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeDaemonFiles:
    """Serves bundles and stores results; can disconnect early, be unavailable or reject results."""

    def __init__(self) -> None:
        self.bundles: dict[str, bytes] = {}
        self.results: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.cut_after: int | None = None
        """Number of bytes of a bundle after which the connection breaks once."""
        self.sent = 0
        self.refuse: tuple[int, str] | None = None
        self.missing = "there is no such bundle"
        """Detail of the answer 404; empty as in that of a proxy."""
        """Status and detail with which results are rejected."""
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
        byte_range = request.headers.get("Range", "")
        self.requests.append(f"GET {request.path} {byte_range} {request.headers['Authorization']}")
        content = self.bundles.get(request.path.rsplit("/", 1)[1])
        if self.away:
            request.send_error(503)
            return
        if content is None:
            self._refuse(request, 404, self.missing)
            return
        first = int(byte_range.removeprefix("bytes=").removesuffix("-") or 0)
        remaining = content[first:]
        request.send_response(206 if first else 200)
        request.send_header("Content-Length", str(len(remaining)))
        request.end_headers()
        if self.cut_after is not None:
            remaining, self.cut_after = remaining[: self.cut_after], None
        self.sent += len(remaining)
        request.wfile.write(remaining)

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
