"""Read a record file, and report the defect of a file that cannot be replayed."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from koalapy.model.errors import UsageError
from koalapy.record.beginning import Beginning
from koalapy.record.lines import FORMAT, Json, beginning_from_json, step_from_json
from koalapy.record.step import Step

AGAIN = "export it again: koala export"
Lines = BinaryIO | gzip.GzipFile
GZIP = b"\x1f\x8b"
MAX_LINE = 1024**3
"""Maximum bytes of a line. The initial state is one line with all waiting jobs. A small packed file could expand to
more."""
NOT_READ = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions from converting a line that is not a part of a record."""


@dataclass(slots=True)
class Life:
    """The record of one daemon run. Its steps can be read once, and before the next run."""

    version: str
    beginning: Beginning
    steps: Iterator[Step] = field(repr=False)


class RecordFile:
    """A record file that ``koala export`` wrote."""

    def __init__(self, path: Path, lost: list[str] | None = None, *, max_line: int = MAX_LINE) -> None:
        """``lost`` receives the parts of the record that the daemon could not read or write.

        ``max_line``: maximum bytes of a line, so that a small packed file cannot fill the memory.
        """
        self._path, self._max_line = path, max_line
        self._lost: list[str] = [] if lost is None else lost
        self._number = 0
        self._ahead: Json | None = None

    def lives(self) -> Iterator[Life]:
        """Yield the daemon runs in order. Raise ``UsageError`` if the file is not a complete record."""
        try:
            with self._path.open("rb") as file:
                is_packed = file.read(len(GZIP)) == GZIP
            opened: Lines = gzip.open(self._path) if is_packed else self._path.open("rb")  # noqa: SIM115
        except OSError as error:
            raise self._unreadable_error(error) from error
        with opened:
            yield from self._read_runs(opened)

    def _read_runs(self, file: Lines) -> Iterator[Life]:
        """Yield the daemon runs of an open file, after a check of its first line. Raise ``UsageError``."""
        export = self._next_line(file)
        if export is None or "koala_export" not in export:
            raise self._make_error("is not a record of koala's", "koala export writes one")
        self._check_format(export["koala_export"])
        while (head := self._next_line(file)) is not None:
            if "end" in head:
                if self._next_line(file) is not None:
                    raise self._make_error(f"has data after its end marker, in line {self._number}")
                return
            if "lost" in head:
                self._lost.append(str(head["lost"]))
                continue
            if head.get("part") != 1:
                raise self._make_error(f"lacks the first part of the daemon run in line {self._number}")
            life = self._read_run(head, file)
            yield life
            for _ in life.steps:  # skip the steps that the caller did not read
                pass
        raise self._truncated_error()

    def _read_run(self, head: Json, file: Lines) -> Life:
        """Return the daemon run after a header line, with its steps still unread. Raise ``UsageError``."""
        self._check_format(head.get("koala_record"))
        content = self._next_line(file)
        if content is None:
            raise self._truncated_error()
        try:
            beginning = beginning_from_json(content["begin"])
        except NOT_READ as error:
            raise self._make_error(
                f"is damaged in line {self._number}: the initial state of the daemon run cannot be read"
            ) from error
        life, version = head.get("life"), head.get("version")
        if not isinstance(life, str) or not isinstance(version, str):
            raise self._make_error(f"is damaged before line {self._number}: it does not say whose life begins there")
        return Life(version, beginning, self._read_steps(life, file))

    def _read_steps(self, life: str, file: Lines) -> Iterator[Step]:
        """Yield the steps of the daemon run with the id ``life``. Raise ``UsageError`` if one is missing or damaged."""
        expected, part = 1, 1
        while (content := self._next_line(file)) is not None:
            if "koala_record" in content and content.get("life") == life:
                part += 1
                if content.get("part") != part:
                    raise self._make_error(f"has a gap before line {self._number}: part {part} of {life} is missing")
                continue
            if "n" not in content:
                self._ahead = content
                return
            try:
                step = step_from_json(content)
            except NOT_READ as error:
                raise self._make_error(f"is damaged in line {self._number}: that is not a step") from error
            if step.number != expected:
                raise self._make_error(
                    f"has a gap before line {self._number}: after step {expected - 1} comes {step.number}"
                )
            expected += 1
            yield step
        raise self._truncated_error()

    def _next_line(self, file: Lines) -> Json | None:
        """Return the next line; None at the end of the file."""
        if self._ahead is not None:
            content, self._ahead = self._ahead, None
            return content
        try:
            line = file.readline(self._max_line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._make_error(f"is damaged after line {self._number}: {error}") from error
        except OSError as error:
            raise self._unreadable_error(error) from error
        if not line:
            return None
        self._number += 1
        if len(line) == self._max_line:
            raise self._make_error(f"is damaged in line {self._number}: it has more than {self._max_line} bytes")
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            if self._number == 1:
                raise self._make_error("is not a record of koala's", "koala export writes one") from error
            if not line.endswith(b"\n"):
                raise self._truncated_error() from error
            raise self._make_error(f"is damaged in line {self._number}") from error
        if not isinstance(content, dict):
            raise self._make_error(f"is damaged in line {self._number}")
        return content

    def _check_format(self, number: object) -> None:
        if number != FORMAT:
            raise self._make_error(
                f"is of format {number}, and this version of koala reads format {FORMAT}",
                "replay it by the version that wrote it",
            )

    def _unreadable_error(self, error: OSError) -> UsageError:
        return self._make_error(f"cannot be read: {error.strerror or error}", "")

    def _truncated_error(self) -> UsageError:
        return self._make_error(f"is cut off after line {self._number}")

    def _make_error(self, problem: str, hint: str = AGAIN) -> UsageError:
        return UsageError(f"{self._path} {problem}", field="file", value=str(self._path), hint=hint)
