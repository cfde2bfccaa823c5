"""Every event that is logged stands on the page of logs, as it is logged, and none besides."""

import re
from collections import defaultdict
from pathlib import Path

from tests.docs.log_events import LEVELS, lines

PAGE = Path(__file__).parents[2] / "docs" / "logs.md"
ROW = re.compile(
    r"^\| `(?P<action>[a-z-]+)` \| (?P<by>[a-z, ]+) \| (?P<level>[a-z, ]+) \| (?P<fields>.+?) \| (?P<says>.+) \|$"
)
OF_LIBRARIES = "library"
"""Lines that no call of ours makes."""


def told() -> dict[str, re.Match[str]]:
    found = [match for line in PAGE.read_text().splitlines() if (match := ROW.match(line))]
    names = [match["action"] for match in found]
    assert names == sorted(set(names))
    return {match["action"]: match for match in found}


def test_every_line_names_an_event_that_is_documented() -> None:
    known = told()
    assert [line.where for line in lines() if line.action not in known] == []
    assert known.keys() - {line.action for line in lines()} == {OF_LIBRARIES}


def test_the_page_says_whose_they_are_what_they_weigh_and_what_is_in_them() -> None:
    by, level, fields = defaultdict(set), defaultdict(set), defaultdict(set)
    for line in lines():
        by[line.action].add(line.by)
        level[line.action].add(line.level)
        fields[line.action] |= line.fields
    for action, row in told().items():
        if action == OF_LIBRARIES:
            continue
        assert row["by"] == ", ".join(sorted(by[action])), action
        assert row["level"] == ", ".join(sorted(level[action], key=LEVELS.index)), action
        assert fields[action] <= set(re.findall(r"`(\w+)`", row["fields"])), action
