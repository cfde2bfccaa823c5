"""Moments as people read them."""

from koalapy.model.moment import clock

NOON = 12 * 3600.0
DAY = 86400.0


def test_today_needs_no_date() -> None:
    assert clock(NOON + 127.9, NOON) == "12:02"
    assert clock(NOON + 127.9, NOON, exact=True) == "12:02:07"


def test_another_day_has_its_date() -> None:
    assert clock(NOON, NOON + DAY) == "1970-01-01 12:00"
    assert clock(DAY - 1, DAY, exact=True) == "1970-01-01 23:59:59"
