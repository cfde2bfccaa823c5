"""What goes over the wire of background load."""

from koalapy.api.schemas import Input, Output, Positive, Seconds


class BackgroundOrder(Input):
    """A job to be handed straight to a cluster's resource manager: that many nodes, busy for that many seconds."""

    nodes: Positive
    seconds: Seconds


class BackgroundStarted(Output):
    """The job, as the resource manager knows it; it may have to wait for its nodes."""

    name: str
    lrm_job: str


class BackgroundStopped(Output):
    stopped: int
    """How many jobs were told to end."""
