"""Store results on disk: each finished cell at once, a complete experiment as one Parquet file with its provenance."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.experiment import Cell, Parameter, Result, Value
from experiments.provenance import Provenance
from koalapy.model.errors import ConflictError, UsageError

METADATA = b"koala"
SEED, SECONDS = "seed", "seconds"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResults:
    """All results of an experiment, in the order of its cells."""

    made_by: Provenance
    results: tuple[Result, ...]


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Lock a folder of results; raise ``ConflictError`` if another run holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}", field="--results", hint="give another"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for it, or give another folder by --results"
            raise ConflictError(f"another run writes to {folder}", field="--results", hint=hint) from None
        yield
    finally:
        os.close(lock)


class Unfinished:
    """The file of finished cells of an unfinished experiment, one line per cell; incomplete lines are ignored."""

    def __init__(self, folder: Path, made_by: Provenance) -> None:
        self.path = folder / f"{made_by.experiment}.cells.jsonl"
        self._header = json.dumps(made_by.as_json())
        self._made_by = made_by

    def read(self) -> dict[str, Result]:
        """Return the stored results by cell key; return none if the provenance differs."""
        try:
            header, *lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
            if Provenance(**json.loads(header)) != self._made_by:
                return {}
        except (FileNotFoundError, ValueError, TypeError):
            return {}
        results = {}
        for line in lines:
            try:
                entry = json.loads(line)
                result = Result(Cell(entry["parameters"], entry["seed"]), entry["values"], entry["seconds"])
                results[result.cell.key] = result
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue
        return results

    def begin(self, results: Iterable[Result]) -> None:
        """Write the file with the known results; ``add`` appends to it."""
        beside = self.path.with_suffix(".new")
        beside.write_text("\n".join([self._header, *map(_format_line, results), ""]), encoding="utf-8")
        beside.replace(self.path)

    def add(self, result: Result) -> None:
        """Append a result and sync it to disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_format_line(result) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _format_line(result: Result) -> str:
    cell = result.cell
    return json.dumps(
        {
            "parameters": dict(cell.parameters),
            "seed": cell.seed,
            "values": dict(result.values),
            "seconds": result.seconds,
        }
    )


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.parquet"


def save_results(folder: Path, stored: StoredResults) -> None:
    """Write the results atomically, with a column for each parameter and value, the seed and the seconds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parameters, values = (
        _column_names([r.cell.parameters for r in stored.results]),
        _column_names([r.values for r in stored.results]),
    )
    if twice := (set(parameters) & set(values)) | ({*parameters, *values} & {SEED, SECONDS}):
        raise ValueError(f"{stored.made_by.experiment} has two columns {sorted(twice)}")
    columns: dict[str, list[Any]] = {
        **{name: [r.cell.parameters.get(name) for r in stored.results] for name in parameters},
        SEED: [r.cell.seed for r in stored.results],
        **{name: _convert_numbers([r.values.get(name) for r in stored.results]) for name in values},
        SECONDS: [r.seconds for r in stored.results],
    }
    metadata = {**stored.made_by.as_json(), "parameters": parameters, "values": values}
    table = pa.table(columns).replace_schema_metadata({METADATA: json.dumps(metadata, sort_keys=True).encode()})
    path = path_of(folder, stored.made_by.experiment)
    beside = path.with_suffix(".new")
    pq.write_table(table, beside, compression="zstd")
    beside.replace(path)


def load_results(folder: Path, name: str) -> StoredResults | None:
    """Read results, or return None if there are none; raise ``UsageError`` if the file is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = path_of(folder, name)
    try:
        table = pq.read_table(path)
        metadata = json.loads((table.schema.metadata or {})[METADATA])
        parameters, values = metadata.pop("parameters"), metadata.pop("values")
        made_by = Provenance(**metadata)
        rows = table.to_pylist()
        results = tuple(_parse_row(row, parameters, values) for row in rows)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        hint = "remove it, and run the experiment again"
        raise UsageError(f"{path} holds no results of an experiment: {error}", field="--results", hint=hint) from error
    return StoredResults(made_by, results)


def _parse_row(row: Json, parameters: Sequence[str], values: Sequence[str]) -> Result:
    cell_parameters: dict[str, Parameter] = {name: row[name] for name in parameters if row[name] is not None}
    cell_values: dict[str, Value] = {name: row[name] for name in values}
    return Result(Cell(cell_parameters, row[SEED]), cell_values, row[SECONDS])


def _column_names(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _convert_numbers(column: list[Any]) -> list[Any]:
    """Convert integers to floats in a column that has floats."""
    if any(isinstance(value, float) for value in column):
        return [float(value) if isinstance(value, int) else value for value in column]
    return column
