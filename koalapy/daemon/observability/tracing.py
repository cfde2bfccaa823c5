"""Send the spans of jobs to an OpenTelemetry collector from a separate thread; rejected spans are lost."""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from koalapy import __version__
from koalapy.daemon.observability.spans import Span, id_of, spans_of_attempt, spans_of_job, trace_of
from koalapy.model.job import Attempt, Job, JobId, JobState

log = structlog.get_logger()

MAX_WAITING = 10_000
"""Maximum number of attempts and jobs that wait to be sent."""
MAX_AT_ONCE = 100
"""Maximum number of attempts and jobs in one request."""
MAX_REMEMBERED = 100_000
"""Maximum number of jobs with a stored time since which they are queued again."""
SEND_TIMEOUT = 5.0
"""Timeout of a request to the collector in seconds."""
STOP_TIMEOUT = 2.0
"""Seconds within which waiting spans are sent at the daemon's end."""
SCOPE = InstrumentationScope("koalapy", __version__)

Make = Callable[[], tuple[JobId, Iterable[Span]]]


class Tracing:
    """An observer of jobs that makes spans and sends them in a separate thread."""

    def __init__(self, endpoint: str, instance: str, max_waiting: int = MAX_WAITING) -> None:
        """``max_waiting``: maximum number of attempts and jobs that wait to be sent; further ones are lost."""
        self._instance = instance
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_TIMEOUT)
        self._resource = Resource.create(
            {"service.name": "koala", "service.version": __version__, "service.instance.id": instance}
        )
        self._waiting: queue.Queue[Make | None] = queue.Queue(max_waiting)
        self._waited_since: dict[JobId, float] = {}
        self._lost, self._reachable = 0, True
        self._thread = threading.Thread(target=self._run_sender, name="tracing", daemon=True)
        self._thread.start()

    def job_changed(self, job: Job, previous_state: JobState | None) -> None:
        if job.state.is_final and not job.spec.internal:
            self._queue_spans(lambda: (job.id, self._job_spans(job)))

    def attempt_ended(self, job: Job, attempt: Attempt) -> None:
        """Queue the spans of an attempt that another one has followed."""
        if not job.spec.internal:
            self._queue_spans(lambda: (job.id, self._attempt_spans(job, attempt)))

    def stop(self) -> None:
        """Send waiting spans for at most ``STOP_TIMEOUT``, and stop the thread."""
        self._queue_spans(None)
        self._thread.join(STOP_TIMEOUT)

    def _queue_spans(self, make: Make | None) -> None:
        """Queue a function that makes spans, or count them as lost. None ends the thread."""
        try:
            self._waiting.put_nowait(make)
        except queue.Full:
            self._lost += 1

    # Methods that run in the thread

    def _job_spans(self, job: Job) -> Iterable[Span]:
        began = self._waited_since.pop(job.id, job.submitted_at if job.generation <= 1 else None)
        return spans_of_job(job, began)

    def _attempt_spans(self, job: Job, attempt: Attempt) -> Iterable[Span]:
        """Return the spans of an attempt and of the wait before it. Remember its end as the start of the next wait."""
        first = job.submitted_at if attempt.generation == 1 else None
        spans = [*spans_of_attempt(attempt, attempt.placed_at, self._waited_since.pop(job.id, first))]
        if attempt.ended_at is not None and len(self._waited_since) < MAX_REMEMBERED:
            self._waited_since[job.id] = attempt.ended_at
        return spans

    def _run_sender(self) -> None:
        """Send queued spans in batches until ``stop``, in a thread."""
        goes_on = True
        while goes_on:
            batch = [self._waiting.get()]
            while len(batch) < MAX_AT_ONCE and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            try:
                made = [make() for make in batch if make is not None]
                self._send_spans([self._to_readable(job, span) for job, spans in made for span in spans])
            except Exception as error:
                log.error("spans were lost by an internal error", action="spans-lost", exc_info=error)
            goes_on = None not in batch
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _send_spans(self, spans: Sequence[ReadableSpan]) -> None:
        """Export spans to the collector. Log when it begins to fail, and when it works again."""
        if not spans:
            return
        is_accepted = self._exporter.export(spans) is SpanExportResult.SUCCESS
        lost, self._lost = self._lost, 0
        if not is_accepted and self._reachable:
            log.warning("a collector does not take the spans of jobs: they are lost", action="spans-lost")
        elif is_accepted and (lost or not self._reachable):
            log.info("the collector takes spans again", action="spans-taken", lost=lost)
        self._reachable = is_accepted

    def _to_readable(self, job: JobId, span: Span) -> ReadableSpan:
        """Convert a span of a job to OpenTelemetry's type. Its ids are derived from the job and its path."""
        return ReadableSpan(
            span.name,
            context=self._span_context(job, span.path),
            parent=self._span_context(job, span.parent) if span.parent else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            status=Status(StatusCode.ERROR, span.fault) if span.fault else Status(StatusCode.UNSET),
            start_time=_to_nanoseconds(span.start),
            end_time=_to_nanoseconds(max(span.start, span.end)),
            instrumentation_scope=SCOPE,
        )

    def _span_context(self, job: JobId, path: str) -> SpanContext:
        ids = trace_of(self._instance, job), id_of(self._instance, job, path)
        return SpanContext(*ids, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _to_nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
