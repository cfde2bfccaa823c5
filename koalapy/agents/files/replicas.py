"""What other sites and the daemon may ask of a cluster's replicas."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from koalapy.agents.files.digest import Content, measure
from koalapy.agents.files.roots import Roots, is_plain_name, shown
from koalapy.model.errors import SiteRejected


class StatQuestion(BaseModel):
    """``stat``: what a file or folder is."""

    path: str
    checksum: bool = True


class Wanted(BaseModel):
    """A replica as the catalogue has it: all of it, or one entry of a folder; ``size`` in bytes is that of the part."""

    path: str
    part: str | None = None
    size: int = Field(ge=0)
    checksum: str = ""

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
        self._under_way: dict[tuple[Path, bool], asyncio.Task[Content]] = {}

    async def stat(self, payload: Mapping[str, Any]) -> dict[str, object]:
        """The canonical path of a file or folder, its size, checksum, and a folder's parts.

        Who asks again while the checksum is still computed waits for the same.
        """
        question = StatQuestion.model_validate(payload)
        path = await asyncio.to_thread(self.roots.find, question.path)
        key = path, question.checksum
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self.measure, path, checksum=question.checksum))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key))
        content = await asyncio.shield(task)
        parts = None if content.parts is None else [asdict(part) for part in content.parts]
        return {"path": str(path), "size": content.size, "checksum": content.checksum, "parts": parts}

    def measure(self, path: Path, *, checksum: bool) -> Content:
        """Blocks for as long as it takes to read it; ``SiteRejected``."""
        with self.roots.open(path) as opened:
            return measure(opened.descriptor, checksum=checksum)

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
