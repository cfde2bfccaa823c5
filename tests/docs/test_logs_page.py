"""Every logged action has a meaning, and the reference shows what the calls log."""

from deploy.documentation.logs_page import LEVELS, log_calls, page
from koalapy.config.logs import MAPPED_FIELDS, MEANINGS

LIBRARY_ACTION = "library"
"""The action of lines of libraries, which no call in the code names."""


def test_log_call_has_a_documented_action_and_a_level() -> None:
    assert [call.location for call in log_calls() if call.action not in MEANINGS or call.level not in LEVELS] == []


def test_log_actions_are_sorted_and_all_logged() -> None:
    assert list(MEANINGS) == sorted(MEANINGS)
    assert MEANINGS.keys() - {call.action for call in log_calls()} == {LIBRARY_ACTION}
    assert MAPPED_FIELDS.keys() <= MEANINGS.keys()


def test_logs_page_shows_process_level_fields_and_meaning() -> None:
    lines = page().splitlines()
    assert len(lines) == len(MEANINGS) + 3
    assert (
        "| `alert` | daemon | warning | `cause`, `kind`, `severity`, `target` | An alert has begun."
        " See [alerts](alerts.md). |"
    ) in lines
    assert any(line.startswith("| `disk-low` | agent, daemon | warning, error | `reason` |") for line in lines)
    assert any(line.startswith("| `agent-error` | agent | error | `error`, `traceback` |") for line in lines)
