"""Dependencies between jobs: their texts, and what follows from the ends of jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.dependency import (
    MAX_NUMBER,
    Dependency,
    End,
    EndCondition,
    Resolution,
    ResultInput,
    describe_clauses,
    format_clause,
    parse_clause,
    parse_result_input,
    resolve_ends,
    with_dependencies,
)

dependencies = st.builds(Dependency, st.integers(1, MAX_NUMBER), st.sampled_from(EndCondition))
few_jobs = st.builds(Dependency, st.integers(1, 4), st.sampled_from(EndCondition))
clauses = st.lists(st.lists(few_jobs, min_size=1, max_size=3, unique=True).map(tuple), max_size=4).map(tuple)


@given(st.lists(dependencies, min_size=1, max_size=4, unique=True).map(tuple))
def test_parse_clause_inverts_format_clause(clause: tuple[Dependency, ...]) -> None:
    assert parse_clause(format_clause(clause)) == clause


@pytest.mark.parametrize(
    "text",
    ["", "?", "7?", "0", "-7", "7:", "7:OK", "7:done", "7,8", "afterok:7", "7:ok:8", "9" * 20, "7.5", "٧", "7[3]"],
)
def test_parse_clause_rejects_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match="is not JOB or JOB:ok"):
        parse_clause(text)


@given(clauses, st.permutations([1, 2, 3, 4]), st.lists(st.booleans(), min_size=4, max_size=4))
def test_resolved_clauses_agree_with_evaluation_of_all_ends(
    all_clauses: tuple[tuple[Dependency, ...], ...], order: list[int], successes: list[bool]
) -> None:
    ended: dict[int, bool] = {}
    remaining, failure = all_clauses, ""
    for job, succeeded in zip(order, successes, strict=True):
        ended[job] = succeeded
        remaining, failure, _ = resolve_ends(remaining, {job: End("ended", succeeded)})
        can_hold = [
            any(d.job not in ended or d.condition.holds_after(succeeded=ended[d.job]) for d in clause)
            for clause in all_clauses
        ]
        assert bool(failure) == (not all(can_hold))
        if failure:
            return
        assert all(d.job not in ended for clause in remaining for d in clause)
    assert not remaining


@given(clauses, st.dictionaries(st.integers(1, 4), st.sampled_from([True, False, None])))
def test_resolve_ends_of_all_jobs_equals_ends_one_after_another(
    all_clauses: tuple[tuple[Dependency, ...], ...], successes: dict[int, bool | None]
) -> None:
    ends = {job: End("ended", succeeded) for job, succeeded in successes.items()}
    expected = Resolution(all_clauses)
    for job, end in ends.items():
        if not expected.failure:
            expected = resolve_ends(expected.remaining, {job: end})
    resolution = resolve_ends(all_clauses, ends)
    assert bool(resolution.failure) == bool(expected.failure)
    if resolution.failure:
        assert resolution.failed_job in ends
    else:
        assert resolution.remaining == expected.remaining


def test_describe_clauses_names_alternatives_and_all_entries() -> None:
    text = describe_clauses(map(parse_clause, ("7", "8:any?9:failed")))
    assert text == "job 7 to succeed, and either job 8 to end or job 9 to fail"


paths = st.text("ab/.*[]= é", min_size=1, max_size=8)
names = st.text("ab.=[]", max_size=8)
numbers = st.none() | st.integers(0, 99_999)


@given(st.builds(ResultInput, st.integers(1, 2**63 - 1), paths, numbers, numbers, names))
def test_parse_result_input_inverts_str(result: ResultInput) -> None:
    assert parse_result_input(str(result)) == result


@pytest.mark.parametrize(
    ("text", "name"), [("7:out.csv", "out.csv"), ("7:a/b/", "b"), ("7[3].0:x:as=y.csv", "y.csv"), ("7:a:b", "a:b")]
)
def test_file_name_is_the_given_name_or_the_last_part_of_the_path(text: str, name: str) -> None:
    assert parse_result_input(text).file_name == name


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "7:", "out.csv", ":out", "0:out", "-7:out", "7[]:out", "7[1-3]:out", "7.x:out", "٧:out"),
        *("7:a\nb", "7:\0", f"{2**63}:out", "7:" + "x" * 4097, "7:a:as=" + "x" * 201),
    ],
)
def test_parse_result_input_rejects_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not JOB:FILE|too long"):
        parse_result_input(text)


@pytest.mark.parametrize(
    ("clauses", "inputs", "expected"),
    [
        ([], ["7:a"], "job 7 to succeed"),
        ([], ["7:a", "7:b", "8[2]:c"], "job 7 to succeed, and job 8 to succeed"),
        (["7:any"], ["7:a"], "job 7 to end"),
        (["9"], ["7:a"], "job 9 to succeed, and job 7 to succeed"),
        (["7?8"], ["7:a"], "either job 7 to succeed or job 8 to succeed, and job 7 to succeed"),
    ],
)
def test_job_waits_for_the_jobs_of_its_inputs(clauses: list[str], inputs: list[str], expected: str) -> None:
    complete = with_dependencies(tuple(map(parse_clause, clauses)), tuple(map(parse_result_input, inputs)))
    assert describe_clauses(complete) == expected
