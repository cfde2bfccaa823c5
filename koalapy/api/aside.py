"""Long answers are put into words beside the event loop, piece by piece: nobody else waits for them."""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fastapi import Response

T = TypeVar("T")


async def json_list(name: str, texts: Iterable[str], rest: dict[str, Any]) -> Response:
    """An object with a list of that name, whose entries are made one after the other, and what else there is to it."""

    def text() -> str:
        # Whatever takes one call for all of them would keep everybody waiting meanwhile, in a thread as well.
        entries = ",".join(texts)
        return "".join([f'{{"{name}":[{entries}]', *(f',"{key}":{json.dumps(rest[key])}' for key in rest), "}"])

    return Response(await asyncio.to_thread(text), media_type="application/json")


async def text_of(make: Callable[[T], str], what: T, media_type: str) -> Response:
    """A text that is made beside the event loop."""
    return Response(await asyncio.to_thread(make, what), media_type=media_type)
