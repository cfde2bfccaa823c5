"""Scripts of jobs in submissions by any client."""

from dataclasses import replace

import pytest

from koalapy.model.job_spec import Launcher
from koalapy.model.request import ComponentRequest, FixedRequest
from tests.validation.submissions import GRID, check_spec, make_spec, one_component, rejection_of

SCRIPT = "#!/bin/sh\ntrue\n"


def test_script_with_name_and_arguments_is_accepted() -> None:
    check_spec(make_spec(one_component(), ("job.sh", "a"), script=SCRIPT), GRID)
    check_spec(make_spec(one_component(), ("job.sh",), script="#! /usr/bin/env -S python -u\n"), GRID)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("true\n", "does not begin with #!"),
        ("#! \n", "does not begin with #!"),
        ("#!sh\n", "without its path"),
        ("#!/bin/sh  # run", "a comment in its first line"),
        ("#!/bin/sh\r\ntrue\r\n", "Windows line ends"),
        ("#!/bin/sh\r", "Windows line ends"),
        ("#!/bin/sh\n\0", "is a program"),
        ("#!/bin/sh\n" + "é" * 2**19, "more than 1048576"),
    ],
)
def test_script_that_cannot_run_is_rejected(script: str, problem: str) -> None:
    refused = rejection_of(make_spec(one_component(), ("job.sh",), script=script))
    assert refused.field == "script"
    assert problem in refused.message
    assert refused.hint


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"command": ()}, "command"),
        ({"launcher": Launcher.PROCESSES}, "launcher"),
        ({"interactive": True}, "interactive"),
        ({"request": one_component(command=("own",))}, "request.components[0].command"),
        ({"environment": (("KOALA_MPIRUN", "x"),)}, "environment.KOALA_MPIRUN"),
    ],
)
def test_field_that_contradicts_a_script_is_rejected(options: dict[str, object], field: str) -> None:
    spec = replace(make_spec(one_component(), ("job.sh",), script=SCRIPT), **options)  # type: ignore[arg-type]
    assert rejection_of(spec).field == field


def test_two_clusters_share_a_script_by_default() -> None:
    request = FixedRequest((ComponentRequest(1, "north"), ComponentRequest(1, "south")))
    check_spec(make_spec(request, ("job.sh",), script=SCRIPT), GRID)
