"""Long looks at many things, during which others have their turn."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")

SLICE = 500
"""Jobs that are looked at before others go on, where a look at one takes about a microsecond."""


async def slices(items: Sequence[T], size: int = SLICE) -> AsyncIterator[Sequence[T]]:
    """So many of them at a time; others go on between."""
    for start in range(0, len(items), size):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + size]
