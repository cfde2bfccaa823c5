"""Build a release: ``python -m deploy.release FOLDER``, by the interpreter of ``.venv-release``.

A release has the source and the wheel of the last commit, a bill of materials (CycloneDX), and checksums. The same
commit gives the same bytes.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement

from deploy.locked import LICENCES, OWN_REQUIREMENT, ROOT, Pin, parse_pins

LOCK = Path("requirements", "install.txt")
VENDORED = Path("koalapy", "dashboard", "static", "vendor")
PARTS_FORMAT = "1.6"
"""Version of CycloneDX."""


def main(folder: Path) -> None:
    """Build all files of a release in the folder."""
    os.umask(0o022)
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.check_output(["git", "status", "--porcelain"], cwd=ROOT):
        print("uncommitted changes are not in the release", file=sys.stderr)
    when = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()
    environment = os.environ | {"SOURCE_DATE_EPOCH": when, "PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    with TemporaryDirectory() as export:
        source = Path(export)
        archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
        subprocess.run(["tar", "-x", "-C", export], input=archive, check=True)
        built = [sys.executable, "-m", "hatchling", "build", "-d", str(source / "built")]
        build = subprocess.run(built, cwd=source, env=environment, capture_output=True, text=True)
        if build.returncode != 0:
            raise SystemExit(f"hatchling: {build.stdout}{build.stderr}")
        packages = sorted((source / "built").iterdir())
        contents = {path.name: path.read_bytes() for path in packages}
        version = next(name.split("-")[1] for name in contents if name.endswith(".whl"))
        contents[f"koalapy-{version}.cdx.json"] = parts(source, version, environment)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    sums = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(contents.items())]
    (folder / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


def parts(source: Path, version: str, environment: dict[str, str]) -> bytes:
    """Return the bill of materials: locked packages, checksums and dependencies."""
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "requirements",
        "--output-reproducible",
        "--mc-type",
        "application",
    ]
    command += ["--pyproject", "pyproject.toml", "--sv", PARTS_FORMAT, str(LOCK)]
    # The tool omits the version and the dependencies. They are added below, and the result is checked again.
    command[1:1] = ["-W", "ignore::UserWarning"]
    document = json.loads(subprocess.check_output(command, cwd=source, env=environment, stderr=subprocess.PIPE))
    licences = json.loads((source / LICENCES.relative_to(ROOT)).read_text())
    _complete(document, version, parse_pins(source / LOCK), licences)
    _add_vendored(document, json.loads((source / VENDORED / "manifest.json").read_text()))
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    _check(text)
    return text.encode()


def _complete(document: dict[str, Any], version: str, locked: list[Pin], licences: dict[str, str]) -> None:
    """Add version and dependencies, and the licence of each package by name."""
    root = document["metadata"]["component"]
    root |= {"version": version, "bom-ref": f"koalapy=={version}", "purl": f"pkg:pypi/koalapy@{version}"}
    reference = {(pin.name, str(pin.version)): f"{pin.name}=={pin.version}" for pin in locked}
    for component in document["components"]:
        component["bom-ref"] = reference[component["name"], component["version"]]
        component["licenses"] = [{"expression": licences[component["name"]]}]
        # The description is the line of the lock with hashes. Only its marker is kept.
        requirement = Requirement(component["description"].partition(":")[2].partition(" --hash")[0].strip())
        component["description"] = f"for {requirement.marker}" if requirement.marker else "always"
    needs: dict[str, set[str]] = {root["bom-ref"]: set(), **{name: set() for name in reference.values()}}
    for pin in locked:
        for dependent in pin.wanted_by:
            users = (
                [root["bom-ref"]]
                if dependent.startswith(OWN_REQUIREMENT)
                else [r for (n, _), r in reference.items() if n == dependent]
            )
            for user in users:
                needs[user].add(f"{pin.name}=={pin.version}")
    document["dependencies"] = [
        {"ref": ref, "dependsOn": sorted(dependencies)} for ref, dependencies in sorted(needs.items())
    ]
    document["components"].sort(key=lambda component: component["bom-ref"])


def _add_vendored(document: dict[str, Any], manifest: list[dict[str, str]]) -> None:
    """Add the vendored packages of the dashboard, with their files and checksums."""
    root = document["metadata"]["component"]["bom-ref"]
    packages: dict[str, list[dict[str, str]]] = {}
    for entry in manifest:
        packages.setdefault(f"pkg:npm/{entry['package']}@{entry['version']}", []).append(entry)
    for purl, entries in packages.items():
        first = entries[0]
        document["components"].append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": first["package"],
                "version": first["version"],
                "purl": purl,
                "description": f"brought along in {VENDORED}",
                "licenses": [{"license": {"id": first["license"]}}],
                "components": [
                    {
                        "type": "file",
                        "bom-ref": f"{purl}#{entry['file']}",
                        "name": entry["file"],
                        "hashes": [{"alg": "SHA-256", "content": entry["sha256"]}],
                    }
                    for entry in entries
                ],
            }
        )
    document["components"].sort(key=lambda component: component["bom-ref"])
    needs = {dependency["ref"]: dependency["dependsOn"] for dependency in document["dependencies"]} | {
        purl: [] for purl in packages
    }
    needs[root] = sorted([*needs[root], *packages])
    document["dependencies"] = [{"ref": ref, "dependsOn": names} for ref, names in sorted(needs.items())]


def _check(text: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.from_version(PARTS_FORMAT)).validate_str(text):
        raise SystemExit(f"the list of parts is not as CycloneDX {PARTS_FORMAT} has it: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
