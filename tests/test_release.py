"""What is handed out is the last commit's, the same each time, and says truly what it is made of."""

import hashlib
import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy.locked import FOLDER, OWN_REQUIREMENT, ROOT, parse_pins
from tests.needs import RELEASE_TOOLS, needs

pytestmark = [needs(RELEASE_TOOLS), pytest.mark.processes]


def release(folder: Path, **environment: str) -> str:
    """What it says on standard output."""
    python = str(ROOT / ".venv-release" / "bin" / "python")
    done = subprocess.run(
        [python, "-m", "deploy.release", str(folder)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    said = release(folder)
    assert said == (folder / "SHA256SUMS").read_text()
    return folder


def files_of(part: dict[str, Any]) -> list[tuple[str, str]]:
    return [(file["name"], file["hashes"][0]["content"]) for file in part["components"]]


def the_one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.mark.evidence("S3")
def test_it_is_the_same_whenever_and_wherever_it_is_made(made: Path, tmp_path: Path) -> None:
    again = release(tmp_path / "again", TZ="Asia/Tokyo", LC_ALL="C", SOURCE_DATE_EPOCH="7", HOME=str(tmp_path))
    assert again == (made / "SHA256SUMS").read_text()
    sums = dict(reversed(line.split("  ")) for line in again.splitlines())
    files = {path.name: path for path in made.iterdir() if path.name != "SHA256SUMS"}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == sums
    assert {path.suffix for path in files.values()} == {".whl", ".gz", ".json"}


def test_the_packages_hold_what_was_committed_and_nothing_else(made: Path) -> None:
    tree = subprocess.check_output(["git", "ls-tree", "-r", "--name-only", "HEAD"], cwd=ROOT, text=True).splitlines()
    with tarfile.open(the_one(made, "*.tar.gz")) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
        assert all(member.mode & 0o022 == 0 for member in source.getmembers())
    assert inside - set(tree) <= {"PKG-INFO"}
    assert {"SECURITY.md", "requirements/install.txt", "deploy/systemd/koala-serve.service"} <= inside
    with zipfile.ZipFile(the_one(made, "*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = {name for name in tree if name.startswith(("koalapy/", "migrations/"))}
    assert names == {name.replace("migrations/", "koalapy/store/migrations/", 1) for name in ours}


@pytest.mark.evidence("S2", "C18")
def test_the_list_of_parts_is_the_lock(made: Path) -> None:
    document: dict[str, Any] = json.loads(the_one(made, "*.cdx.json").read_text())
    assert document["bomFormat"] == "CycloneDX"
    locked = {f"pkg:pypi/{pin.name}@{pin.version}": pin for pin in parse_pins(FOLDER / "install.txt")}
    parts = {part["purl"]: part for part in document["components"]}
    assert {purl for purl in parts if purl.startswith("pkg:pypi/")} == locked.keys()
    vendored = {name: digest for purl in parts.keys() - locked.keys() for name, digest in files_of(parts[purl])}
    folder = ROOT / "koalapy" / "dashboard" / "static" / "vendor"
    brought = {path.name: path for path in folder.iterdir() if path.suffix in (".js", ".css")}
    assert vendored == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in brought.items()}
    assert all(parts[purl]["licenses"] for purl in parts.keys() - locked.keys())
    for purl, pin in locked.items():
        (files,) = parts[purl]["externalReferences"]
        hashes = {(one["alg"], one["content"]) for one in files["hashes"]}
        assert hashes == {("SHA-256", digest) for digest in pin.hashes}, purl
    needs_of = {one["ref"]: set(one["dependsOn"]) for one in document["dependencies"]}
    root = document["metadata"]["component"]
    assert root["name"] == "koalapy"
    assert root["purl"] == f"pkg:pypi/koalapy@{root['version']}"
    direct = {
        f"{pin.name}=={pin.version}"
        for pin in locked.values()
        if any(w.startswith(OWN_REQUIREMENT) for w in pin.wanted_by)
    }
    assert needs_of[root["bom-ref"]] == direct | (parts.keys() - locked.keys())
    # Each part is there because somebody needs it.
    reached, ahead = {root["bom-ref"]}, [root["bom-ref"]]
    while ahead:
        found = needs_of[ahead.pop()] - reached
        reached |= found
        ahead += found
    assert reached - {root["bom-ref"]} == {part["bom-ref"] for part in document["components"]}
