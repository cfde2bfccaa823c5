"""What the auditor finds in the evidence of real jobs: nothing, also if the daemon was killed at any step."""

from collections.abc import Callable

import pytest

from tests.grid.embedded import EmbeddedGrid, list_violations

pytestmark = pytest.mark.processes

BOTH = {"type": "fixed", "components": [{"size": 1, "cluster": "north"}, {"size": 2, "cluster": "south"}]}


def test_record_that_stops_at_any_step_is_no_violation(make_grid: Callable[..., EmbeddedGrid]) -> None:
    """A killed daemon may have stored all of its jobs, and have written any beginning of its record."""
    grid = make_grid()
    programs = [f"echo {number}; exit {number % 3}" for number in range(12)]
    idents = [grid.submit(BOTH, "sh", "-c", program) for program in programs]
    one_ends = '[ "$KOALA_COMPONENT" = 0 ] || exec sleep 100'
    idents.append(grid.submit(BOTH, "sh", "-c", one_ends, walltime=2))
    ends = [grid.wait_for_end(ident) for ident in idents]
    assert [job["exit_code"] for job in ends] == [*[number % 3 for number in range(12)], None]
    assert grid.stop_daemon() == 0
    (record,) = (grid.directory / "record").iterdir()
    record.with_name("9990000000000-000001.jsonl").write_text('{"at": 9990000000.0}\n')  # that of the next daemon
    lines = record.read_bytes().splitlines(keepends=True)
    violations = {}
    for count in range(len(lines) + 1):
        record.write_bytes(b"".join(lines[:count]))
        violations[count] = list_violations(grid)
    assert not any(violations.values()), violations
