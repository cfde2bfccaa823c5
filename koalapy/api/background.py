"""The routes by which experiments load clusters as local users do, past the scheduler."""

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import WithJsonSchema

from koalapy.api.clusters import Name
from koalapy.api.fields import Input, Output, Positive, Seconds
from koalapy.api.problems import declared, problem
from koalapy.api.routes import api_router
from koalapy.daemon.agents.questions import Questions
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.model.errors import ProblemCode, UsageError

ANSWER_TIMEOUT = 30.0
"""Seconds that a cluster has to answer."""


MAX_SECONDS = 600.0
"""Seconds that one background job may run."""


class BackgroundOrder(Input):
    """A job to be handed straight to a cluster's resource manager: that many nodes, busy for that many seconds."""

    nodes: Positive
    seconds: Annotated[
        Seconds,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
                    {"type": "string", "format": "duration-of-load"},
                ],
                "description": "seconds, or 5m",
            }
        ),
    ]


class BackgroundStarted(Output):
    """The job, as the resource manager knows it; it may have to wait for its nodes."""

    name: str
    lrm_job: str


class BackgroundStopped(Output):
    stopped: int
    """How many jobs were told to end."""


def background_router(service: Jobs, questions: Questions, allowed: bool) -> APIRouter:
    """``allowed``: the daemon's setting ``background_load``."""
    router = api_router("clusters", "/clusters/{name}/background")

    @router.post("", status_code=201, response_model=BackgroundStarted, responses=declared(502))
    async def start_background(name: Name, order: BackgroundOrder) -> Any:
        """Keep nodes of a cluster busy as its local users do, for a while; only where the daemon allows it."""
        if not allowed:
            return _forbidden()
        total = service.cluster(name).total  # 0 while nothing is known of it: then its agent tells what is wrong
        if order.nodes < 1 or order.nodes > total > 0:
            hint = f"give 1 to {total}" if total else "give 1 or more"
            raise UsageError(f"nodes is {order.nodes}", field="nodes", value=order.nodes, hint=hint)
        if not 0 < order.seconds <= MAX_SECONDS:
            hint = f"give more than 0 and up to {MAX_SECONDS:g} seconds"
            raise UsageError(f"seconds is {order.seconds:g}", field="seconds", value=order.seconds, hint=hint)
        return await questions.ask(
            name, "background", {"nodes": order.nodes, "seconds": order.seconds}, timeout=ANSWER_TIMEOUT
        )

    @router.delete("", response_model=BackgroundStopped, responses=declared(502))
    async def stop_background(name: Name) -> Any:
        """End the background load that was started on a cluster by this route."""
        if not allowed:
            return _forbidden()
        service.cluster(name)
        return await questions.ask(name, "background-stop", {}, timeout=ANSWER_TIMEOUT)

    return router


def _forbidden() -> JSONResponse:
    return problem(
        ProblemCode.BACKGROUND_LOAD_DISABLED,
        "this daemon starts no background load",
        field="background_load",
        hint="set background_load: true in its configuration",
    )
