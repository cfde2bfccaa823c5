"""Hashes of submissions."""

from dataclasses import dataclass, field, fields, make_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import (
    Bundle,
    ComponentRequest,
    FixedRequest,
    FlexibleRequest,
    InputFile,
    NonFixedRequest,
    Request,
)
from koalapy.validation.submission import hash_spec

SPEC = JobSpec(FlexibleRequest(6, max_components=2), ("python", "-m", "wave"), name="wave", environment=(("A", "1"),))
OF_SPEC = "e6a60ca8cab258bc72681868aa3d20100abaeba19c1c2714f5c3a6d341ce2c96"
component = st.builds(ComponentRequest, size=st.integers(1, 3), output=st.sampled_from([None, "o"]))
components = st.lists(component, min_size=1, max_size=2).map(tuple)
requests = st.one_of(
    st.builds(FlexibleRequest, total_size=st.integers(1, 3)),
    st.builds(FixedRequest, components),
    st.builds(NonFixedRequest, components),
)
specs = st.builds(
    JobSpec,
    requests,
    st.lists(st.sampled_from(["a", "b", "\udcff"]), max_size=2).map(tuple),
    priority=st.sampled_from(Priority),
    walltime=st.sampled_from([None, 1.0, 2.0]),
    retry_on_exit=st.sampled_from([(), (1,)]),
    bundle=st.sampled_from([None, Bundle("b", 0, 0)]),
    inputs=st.sampled_from([(), (InputFile("f"),), (InputFile("f", target="g"),)]),
)


@given(specs, specs)
def test_hash_spec_of_different_specs_differs(first: JobSpec, second: JobSpec) -> None:
    assert (hash_spec(first) == hash_spec(second)) == (first == second)


def test_hash_spec_stays_the_same_over_versions() -> None:
    """Databases contain these hashes: a changed hash would reject idempotency keys that are reused after an upgrade."""
    assert hash_spec(SPEC) == OF_SPEC


@pytest.mark.parametrize("grown", [False, True], ids=["job", "request"])
def test_hash_spec_ignores_defaults_of_later_fields(grown: bool) -> None:
    @dataclass(frozen=True, slots=True)
    class LaterRequest(FlexibleRequest):
        burst: float | None = None

    request: Request = LaterRequest(6, max_components=2) if grown else SPEC.request
    later = make_dataclass("Later", [("urgency", int, field(default=3))], bases=(JobSpec,), frozen=True, slots=True)
    same = later(**{field.name: getattr(SPEC, field.name) for field in fields(SPEC)} | {"request": request})
    assert hash_spec(same) == OF_SPEC
    assert hash_spec(replace(same, urgency=4)) != OF_SPEC
