"""Whether ``requirements/`` holds what ``pyproject.toml`` asks for, and nothing else: ``python -m deploy.locked``."""

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
OURS = "koalapy (pyproject.toml"
"""So begins what a locked package is for, if it is not for another one."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A package as it is locked; there may be several of a name, for different Pythons."""

    name: str
    version: Version
    hashes: tuple[str, ...]
    wanted_by: tuple[str, ...]


def pins(file: Path) -> list[Pin]:
    """What a lock file names."""
    text = file.read_text()
    heads = list(re.finditer(r"^(?P<name>[\w.-]+)==(?P<version>[^\s;]+)", text, re.MULTILINE))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [_pin(head, text[head.end() : end]) for head, end in zip(heads, ends, strict=True)]


def _pin(head: re.Match[str], rest: str) -> Pin:
    hashes = tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", rest))
    whose = re.findall(r"^    # (?:via|  )\s*(\S.*)$", rest, re.MULTILINE)
    wanted_by = tuple(name for name in whose if not name.startswith("-c "))
    return Pin(str(canonicalize_name(head["name"])), Version(head["version"]), hashes, wanted_by)


def asked(project: dict[str, Any]) -> dict[str, list[Requirement]]:
    """By lock file, what ``pyproject.toml`` asks for directly."""
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
    return {name: [Requirement(text) for text in found] for name, found in texts.items()}


def disagreements(project: dict[str, Any], folder: Path) -> Iterator[str]:
    """What is asked for and not locked, locked and not asked for, or locked twice in different ways."""
    versions: dict[str, set[Version]] = {}
    for name, requirements in asked(project).items():
        file = folder / f"{name}.txt"
        locked = pins(file)
        for requirement in requirements:
            there = [pin for pin in locked if pin.name == canonicalize_name(requirement.name)]
            if not there:
                yield f"{requirement} is not in {file.name}"
            for pin in there:
                if not requirement.specifier.contains(pin.version, prereleases=True):
                    yield f"{requirement} is {pin.version} in {file.name}"
        names = {canonicalize_name(requirement.name) for requirement in requirements}
        here = {pin.name for pin in locked}
        for pin in locked:
            if not pin.hashes:
                yield f"{pin.name} has no hash in {file.name}"
            if any(whose.startswith(OURS) for whose in pin.wanted_by) and pin.name not in names:
                yield f"{pin.name} of {file.name} is not asked for any more"
            if not any(whose.startswith(OURS) or canonicalize_name(whose) in here for whose in pin.wanted_by):
                yield f"nobody wants {pin.name} of {file.name}"
        for locked_name in here:
            found = {pin.version for pin in locked if pin.name == locked_name}
            if found != versions.setdefault(locked_name, found):
                yield f"{locked_name} has another version in {file.name} than elsewhere"


def main() -> int:
    """Say what does not agree."""
    found = list(disagreements(tomllib.loads((ROOT / "pyproject.toml").read_text()), FOLDER))
    for line in found:
        print(f"requirements/ and pyproject.toml do not agree: {line}; run make lock", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
