"""Query parameters that a route does not know are refused, so that a misspelt filter never lists everything."""

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from koalapy.model.errors import UsageError
from koalapy.model.wording import known_names


async def refuse_unknown(request: Request) -> None:
    """Raises ``UsageError`` for the first query parameter the route does not declare."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = set(_names(route.dependant))
    for name, value in request.query_params.items():
        if name not in known:
            raise UsageError(f"unknown parameter {name!r}", field=name, value=value, hint=known_names(name, known))


def _names(dependant: Dependant) -> Iterator[str]:
    """Of the parameters that a route takes, and of those that what it depends on does."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for each in dependant.dependencies:
        yield from _names(each)
