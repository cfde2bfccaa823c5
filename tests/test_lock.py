"""What is installed is locked, whole, and what is asked for."""

import subprocess
import sys
import tomllib
from copy import deepcopy
from importlib.metadata import distributions
from pathlib import Path
from shutil import copytree

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.locked import FOLDER, ROOT, find_differences, parse_pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.evidence("S1", "C17")
def test_what_is_locked_is_what_is_asked_for() -> None:
    assert list(find_differences(PROJECT, FOLDER)) == []
    assert len(parse_pins(FOLDER / "dev.txt")) > len(parse_pins(FOLDER / "install.txt")) > 30


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda project: project["dependencies"].append("joy>=3"), "joy>=3 is not in dev.txt"),
        (lambda project: project["optional-dependencies"]["dev"].append("pytest>=9999"), "pytest>=9999 is "),
        (lambda project: project["dependencies"].remove("pyyaml>=6"), "pyyaml of install.txt is not required any more"),
    ],
)
def test_a_change_of_what_is_asked_for_is_said(edit: object, said: str) -> None:
    project = deepcopy(PROJECT)
    edit(project["project"])  # type: ignore[operator]
    assert any(line.startswith(said) for line in find_differences(project, FOLDER))


@pytest.mark.evidence("S1")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rich==", "rich==1.", "rich has another version in"),
        ("    --hash=sha256:", "    --hash=md5:", "rich has no hash in install.txt"),
        ("    # via koalapy", "    # via nobody", "nothing requires httptools of install.txt"),
    ],
)
def test_a_lock_that_was_tampered_with_is_said(tmp_path: Path, old: str, new: str, said: str) -> None:
    copytree(FOLDER, tmp_path / "requirements")
    file = tmp_path / "requirements" / "install.txt"
    file.write_text(file.read_text().replace("    #   koalapy (", "    # via koalapy (").replace(old, new))
    assert any(line.startswith(said) for line in find_differences(PROJECT, tmp_path / "requirements"))


@pytest.mark.evidence("C17")
@pytest.mark.processes
def test_what_is_installed_here_is_what_is_locked() -> None:
    """Nothing is missing, and nothing of another version."""
    locked: dict[str, set[Version]] = {}
    for pin in [*parse_pins(FOLDER / "build.txt"), *parse_pins(FOLDER / "dev.txt")]:
        locked.setdefault(pin.name, set()).add(pin.version)
    here = {canonicalize_name(one.metadata["Name"]): Version(one.version) for one in distributions()}
    assert len(here.keys() & locked.keys()) > 60
    assert {name: here[name] for name in here.keys() & locked.keys() if here[name] not in locked[name]} == {}
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout
