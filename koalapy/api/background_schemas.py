"""What goes over the wire of background load."""

from typing import Annotated

from pydantic import WithJsonSchema

from koalapy.api.fields import Input, Output, Positive, Seconds

LONGEST = 600.0
"""Seconds that one background job may run."""


class BackgroundOrder(Input):
    """A job to be handed straight to a cluster's resource manager: that many nodes, busy for that many seconds."""

    nodes: Positive
    seconds: Annotated[
        Seconds,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST},
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
