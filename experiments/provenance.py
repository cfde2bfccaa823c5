"""Record the provenance of results: versions, traces, and the source of all modules that the experiment imports."""

import ast
import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import koalapy
from experiments.experiment import Experiment
from experiments.traces import Traces

PACKAGES = {"koalapy": Path(koalapy.__file__).resolve().parent, "experiments": Path(__file__).resolve().parent}


@dataclass(frozen=True)
class Provenance:
    """The provenance of results. Results with the same source and traces are comparable with any Python version."""

    experiment: str
    koalapy: str
    python: str
    source: str
    """SHA-256 of the source."""
    traces: Mapping[str, str]
    """SHA-256 by the name of the trace."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Provenance) and self._comparison_key() == other._comparison_key()

    def __hash__(self) -> int:
        return hash(self._comparison_key())

    def _comparison_key(self) -> tuple[object, ...]:
        return self.experiment, self.source, tuple(sorted(self.traces.items()))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def build_provenance(experiment: Experiment, traces: Traces) -> Provenance:
    """Return the provenance of results that the experiment would produce now."""
    return Provenance(
        experiment.name,
        koalapy.__version__,
        platform.python_version(),
        source_hash(type(experiment).__module__),
        {name: traces.sha256(name) for name in experiment.traces},
    )


@cache
def source_hash(module: str) -> str:
    """Hash a module, its direct and indirect imports from both packages, and the data of experiments."""
    files: set[Path] = set()
    pending = [path for path in (_find_file(module),) if path]
    while pending:
        path = pending.pop()
        if path not in files:
            files.add(path)
            pending += _find_imports(path)
    data = PACKAGES["experiments"]
    files |= {path for path in data.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")}
    digest = hashlib.sha256()
    for path in sorted(files):
        package = next(folder for folder in PACKAGES.values() if path.is_relative_to(folder))
        name = path.relative_to(package.parent).as_posix()
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


@cache
def _find_imports(path: Path) -> tuple[Path, ...]:
    return tuple(file for name in _imported_names(path) if (file := _find_file(name)))


def _imported_names(path: Path) -> Iterator[str]:
    """Yield names of imported modules, and of attributes that may be modules of a package."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _find_file(module: str) -> Path | None:
    first, *parts = module.split(".")
    if first not in PACKAGES or not parts:
        return None  # the package ``__init__`` holds only the version
    path = PACKAGES[first].joinpath(*parts)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None
