"""The indices of arrays, and ranges of positions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.array import TaskIndices, is_selected, without_first, without_positions


@pytest.mark.parametrize(
    ("text", "form", "indices", "limit"),
    [
        ("1-4%2", "1-4%2", [1, 2, 3, 4], 2),
        ("0-10:5", "0-10:5", [0, 5, 10], None),
        ("0-11:5", "0-10:5", [0, 5, 10], None),
        (" 9, 3,7 ", "3,7,9", [3, 7, 9], None),
        ("5-5:3", "5", [5], None),
        ("2147483647", "2147483647", [2147483647], None),
        ("%3", "%3", [], 3),
    ],
)
def test_indices_are_parsed_and_written(text: str, form: str, indices: list[int], limit: int | None) -> None:
    parsed = TaskIndices.parse(text)
    assert str(parsed) == form
    assert TaskIndices.parse(form) == parsed
    assert [parsed.index_at(position) for position in range(parsed.size)] == indices
    assert parsed.limit == limit


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("%", "has '' after the %"),
        ("1-5%0", "has '0' after the %"),
        ("1-5%x", "has 'x' after the %"),
        ("a", "has the part 'a'"),
        ("1,,2", "has the part ''"),
        ("-3", "has the part '-3'"),
        ("1-", "has the part '1-'"),
        ("1.5", "has the part '1.5'"),
        ("٣", "has the part '٣'"),
        ("9-3", "ends before it begins"),
        ("1-9:0", "with the step 0"),
        ("1-5,3", "has 1-5 and 3, which overlap"),
        ("3,3", "has 3 and 3, which overlap"),
        ("2147483648", "the highest possible index is 2147483647"),
        ("9" * 5000, "which is not an index"),
    ],
)
def test_wrong_indices_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        TaskIndices.parse(text)
    assert problem in str(raised.value)
    assert len(str(raised.value)) < 200


positions = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 5)).map(lambda pair: (pair[0], sum(pair))), max_size=6
)


def as_set(ranges: object) -> set[int]:
    return {position for first, last in ranges for position in range(first, last + 1)}  # type: ignore[attr-defined]


@given(st.lists(st.integers(0, 40), unique=True), positions)
def test_removed_positions_are_those_of_sets(kept: list[int], removed: list[tuple[int, int]]) -> None:
    pending = tuple((position, position) for position in sorted(kept))
    assert as_set(without_positions(pending, removed)) == set(kept) - as_set(removed)
    whole = ((0, 40),)
    remaining = without_positions(whole, removed)
    assert as_set(remaining) == set(range(41)) - as_set(removed)
    assert list(remaining) == sorted(remaining)
    if remaining:
        assert as_set(without_first(remaining)) == as_set(remaining) - {min(as_set(remaining))}


texts = st.sampled_from(["1-20", "0-30:3", "2,5,9-14", "7", "0-8:2,10-30:5"])


@given(texts, texts)
def test_selected_positions_are_those_of_common_indices(array: str, selected: str) -> None:
    indices, wanted = TaskIndices.parse(array), TaskIndices.parse(selected)
    all_indices = [indices.index_at(position) for position in range(indices.size)]
    wanted_indices = {wanted.index_at(position) for position in range(wanted.size)}
    expected = {position for position, index in enumerate(all_indices) if index in wanted_indices}
    positions = list(indices.positions_of(wanted))
    assert as_set(positions) == expected
    assert positions == sorted(positions)
    assert {position for position in range(indices.size) if is_selected(position, positions)} == expected
    assert [indices.position_of(index) for index in all_indices] == list(range(indices.size))
