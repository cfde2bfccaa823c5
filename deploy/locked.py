"""Check that ``requirements/`` agrees with ``pyproject.toml``: ``python -m deploy.locked``."""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
LICENCES = FOLDER / "licences.json"
"""The licence of each package for sites, as an SPDX expression. A new package gets its entry by hand."""
OWN_REQUIREMENT = "koalapy (pyproject.toml"
"""Prefix of the origin of packages that koalapy itself requires."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A locked package. A name may have several, for different versions of Python."""

    name: str
    version: Version
    hashes: tuple[str, ...]
    wanted_by: tuple[str, ...]


def parse_pins(file: Path) -> list[Pin]:
    """Return the packages of a lock file."""
    text = file.read_text()
    heads = list(re.finditer(r"^(?P<name>[\w.-]+)==(?P<version>[^\s;]+)", text, re.MULTILINE))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [_pin(head, text[head.end() : end]) for head, end in zip(heads, ends, strict=True)]


def _pin(head: re.Match[str], text: str) -> Pin:
    hashes = tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", text))
    dependents = re.findall(r"^    # (?:via|  )\s*(\S.*)$", text, re.MULTILINE)
    wanted_by = tuple(name for name in dependents if not name.startswith("-c "))
    return Pin(str(canonicalize_name(head["name"])), Version(head["version"]), hashes, wanted_by)


def direct_requirements(project: dict[str, Any]) -> dict[str, list[Requirement]]:
    """Return the direct requirements of ``pyproject.toml``, by lock file."""
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    base = project["project"]["dependencies"]
    of_sites = [text for name, texts in extras.items() if name != "dev" for text in texts]
    texts = {
        "build": [*project["build-system"]["requires"], *groups["build"]],
        "dev": [*base, *of_sites, *extras["dev"]],
        "install": [*base, *of_sites],
        "mpi": [*base, *extras["mpi"]],
        "release": groups["release"],
    }
    return {name: [Requirement(text) for text in requirement_texts] for name, requirement_texts in texts.items()}


def find_differences(project: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield requirements that are not locked, superfluous packages, and packages locked in different versions."""
    licensed, locked_packages = json.loads((folder / LICENCES.name).read_text()).keys(), set[str]()
    versions: dict[str, set[Version]] = {}
    for name, requirements in direct_requirements(project).items():
        file = folder / f"{name}.txt"
        locked = parse_pins(file)
        for requirement in requirements:
            matching_pins = [pin for pin in locked if pin.name == canonicalize_name(requirement.name)]
            if not matching_pins:
                yield f"{requirement} is not in {file.name}"
            for pin in matching_pins:
                if not requirement.specifier.contains(pin.version, prereleases=True):
                    yield f"{requirement} is {pin.version} in {file.name}"
        if name == "install":
            locked_packages = {pin.name for pin in locked}
        names = {canonicalize_name(requirement.name) for requirement in requirements}
        locked_names = {pin.name for pin in locked}
        for pin in locked:
            if not pin.hashes:
                yield f"{pin.name} has no hash in {file.name}"
            if any(dependent.startswith(OWN_REQUIREMENT) for dependent in pin.wanted_by) and pin.name not in names:
                yield f"{pin.name} of {file.name} is not required any more"
            if not any(
                dependent.startswith(OWN_REQUIREMENT) or canonicalize_name(dependent) in locked_names
                for dependent in pin.wanted_by
            ):
                yield f"nothing requires {pin.name} of {file.name}"
        for locked_name in locked_names:
            locked_versions = {pin.version for pin in locked if pin.name == locked_name}
            if locked_versions != versions.setdefault(locked_name, locked_versions):
                yield f"{locked_name} has another version in {file.name} than in other files"
    yield from (f"{name} of install.txt has no licence in {LICENCES.name}" for name in locked_packages - licensed)
    yield from (f"{name} of {LICENCES.name} is not in install.txt" for name in licensed - locked_packages)


def main() -> int:
    """Print the differences and return the exit code."""
    differences = list(find_differences(tomllib.loads((ROOT / "pyproject.toml").read_text()), FOLDER))
    for line in differences:
        print(f"requirements/ and pyproject.toml do not agree: {line}; run make lock", file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
