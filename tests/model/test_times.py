"""Points in time as users write them."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.errors import UsageError
from koalapy.model.times import MAX_TIME, format_exact_time, parse_moment, parse_time

NOW = datetime(2026, 11, 26, 14, 30, 20, tzinfo=UTC)
PARIS = timezone(timedelta(hours=1))


def parsed(text: str, zone: timezone = UTC) -> str:
    return datetime.fromtimestamp(parse_time(text, NOW.timestamp(), zone), UTC).strftime("%m-%d %H:%M:%S")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-12-01T16:00", "12-01 16:00:00"),
        ("2026-12-01 16:00:05Z", "12-01 16:00:05"),
        ("2026-12-01T16:00+02:00", "12-01 14:00:00"),
        ("2026-12-01", "12-01 00:00:00"),
        ("16:00", "11-26 16:00:00"),
        ("14:30", "11-27 14:30:00"),
        ("14:30:21", "11-26 14:30:21"),
        ("4:00pm", "11-26 16:00:00"),
        ("12:05 AM", "11-27 00:05:00"),
        ("midnight", "11-27 00:00:00"),
        ("noon", "11-27 12:00:00"),
        ("teatime", "11-26 16:00:00"),
        ("today", "11-26 00:00:00"),
        (" Tomorrow ", "11-27 00:00:00"),
        ("now", "11-26 14:30:20"),
        ("now+90m", "11-26 16:00:20"),
        ("now+1hour", "11-26 15:30:20"),
        ("now + 1h30m", "11-26 16:00:20"),
        ("now+2days", "11-28 14:30:20"),
        ("now+1week", "12-03 14:30:20"),
    ],
)
def test_parse_time_accepts_forms_of_slurm_and_iso_8601(text: str, moment: str) -> None:
    assert parsed(text) == moment


@pytest.mark.parametrize(
    ("text", "moment"),
    [("16:00", "11-26 15:00:00"), ("15:30", "11-27 14:30:00"), ("2026-12-01T16:00Z", "12-01 16:00:00")],
)
def test_parse_time_applies_zone_to_texts_without_one(text: str, moment: str) -> None:
    assert parsed(text, PARIS) == moment


@pytest.mark.parametrize(
    "text",
    [
        *("", "90", "now+90", "now+", "now-1h", "24:00", "12:60", "13:00pm", "0:30am", "2026-02-30", "2026-13-01"),
        *("1/2/26", "tomorrow 9:00", "soon", "now+1h30", "now+1y", "2026-12-01T16", "-5"),
    ],
)
def test_parse_time_rejects_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed(text)


@given(st.text(max_size=30))
def test_parse_time_raises_only_value_and_overflow_errors(text: str) -> None:
    try:
        assert parse_time(text, NOW.timestamp()) > 0
    except (ValueError, OverflowError):
        return


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
        ("0001-01-01T00:00+23:59", 0.0),
        ("9999-12-31T23:59-23:59", MAX_TIME),
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
