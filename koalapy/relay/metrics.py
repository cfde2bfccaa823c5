"""Format the counters of a relay as Prometheus text."""

from collections.abc import Iterator, Sequence

from koalapy.relay.relay import Relay
from koalapy.system.process import count_open_files

Sample = tuple[dict[str, str], float]


def format_metrics(relay: Relay) -> str:
    """Return the metrics of a relay."""
    attempts = relay.live.by_token.values()
    open_files, max_files = count_open_files()
    families: list[tuple[str, str, str, Sequence[Sample]]] = [
        ("koala_relay_streams", "gauge", "Open streams.", [({}, len(relay.streams))]),
        ("koala_relay_streams_total", "counter", "Streams since the start.", [({}, relay.total_streams)]),
        ("koala_relay_streams_limit", "gauge", "Maximum open streams.", [({}, relay.limits.streams)]),
        ("koala_relay_children", "gauge", "Connected nodes or heads.", [({}, len(relay.children))]),
        ("koala_relay_pipes", "gauge", "Open pipes.", [({}, relay.pool.open_pipes)]),
        ("koala_relay_open_files", "gauge", "Open files.", [({}, open_files)]),
        ("koala_relay_open_files_limit", "gauge", "Maximum open files.", [({}, max_files)]),
        (
            "koala_relay_refused_total",
            "counter",
            "Refused streams and connections, by reason.",
            [({"reason": reason}, count) for reason, count in sorted(relay.refusals.items())],
        ),
        (
            "koala_relay_attempt_streams",
            "gauge",
            "Open streams of a live attempt.",
            [({"attempt": attempt.token}, attempt.stream_count) for attempt in attempts],
        ),
        (
            "koala_relay_attempt_bytes_total",
            "counter",
            "Bytes that a live attempt has sent from one cluster to another.",
            [
                ({"attempt": attempt.token, "from": source, "to": target}, count[0])
                for attempt in attempts
                for (source, target), count in attempt.bytes_moved.items()
            ],
        ),
    ]
    return "".join(line for family in families for line in _format_family(*family))


def _format_family(name: str, kind: str, text: str, samples: Sequence[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        pairs = ",".join(f'{label}="{_escape(content)}"' for label, content in labels.items())
        yield f"{name}{{{pairs}}} {value:.0f}\n" if pairs else f"{name} {value:.0f}\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
