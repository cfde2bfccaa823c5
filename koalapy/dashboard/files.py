"""The files that pages load: style, script, and what others wrote, each under a name that its content gives it."""

import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import PurePosixPath

TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
MANIFEST = "vendor/manifest.json"
"""What others wrote: package, version, licence, and SHA-256 of each file."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """``name`` below ``static``."""

    name: str
    type: str
    content: bytes
    compressed: bytes
    digest: str


@cache
def page_files() -> dict[str, PageFile]:
    """By their names; ``ValueError`` where one that others wrote is not what the manifest says."""
    root = resources.files("koalapy.dashboard") / "static"
    vendored = {f"vendor/{entry['file']}": entry["sha256"] for entry in json.loads((root / MANIFEST).read_text())}
    found = {}
    for folder, names in (("", root), ("vendor/", root / "vendor")):
        for each in names.iterdir():
            name = folder + each.name
            kind = TYPES.get(PurePosixPath(name).suffix)
            if kind is None or not each.is_file():
                continue
            content = each.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if folder and vendored.get(name) != digest:
                raise ValueError(f"{name} is not what {MANIFEST} says")
            found[name] = PageFile(name, kind, content, gzip.compress(content, mtime=0), digest[:16])
    return found


def url_of(name: str) -> str:
    """Where a page finds a file: another place whenever its content is another."""
    return f"/static/{page_files()[name].digest}/{name}"
