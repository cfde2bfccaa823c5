"""The names and ids of jobs submitted through DRMAA, which itself remembers neither: a small file of JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from koalapy.agent.lrm.port import LrmJob, LrmJobState
from koalapy.model.errors import SiteUnavailable
from koalapy.runner.atomic_files import replace_file
from koalapy.system.clock import SYSTEM_CLOCK, Clock

_RETENTION = 7 * 86400.0
"""Seconds for which an ended job is remembered."""


@dataclass(slots=True)
class SubmittedJob:
    """One job; ``job`` is None from before it is submitted until that is answered, ``ended`` the time of its end."""

    name: str
    nodes: int
    job: str | None = None
    ended: float = 0.0
    cancelled: bool = False
    exit_code: int | None = None
    lost: bool = False
    reason: str = ""
    user: str = ""

    def as_job(self) -> LrmJob:
        """As it ended."""
        code, lost = self.exit_code, self.lost
        return LrmJob(self.job or "", self.name, LrmJobState.ENDED, (), code, lost, self.reason, user=self.user)


class SubmittedJobs:
    """Every method that changes something has written it when it returns; they raise ``SiteUnavailable``."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = path, clock
        self.entries: dict[str, SubmittedJob] = {}

    def load(self) -> None:
        try:
            stored = json.loads(self._path.read_bytes())
            self.entries = {name: SubmittedJob(**fields) for name, fields in stored.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise SiteUnavailable(f"cannot read {self._path}: {error}", hint="move it away") from error

    def intend(self, name: str, nodes: int, user: str = "") -> None:
        self.entries[name] = SubmittedJob(name, nodes, user=user)
        self._write()

    def submitted(self, name: str, job: str) -> None:
        self.entries[name].job = job
        self._write()

    def forget(self, name: str) -> None:
        self.entries.pop(name, None)
        self._write()

    def ended(self, jobs: Sequence[LrmJob]) -> None:
        now = self._clock.now()
        for job in jobs:
            entry = self.entries[job.name]
            entry.ended, entry.exit_code, entry.lost, entry.reason = now, job.exit_code, job.lost, job.reason
        self._write()

    def _write(self) -> None:
        limit = self._clock.now() - _RETENTION
        self.entries = {name: each for name, each in self.entries.items() if not 0 < each.ended < limit}
        content = json.dumps({name: asdict(each) for name, each in self.entries.items()}).encode()
        try:
            replace_file(self._path, content)
        except OSError as error:
            raise SiteUnavailable(f"cannot write {self._path}: {error.strerror}") from error
