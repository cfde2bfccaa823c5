"""Application names of programs."""

import pytest

from koalapy.model.application import application_of, printable_application_of
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("./wave --steps 4", "wave"),
        ("/opt/codes/wave", "wave"),
        ("{scratch}/wave", "wave"),
        ("python -m koalapy.apps.wave --steps 4", "koalapy.apps.wave"),
        ("python3.12 -u -m koalapy.apps.wave", "koalapy.apps.wave"),
        ("python solve.py in.nc", "solve.py"),
        ("bash run.sh", "run.sh"),
        ("sh -c wave", ""),
        ("bash -xc wave", ""),
        ("python -c pass", ""),
        ("python -", ""),
        ("python", ""),
        ("python -m", ""),
        ("perl -e 1/2", ""),
        ("julia -O3 solve.jl", "solve.jl"),
        ("bash -e run.sh", "run.sh"),
        ("env THREADS=2 ./wave", ""),
        ("/usr/bin/time -v ./wave", ""),
    ],
)
def test_application_of_command_is_program_name(command: str, name: str) -> None:
    assert application_of(JobSpec(FlexibleRequest(1), tuple(command.split()))) == name


def test_application_of_coupled_programs_joins_names() -> None:
    parts = (ComponentRequest(1, command=("ocean",)), ComponentRequest(2), ComponentRequest(2, command=("air",)))
    request = NonFixedRequest(parts)
    assert application_of(JobSpec(request, ("ocean", "--coarse"))) == "ocean+air"
    assert application_of(JobSpec(request, ("sh", "-c", "x"))) == ""
    assert application_of(JobSpec(NonFixedRequest((ComponentRequest(1, command=("air",)),)), ())) == "air"


@pytest.mark.parametrize(
    ("command", "explicit", "application", "printable"),
    [
        (("sh", "-c", "x"), "wave", "wave", "wave"),
        (("wave",), "-", "", "-"),
        (("python", "-m", "koalapy.apps.poisson"), "", "koalapy.apps.poisson", "koalapy.apps.poisson"),
        (("sh", "-c", "x"), "", "", ""),
        (("a\x1bb",), "", "a\x1bb", ""),
    ],
)
def test_explicit_application_is_preferred(
    command: tuple[str, ...], explicit: str, application: str, printable: str
) -> None:
    spec = JobSpec(FlexibleRequest(1), command, application=explicit)
    assert (application_of(spec), printable_application_of(spec)) == (application, printable)
