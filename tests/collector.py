"""An OpenTelemetry collector that accepts or rejects OTLP over HTTP."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MAX_WAIT_S = 60.0


class Collector:
    """A collector that serves while the ``with`` block runs."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.status = 200
        self.rejected_count = 0
        self._changed = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                with outer._changed:
                    if outer.status == 200:
                        outer._store(ExportTraceServiceRequest.FromString(body))
                    else:
                        outer.rejected_count += 1
                    outer._changed.notify_all()
                self.send_response(outer.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def _store(self, request: ExportTraceServiceRequest) -> None:
        for resource_spans in request.resource_spans:
            attributes = {
                attribute.key: attribute.value.string_value for attribute in resource_spans.resource.attributes
            }
            self.services.add(attributes["service.name"])
            for scope_spans in resource_spans.scope_spans:
                self.spans += scope_spans.spans

    def __enter__(self) -> "Collector":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait_for_jobs(self, count: int) -> list[Span]:
        """Return all spans once there are spans of ``count`` ended jobs."""
        end = time.monotonic() + MAX_WAIT_S
        with self._changed:
            while len([span for span in self.spans if span.name == "job"]) < count:
                assert self._changed.wait(end - time.monotonic()), f"{count} jobs, of {self.spans}"
            return list(self.spans)

    def wait_for_rejection(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.rejected_count > 0, MAX_WAIT_S)


def parent_span_names(spans: list[Span]) -> set[tuple[str, str]]:
    """Return the pairs of each span's name and its parent's name, which is empty for a root span."""
    names = {span.span_id: span.name for span in spans}
    assert len(names) == len(spans)
    return {(span.name, names[span.parent_span_id] if span.parent_span_id else "") for span in spans}


def read_attributes(span: Span) -> dict[str, object]:
    values: dict[str, object] = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        values[attribute.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values
