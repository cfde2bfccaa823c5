"""``koala audit-log``: its lines as text and as JSON, and the verification."""

import json

from koalapy.cli.daemon.record import _format_entry
from koalapy.client.errors import Exit
from tests.cli.conftest import Koala


def test_audit_log_lists_changes_and_rejected_requests(koala: Koala) -> None:
    assert koala("submit", "--flexible", "2", "--env", "SECRET=sesame", "--", "sleep", "9").code == 0
    assert koala("cancel", "1").code == 0
    assert koala("queue", "--token", "not-the-token-of-anybody").code == Exit.NOT_ALLOWED
    result = koala("audit-log")
    lines = result.out.splitlines()
    assert result.code == 0
    assert [line.split("  ")[1:] for line in lines] == [
        ["ada (admin, a token of the test)", "from 127.0.0.1", "submit_job", "done"],
        ["ada (admin, a token of the test)", "from 127.0.0.1", "cancel_jobs", "done"],
        ["unknown", "from 127.0.0.1", "GET", "/api/v1/jobs", "refused", "401 no valid token was sent"],
    ]
    assert "sesame" not in result.out
    assert "not-the-token" not in result.out


def test_audit_log_json_lines_are_filtered(koala: Koala) -> None:
    for _ in range(2):
        koala("submit", "--flexible", "2", "--", "sleep", "9")
    koala("hold", "1")
    entries = [
        json.loads(line)
        for line in koala("audit-log", "--json-lines", "--user", "ada", "--since", "60s").out.splitlines()
    ]
    assert [(entry["actor"], entry["action"], entry["outcome"], entry["times"]) for entry in entries] == [
        ("ada", "submit_job", "done", 1),
        ("ada", "submit_job", "done", 1),
        ("ada", "hold_jobs", "done", 1),
    ]
    assert len(koala("audit-log", "--action", "hold_jobs").out.splitlines()) == 1


def test_audit_log_without_matching_entries_says_so(koala: Koala) -> None:
    ended = koala("audit-log", "--user", "eve", "--action", "hold_job")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "koala: there are no entries of eve with the action hold_job since 1d\n"
    assert koala("audit-log", "--json-lines", "--since", "2d").err == ""
    for action in ("login", "impersonate-runner", "GET", "list_audit", "submit_job"):
        assert koala("audit-log", "--action", action).code == 0


def test_audit_log_is_limited_to_a_span(koala: Koala) -> None:
    koala("submit", "--flexible", "2", "--", "sleep", "9")
    assert len(koala("audit-log", "--since", "1h", "--until", "now").out.splitlines()) == 1
    ended = koala("audit-log", "--since", "2d", "--until", "1d")
    assert (ended.out, ended.err) == ("", "koala: there are no entries since 2d and before 1d\n")
    assert koala("audit-log", "--since", "2026-01-01", "--until", "yesterday").code == 0


def test_audit_log_entry_has_no_control_codes() -> None:
    entry = {"at": "2026-11-22T12:00:00.000Z", "actor": "", "role": "", "how": "", "address": "192.0.2.7"}
    entry |= {"action": "GET", "target": "/\x1b[2J\n", "outcome": "refused", "detail": "", "times": 3}
    assert _format_entry(entry) == "2026-11-22T12:00:00.000Z  unknown  from 192.0.2.7  GET  /?[2J  refused  (3 times)"


def test_audit_log_verify_of_untouched_audit_prints_its_last_entry(koala: Koala) -> None:
    empty = koala("audit-log", "--verify")
    assert (empty.code, empty.out) == (0, "0 entries are as they were written\n")
    koala("submit", "--flexible", "2", "--", "sleep", "9")
    first = koala("audit-log", "--verify")
    assert first.out.startswith("1 entry is as it was written; the last is 1:")
    head = first.out.split()[-1]
    koala("hold", "1")
    assert koala("audit-log", "--verify", "--known-head", head).out.startswith("2 entries are as they were written")


def test_audit_log_verify_with_changed_entry_exits_with_1(koala: Koala) -> None:
    koala("submit", "--flexible", "2", "--", "sleep", "9")
    broken = koala("audit-log", "--verify", "--known-head", f"1:{'0' * 64}")
    assert (broken.code, broken.out) == (Exit.FAILED, "")
    assert "entry 1 does not have the hash that the daemon noted" in broken.err
    koala("hold", "1")
    broken = koala("audit-log", "--verify", "--known-head", f"1:{'0' * 64}")
    assert (broken.code, broken.out) == (Exit.FAILED, "")
    assert "the audit log was altered: entry 2 is not as it was written" in broken.err
    removed = koala("audit-log", "--verify", "--known-head", f"9:{'0' * 64}")
    assert "entries after 2 were removed: entry 9 was written" in removed.err
