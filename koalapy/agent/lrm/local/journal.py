"""locald's memory over restarts: which jobs there were and how they ended, one JSON line for each event."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from koalapy.agent.lrm.local.jobs import MAX_RETAINED_JOBS, LocalJob
from koalapy.runner.atomic_files import replace_file

_MAX_LINES = 6 * MAX_RETAINED_JOBS


class Journal:
    """An append-only file, written anew from time to time. Not synced: it outlives the process, not the machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._lines = 0

    def load(self) -> list[LocalJob]:
        """Jobs as the last locald left them; those that had not ended are lost with it."""
        jobs: dict[int, LocalJob] = {}
        try:
            lines = self._path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                _apply(jobs, json.loads(line))
            except (ValueError, TypeError, KeyError):  # cut off when the machine or the process died
                continue
        for job in jobs.values():
            if job.state != "ended":
                job.lost, job.reason = True, "the cluster's resource manager was killed"
        return list(jobs.values())[-MAX_RETAINED_JOBS:]

    def submitted(self, job: LocalJob) -> None:
        """Raises ``OSError``."""
        self._append(_submission(job))

    def ended(self, job: LocalJob) -> None:
        try:
            self._append(_end(job))
        except OSError as error:
            print(f"locald: {self._path}: {error}", file=sys.stderr)

    @property
    def is_there(self) -> bool:
        """Whether nobody has removed it."""
        return self._path.exists()

    @property
    def is_long(self) -> bool:
        """Time to write it anew."""
        return self._lines > _MAX_LINES

    def rewrite(self, jobs: Iterable[LocalJob]) -> None:
        """Replace the file by what is still remembered; raises ``OSError``."""
        lines = [line for job in jobs for line in _lines_of(job)]
        replace_file(self._path, b"".join(lines))
        self.close()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._lines = len(lines)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, line: bytes) -> None:
        os.write(self._file, line)
        self._lines += 1


def _lines_of(job: LocalJob) -> list[bytes]:
    return [_submission(job), _end(job)] if job.state == "ended" else [_submission(job)]


def _submission(job: LocalJob) -> bytes:
    return _line(["submitted", job.id, job.name, job.user, job.size])


def _end(job: LocalJob) -> bytes:
    return _line(["ended", job.id, job.exit_code, job.lost, job.reason])


def _line(entry: list[object]) -> bytes:
    return b"\n" + json.dumps(entry).encode() + b"\n"  # whatever was torn before this ends here


def _apply(jobs: dict[int, LocalJob], entry: object) -> None:
    match entry:
        case ["submitted", int(id), str(name), str(user), int(size)]:
            jobs[id] = LocalJob(id, name, user, size)
        case ["ended", int(id), int() | None as exit_code, bool(lost), str(reason)]:
            job = jobs[id]
            job.state, job.exit_code, job.lost, job.reason = "ended", exit_code, lost, reason
