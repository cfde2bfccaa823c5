"""Helpers of all routes: the router, large responses, and cancellation when a client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from koalapy.model.errors import UsageError
from koalapy.model.wording import suggest_names

T = TypeVar("T")


def api_router(tag: str, prefix: str = "") -> APIRouter:
    """Return a router below ``/api/v1`` for one tag. The name of a route's function becomes its operation id."""
    return APIRouter(prefix=f"/api/v1{prefix}", tags=[tag], dependencies=[Depends(reject_unknown_parameters)])


async def reject_unknown_parameters(request: Request) -> None:
    """Raise ``UsageError`` for the first query parameter that the route does not declare.

    Otherwise a list with a misspelt filter would contain everything.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    names = set(_parameter_names(route.dependant))
    for name, value in request.query_params.items():
        if name not in names:
            raise UsageError(f"unknown parameter {name!r}", field=name, value=value, hint=suggest_names(name, names))


def _parameter_names(dependant: Dependant) -> Iterator[str]:
    """Yield the query parameters of a route and of all its dependencies."""
    for parameter in dependant.query_params:
        kind: Any = parameter.field_info.annotation
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
        yield from kind.model_fields if is_model else [parameter.alias]
    for dependency in dependant.dependencies:
        yield from _parameter_names(dependency)


async def render_json_list(name: str, entries: Iterable[str], fields: dict[str, Any]) -> Response:
    """Return a JSON object with the list ``name`` and some more fields, encoded in a thread.

    ``entries`` are already JSON. Encoding the whole list in one call would block other threads until its end.
    """

    def encode() -> str:
        head = f'{{"{name}":[{",".join(entries)}]'
        return "".join([head, *(f',"{key}":{json.dumps(value)}' for key, value in fields.items()), "}"])

    return Response(await asyncio.to_thread(encode), media_type="application/json")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a read-only computation; cancel it and raise ``ClientDisconnect`` if the client disconnects.

    The request's body must have been read before.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work_task, disconnect_task = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait([work_task, disconnect_task], return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        disconnect_task.result()
        raise ClientDisconnect
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


async def ignore_disconnect(request: Request) -> AsyncIterator[None]:
    """Ignore errors of a stream of events whose client has disconnected: FastAPI fails to send it pending events."""
    try:
        yield
    except ExceptionGroup:
        if not await request.is_disconnected():
            raise
