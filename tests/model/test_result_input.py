"""Results of jobs as inputs: their texts, and the dependencies that follow from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.dependency import describe_clauses, parse_clause
from koalapy.model.result_input import ResultInput, parse_result_input, with_dependencies

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
