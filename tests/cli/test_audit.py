"""``koala audit-log``: who did what, as people and as log shippers read it."""

import json

from koalapy.cli.audit import _line
from koalapy.cli.errors import Exit
from tests.cli.conftest import Koala


def test_it_tells_who_did_what_and_who_was_refused(koala: Koala) -> None:
    assert koala("submit", "--flexible", "2", "--env", "SECRET=sesame", "--", "sleep", "9").code == 0
    assert koala("cancel", "1").code == 0
    assert koala("queue", "--token", "not-the-token-of-anybody").code == Exit.NOT_ALLOWED
    told = koala("audit-log")
    lines = told.out.splitlines()
    assert told.code == 0
    assert [line.split("  ")[1:] for line in lines] == [
        ["ada (admin, a token of the test)", "from 127.0.0.1", "submit_job", "done"],
        ["ada (admin, a token of the test)", "from 127.0.0.1", "cancel_jobs", "done"],
        ["somebody", "from 127.0.0.1", "GET", "/api/v1/jobs", "refused", "401 no valid token was shown"],
    ]
    assert "sesame" not in told.out
    assert "not-the-token" not in told.out


def test_it_is_filtered_and_told_as_json_lines(koala: Koala) -> None:
    for _ in range(2):
        koala("submit", "--flexible", "2", "--", "sleep", "9")
    koala("hold", "1")
    found = [
        json.loads(line)
        for line in koala("audit-log", "--json-lines", "--user", "ada", "--since", "60").out.splitlines()
    ]
    assert [(one["actor"], one["action"], one["outcome"], one["times"]) for one in found] == [
        ("ada", "submit_job", "done", 1),
        ("ada", "submit_job", "done", 1),
        ("ada", "hold_job", "done", 1),
    ]
    assert len(koala("audit-log", "--action", "hold_job").out.splitlines()) == 1
    assert koala("audit-log", "--user", "eve").out == ""


def test_what_is_shown_does_no_harm_to_a_terminal() -> None:
    entry = {"at": "2026-11-22T12:00:00.000Z", "actor": "", "role": "", "how": "", "address": "192.0.2.7"}
    entry |= {"action": "GET", "target": "/\x1b[2J\n", "outcome": "refused", "detail": "", "times": 3}
    assert _line(entry) == "2026-11-22T12:00:00.000Z  somebody  from 192.0.2.7  GET  /?[2J  refused  (3 times)"
