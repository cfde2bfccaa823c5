"""Serve plain submissions without FastAPI's matching of routes and resolution of dependencies.

That saves a sixth of the daemon's processor time for a submission. Authentication, limits and the audit are middleware
around this application, and authorization is the function that all routes depend on.
"""

import json
from collections.abc import Awaitable, Callable

from fastapi import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.access import identity_of
from koalapy.api.job_views import JobSubmission
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.model.identity import Identity
from koalapy.model.job_spec import JobSpec

Submit = Callable[[JobSpec, Identity, str | None], Awaitable[tuple[JobRecord, bool]]]
MAX_KEY_LENGTH = 200


class DirectSubmission:
    """Serve valid requests of one route that submits a job; pass every other request on to the application."""

    def __init__(
        self,
        app: ASGIApp,
        route: APIRoute,
        authorize: Callable[[HTTPConnection], Awaitable[None]],
        submit: Submit,
        respond: Callable[[JobRecord, bool], Response],
    ) -> None:
        """``authorize`` raises an error for a caller that may not submit; ``respond`` builds the response."""
        self._app, self._route, self._path = app, route, route.path
        self._authorize, self._submit, self._respond = authorize, submit, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_submission = scope["type"] == "http" and scope["path"] == self._path and scope["method"] == "POST"
        if not is_submission or scope["query_string"]:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body", False):
            messages.append(await receive())
        key = _read_headers(scope)
        submission = None if key is None else _parse_submission(messages)
        if key is None or submission is None:
            await self._app(scope, _replay(messages, receive), send)
            return
        scope["route"], scope["path_params"] = self._route, {}
        await self._authorize(HTTPConnection(scope))
        caller = identity_of(scope)
        assert caller is not None
        response = self._respond(*await self._submit(submission.to_model(), caller, key or None))
        await response(scope, receive, send)


def _read_headers(scope: Scope) -> str | None:
    """Return the idempotency key of a plain JSON request, empty without one; None for any other request."""
    types = [value for name, value in scope["headers"] if name == b"content-type"]
    keys = [value.decode("latin-1") for name, value in scope["headers"] if name == b"idempotency-key"]
    if types != [b"application/json"] or len(keys) > 1:
        return None
    if not keys:
        return ""
    return keys[0] if 0 < len(keys[0]) <= MAX_KEY_LENGTH and "\0" not in keys[0] else None


def _parse_submission(messages: list[Message]) -> JobSubmission | None:
    """Return the submission in a body; None if it is not valid or not complete."""
    if messages[-1]["type"] != "http.request":
        return None
    try:
        submission: JobSubmission = JobSubmission.model_validate(
            json.loads(b"".join(message.get("body", b"") for message in messages))
        )
    except (ValueError, RecursionError, ValidationError):
        return None
    return submission


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """Return a ``receive`` that repeats the messages that were received already."""
    remaining = iter(messages)

    async def receive_again() -> Message:
        return next(remaining, None) or await receive()

    return receive_again
