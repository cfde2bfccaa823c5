"""One pull for all stages that want the same: the first brings it, the others copy it from there.

Whoever copies verifies what came of it, as after a pull, for a program may have written to its input. So nobody depends
on anybody: if there is nothing to be copied, or something else, it is pulled.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from koalapy.agents.files.trouble import StageTrouble
from koalapy.protocol.messages import StageFile

Content = tuple[str, str, str | None, str, int]
"""A replica, or an entry of it, as the catalogue has it. The checksum alone would not do: empty files have that of
empty folders."""


def content_of(file: StageFile) -> Content:
    return file.source, file.path, file.part, file.checksum, file.size


class Errand:
    """Something for which one stage goes at a time."""

    def __init__(self) -> None:
        self.wanted = 0
        """How many stages are on it or wait for it."""
        self.free = asyncio.Lock()
        self.trouble: StageTrouble | None = None


class Errands:
    """Those that somebody is on or waits for."""

    def __init__(self) -> None:
        self._known: dict[Content, Errand] = {}

    @asynccontextmanager
    async def alone(self, file: StageFile) -> AsyncIterator[None]:
        """Wait until nobody else brings this; ``StageTrouble`` when it could not be had from its source meanwhile."""
        errand = self._known.setdefault(content_of(file), Errand())
        errand.wanted += 1
        try:
            async with errand.free:
                if errand.trouble is not None:
                    raise errand.trouble
                yield
        except StageTrouble as trouble:
            # What names no source is the trouble of that one stage.
            errand.trouble = trouble if trouble.source and trouble.fault != "site" else None
            raise
        finally:
            errand.wanted -= 1
            if not errand.wanted:
                del self._known[content_of(file)]
