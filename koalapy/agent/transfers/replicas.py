"""The replicas of a cluster: answers other sites and the daemon, and lends replicas to jobs."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from koalapy.agent.transfers.digest import Content, measure_content
from koalapy.agent.transfers.roots import Roots, is_plain_name, printable
from koalapy.agent.transfers.seals import Seals, make_read_only, seal_of, settable_part
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable
from koalapy.system.clock import SYSTEM_CLOCK, Clock

MAX_CONCURRENT_READS = 4
"""Checksums computed at once for questions; further ones wait."""
STOP_POLL_INTERVAL = 0.2
"""Seconds between two checks for a stop while waiting."""
MAX_ANSWER_SIZE = 16 * 1024 * 1024
"""Maximum characters for a folder's entries; the daemon accepts no message that is much larger."""


class StatQuestion(BaseModel):
    """The question ``stat`` about a file or folder."""

    path: str
    checksum: bool = True


class ReplicaRequest(BaseModel):
    """A replica of the catalogue, or one entry of a folder; ``size`` in bytes is that of the part."""

    path: str
    part: str | None = None
    size: int = Field(ge=0)
    encrypted: bool = False
    """Whether the puller requests an encrypted transfer."""

    def path_on_disk(self) -> Path:
        """Return the path of the replica, or of its entry ``part``. Raise ``SiteRejected`` if ``part`` is not a plain
        file name."""
        if self.part is None:
            return Path(self.path)
        if not is_plain_name(self.part):
            raise SiteRejected(
                f"{self.part!r} is not the name of one entry of {self.path}: give a name without '/'",
                fault=SiteFault.OUTSIDE,
            )
        return Path(self.path) / self.part


class Replicas:
    """Checks, measures and lends replicas; answers the question ``stat``."""

    def __init__(
        self,
        roots: Roots,
        seals: Seals | None = None,
        clock: Clock = SYSTEM_CLOCK,
        max_answer_size: int = MAX_ANSWER_SIZE,
    ) -> None:
        self.roots, self._clock, self._max_answer_size = roots, clock, max_answer_size
        self._seals = seals or Seals()
        self._reading: dict[Path, threading.Lock] = {}
        self._under_way: dict[tuple[Path, bool], asyncio.Future[Content]] = {}
        # A read may take hours and must not block others.
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_READS, "stat")
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def stat_replica(self, payload: Mapping[str, Any]) -> dict[str, object]:
        """Return the canonical path of a file or folder, its size, checksum, and a folder's parts.

        Questions for the same path share one computation.
        """
        question = StatQuestion.model_validate(payload)
        path = await asyncio.to_thread(self.roots.resolve_path, question.path)
        key = path, question.checksum
        looking = self._under_way.get(key)
        if looking is None:
            look = partial(self.measure_replica, path, checksum=question.checksum)
            looking = asyncio.get_running_loop().run_in_executor(self._threads, look)
            self._under_way[key] = looking
            looking.add_done_callback(lambda _: self._under_way.pop(key))
        content = await asyncio.shield(looking)
        parts = None if content.parts is None else [asdict(part) for part in content.parts]
        if parts and await asyncio.to_thread(lambda: len(json.dumps(parts))) > self._max_answer_size:
            raise SiteRejected(
                f"{printable(str(path))} has {len(parts):,} entries; their list is "
                f"longer than the {self._max_answer_size:,} bytes of an agent's answer",
                hint="move them into subfolders",
                fault=SiteFault.IRREGULAR,
            )
        return {"path": str(path), "size": content.size, "checksum": content.checksum, "parts": parts}

    def measure_replica(self, path: Path, *, checksum: bool) -> Content:
        """Return the content of a replica. Block while it is read. Raise ``SiteRejected``."""
        with self.roots.open_path(path) as opened:
            if not checksum:
                return measure_content(opened.descriptor, checksum=False)
            return self._read(path, opened.descriptor, self._closing)

    def _read(self, path: Path, descriptor: int, stop: threading.Event, changed_before: float | None = None) -> Content:
        """Return the content with checksum; remember it unless the replica changed during the read.

        ``changed_before``: the last change by others, if the agent has changed it since.
        """
        seal_before, _ = seal_of(descriptor)
        began = self._clock.now()
        content = measure_content(descriptor, checksum=True, given_up=stop.is_set)
        seal_after, changed = seal_of(descriptor)
        if seal_before == seal_after:
            changed = changed if changed_before is None else changed_before
            self._seals.record_seal(path, seal_after, content.checksum, changed + max(0.0, self._clock.now() - began))
        return content

    def lend_replica(self, request: ReplicaRequest, checksum: str, stop: threading.Event) -> Path:
        """Return the path of a replica for jobs, after making it read-only and verifying its content.

        Read it only if its seal, a digest of sizes and times, has changed. Block. Raise ``SiteRejected``.
        """
        path = self.check_replica(request)
        with self._alone(path, stop), self.roots.open_path(path) as opened:
            seal, changed = seal_of(opened.descriptor)
            is_known, changed_before = self._seals.is_unchanged(path, seal, checksum), None
            if make_read_only(opened.descriptor):
                # The agent's own change of permissions needs no new read if nothing else changed.
                former, (seal, _) = settable_part(seal), seal_of(opened.descriptor)
                is_same = settable_part(seal) == former
                is_known, changed_before = is_known and is_same, changed if is_same else None
            if is_known:
                self._seals.replace_seal(path, seal, checksum)
                return path
            content = self._read(path, opened.descriptor, stop, changed_before)
        if (content.size, content.checksum) != (request.size, checksum):
            change = f"its SHA-256 begins with {content.checksum[:8]} now and not {checksum[:8]}: it was changed"
            raise SiteRejected(f"{printable(str(path))}: {change}", fault=SiteFault.CHANGED)
        return path

    @contextmanager
    def _alone(self, path: Path, stop: threading.Event) -> Iterator[None]:
        """Lock a replica so that one thread at a time reads it. Raise ``SiteUnavailable`` when stopped."""
        lock = self._reading.setdefault(path, threading.Lock())
        while not lock.acquire(timeout=STOP_POLL_INTERVAL):
            if stop.is_set():
                raise SiteUnavailable("it is no longer needed")
        try:
            yield
        finally:
            lock.release()

    def check_replica(self, request: ReplicaRequest) -> Path:
        """Return the path of a readable replica of the right size. Raise ``SiteRejected`` otherwise."""
        path = request.path_on_disk()
        with self.roots.open_path(path) as opened:
            size = measure_content(opened.descriptor, checksum=False).size
            if not opened.is_folder:
                os.pread(opened.descriptor, 1, 0)
        if size != request.size:
            raise SiteRejected(
                f"{printable(str(path))} has {size:,} bytes now and not {request.size:,}", fault=SiteFault.CHANGED
            )
        return path
