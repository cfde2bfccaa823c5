"""The lock files agree with pyproject.toml and with the installed packages."""

import json
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

from deploy.locked import FOLDER, LICENCES, ROOT, find_differences, parse_pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.evidence("S1", "C17")
def test_lock_files_agree_with_project() -> None:
    assert list(find_differences(PROJECT, FOLDER)) == []
    assert len(parse_pins(FOLDER / "dev.txt")) > len(parse_pins(FOLDER / "install.txt")) > 30


@pytest.mark.parametrize(
    ("edit", "expected_difference"),
    [
        (lambda project: project["dependencies"].append("joy>=3"), "joy>=3 is not in dev.txt"),
        (lambda project: project["optional-dependencies"]["dev"].append("pytest>=9999"), "pytest>=9999 is "),
        (lambda project: project["dependencies"].remove("pyyaml>=6"), "pyyaml of install.txt is not required any more"),
    ],
)
def test_changed_requirement_is_reported(edit: object, expected_difference: str) -> None:
    project = deepcopy(PROJECT)
    edit(project["project"])  # type: ignore[operator]
    assert any(line.startswith(expected_difference) for line in find_differences(project, FOLDER))


@pytest.mark.evidence("S1")
@pytest.mark.parametrize(
    ("original", "replacement", "expected_difference"),
    [
        ("rich==", "rich==1.", "rich has another version in"),
        ("    --hash=sha256:", "    --hash=md5:", "rich has no hash in install.txt"),
        ("    # via koalapy", "    # via nobody", "nothing requires httptools of install.txt"),
    ],
)
def test_manipulated_lock_file_is_reported(
    tmp_path: Path, original: str, replacement: str, expected_difference: str
) -> None:
    copytree(FOLDER, tmp_path / "requirements")
    file = tmp_path / "requirements" / "install.txt"
    file.write_text(file.read_text().replace("    #   koalapy (", "    # via koalapy (").replace(original, replacement))
    assert any(line.startswith(expected_difference) for line in find_differences(PROJECT, tmp_path / "requirements"))


def test_package_without_licence_is_reported(tmp_path: Path) -> None:
    copytree(FOLDER, tmp_path / "requirements")
    file = tmp_path / "requirements" / LICENCES.name
    file.write_text(file.read_text().replace('"rich"', '"poor"'))
    assert sorted(find_differences(PROJECT, tmp_path / "requirements")) == [
        "poor of licences.json is not in install.txt",
        "rich of install.txt has no licence in licences.json",
    ]


@pytest.mark.evidence("C18")
def test_licences_are_those_that_packages_declare() -> None:
    licences = json.loads(LICENCES.read_text())
    installed = {str(canonicalize_name(d.metadata["Name"])): d.metadata for d in distributions()}
    declared = {name: m["License-Expression"] for name, m in installed.items() if "License-Expression" in m}
    assert len(licences.keys() & declared.keys()) > 30
    assert {name: licences[name] for name in licences.keys() & declared.keys()} == {
        name: declared[name] for name in licences.keys() & declared.keys()
    }


@pytest.mark.evidence("C17")
@pytest.mark.processes
def test_installed_packages_are_the_locked_ones() -> None:
    locked: dict[str, set[Version]] = {}
    for pin in [*parse_pins(FOLDER / "build.txt"), *parse_pins(FOLDER / "dev.txt")]:
        locked.setdefault(pin.name, set()).add(pin.version)
    installed = {
        canonicalize_name(distribution.metadata["Name"]): Version(distribution.version)
        for distribution in distributions()
    }
    assert len(installed.keys() & locked.keys()) > 60
    assert {
        name: installed[name] for name in installed.keys() & locked.keys() if installed[name] not in locked[name]
    } == {}
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert check.returncode == 0, check.stdout
