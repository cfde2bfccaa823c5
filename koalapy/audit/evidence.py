"""A temporary SQLite database of facts, by which the facts of a large grid are grouped with little memory."""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Self, get_args

from pydantic import TypeAdapter

from koalapy.audit.facts import Fact, JobRecord, MissingRow, Output, Run, RunKind, Source, Submission

_ADAPTERS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Fact)}
_INDICES = """
CREATE INDEX facts_by_job ON facts (job, kind);
CREATE INDEX facts_by_array ON facts (json_extract(content, '$.task_of')) WHERE kind = 'JobRecord';
CREATE INDEX facts_by_key ON facts (json_extract(content, '$.key')) WHERE kind = 'Submission';
"""
_USES = """
SELECT source, json_extract(content, '$.cluster') AS cluster, node.value AS node, json_extract(content, '$.kind'), job,
    json_extract(content, '$.attempt'), CASE WHEN json_extract(content, '$.part') LIKE 'rank %' THEN 'ranks'
    ELSE json_extract(content, '$.part') END, json_extract(content, '$.begin') AS begin, json_extract(content, '$.end'),
    json_extract(content, '$.has_ended'), facts.rowid
FROM facts, json_each(content, '$.nodes') AS node WHERE kind = 'Run' AND begin IS NOT NULL
ORDER BY source, cluster, node, begin
"""


class NodeUse(NamedTuple):
    """A run on a node, without what its comparison with other runs on that node does not need."""

    kind: str
    job: int
    attempt: int
    part: str
    """Its component; equal for all ranks, since several may run on a node."""
    begin: float
    last_moment: float | None
    fact: int
    """The number by which ``find_run`` returns it."""


@dataclass(slots=True)
class JobEvidence:
    """All facts about one job."""

    job: int
    record: JobRecord | None = None
    runs: list[Run] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    missing: list[MissingRow] = field(default_factory=list)

    def runs_of(self, kind: RunKind, attempt: int | None = None) -> list[Run]:
        return [run for run in self.runs if run.kind is kind and attempt in (None, run.attempt)]


class Evidence:
    """The facts of an audit, which are read by job, array, key and node."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self._database = sqlite3.connect("")  # a temporary file, which stays in memory while it is small
        self._database.executescript("CREATE TABLE facts (job INTEGER, kind TEXT, source INTEGER, content TEXT)")
        numbers: dict[Source, int] = {}

        def to_row(fact: Fact) -> tuple[int, str, int, str]:
            kind, number = type(fact).__name__, numbers.setdefault(fact.source, len(numbers))
            return fact.job, kind, number, _ADAPTERS[kind].dump_json(fact, exclude={"source"}).decode()

        self._database.executemany("INSERT INTO facts VALUES (?, ?, ?, ?)", map(to_row, facts))
        self._database.executescript(_INDICES)
        self.sources = list(numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def _restore(self, kind: str, source: int, content: str) -> Any:
        return _ADAPTERS[kind].validate_python(json.loads(content) | {"source": self.sources[source]})

    def jobs(self) -> Iterator[JobEvidence]:
        """Yield the facts of one job after the other."""
        rows = self._database.execute("SELECT job, kind, source, content FROM facts ORDER BY job, kind")
        for job, group in groupby(rows, key=lambda row: int(row[0])):
            evidence = JobEvidence(job)
            lists: dict[type, list[Any]] = {Run: evidence.runs, Output: evidence.outputs, MissingRow: evidence.missing}
            for fact in (self._restore(*row) for _, *row in group):
                if isinstance(fact, JobRecord):
                    evidence.record = fact
                elif type(fact) in lists:
                    lists[type(fact)].append(fact)
            yield evidence

    @cached_property
    def _has_records(self) -> bool:
        return bool(self._database.execute("SELECT 1 FROM facts WHERE kind = 'JobRecord' LIMIT 1").fetchone())

    def may_be_removed(self, job: int) -> bool:
        """Return whether a job may lack its record, since the daemon removes jobs by age, or no database was read."""
        was_given = not any(first <= job <= last for source in self.sources for first, last in source.skipped)
        is_removed = was_given and job <= max((source.removed_to for source in self.sources), default=0)
        return job > 0 and (is_removed or not self._has_records)

    def find_record(self, job: int) -> JobRecord | None:
        rows = self._database.execute(
            "SELECT kind, source, content FROM facts WHERE job = ? AND kind = 'JobRecord'", (job,)
        )
        return None if (row := rows.fetchone()) is None else self._restore(*row)

    def tasks_of(self, array: int) -> Iterator[tuple[int, int, str]]:
        """Yield index, job and state of an array's started tasks, by index."""
        yield from self._database.execute(
            "SELECT json_extract(content, '$.index'), job, json_extract(content, '$.state') FROM facts"
            " WHERE kind = 'JobRecord' AND json_extract(content, '$.task_of') = ? ORDER BY 1, 2",
            (array,),
        )

    def submissions(self) -> Iterator[list[Submission]]:
        """Yield the submissions with one key, for one key after the other."""
        rows = self._database.execute(
            "SELECT kind, source, content FROM facts WHERE kind = 'Submission'"
            " ORDER BY json_extract(content, '$.key'), job"
        )
        for _, group in groupby((self._restore(*row) for row in rows), key=lambda submission: submission.key):
            yield list(group)

    def node_uses(self) -> Iterator[tuple[Source, Iterator[NodeUse]]]:
        """Yield the uses of one node by one source in the order of their beginnings, for one node after the other."""
        for (number, *_), group in groupby(self._database.execute(_USES), key=lambda row: row[:3]):
            source = self.sources[number]
            uses = (
                NodeUse(kind, job, attempt, part, begin, end if has_ended else source.read_at, fact)
                for *_, kind, job, attempt, part, begin, end, has_ended, fact in group
            )
            yield source, uses

    def find_runs(self, job: int) -> Iterator[Run]:
        """Yield the runs of a job by all sources."""
        query = "SELECT kind, source, content FROM facts WHERE job = ? AND kind = 'Run'"
        return (self._restore(*row) for row in self._database.execute(query, (job,)))

    def find_run(self, number: int) -> Run:
        """Return the run of a use."""
        rows = self._database.execute("SELECT source, content FROM facts WHERE rowid = ?", (number,))
        run: Run = self._restore("Run", *rows.fetchone())
        return run
