"""A collector of OpenTelemetry's, as far as a daemon sees one: it takes OTLP by HTTP, or says that it cannot."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

DEADLINE = 60.0


class Collector:
    """Between ``with`` and its end."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.status = 200
        self.refused = 0
        self._changed = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                with outer._changed:
                    if outer.status == 200:
                        outer._take(ExportTraceServiceRequest.FromString(body))
                    else:
                        outer.refused += 1
                    outer._changed.notify_all()
                self.send_response(outer.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            told = {each.key: each.value.string_value for each in of_resource.resource.attributes}
            self.services.add(told["service.name"])
            for scope in of_resource.scope_spans:
                self.spans += scope.spans

    def __enter__(self) -> "Collector":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self, count: int) -> list[Span]:
        """The spans of jobs that are over, once there are so many of these."""
        end = time.monotonic() + DEADLINE
        with self._changed:
            while len([span for span in self.spans if span.name == "job"]) < count:
                assert self._changed.wait(end - time.monotonic()), f"{count} jobs, of {self.spans}"
            return list(self.spans)

    def wait_refused(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.refused > 0, DEADLINE)


def tree(spans: list[Span]) -> set[tuple[str, str]]:
    """Each span's name with that of what it is of; empty of the outermost."""
    names = {span.span_id: span.name for span in spans}
    assert len(names) == len(spans)
    return {(span.name, names[span.parent_span_id] if span.parent_span_id else "") for span in spans}


def attributes(span: Span) -> dict[str, object]:
    told: dict[str, object] = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        told[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return told
