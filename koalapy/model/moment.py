"""Moments in texts for people: in UTC, with the date when it is not the day of ``now``."""

from datetime import UTC, datetime


def clock(at: float, now: float, *, exact: bool = False) -> str:
    """Seconds since the epoch as ``14:02``, ``2026-11-20 14:02``, or with ``exact`` ``14:02:07``."""
    moment, today = datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(now, UTC)
    time = moment.strftime("%H:%M:%S" if exact else "%H:%M")
    return time if moment.date() == today.date() else f"{moment.date().isoformat()} {time}"
