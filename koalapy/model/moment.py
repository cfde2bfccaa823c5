"""Parse times that users give for lists: ``7d`` (ago), ``yesterday``, ``2026-11-20``, ``2026-11-20T14:00``."""

import re
from datetime import UTC, date, datetime
from typing import NoReturn

from koalapy.model.errors import UsageError

_AGO = re.compile(r"(?:(\d{1,6})w)?(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", re.ASCII)
_UNITS = (604800.0, 86400.0, 3600.0, 60.0, 1.0)
_DAY = 86400.0
EXAMPLES = "7d, 2h30m, yesterday, 2026-11-20 or 2026-11-20T14:00 (UTC)"
MAX_LENGTH = 40
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
        return max(0.0, now - sum(int(part or 0) * unit for part, unit in zip(ago.groups(), _UNITS, strict=True)))
    if re.fullmatch(r"\d{1,6}", value, re.ASCII):
        _refuse(text, field, f"which has no unit: give {value}s, {value}m, {value}h or {value}d")
    try:
        if "T" in value or " " in value or ":" in value:
            moment = datetime.fromisoformat(value)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        else:
            moment = datetime.combine(date.fromisoformat(value), datetime.min.time(), UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        _refuse(text, field, f"which is no time: give {EXAMPLES}")


def format_exact_time(timestamp: float) -> str:
    """Return a time in seconds since the epoch as ISO 8601 in UTC, to the microsecond."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat().replace("+00:00", "Z")


def _refuse(text: str, field: str, problem: str) -> NoReturn:
    problem, _, hint = problem.partition(": ")
    raise UsageError(f"{field} is {text[:MAX_LENGTH]!r}, {problem}", field=field, value=text[:MAX_LENGTH], hint=hint)
