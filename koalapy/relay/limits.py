"""The limits of a relay."""

from dataclasses import dataclass

from koalapy.runner.relay_protocol import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S

RESERVED_FILES = 128
"""Files of a relay besides those of streams."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum numbers of streams and connections, and durations in seconds."""

    streams: int = 4096
    """Streams of the relay."""
    attempt_streams: int = 4096
    """Streams of one attempt."""
    stream_rate: float = 2000.0
    stream_burst: float = 4096.0
    """New streams of an attempt per second, and at once."""
    strangers: int = 512
    """Connections without a first line, from addresses that have authenticated no stream yet. The oldest one of the
    address with most of them is closed."""
    first_line_timeout: float = 30.0
    dial_timeout: float = 60.0
    """Time in which a dialled stream must be taken."""
    heartbeat: float = HEARTBEAT_INTERVAL_S
    silence: float = SILENCE_LIMIT_S
    """Time without a line of the peer, after which a control connection counts as dead."""
    reconnect: float = 5.0
    """Maximum pause before a head connects to the hub again."""


def files_needed(limits: Limits) -> int:
    """Return the open files that a relay needs for its maximum number of streams."""
    return 2 * limits.streams + RESERVED_FILES
