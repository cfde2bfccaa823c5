"""Reports of workload runs that users have sent: each a file below the data directory, and the oldest go first."""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import structlog

from koalapy.daemon.jobs.quota import Room
from koalapy.model.errors import FullError, NotFoundError, StoreUnavailable
from koalapy.model.identity import Identity, Role
from koalapy.model.quantities import bytes_text
from koalapy.workload import measures
from koalapy.workload.compare import label_of

log = structlog.get_logger()

Json = dict[str, Any]
MAX_REPORTS = 100
"""Of one owner."""
INCOMING = ".incoming-"
"""How the names of files begin that are not whole yet."""
SUFFIX = ".report"


@dataclass(frozen=True, slots=True)
class KeptReport:
    """What lists tell of a report; times are means in seconds over the jobs that ``ran`` to an end of their own."""

    id: str
    owner: str
    name: str
    policy: str
    """That of all jobs; empty where there are several."""
    received_at: float
    began: str
    seconds: float
    interrupted: str
    """Why the run ended before its jobs, if it did."""
    jobs: int
    ran: int
    states: Mapping[str, int]
    queue_time: float | None
    wait_time: float | None
    response_time: float | None
    utilisation: float | None
    """The share of all nodes that jobs of this scheduler had."""
    background: float | None
    """That local users had."""


class WorkloadReports:
    """Keeps them; whose own take up the most make way when there is no room for another's."""

    def __init__(self, directory: Path, quota: int, clock: Callable[[], float]) -> None:
        """``quota``: bytes of all together."""
        self._directory, self._quota, self._clock = directory, quota, clock
        self._kept: dict[str, tuple[KeptReport, int]] = {}
        """With their bytes, in the order in which they came."""
        self._changing = asyncio.Lock()
        found = sorted(self._found(), key=lambda one: one[0].received_at)
        self._kept = {kept.id: (kept, size) for kept, size in found}

    def _found(self) -> list[tuple[KeptReport, int]]:
        for path in self._directory.glob(f"{INCOMING}*"):
            path.unlink(missing_ok=True)
        found = []
        for path in self._directory.glob(f"*{SUFFIX}"):
            try:
                with path.open(encoding="utf-8") as file:
                    kept = KeptReport(**json.loads(file.readline()))
                if self._path(kept.id) != path:
                    raise ValueError("it has another's name")
                found.append((kept, path.stat().st_size))
            except (OSError, ValueError, TypeError) as error:
                # It may be of a daemon after this one, and stays.
                log.warning("a workload's report is left out", action="workload-unreadable", error=str(error))
        return found

    @property
    def room(self) -> Room:
        return Room(sum(size for _, size in self._kept.values()), self._quota)

    def seen_by(self, by: Identity) -> list[KeptReport]:
        """The newest first: one's own, operators all."""
        return [kept for kept, _ in reversed(self._kept.values()) if _may(by, kept)]

    async def keep(self, owner: str, name: str, sent: Json) -> tuple[KeptReport, bool]:
        """Keep a report that is known to be one; False when it was there. ``FullError`` when there is no room for it,
        ``StoreUnavailable`` when the disk does not take it."""
        kept, content = await asyncio.to_thread(self._written, owner, name, sent)
        async with self._changing:
            if kept.id in self._kept:
                return self._kept[kept.id][0], False
            gone = self._too_many(kept, len(content))
            if kept.id in gone:
                raise FullError(
                    f"there is no room for it: workloads_quota is {bytes_text(self._quota)}",
                    field="body",
                    hint="remove reports of yours, or have the daemon's operator raise workloads_quota",
                )
            for one in gone:
                await self._discard(one)
            await asyncio.to_thread(self._save, kept.id, content)
            self._kept[kept.id] = kept, len(content)
        return kept, True

    def _written(self, owner: str, name: str, sent: Json) -> tuple[KeptReport, bytes]:
        """A report with all that follows from its jobs, as it goes to disk: a line of facts, and then itself."""
        jobs = sent["jobs"]
        summary = measures.means(jobs)
        told = sent | {
            "summary": summary,
            "by_application": measures.by_application(jobs),
            "by_size": measures.by_size(jobs),
        }
        text = json.dumps(told, sort_keys=True, separators=(",", ":"))
        run, used = sent["run"], sent["utilisation"]["all"]
        kept = KeptReport(
            id=sha256(json.dumps([owner, name, text]).encode()).hexdigest()[:32],
            owner=owner,
            name=name,
            policy=label_of(sent, ""),
            received_at=self._clock(),
            began=run["began"],
            seconds=run["seconds"],
            interrupted=run["interrupted"],
            jobs=len(jobs),
            ran=summary["ran"],
            states=summary["states"],
            queue_time=summary["queue_time"],
            wait_time=summary["wait_time"],
            response_time=summary["response_time"],
            utilisation=used["ours"],
            background=used["background"],
        )
        return kept, f"{json.dumps(asdict(kept))}\n{text}\n".encode()

    def _save(self, ident: str, content: bytes) -> None:
        incoming = self._directory / f"{INCOMING}{uuid.uuid4().hex}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                incoming.write_bytes(content)
                incoming.rename(self._path(ident))
            finally:
                incoming.unlink(missing_ok=True)
        except OSError as error:
            hint = "try again when the daemon's data directory has room"
            raise StoreUnavailable(f"the report cannot be kept: {error.strerror or error}", hint=hint) from error

    def _too_many(self, new: KeptReport, size: int) -> list[str]:
        """With a new one: the oldest of its owner's that are too many, and then of whoever has the most bytes."""
        left = self._kept | {new.id: (new, size)}
        own = [ident for ident, (kept, _) in left.items() if kept.owner == new.owner]
        gone = own[: max(0, len(own) - MAX_REPORTS)]
        for ident in gone:
            del left[ident]
        used = Counter[str]()
        for kept, size in left.values():
            used[kept.owner] += size
        while used.total() > self._quota:
            most = max(used, key=lambda name: used[name])
            oldest = next(ident for ident, (kept, _) in left.items() if kept.owner == most)
            used[most] -= left.pop(oldest)[1]
            gone.append(oldest)
        return gone

    async def _discard(self, ident: str) -> None:
        try:
            await asyncio.to_thread(self._path(ident).unlink, missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"the report cannot be removed: {error.strerror or error}") from error
        self._kept.pop(ident, None)

    async def read(self, by: Identity, ident: str) -> tuple[KeptReport, Json]:
        """A report that somebody may see; ``NotFoundError`` as for none."""
        kept = self._one(by, ident)
        try:
            lines = (await asyncio.to_thread(self._path(ident).read_text, "utf-8")).split("\n", 1)
        except FileNotFoundError as error:
            raise _no_report(ident) from error
        except OSError as error:
            raise StoreUnavailable(f"the report cannot be read: {error.strerror or error}") from error
        told: Json = await asyncio.to_thread(json.loads, lines[1])
        return kept, told

    async def remove(self, by: Identity, ident: str) -> KeptReport:
        """One's own, operators any; ``NotFoundError`` as for none."""
        async with self._changing:
            kept = self._one(by, ident)
            await self._discard(ident)
        return kept

    def _one(self, by: Identity, ident: str) -> KeptReport:
        kept, _ = self._kept.get(ident, (None, 0))
        if kept is None or not _may(by, kept):
            raise _no_report(ident)
        return kept

    def _path(self, ident: str) -> Path:
        return self._directory / f"{ident}{SUFFIX}"


def _may(by: Identity, kept: KeptReport) -> bool:
    return by.may(Role.OPERATOR) or kept.owner == by.user


def _no_report(ident: str) -> NotFoundError:
    hint = "GET /api/v1/workloads tells which there are"
    return NotFoundError(f"there is no report {ident}", field="report", value=ident, hint=hint)
