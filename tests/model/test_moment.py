"""Times that users give for lists."""

import pytest

from koalapy.model.errors import UsageError
from koalapy.model.moment import format_exact_time, parse_moment

DAY = 86400.0
NOON = 20_000 * DAY + DAY / 2
"""2024-10-04, 12:00 UTC."""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("now", NOON),
        ("today", 20_000 * DAY),
        ("Yesterday", 19_999 * DAY),
        ("7d", NOON - 7 * DAY),
        (" 2h30m ", NOON - 9000),
        ("1w1s", NOON - 7 * DAY - 1),
        ("0s", NOON),
        ("999999d", 0.0),
        ("2024-10-04", 20_000 * DAY),
        ("2024-10-04T12:00", NOON),
        ("2024-10-04 14:00:00.5+02:00", NOON + 0.5),
        ("2024-10-04T12:00:00Z", NOON),
    ],
)
def test_parse_moment_returns_seconds(text: str, seconds: float) -> None:
    assert parse_moment(text, NOON, "since") == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7", "since is '7', which has no unit"),
        ("", "since is '', which is no time"),
        ("-7d", "since is '-7d', which is no time"),
        ("d7", "since is 'd7', which is no time"),
        ("7.5d", "since is '7.5d', which is no time"),
        ("2024-13-01", "since is '2024-13-01', which is no time"),
        ("12:00", "since is '12:00', which is no time"),
        ("\u0667d", "since is '\u0667d', which is no time"),
        ("x" * 1000, f"since is {'x' * 40!r}, which is no time"),
    ],
)
def test_parse_moment_rejects_other_texts(text: str, message: str) -> None:
    with pytest.raises(UsageError, match="since") as error:
        parse_moment(text, NOON, "since")
    assert (error.value.message, error.value.field) == (message, "since")
    assert error.value.hint.startswith("give ")


def test_exact_time_is_parsed_as_same_time() -> None:
    assert parse_moment(format_exact_time(NOON + 0.123456), NOON, "since") == NOON + 0.123456
