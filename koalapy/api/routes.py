"""What the routes of the API have in common: their router, and how long answers are made and given up."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from koalapy.model.errors import UsageError
from koalapy.model.wording import suggest_names

T = TypeVar("T")


def api_router(tag: str, prefix: str = "") -> APIRouter:
    """Return a router below ``/api/v1`` for one tag. The function of a route has the name of its operation."""
    return APIRouter(prefix=f"/api/v1{prefix}", tags=[tag], dependencies=[Depends(reject_unknown_parameters)])


async def reject_unknown_parameters(request: Request) -> None:
    """Raise ``UsageError`` for the first query parameter that the route does not declare.

    A misspelt filter would list everything.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = set(_parameter_names(route.dependant))
    for name, value in request.query_params.items():
        if name not in known:
            raise UsageError(f"unknown parameter {name!r}", field=name, value=value, hint=suggest_names(name, known))


def _parameter_names(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _parameter_names(dependency)


async def render_json_list(name: str, texts: Iterable[str], others: dict[str, Any]) -> Response:
    """Return an object with a list ``name`` of the entries ``texts``, and ``others``; make it beside the event loop."""

    def text() -> str:
        # One call of the encoder for all entries would hold the interpreter for the whole of it, in a thread as well.
        entries = ",".join(texts)
        return "".join([f'{{"{name}":[{entries}]', *(f',"{key}":{json.dumps(others[key])}' for key in others), "}"])

    return Response(await asyncio.to_thread(text), media_type="application/json")


async def text_of(make: Callable[[T], str], source: T, media_type: str) -> Response:
    """Return a text that is made beside the event loop."""
    return Response(await asyncio.to_thread(make, source), media_type=media_type)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await a computation that changes nothing; cancel it and raise ``ClientDisconnect`` when the client is gone.

    The body must have been read.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        leaving.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
