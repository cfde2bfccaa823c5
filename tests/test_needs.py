"""The summary of unmet needs of the machine."""

from dataclasses import replace

from tests import needs
from tests.conftest import list_unmet_needs


def test_summary_lists_each_unmet_need_once() -> None:
    missing = [replace(need, is_met=False) for need in needs.ALL]
    reasons = ["Skipped: rsync missing"] * 3 + ["Skipped: network namespaces missing: [Errno 1] setns", "odd"]
    lines = list(list_unmet_needs(reasons, missing))
    assert lines[:3] == [
        "rsync missing: 3 tests skipped; apt-get install rsync",
        "PostgreSQL missing: the store is tested with SQLite only; apt-get install postgresql",
        "PgBouncer missing: PostgreSQL is not tested behind a pooler; apt-get install postgresql pgbouncer",
    ]
    assert "network namespaces missing: 1 test skipped; run them as root, with the capability SYS_ADMIN" in lines
    assert lines[-1] == "1 skipped: odd"
    assert list(list_unmet_needs([], [replace(need, is_met=True) for need in needs.ALL])) == []
