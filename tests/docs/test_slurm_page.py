"""The rows of docs/coming-from-slurm.md are complete; the testbed runs them in both forms."""

from tests.docs.slurm_page import DATA, ROWS, find_commands


def test_every_row_is_compared_on_the_testbed_or_has_a_reason() -> None:
    assert sorted(find_commands()) == sorted([*ROWS, *DATA["not_compared"]])
