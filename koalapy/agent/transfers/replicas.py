"""What other sites and the daemon may ask of a cluster's replicas."""

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
"""How many checksums are computed at once; further ones wait."""
STOP_POLL_INTERVAL = 0.2
"""Seconds between two looks, while one waits, at whether that is still wanted."""
MAX_ANSWER_SIZE = 16 * 1024 * 1024
"""Characters in which a folder's entries can be told: the daemon takes no message that is much larger."""


class StatQuestion(BaseModel):
    """``stat``: what a file or folder is."""

    path: str
    checksum: bool = True


class ReplicaRequest(BaseModel):
    """A replica as the catalogue has it: all of it, or one entry of a folder; ``size`` in bytes is that of the part."""

    path: str
    part: str | None = None
    size: int = Field(ge=0)
    encrypted: bool = False
    """Whether the puller wants it to come encrypted."""

    def path_on_disk(self) -> Path:
        """``SiteRejected`` when the part is no entry of a folder."""
        if self.part is None:
            return Path(self.path)
        if not is_plain_name(self.part):
            raise SiteRejected(f"{self.part!r} is no entry of a folder", fault=SiteFault.OUTSIDE)
        return Path(self.path) / self.part


class Replicas:
    """Answers the question ``stat``."""

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
        # Of their own, for each may take hours, and others must not wait for them.
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_READS, "stat")
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def stat_replica(self, payload: Mapping[str, Any]) -> dict[str, object]:
        """The canonical path of a file or folder, its size, checksum, and a folder's parts.

        Who asks again while the checksum is still computed waits for the same.
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
                f"{printable(str(path))} has {len(parts):,} entries, which are too many",
                hint="put them into folders within it",
                fault=SiteFault.IRREGULAR,
            )
        return {"path": str(path), "size": content.size, "checksum": content.checksum, "parts": parts}

    def measure_replica(self, path: Path, *, checksum: bool) -> Content:
        """Blocks for as long as it takes to read it; ``SiteRejected``."""
        with self.roots.open_path(path) as opened:
            if not checksum:
                return measure_content(opened.descriptor, checksum=False)
            return self._read(path, opened.descriptor, self._closing)

    def _read(self, path: Path, descriptor: int, stop: threading.Event, changed_before: float | None = None) -> Content:
        """What it holds, with its checksum, which is remembered unless it was written to meanwhile.

        ``changed_before``: when others last changed it, if we have done so since.
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
        """The place of a replica that programs are to find as it is, which still is what it was: it is read again when
        anything about it is another than when it was read last, and made read-only. Blocks; ``SiteRejected``."""
        path = self.check_replica(request)
        with self._alone(path, stop), self.roots.open_path(path) as opened:
            seal, changed = seal_of(opened.descriptor)
            is_known, changed_before = self._seals.is_unchanged(path, seal, checksum), None
            if make_read_only(opened.descriptor):
                # That is no reason to read it, and with nothing else about it changed it is no change.
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
        """Who wants the same meanwhile waits, and need not read it again; ``SiteUnavailable`` when told to stop."""
        lock = self._reading.setdefault(path, threading.Lock())
        while not lock.acquire(timeout=STOP_POLL_INTERVAL):
            if stop.is_set():
                raise SiteUnavailable("nobody wants it any more")
        try:
            yield
        finally:
            lock.release()

    def check_replica(self, request: ReplicaRequest) -> Path:
        """The place of a replica that is there, can be read and has its size; ``SiteRejected`` otherwise."""
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
