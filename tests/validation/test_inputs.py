"""What a submission's inputs mean by the replica catalogue."""

from dataclasses import replace
from typing import Any

import pytest

from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec
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


def filled(request: Request, *inputs: InputFile, **more: Any) -> JobSpec:
    return resolve_inputs(JobSpec(request, ("true",), inputs=inputs, **more), CATALOGUE)


def own(*inputs: InputFile) -> NonFixedRequest:
    return NonFixedRequest((ComponentRequest(1), ComponentRequest(1, inputs=inputs)))


def test_an_input_of_the_whole_job_becomes_one_of_each_component() -> None:
    spec = filled(TWO, InputFile("climate/mesh.nc"))
    assert spec.inputs == ()
    mesh = InputFile("climate/mesh.nc", 200, ("north", "south"))
    assert [c.inputs for c in spec.request.components] == [(mesh,), (mesh,)]  # type: ignore[union-attr]
    assert spec.inputs_of(0)[0].file_name == "mesh.nc"


def test_of_a_flexible_request_it_stays_one_of_the_job() -> None:
    spec = filled(SIX, InputFile("climate/mesh.nc", target="mesh"))
    assert spec.inputs == (InputFile("climate/mesh.nc", 200, ("north", "south"), target="mesh"),)


def test_of_a_partitioned_one_each_component_gets_its_part() -> None:
    request = FixedRequest((ComponentRequest(1, "a"), ComponentRequest(1, "b")))
    spec = filled(request, InputFile("fields", distribution="partitioned"))
    first, second = (spec.inputs_of(index)[0] for index in (0, 1))
    assert (first.part, first.size, first.file_name, first.sites) == ("a", 10, "fields", ("north",))
    assert (second.part, second.size, second.file_name) == ("b", 20, "fields")
    again = resolve_inputs(spec, CATALOGUE)
    assert again == spec, "what is resolved stays as it is"


def test_a_component_may_have_inputs_of_its_own_besides() -> None:
    request = own(InputFile("fields", part="b", target="mine"))
    spec = filled(request, InputFile("climate/mesh.nc"))
    assert [file.file_name for file in spec.inputs_of(0)] == ["mesh.nc"]
    assert [(file.file_name, file.size) for file in spec.inputs_of(1)] == [("mesh.nc", 200), ("mine", 20)]


PARTITIONED = InputFile("fields", distribution="partitioned")
THREE = NonFixedRequest((ComponentRequest(1),) * 3)


@pytest.mark.parametrize(
    ("spec", "field", "said", "hint"),
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
            JobSpec(own(InputFile("old/mesh.nc")), (), inputs=(InputFile("climate/mesh.nc"),)),
            "request.components[1].inputs[0].as",
            "as climate/mesh.nc is",
            "another name",
        ),
        (
            JobSpec(own(InputFile("fields", part="c")), ()),
            "request.components[1].inputs[0].part",
            "no such entry",
            "known: a, b",
        ),
        (
            JobSpec(own(InputFile("climate/mesh.nc", part="c")), ()),
            "request.components[1].inputs[0].part",
            "climate/mesh.nc is a file",
            "leave it out",
        ),
        (JobSpec(own(InputFile("x")), ()), "request.components[1].inputs[0].file", "does not know", "add"),
    ],
)
def test_what_the_catalogue_cannot_give_is_refused(spec: JobSpec, field: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve_inputs(spec, CATALOGUE)
    assert refused.value.field == field
    assert said in refused.value.message
    assert hint in refused.value.hint


def test_of_very_many_entries_only_some_are_told() -> None:
    large = replace(FIELDS, parts=tuple(Part(f"part-{n}", 1, "aa") for n in range(50_000)))
    with pytest.raises(UsageError) as refused:
        resolve_inputs(JobSpec(own(InputFile("fields", part="x")), ()), Catalogue((large,)))
    assert refused.value.hint == "its 50000 entries are part-0, part-1, part-2, part-3 and 49996 more"


def test_of_very_many_names_only_the_nearest_is_told() -> None:
    names = [f"climate/{n}/mesh.nc" for n in range(50_000)] + [f"climate/{n}/mass.nc" for n in range(50_000)]
    hint = near_names("climates/77/mesh.nc", names)
    assert hint.startswith("did you mean climate/")
    assert hint.endswith("koala replicas list shows all 100000")


@pytest.mark.parametrize("name", [".", "..", "a/b", "a\nb", "a\0", "x" * 256, "é" * 128])
def test_an_input_is_called_by_a_plain_name(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        filled(SIX, InputFile("climate/mesh.nc", target=name))
    assert refused.value.field == "inputs[0].as"


@pytest.mark.parametrize("name", ["-rf", "two words", "été", "...", "x" * 255])
def test_strange_plain_names_are_names(name: str) -> None:
    assert filled(SIX, InputFile("climate/mesh.nc", target=name)).inputs[0].file_name == name
