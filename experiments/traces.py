"""Read the workload traces of the experiments."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from koalapy.model.errors import UsageError
from koalapy.workload import swf

ENDING = ".swf.xz"
VARIABLE = "KOALA_TRACES"


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return ``KOALA_TRACES``, or the default folder next to the project."""
    if folder := environment.get(VARIABLE):
        return Path(folder)
    return Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"


@dataclass(frozen=True, slots=True)
class Traces:
    """A folder of traces, by names without ``.swf.xz``."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{ENDING}"

    def names(self) -> list[str]:
        """Return the names of the available traces."""
        return sorted(path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}"))

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def read(self, name: str) -> swf.Trace:
        """Read a trace and list its lines that are no jobs. The result is cached: do not change it."""
        if not self.has(name):
            hint = f"give the folder that has it, by --traces or {VARIABLE}"
            raise UsageError(f"there is no trace {self.path(name)}", field="--traces", value=name, hint=hint)
        return _read_cached(self.path(name))

    def sha256(self, name: str) -> str:
        """Return the hash of the compressed file."""
        return hashlib.sha256(self.path(name).read_bytes()).hexdigest()


@lru_cache(maxsize=2)
def _read_cached(path: Path) -> swf.Trace:
    return swf.read_trace(path, lenient=True)
