"""What users of a simulated grid want."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec
from koalapy.model.request import ClusterName


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job that will be submitted. Times in seconds.

    Jobs that are alike are best given one ``spec``: it is held against the rules once.
    """

    at: float
    """When it is submitted."""
    spec: JobSpec
    lasts: float
    """How long its program runs on one cluster of speed 1; what makes it longer says a ``RunTime``."""
    exit_code: int = 0
    label: str = ""
    """What it is called where the workload comes from."""

    def __post_init__(self) -> None:
        for name, value in (("at", self.at), ("lasts", self.lasts)):
            if not (isfinite(value) and value >= 0):
                raise UsageError(f"{name} is {value}, but must be at least 0", field=name, value=value)


@dataclass(frozen=True, slots=True)
class LocalUser:
    """One local job: it waits in the resource manager's queue until there are nodes. Times in seconds."""

    at: float
    cluster: ClusterName
    nodes: int
    lasts: float


Gang = Sequence[tuple[ClusterName, int]]
"""Clusters and nodes; one cluster once, however many components a job has there."""
RunTime = Callable[[PlannedJob, Gang], float]
"""A factor, by which ``PlannedJob.lasts`` is multiplied: how long a program runs where it was placed."""


def constant(job: PlannedJob, gang: Gang) -> float:
    """The same wherever it runs."""
    return 1.0
