"""What users of a simulated grid want."""

from dataclasses import dataclass
from math import isfinite

from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec


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
