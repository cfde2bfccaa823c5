"""Report the counters of a relay as Prometheus text."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from koalapy.relay.relay import Relay
from koalapy.system.process import count_open_files

Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Exposition:
    """The metrics of a relay."""

    relay: Relay

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their samples; the Prometheus client calls this to encode them."""
        relay, attempts = self.relay, self.relay.live.by_token.values()
        open_files, max_files = count_open_files()
        yield _gauge("streams", "Open streams.", [((), len(relay.streams))])
        yield _counter("streams", "Streams since the start.", [((), relay.total_streams)])
        yield _gauge("streams_limit", "Maximum open streams.", [((), relay.limits.streams)])
        yield _gauge("children", "Connected nodes or heads.", [((), len(relay.children))])
        yield _gauge("pipes", "Open pipes.", [((), relay.pool.open_pipes)])
        yield _gauge("open_files", "Open files.", [((), open_files)])
        yield _gauge("open_files_limit", "Maximum open files.", [((), max_files)])
        refusals = [((reason,), count) for reason, count in sorted(relay.refusals.items())]
        yield _counter("refused", "Refused streams and connections, by reason.", refusals, "reason")
        streams = [((attempt.token,), attempt.stream_count) for attempt in attempts]
        yield _gauge("attempt_streams", "Open streams of a live attempt.", streams, "attempt")
        moved = [
            ((attempt.token, *pair), count[0]) for attempt in attempts for pair, count in attempt.bytes_moved.items()
        ]
        text = "Bytes that a live attempt has sent from one cluster to another."
        yield _counter("attempt_bytes", text, moved, "attempt", "from", "to")


def format_metrics(relay: Relay) -> str:
    """Return the metrics of a relay as Prometheus text."""
    return generate_latest(Exposition(relay)).decode()


def _gauge(name: str, text: str, samples: Iterable[Sample], *labels: str) -> Metric:
    return _with(GaugeMetricFamily(f"koala_relay_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, samples: Iterable[Sample], *labels: str) -> Metric:
    return _with(CounterMetricFamily(f"koala_relay_{name}", text, labels=labels), samples)


def _with(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family
