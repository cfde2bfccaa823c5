"""The time range in the address of a page: ``since`` and ``until``, as in the REST API."""

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Query
from pydantic import Field

from koalapy.api.fields import PastTime
from koalapy.model.errors import reject
from koalapy.model.history import SAMPLE_INTERVAL_S
from koalapy.model.times import PAST_TIME_EXAMPLES, parse_moment

RANGES = {"1h": 3600.0, "6h": 6 * 3600.0, "24h": 86_400.0, "7d": 7 * 86_400.0, "30d": 30 * 86_400.0}
"""The ranges up to now that pages offer, as texts of ``since``, and their seconds."""

OptionalTime = PastTime | Annotated[str, Field(max_length=0)]
Since = Annotated[OptionalTime, Query(description=f"start of the shown time: {PAST_TIME_EXAMPLES}; empty: as usual")]
Until = Annotated[OptionalTime, Query(description="end of the shown time; empty: now")]


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A range of past time, with the texts of the address that select it; times in seconds since the epoch."""

    start: float = field(compare=False)
    end: float = field(compare=False)
    since: str
    until: str
    """Empty for now."""
    name: str
    """Its name in ``RANGES``; empty for another range."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def parse_range(since: str, until: str, now: float, default: str = "6h") -> TimeRange:
    """Return the range of an address. Raise ``UsageError`` for an invalid time, or if it ends before it begins."""
    since, until = since.strip() or default, "" if until.strip() == "now" else until.strip()
    start, end = parse_moment(since, now, "since"), min(now, parse_moment(until or "now", now, "until"))
    start = max(0.0, start)
    if start > end - SAMPLE_INTERVAL_S:
        hint = "give a since at least a minute before until, and before now"
        reject("since", since, f"is {since}, which is not before {until or 'now'}", hint)
    name = next((name for name, span in RANGES.items() if not until and abs(now - start - span) < 1), "")
    return TimeRange(start, end, since, until, name)
