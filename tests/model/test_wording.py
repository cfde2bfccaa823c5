"""Texts for users."""

import pytest

from koalapy.model.wording import (
    describe_exit,
    escape_formula,
    format_hosts,
    format_idle,
    format_list,
    format_nodes,
    format_time,
    suggest_names,
)

NOON = 12 * 3600.0
DAY = 86400.0


def test_format_time_of_today_has_no_date() -> None:
    assert format_time(NOON + 127.9, NOON) == "12:02"
    assert format_time(NOON + 127.9, NOON, exact=True) == "12:02:07"


def test_format_time_of_other_day_has_date() -> None:
    assert format_time(NOON, NOON + DAY) == "1970-01-01 12:00"
    assert format_time(DAY - 1, DAY, exact=True) == "1970-01-01 23:59:59"


@pytest.mark.parametrize(
    ("texts", "count", "line"),
    [
        ([], None, ""),
        (["a"], None, "a"),
        (["a", "b", "c", "d"], None, "a, b, c, d"),
        (["a", "b", "c", "d", "e", "f"], None, "a, b, c, d and 2 more"),
        (["a", "b", "c", "d"], 100, "a, b, c, d and 96 more"),
    ],
)
def test_format_list_limits_long_lists(texts: list[str], count: int | None, line: str) -> None:
    assert format_list(texts, count) == line


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["n2", "n0", "n1", "n7", "gpu1"], "n[0-2,7],gpu1"),
        (["n9", "n10"], "n[9-10]"),
        (["n08", "n09", "n10", "n011"], "n[08-10,011]"),
        (["n1.north", "n2.north", "n3.south"], "n[1-2].north,n3.south"),
        (["n" + 30 * "9", "n" + 30 * "9"], "n999999999999[999999999999999999,999999999999999999]"),
    ],
)
def test_format_hosts_joins_consecutive_numbers(hosts: list[str], text: str) -> None:
    assert format_hosts(hosts) == text


def test_format_nodes_uses_singular_and_plural() -> None:
    assert [format_nodes(0), format_nodes(1), format_nodes(2, "idle")] == ["0 nodes", "1 node", "2 idle nodes"]
    assert [format_idle(1), format_idle(2)] == ["1 is idle", "2 are idle"]


def test_suggest_names_lists_known_names() -> None:
    assert suggest_names("nroth", ["south", "north"]) == "did you mean north? known: north, south"
    assert suggest_names("x", []) == "known: none"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exited with 3"),
        (137, "was killed by signal 9 (SIGKILL)"),
        (143, "was killed by signal 15 (SIGTERM)"),
        (128, "exited with 128"),
        (160, "exited with 160"),
        (162, "exited with 162"),
        (255, "exited with 255"),
    ],
)
def test_describe_exit_names_standard_signals(code: int, text: str) -> None:
    assert describe_exit(code) == text


@pytest.mark.parametrize("text", ["=1+1", "+1", "-2+3", "@SUM(1)", "\t=1", "\n=1", "\uff1d1+1", "\uff20SUM(1)"])
def test_escape_formula_quotes_what_spreadsheets_run(text: str) -> None:
    assert escape_formula(text) == f"'{text}"
    assert escape_formula(f"a{text}") == f"a{text}"
