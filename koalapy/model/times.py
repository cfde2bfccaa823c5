"""Parse points in time as users write them: of the future, in the forms of Slurm's ``--begin``, and of the past."""

import re
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import NoReturn

from koalapy.model.errors import reject

MAX_TIME = 2.0**33
"""The latest point in time that a job may name, in seconds since the epoch: in the year 2242."""
TIME_HINT = "give 2026-12-01T16:00, 16:00, tomorrow, or now+90m"
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(am|pm)?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[t ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?\s?(?:z|[+-]\d\d:?\d\d)?)?", re.ASCII)
_RELATIVE = re.compile(r"now(?:\s*\+\s*(.+))?", re.ASCII)
_SPAN = re.compile(r"(\d{1,9})\s*(weeks?|w|days?|d|hours?|hrs?|h|minutes?|mins?|m|seconds?|secs?|s)", re.ASCII)
_UNITS = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}
_NAMED = {"midnight": (0, 0), "noon": (12, 0), "fika": (15, 0), "teatime": (16, 0)}
"""Hours and minutes of the names that Slurm knows."""


def parse_time(text: str, now: float, zone: tzinfo | None = UTC) -> float:
    """Return a point in time in seconds since the epoch. Raise ``ValueError`` for another text.

    A time of day is the next one after ``now``, and a date alone means its first moment. ``zone``: the time zone of
    texts without one; None for that of this machine.
    """
    text = text.strip().lower()
    if (relative := _RELATIVE.fullmatch(text)) is not None:
        return now + (_parse_span(relative[1]) if relative[1] else 0.0)
    local_now = datetime.fromtimestamp(now, zone) if zone else datetime.fromtimestamp(now).astimezone()
    if text in ("today", "tomorrow"):
        return _time_of_day(local_now, 1 if text == "tomorrow" else 0, 0, 0, zone=zone)
    if text in _NAMED:
        return _next_time_of_day(local_now, *_NAMED[text], zone=zone)
    if (clock := _CLOCK.fullmatch(text)) is not None:
        return _next_time_of_day(local_now, *_clock_parts(*clock.groups()), zone=zone)
    if _DATE.fullmatch(text) is None:
        raise ValueError(TIME_HINT)
    moment = datetime.fromisoformat(text.upper().replace(" +", "+").replace(" Z", "Z"))
    return (moment if moment.tzinfo or zone is None else moment.replace(tzinfo=zone)).timestamp()


def _parse_span(text: str) -> float:
    """Return the seconds of ``90m`` or ``1h30m``. Raise ``ValueError`` for another text, such as one without units."""
    parts = _SPAN.findall(text)
    if _SPAN.sub("", text).strip() or not parts:
        raise ValueError(TIME_HINT)
    return float(sum(int(count) * _UNITS[unit[0]] for count, unit in parts))


def _clock_parts(hours: str, minutes: str, seconds: str | None, half: str | None) -> tuple[int, int, int]:
    """Return hour, minute and second of a time of day. Raise ``ValueError`` for one that does not exist."""
    hour = int(hours)
    if half is not None:
        if not 1 <= hour <= 12:
            raise ValueError(TIME_HINT)
        hour = hour % 12 + (12 if half == "pm" else 0)
    if hour > 23 or int(minutes) > 59 or int(seconds or 0) > 59:
        raise ValueError(TIME_HINT)
    return hour, int(minutes), int(seconds or 0)


def _next_time_of_day(now: datetime, hour: int, minute: int, second: int = 0, *, zone: tzinfo | None) -> float:
    """Return the next such time of day after ``now``."""
    today = _time_of_day(now, 0, hour, minute, second, zone=zone)
    return today if today > now.timestamp() else _time_of_day(now, 1, hour, minute, second, zone=zone)


def _time_of_day(now: datetime, days: int, hour: int, minute: int, second: int = 0, *, zone: tzinfo | None) -> float:
    """Return a time of the day that is ``days`` after ``now``, by the clock that is valid on that day."""
    day = now.date() + timedelta(days=days)
    return datetime(day.year, day.month, day.day, hour, minute, second, tzinfo=zone).timestamp()


_AGO = re.compile(r"(?:(\d{1,6})w)?(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", re.ASCII)
_AGO_UNITS = (604800.0, 86400.0, 3600.0, 60.0, 1.0)
_DAY = 86400.0
PAST_TIME_EXAMPLES = "7d, 2h30m, yesterday, 2026-11-20 or 2026-11-20T14:00 (UTC)"
MAX_PAST_TIME_LENGTH = 40
"""Maximum characters of a time."""


def parse_moment(text: str, now: float, field: str) -> float:
    """Return a time in seconds since the epoch. Raise ``UsageError`` with the name of the field if it is invalid.

    A duration means so long before ``now``, a day its beginning. Times without an offset are in UTC.
    """
    value = text.strip()
    match value.lower():
        case "now":
            return now
        case "today":
            return now // _DAY * _DAY
        case "yesterday":
            return now // _DAY * _DAY - _DAY
    if value and (ago := _AGO.fullmatch(value)):
        return max(0.0, now - sum(int(part or 0) * unit for part, unit in zip(ago.groups(), _AGO_UNITS, strict=True)))
    if re.fullmatch(r"\d{1,6}", value, re.ASCII):
        _refuse(text, field, f"which has no unit: give {value}s, {value}m, {value}h or {value}d")
    try:
        if "T" in value or " " in value or ":" in value:
            moment = datetime.fromisoformat(value)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        else:
            moment = datetime.combine(date.fromisoformat(value), datetime.min.time(), UTC)
        return min(max(0.0, moment.timestamp()), MAX_TIME)
    except (ValueError, OverflowError):
        _refuse(text, field, f"which is no time: give {PAST_TIME_EXAMPLES}")


def format_exact_time(timestamp: float) -> str:
    """Return a time in seconds since the epoch as ISO 8601 in UTC, to the microsecond."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat().replace("+00:00", "Z")


def _refuse(text: str, field: str, problem: str) -> NoReturn:
    problem, _, hint = problem.partition(": ")
    reject(field, text[:MAX_PAST_TIME_LENGTH], f"is {text[:MAX_PAST_TIME_LENGTH]!r}, {problem}", hint)
