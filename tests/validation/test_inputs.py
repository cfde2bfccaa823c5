"""Resolution of inputs by the replica catalogue."""

from dataclasses import replace
from typing import Any

import pytest

from koalapy.model.errors import UsageError
from koalapy.model.job_spec import JobSpec
from koalapy.model.replica import Catalogue, Part, Replica, ReplicaState
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.validation.inputs import near_names, resolve_inputs

MESH = Replica("climate/mesh.nc", "north", "/data/mesh.nc", 200, "c0ffee")
FIELDS = Replica("fields", "north", "/data/fields", 30, "f1e1d5", (Part("a", 10, "aa"), Part("b", 20, "bb")))
GONE = replace(MESH, name="gone", state=ReplicaState.MISSING, reason="/data/gone is not there")
CATALOGUE = Catalogue(
    (
        MESH,
        replace(MESH, cluster="south"),
        replace(MESH, cluster="west", state=ReplicaState.CHANGED),
        FIELDS,
        GONE,
        replace(GONE, cluster="south", state=ReplicaState.CHANGED, reason=""),
        replace(MESH, name="old/mesh.nc"),
    )
)
TWO = NonFixedRequest((ComponentRequest(1), ComponentRequest(2)))
SIX = FlexibleRequest(6)


def resolve_spec(request: Request, *inputs: InputFile, **options: Any) -> JobSpec:
    return resolve_inputs(JobSpec(request, ("true",), inputs=inputs, **options), CATALOGUE)


def components_with(*inputs: InputFile) -> NonFixedRequest:
    return NonFixedRequest((ComponentRequest(1), ComponentRequest(1, inputs=inputs)))


def test_job_input_is_given_to_each_component() -> None:
    spec = resolve_spec(TWO, InputFile("climate/mesh.nc"))
    assert spec.inputs == ()
    mesh = InputFile("climate/mesh.nc", 200, ("north", "south"))
    assert [c.inputs for c in spec.request.components] == [(mesh,), (mesh,)]  # type: ignore[union-attr]
    assert spec.inputs_of(0)[0].file_name == "mesh.nc"


def test_job_input_of_flexible_request_stays_with_job() -> None:
    spec = resolve_spec(SIX, InputFile("climate/mesh.nc", target="mesh"))
    assert spec.inputs == (InputFile("climate/mesh.nc", 200, ("north", "south"), target="mesh"),)


def test_partitioned_input_gives_each_component_its_part() -> None:
    request = FixedRequest((ComponentRequest(1, "a"), ComponentRequest(1, "b")))
    spec = resolve_spec(request, InputFile("fields", distribution="partitioned"))
    first, second = (spec.inputs_of(index)[0] for index in (0, 1))
    assert (first.part, first.size, first.file_name, first.sites) == ("a", 10, "fields", ("north",))
    assert (second.part, second.size, second.file_name) == ("b", 20, "fields")
    again = resolve_inputs(spec, CATALOGUE)
    assert again == spec, "what is resolved stays as it is"


def test_component_inputs_are_added_to_job_inputs() -> None:
    request = components_with(InputFile("fields", part="b", target="mine"))
    spec = resolve_spec(request, InputFile("climate/mesh.nc"))
    assert [file.file_name for file in spec.inputs_of(0)] == ["mesh.nc"]
    assert [(file.file_name, file.size) for file in spec.inputs_of(1)] == [("mesh.nc", 200), ("mine", 20)]


PARTITIONED = InputFile("fields", distribution="partitioned")
THREE = NonFixedRequest((ComponentRequest(1),) * 3)


@pytest.mark.parametrize(
    ("spec", "field", "message", "hint"),
    [
        (
            JobSpec(TWO, (), inputs=(InputFile("climate/mash.nc"),)),
            "inputs[0].file",
            "inputs[0].file is climate/mash.nc, which the replica catalogue does not know",
            "did you mean climate/mesh.nc?",
        ),
        (JobSpec(SIX, (), inputs=(InputFile("x"),)), "inputs[0].file", "does not know", "koala replicas add"),
        (
            JobSpec(TWO, (), inputs=(InputFile("gone"),)),
            "inputs[0].file",
            "no replica is good: north is missing (/data/gone is not there), south is changed",
            "koala replicas verify gone",
        ),
        (JobSpec(SIX, (), inputs=(PARTITIONED,)), "inputs[0].distribution", "the request is flexible", "nonfixed"),
        (
            JobSpec(THREE, (), inputs=(PARTITIONED,)),
            "inputs[0]",
            "inputs[0] is fields, a folder of 2 entries, but the request has 3 components",
            "make a folder with 3",
        ),
        (JobSpec(TWO, (), inputs=(replace(PARTITIONED, name="climate/mesh.nc"),)), "inputs[0]", "is a file", "folder"),
        (
            JobSpec(SIX, (), inputs=(InputFile("climate/mesh.nc"), InputFile("old/mesh.nc"))),
            "inputs[1].as",
            "would make old/mesh.nc mesh.nc in the component's folder, as climate/mesh.nc is",
            "another name",
        ),
        (
            JobSpec(components_with(InputFile("old/mesh.nc")), (), inputs=(InputFile("climate/mesh.nc"),)),
            "request.components[1].inputs[0].as",
            "as climate/mesh.nc is",
            "another name",
        ),
        (
            JobSpec(components_with(InputFile("fields", part="c")), ()),
            "request.components[1].inputs[0].part",
            "no such entry",
            "known: a, b",
        ),
        (
            JobSpec(components_with(InputFile("climate/mesh.nc", part="c")), ()),
            "request.components[1].inputs[0].part",
            "climate/mesh.nc is a file",
            "leave it out",
        ),
        (JobSpec(components_with(InputFile("x")), ()), "request.components[1].inputs[0].file", "does not know", "add"),
    ],
)
def test_input_missing_in_catalogue_is_rejected(spec: JobSpec, field: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve_inputs(spec, CATALOGUE)
    assert refused.value.field == field
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_message_with_many_entries_lists_only_some() -> None:
    large = replace(FIELDS, parts=tuple(Part(f"part-{n}", 1, "aa") for n in range(50_000)))
    with pytest.raises(UsageError) as refused:
        resolve_inputs(JobSpec(components_with(InputFile("fields", part="x")), ()), Catalogue((large,)))
    assert refused.value.hint == "its 50000 entries are part-0, part-1, part-2, part-3 and 49996 more"


def test_message_with_many_names_lists_only_the_nearest() -> None:
    names = [f"climate/{n}/mesh.nc" for n in range(50_000)] + [f"climate/{n}/mass.nc" for n in range(50_000)]
    hint = near_names("climates/77/mesh.nc", names)
    assert hint.startswith("did you mean climate/")
    assert hint.endswith("koala replicas list shows all 100000")


@pytest.mark.parametrize("name", [".", "..", "a/b", "a\nb", "a\0", "x" * 256, "é" * 128])
def test_input_without_plain_name_is_rejected(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve_spec(SIX, InputFile("climate/mesh.nc", target=name))
    assert refused.value.field == "inputs[0].as"


@pytest.mark.parametrize("name", ["-rf", "two words", "été", "...", "x" * 255])
def test_input_with_unusual_plain_name_is_accepted(name: str) -> None:
    assert resolve_spec(SIX, InputFile("climate/mesh.nc", target=name)).inputs[0].file_name == name
