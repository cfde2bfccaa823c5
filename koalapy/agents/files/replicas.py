"""What other sites and the daemon may ask of a cluster's replicas."""

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from koalapy.agents.files.digest import Content, measure
from koalapy.agents.files.roots import Roots, is_plain_name, shown
from koalapy.model.errors import SiteRejected

LOOKS = 4
"""How many checksums are computed at once; further ones wait."""
LARGEST_ANSWER = 16 * 1024 * 1024
"""Characters in which a folder's entries can be told: the daemon takes no message that is much larger."""


class StatQuestion(BaseModel):
    """``stat``: what a file or folder is."""

    path: str
    checksum: bool = True


class Wanted(BaseModel):
    """A replica as the catalogue has it: all of it, or one entry of a folder; ``size`` in bytes is that of the part."""

    path: str
    part: str | None = None
    size: int = Field(ge=0)

    def place(self) -> Path:
        """``SiteRejected`` when the part is no entry of a folder."""
        if self.part is None:
            return Path(self.path)
        if not is_plain_name(self.part):
            raise SiteRejected(f"{self.part!r} is no entry of a folder", fault="outside")
        return Path(self.path) / self.part


class Replicas:
    """Answers the question ``stat``."""

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self._under_way: dict[tuple[Path, bool], asyncio.Future[Content]] = {}
        # Of their own, for each may take hours, and others must not wait for them.
        self._threads = ThreadPoolExecutor(LOOKS, "stat")
        self._closing = threading.Event()

    def close(self) -> None:
        """Give up what is being looked at."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def stat(self, payload: Mapping[str, Any]) -> dict[str, object]:
        """The canonical path of a file or folder, its size, checksum, and a folder's parts.

        Who asks again while the checksum is still computed waits for the same.
        """
        question = StatQuestion.model_validate(payload)
        path = await asyncio.to_thread(self.roots.find, question.path)
        key = path, question.checksum
        looking = self._under_way.get(key)
        if looking is None:
            look = partial(self.measure, path, checksum=question.checksum)
            looking = asyncio.get_running_loop().run_in_executor(self._threads, look)
            self._under_way[key] = looking
            looking.add_done_callback(lambda _: self._under_way.pop(key))
        content = await asyncio.shield(looking)
        parts = None if content.parts is None else [asdict(part) for part in content.parts]
        if parts and await asyncio.to_thread(lambda: len(json.dumps(parts))) > LARGEST_ANSWER:
            raise SiteRejected(
                f"{shown(str(path))} has {len(parts):,} entries, which are too many",
                hint="put them into folders within it", fault="irregular",
            )  # fmt: skip
        return {"path": str(path), "size": content.size, "checksum": content.checksum, "parts": parts}

    def measure(self, path: Path, *, checksum: bool) -> Content:
        """Blocks for as long as it takes to read it; ``SiteRejected``."""
        with self.roots.open(path) as opened:
            return measure(opened.descriptor, checksum=checksum, given_up=self._closing.is_set)

    def check(self, wanted: Wanted) -> Path:
        """The place of a replica that is there, can be read and has its size; ``SiteRejected`` otherwise."""
        path = wanted.place()
        with self.roots.open(path) as opened:
            size = measure(opened.descriptor, checksum=False).size
            if not opened.is_folder:
                os.pread(opened.descriptor, 1, 0)
        if size != wanted.size:
            raise SiteRejected(f"{shown(str(path))} has {size:,} bytes now and not {wanted.size:,}", fault="changed")
        return path
