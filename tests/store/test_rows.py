"""Specs survive the way into the database and back."""

import json

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import ClaimingMode, JobSpec, Launcher, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.store.rows import spec_from_json, spec_to_json

words = st.text(max_size=8)
environments = st.lists(st.tuples(words, words), max_size=3).map(tuple)
commands = st.lists(words, max_size=3).map(tuple)
sizes = st.integers(1, 100)
fractions = st.none() | st.floats(0, 1)
files = st.builds(InputFile, name=words, size=st.integers(0, 2**50), sites=st.lists(words, max_size=3).map(tuple))


def components(clusters: st.SearchStrategy[str | None]) -> st.SearchStrategy[tuple[ComponentRequest, ...]]:
    one = st.builds(
        ComponentRequest,
        size=sizes,
        cluster=clusters,
        command=st.none() | commands,
        environment=environments,
        output=st.none() | words,
        inputs=st.lists(files, max_size=2).map(tuple),
    )
    return st.lists(one, min_size=1, max_size=3).map(tuple)


requests = st.one_of(
    st.builds(FixedRequest, components(words)),
    st.builds(NonFixedRequest, components(st.none())),
    st.builds(
        FlexibleRequest,
        total_size=sizes,
        min_component_size=sizes,
        max_components=st.none() | sizes,
        split_options=st.lists(st.lists(sizes, max_size=3).map(tuple), max_size=3).map(tuple),
    ),
)
specs = st.builds(
    JobSpec,
    request=requests,
    command=commands,
    name=words,
    owner=words,
    environment=environments,
    priority=st.sampled_from(Priority),
    policy=words,
    policy_options=environments,
    coallocation=st.none() | sizes,
    speed_ratio_min=fractions,
    claiming=st.none() | st.sampled_from(ClaimingMode),
    claim_threshold=fractions,
    launcher=st.sampled_from(Launcher),
    processes_per_node=st.none() | sizes,
    workdir=st.none() | words,
    output=st.none() | words,
    walltime=st.none() | st.floats(0.5, 1e6),
    max_restarts=st.none() | sizes,
    max_placement_tries=st.none() | sizes,
    max_claiming_tries=st.none() | sizes,
    retry_on_exit=st.lists(st.integers(1, 255), max_size=3).map(tuple),
)


@given(specs)
def test_a_spec_comes_back_as_it_was(spec: JobSpec) -> None:
    back = spec_from_json(json.loads(json.dumps(spec_to_json(spec))))
    assert back == spec
    assert hash(back) == hash(spec)
    assert back.claiming is spec.claiming


def test_the_spec_of_an_older_daemon_is_read() -> None:
    """Version 0001 of the tables knew neither inputs nor policy options."""
    component = {"size": 2, "cluster": None, "command": None, "environment": [], "output": None}
    spec = spec_from_json({"request": {"type": "nonfixed", "components": [component]}, "command": ["true"]})
    assert spec == JobSpec(NonFixedRequest((ComponentRequest(2),)), ("true",))


def test_a_plain_spec_is_a_short_row() -> None:
    spec = JobSpec(FlexibleRequest(6), ("true",))
    assert set(spec_to_json(spec)) == {"request", "command"}
