"""Spans of time, sizes and bandwidths as people write them: ``0.5ms``, ``16GB``, ``1Gbit``."""

import re
from math import isfinite

SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_POWERS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
BYTES = {"": 1.0, **{f"{prefix}B": power for prefix, power in (_POWERS | _BINARY).items()}}
BYTES_PER_SECOND = BYTES | {f"{prefix}bit": power / 8 for prefix, power in _POWERS.items()}
"""Bits and bytes are written out, for ``b`` stands for either."""


def parse_seconds(value: float | str) -> float:
    """A number of seconds, or a text with a unit; ``ValueError`` that says what to write."""
    return _quantity(value, SECONDS, "give seconds, or a number with ms or us: 0.5ms")


def parse_bytes(value: float | str) -> int:
    """A number of bytes, or a text with a unit; ``ValueError`` that says what to write."""
    hint = "give bytes, or a number with a unit: 16GB, 512MiB"
    size = _quantity(value, BYTES, hint)
    if not isfinite(size):
        raise ValueError(hint)
    return round(size)


def parse_bandwidth(value: float | str) -> float:
    """A number of bytes per second, or a text with a unit; ``ValueError`` that says what to write."""
    text = re.sub(r"/s$", "", value.strip()) if isinstance(value, str) else value
    return _quantity(text, BYTES_PER_SECOND, "give bytes per second, or a number with a unit: 1Gbit, 100MB")


def format_bytes(size: float) -> str:
    """``200 MB``, ``1.5 GB``, ``17 bytes``: decimal units, three digits."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= 0.9995 * power:
            return f"{size / power:.3g} {unit}"
    return f"{size:.3g} {'byte' if size == 1 else 'bytes'}"


def _quantity(value: float | str, units: dict[str, float], hint: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(hint)
    if not isinstance(value, str):
        return float(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([A-Za-zµ]*)\s*", value)
    if not match or match[2] not in units:
        raise ValueError(hint)
    return float(match[1]) * units[match[2]]
