"""A release is built from the last commit, reproducibly, with a correct bill of materials."""

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


def build_release(folder: Path, **environment: str) -> str:
    """Build a release in a folder, and return the standard output."""
    python = str(ROOT / ".venv-release" / "bin" / "python")
    result = subprocess.run(
        [python, "-m", "deploy.release", str(folder)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def release_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    checksums = build_release(folder)
    assert checksums == (folder / "SHA256SUMS").read_text()
    return folder


def list_files(part: dict[str, Any]) -> list[tuple[str, str]]:
    return [(file["name"], file["hashes"][0]["content"]) for file in part["components"]]


def find_file(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


@pytest.mark.nightly
@pytest.mark.evidence("S3")
def test_release_build_is_reproducible(release_folder: Path, tmp_path: Path) -> None:
    second_checksums = build_release(
        tmp_path / "again", TZ="Asia/Tokyo", LC_ALL="C", SOURCE_DATE_EPOCH="7", HOME=str(tmp_path)
    )
    assert second_checksums == (release_folder / "SHA256SUMS").read_text()
    sums = dict(reversed(line.split("  ")) for line in second_checksums.splitlines())
    files = {path.name: path for path in release_folder.iterdir() if path.name != "SHA256SUMS"}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == sums
    assert {path.suffix for path in files.values()} == {".whl", ".gz", ".json"}


def test_release_packages_hold_committed_files_only(release_folder: Path) -> None:
    tree = subprocess.check_output(["git", "ls-tree", "-r", "--name-only", "HEAD"], cwd=ROOT, text=True).splitlines()
    with tarfile.open(find_file(release_folder, "*.tar.gz")) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
        assert all(member.mode & 0o022 == 0 for member in source.getmembers())
    assert inside - set(tree) <= {"PKG-INFO"}
    assert {"SECURITY.md", "requirements/install.txt", "deploy/systemd/koala-serve.service"} <= inside
    with zipfile.ZipFile(find_file(release_folder, "*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name and ".data/" not in name}
    ours = {name for name in tree if name.startswith(("koalapy/", "migrations/"))}
    assert names == {name.replace("migrations/", "koalapy/store/migrations/", 1) for name in ours}


def test_wheel_installs_manual_pages(release_folder: Path) -> None:
    with zipfile.ZipFile(find_file(release_folder, "*.whl")) as wheel:
        data = {name: wheel.read(name) for name in wheel.namelist() if ".data/" in name}
    pages = {name.partition(".data/data/share/man/man1/")[2]: page for name, page in data.items()}
    assert {"koala.1", "koala-submit.1", "koala-clusters.1"} <= pages.keys()
    assert all(page.startswith(b".TH KOALA") for page in pages.values())


@pytest.mark.evidence("S2", "C18")
def test_bill_of_materials_equals_lock_file(release_folder: Path) -> None:
    document: dict[str, Any] = json.loads(find_file(release_folder, "*.cdx.json").read_text())
    assert document["bomFormat"] == "CycloneDX"
    locked = {f"pkg:pypi/{pin.name}@{pin.version}": pin for pin in parse_pins(FOLDER / "install.txt")}
    components = {part["purl"]: part for part in document["components"]}
    assert {purl for purl in components if purl.startswith("pkg:pypi/")} == locked.keys()
    vendored = {
        name: digest for purl in components.keys() - locked.keys() for name, digest in list_files(components[purl])
    }
    folder = ROOT / "koalapy" / "dashboard" / "static" / "vendor"
    vendored_files = {path.name: path for path in folder.iterdir() if path.suffix in (".js", ".css")}
    assert vendored == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in vendored_files.items()}
    assert all(part["licenses"] for part in components.values())
    for purl, pin in locked.items():
        (files,) = components[purl]["externalReferences"]
        hashes = {(entry["alg"], entry["content"]) for entry in files["hashes"]}
        assert hashes == {("SHA-256", digest) for digest in pin.hashes}, purl
    needs_of = {entry["ref"]: set(entry["dependsOn"]) for entry in document["dependencies"]}
    root = document["metadata"]["component"]
    assert root["name"] == "koalapy"
    assert root["purl"] == f"pkg:pypi/koalapy@{root['version']}"
    direct = {
        f"{pin.name}=={pin.version}"
        for pin in locked.values()
        if any(w.startswith(OWN_REQUIREMENT) for w in pin.wanted_by)
    }
    assert needs_of[root["bom-ref"]] == direct | (components.keys() - locked.keys())
    # Each component is a dependency of another one.
    reached, pending = {root["bom-ref"]}, [root["bom-ref"]]
    while pending:
        new_parts = needs_of[pending.pop()] - reached
        reached |= new_parts
        pending += new_parts
    assert reached - {root["bom-ref"]} == {part["bom-ref"] for part in document["components"]}
