"""Searches for jobs: matches, errors with hints, and privacy."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.api.job_views import redact_job
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.model.errors import UsageError
from koalapy.model.job import FINAL_STATES, Attempt, Component, Job, JobState
from koalapy.model.job_search import KINDS, MAX_WORDS, STATE_GROUPS, format_term, parse_search
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest

NOW = 100_000.0
FIXED = FixedRequest((ComponentRequest(4, "north"), ComponentRequest(8, "south")))
JOBS = [
    Job(1, JobSpec(FlexibleRequest(64), ("wave",), "worst-fit", owner="alice", name="wave 1"), NOW - 7200),
    Job(
        2,
        JobSpec(FIXED, ("prime",), "fixed", owner="bob", priority=Priority.HIGH, home_site="north"),
        NOW - 60,
        JobState.HELD,
    ),
    Job(
        3,
        JobSpec(FlexibleRequest(2), ("python", "wave.py"), owner="alice", name="a,b"),
        NOW - 10,
        JobState.RUNNING,
        generation=1,
        restarts=2,
        attempt=Attempt(1, (Component(0, "east", 2),), NOW - 5),
    ),
    Job(
        4,
        JobSpec(FlexibleRequest(2), ("wave",), owner="carol", name="[x]"),
        NOW - 95_000,
        JobState.FAILED,
        ended_at=NOW - 90_000,
    ),
]


def matching_ids(text: str, *, include_private: bool = True) -> list[int]:
    search = parse_search(text)
    return [job.id for job in JOBS if search.matches(job, NOW, include_private=include_private)]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", [1, 2, 3]),
        ("user:alice", [1, 3]),
        ("user:alice state:waiting", [1]),
        ("user:alice,carol state:any", [1, 3, 4]),
        ("-user:alice", [2]),
        ("size>32", [1]),
        ("size<=12 size>2", [2]),
        ("size:2", [3]),
        ("age>1h", [1]),
        ("age<90s", [2, 3]),
        ("ended>1d", [4]),
        ("ended<1d", []),
        ("ended>1d state:waiting,failed", [4]),
        ("-ended>1d", [1, 2, 3]),
        ("ended:1970-01-01", [4]),
        ("ended:2000-01-01,1970-01-*", [4]),
        ("ended:2000-01-01", []),
        ("cluster:north", [2]),
        ("cluster:east", [3]),
        ("priority:HIGH", [2]),
        ("home:north", [2]),
        ("state:held,running", [2, 3]),
        ("state:over", [4]),
        ("-state:held", [1, 3, 4]),
        ("state:active", [3]),
        ("restarts>0", [3]),
        ("Wave", [1, 3]),
        ("any:*WAVE*,bob", [1, 2, 3]),
        ("-alice", [2]),
        ('name:"wave 1"', [1]),
        ('name:"a,b"', [3]),
        ('name:"wave*"', []),
        ('name:"wave"*', [1]),
        ("name:wave*", [1]),
        ("name:[x] state:any", [4]),
        ("name:[x* state:any", [4]),
        ("name:?x? state:any", []),
        ("app:prime", [2]),
        ("policy:worst*", [1]),
        ("2", [2]),
        ("id:1,3", [1, 3]),
        ("id>=2", [2, 3]),
        ("  USER:alice   size=64 ", [1]),
    ],
)
def test_search_finds_matching_jobs(text: str, ids: list[int]) -> None:
    assert matching_ids(text) == ids


@pytest.mark.parametrize(
    ("text", "says", "way_out"),
    [
        ("wa/ve", "wa/ve is not a word of a filter", "name:wa/ve"),
        ("usr:alice", "there is no usr in filters", "did you mean user?"),
        ("state:waitng", "there is no state waitng", "did you mean waiting?"),
        ("priority:urgent", "there is no priority urgent", "known: high, low"),
        ("size>big", "big in size>big is not a number", "size>32"),
        ("size>1h", "1h in size>1h is not a number", "give a number"),
        ("age>1y", "1y in age>1y is not a number", "2h, 1d"),
        ("ended:2026-02-30", "2026-02-30 in ended:2026-02-30 is not a day", "ended>2d"),
        ("ended:today", "is not a day", "ended:2026-11-24"),
        ("ended>2026-11-24", "is not a number", "ended>2d"),
        ("user>alice", "user cannot be compared with >", "user:alice"),
        ("size>1,2", "size is compared with 1, 2", "compare it with one"),
        ("user:", "user: has no value", "user:alice"),
        ("user:a,,b", "user:a,,b has no value", "user:alice"),
        ('name:"my', "quotation mark too many", 'name:"my job"'),
        ("a:b " * (MAX_WORDS + 1), f"has {MAX_WORDS + 1} words", f"at most {MAX_WORDS}"),
        ("x" * 1001, "1001 characters", "at most 1000"),
        ("user:a\x1b", "cannot be seen", "leave them out"),
    ],
)
def test_search_with_invalid_term_is_rejected_with_hint(text: str, says: str, way_out: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_search(text)
    assert says in error.value.message
    assert way_out in error.value.hint
    assert error.value.field == "q"


visible = st.text(st.one_of(st.sampled_from('*,":- ab'), st.characters(categories=("L", "N", "P", "S"))), min_size=1)


@given(visible.map(str.strip).filter(bool))
@example("bob,alice")
@example("*")
@example('"')
@example('a" user:"alice')
def test_format_term_matches_only_its_value(name: str) -> None:
    search = parse_search(f"{format_term('user', name)} state:any")
    job = replace(JOBS[0], spec=replace(JOBS[0].spec, owner=name))
    other_jobs = [other_job for other_job in JOBS if other_job.spec.owner != name]
    assert search.matches(job, NOW)
    assert search.single_value("user") == name
    assert not any(search.matches(other_job, NOW) for other_job in other_jobs)


values = st.sampled_from(
    ["alice", "bob", "*", "a*", "wave*", "north", "high", "1", "2", "64", "1h", "held", "any", '"', ""]
)
terms = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "-"]),
    st.sampled_from([*KINDS, "nothing"]),
    st.sampled_from([":", "=", "<", ">", "<=", ">="]),
    st.lists(values, min_size=1, max_size=3).map(",".join),
)
searches = st.one_of(st.lists(terms, max_size=4).map(" ".join), st.text(max_size=80))


@given(searches)
def test_search_of_any_text_reveals_no_private_fields(text: str) -> None:
    try:
        search = parse_search(text)
    except UsageError as error:
        rejection = error
    else:
        rejection = None
    if rejection is not None:
        assert rejection.message
        assert rejection.hint
        return
    assert parse_search(search.text).states == search.states
    for job in JOBS:
        redacted = redact_job(JobRecord(job, "a secret")).job
        is_public_match = search.matches(job, NOW, include_private=False)
        assert is_public_match == search.matches(redacted, NOW, include_private=False)
        if not is_public_match:
            continue
        # Private fields must not affect the match.
        secret = replace(job, restarts=7, spec=replace(job.spec, owner="x", name="y", policy="z", application="q"))
        assert search.matches(secret, NOW, include_private=False)


def test_search_state_groups_cover_all_states() -> None:
    assert {state for group in STATE_GROUPS.values() for state in group} == set(JobState)
    assert not parse_search("").states & FINAL_STATES


def test_search_with_long_pattern_ends_quickly() -> None:
    search = parse_search("name:" + "*a" * 200)
    assert not search.matches(replace(JOBS[0], spec=replace(JOBS[0].spec, name="a" * 190 + "b")), NOW)


@pytest.mark.parametrize(
    ("text", "minimum", "maximum"),
    [
        ("restarts>0", 1, None),
        ("restarts>=3", 3, None),
        ("restarts>2.5", 3, None),
        ("restarts>=2.5", 3, None),
        ("restarts:4", 4, 4),
        ("restarts>1 restarts>=5", 5, None),
        ("restarts<3", 0, 2),
        ("restarts<=3 restarts<5", 0, 3),
        ("restarts<2.5", 0, 2),
        ("restarts>3", 4, None),
        ("-restarts>3", 0, None),
        ("-restarts<3", 0, None),
        ("restarts:2,3", 0, None),
        ("size>3", 0, None),
        ("", 0, None),
    ],
)
def test_search_bounds_hold_for_all_matches(text: str, minimum: int, maximum: int | None) -> None:
    search = parse_search(text)
    assert (search.minimum("restarts"), search.maximum("restarts")) == (minimum, maximum)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("id:12", (12,)),
        ("state:over id:12,13", (12, 13)),
        ("id:north", ()),
        (f"id:{'9' * 30}", ()),
        ("id:1*", None),
        ("-id:12", None),
        ("id>12", None),
        ("", None),
    ],
)
def test_search_ids_are_the_only_possible_matches(text: str, ids: tuple[int, ...] | None) -> None:
    assert parse_search(text).ids == ids
