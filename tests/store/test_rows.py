"""Specs survive the way into the database and back."""

import json

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobSpec, Launcher, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest
from koalapy.store.rows import spec_from_json, spec_to_json

words = st.text(max_size=8)
environments = st.lists(st.tuples(words, words), max_size=3).map(tuple)
commands = st.lists(words, max_size=3).map(tuple)
sizes = st.integers(1, 100)


def components(clusters: st.SearchStrategy[str | None]) -> st.SearchStrategy[tuple[ComponentRequest, ...]]:
    one = st.builds(
        ComponentRequest,
        size=sizes,
        cluster=clusters,
        command=st.none() | commands,
        environment=environments,
        output=st.none() | words,
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
    launcher=st.sampled_from(Launcher),
    processes_per_node=st.none() | sizes,
    workdir=st.none() | words,
    output=st.none() | words,
    walltime=st.none() | st.floats(0.5, 1e6),
    max_restarts=st.none() | sizes,
    max_placement_tries=st.none() | sizes,
)


@given(specs)
def test_a_spec_comes_back_as_it_was(spec: JobSpec) -> None:
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_plain_spec_is_a_short_row() -> None:
    spec = JobSpec(FlexibleRequest(6), ("true",))
    assert set(spec_to_json(spec)) == {"request", "command"}
