"""Every state and error of DRMAA 1.0 and of its Python package has a mapping."""

import ast
import importlib.util
from pathlib import Path

import pytest

from koalapy.agent.lrm.drmaa.adapter import STATES
from koalapy.agent.lrm.drmaa.control import PERMANENT_ERRORS, TRANSIENT_ERRORS, convert_error, start_error
from koalapy.agent.lrm.port import DrmaaEnding, LrmJobState
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable
from tests.needs import DRMAA

# The C binding's list, codes 1 to 25, as the package names them (it has no names for 24 and 25).
EXCEPTIONS = [
    "Internal",
    "DrmCommunication",
    "Authorization",
    "InvalidArgument",
    "NoActiveSession",
    "OutOfMemory",
    "InvalidContactString",
    "DefaultContactString",
    "NoDefaultContactStringSelected",
    "DrmsInit",
    "AlreadyActiveSession",
    "DrmsExit",
    "InvalidAttributeFormat",
    "InvalidAttributeValue",
    "ConflictingAttributeValues",
    "TryLater",
    "DeniedByDrm",
    "InvalidJob",
    "ResumeInconsistentState",
    "SuspendInconsistentState",
    "HoldInconsistentState",
    "ReleaseInconsistentState",
    "ExitTimeout",
]
TRANSIENT = {
    "Internal",
    "DrmCommunication",
    "NoActiveSession",
    "OutOfMemory",
    "DrmsInit",
    "AlreadyActiveSession",
    "DrmsExit",
    "TryLater",
    "ExitTimeout",
    "NoUsage",
    "StopIteration",
}
PS_STATES = [
    "undetermined",
    "queued_active",
    "system_on_hold",
    "user_on_hold",
    "user_system_on_hold",
    "running",
    "system_suspended",
    "user_suspended",
    "user_system_suspended",
    "done",
    "failed",
]


def classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Parse the classes of a module of the installed package. An import would need the DRMAA library."""
    spec = importlib.util.find_spec("drmaa")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(DRMAA.reason)
    tree = ast.parse(Path(spec.submodule_search_locations[0], f"{module}.py").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def test_every_state_of_the_specification_is_mapped() -> None:
    assert set(PS_STATES) == STATES.keys()
    assert STATES["undetermined"] is LrmJobState.UNKNOWN
    assert [state for state in PS_STATES if STATES[state] is LrmJobState.ENDED] == ["done", "failed"]


def test_every_state_of_the_package_is_mapped() -> None:
    states = [
        node.value.value
        for node in classes_of("const")["JobState"].body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    ]
    assert states
    assert set(states) <= STATES.keys()


def test_every_error_of_the_package_is_mapped() -> None:
    classes = classes_of("errors")
    assert len(classes) > 20
    assert classes.keys() <= PERMANENT_ERRORS | TRANSIENT_ERRORS


@pytest.mark.parametrize("name", [f"{entry}Exception" for entry in EXCEPTIONS] + ["NoUsage", "StopIteration"])
def test_convert_error_returns_one_line(name: str) -> None:
    error = convert_error(name, "code 17: job rejected:\n  the reason ")
    assert isinstance(error, SiteUnavailable if name.removesuffix("Exception") in TRANSIENT else SiteRejected)
    assert (error.message, error.value) == ("DRMAA: job rejected: the reason", name)


def test_convert_unknown_error_is_unavailable() -> None:
    assert isinstance(convert_error("SurpriseException", ""), SiteUnavailable)
    assert convert_error("SurpriseException", "").message == "DRMAA: SurpriseException"


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("package", SiteRejected, "pip install 'koalapy[drmaa]'"),
        ("library", SiteRejected, "gridengine-drmaa1.0"),
        ("DrmCommunicationException", SiteUnavailable, ""),
    ],
)
def test_start_error_has_hint(name: str, kind: type[SiteError], hint: str) -> None:
    error = start_error(name, "code 2: no\nqmaster", "/lib/x.so")
    assert type(error) is kind
    assert hint in error.hint
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("ending", "number"),
    [
        (DrmaaEnding("1", exit_code=7), None),
        (DrmaaEnding("1", exit_code=128), None),
        (DrmaaEnding("1", exit_code=137), 9),
        (DrmaaEnding("1", signal="SIGTERM"), 15),
        (DrmaaEnding("1", signal="SIGWHATEVER"), 9),
        (DrmaaEnding("1"), None),
    ],
)
def test_signal_number_of_ending(ending: DrmaaEnding, number: int | None) -> None:
    assert ending.signal_number == number


@pytest.mark.parametrize("name", ["TryLaterException", "DeniedByDrmException", "DrmaaException"])
def test_convert_error_about_limit_is_rejected(name: str) -> None:
    error = convert_error(name, "code 25: job rejected: only 1 jobs are allowed per user (current job count: 1)")
    assert isinstance(error, SiteRejected)
    assert error.fault == "limit"
    assert isinstance(convert_error("TryLaterException", "code 25: the master is busy"), SiteUnavailable)
