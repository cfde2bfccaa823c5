"""What goes over the wire: the JSON of submissions, jobs, clusters and problems."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from koalapy.model.job import JobState, Launcher, Priority


class Input(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Output(BaseModel):
    model_config = ConfigDict(extra="forbid")


def seconds(value: object) -> object:
    """A duration in seconds, or as people write it: ``90m``, ``1h30m``, ``2-12:00:00``, ``1:30:00``."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text):
        days, first, second, third = clock.groups()
        hours, minutes, rest = (first, second, third) if third is not None or days else ("0", first, second)
        return int(days or 0) * 86400 + int(hours) * 3600 + int(minutes) * 60 + int(rest or 0)
    if text and (units := re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)):
        return sum(int(part or 0) * unit for part, unit in zip(units.groups(), (86400, 3600, 60, 1), strict=True))
    return value


Seconds = Annotated[float, BeforeValidator(seconds)]
"""Seconds; also accepted as ``90m``, ``1h30m``, ``1:30:00`` or ``2-12:00:00``."""

Cluster = Annotated[str, Field(min_length=1, max_length=100)]


# Submissions


class FixedComponent(Input):
    """A component with its cluster."""

    size: int
    cluster: Cluster
    command: list[str] | None = None
    environment: dict[str, str] = {}
    output: str | None = None


class NonFixedComponent(Input):
    """A component whose cluster the scheduler chooses."""

    size: int
    command: list[str] | None = None
    environment: dict[str, str] = {}
    output: str | None = None


class Fixed(Input):
    """Sizes and clusters are given."""

    type: Literal["fixed"]
    components: list[FixedComponent]


class NonFixed(Input):
    """Sizes are given."""

    type: Literal["nonfixed"]
    components: list[NonFixedComponent]


class Flexible(Input):
    """The total is given; the scheduler chooses components and clusters within the bounds."""

    type: Literal["flexible"]
    total_size: int
    min_component_size: int = 1
    max_components: int | None = None
    split_options: list[list[int]] = []


Request = Annotated[Fixed | NonFixed | Flexible, Field(discriminator="type")]


class JobSubmission(Input):
    """A parallel job: what to run, and on how many nodes of which clusters."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "request": {"type": "flexible", "total_size": 6},
                    "command": ["python", "-m", "koalapy.apps.poisson"],
                    "name": "poisson",
                }
            ]
        },
    )

    request: Request
    command: list[str] = []
    name: Annotated[str, Field(max_length=200)] = ""
    owner: Annotated[str, Field(max_length=200)] = ""
    environment: dict[str, str] = {}
    priority: Priority = Priority.LOW
    policy: str = ""
    launcher: Launcher = Launcher.OPENMPI
    processes_per_node: int | None = None
    workdir: str | None = None
    output: str | None = None
    walltime: Seconds | None = None
    max_restarts: int | None = None
    max_placement_tries: int | None = None


class Why(Input):
    """Why somebody acts on a job."""

    reason: Annotated[str, Field(max_length=1000)] = ""


# Answers


class ComponentView(Output):
    index: int
    cluster: str
    size: int
    state: str
    hosts: list[str]
    lrm_job: str | None
    exit_code: int | None
    error: str
    unknown_since: str | None


class TimelineView(Output):
    at: str
    event: str
    state: JobState
    reason: str
    generation: int
    component: int | None
    cluster: str | None


class JobView(Output):
    """A job and where it stands; times are ISO 8601 in UTC, spans are in seconds."""

    id: int
    name: str
    owner: str
    state: JobState
    reason: str
    exit_code: int | None
    request: dict[str, Any]
    command: list[str]
    environment: dict[str, str]
    priority: Priority
    policy: str
    launcher: Launcher
    processes_per_node: int | None
    workdir: str | None
    output: str | None
    walltime: float | None
    submitted_at: str
    placed_at: str | None
    started_at: str | None
    ended_at: str | None
    queue_time: float | None
    wait_time: float | None
    startup_overhead: float | None
    response_time: float | None
    generation: int
    restarts: int
    placement_tries: int
    claiming_tries: int
    components: list[ComponentView]


class JobWithTimeline(JobView):
    timeline: list[TimelineView]


class JobPage(Output):
    jobs: list[JobView]
    next: str | None
    """Where the next page is; null on the last."""


class Timeline(Output):
    timeline: list[TimelineView]


class ClusterView(Output):
    name: str
    kind: str
    state: str
    total: int
    idle: int
    used: int
    background: int
    down: int
    errors: int
    reason: str
    last_heard: str | None
    processes_per_node: int
    speed: float
    details: dict[str, Any]


class ClusterList(Output):
    clusters: list[ClusterView]


class PolicyView(Output):
    name: str
    serves: list[str]
    summary: str


class PolicyList(Output):
    policies: list[PolicyView]


class Health(Output):
    status: Literal["ok", "degraded"]
    version: str
    epoch: int
    queued: int
    active: int
    clusters: dict[str, str]


class Problem(BaseModel):
    """What went wrong (RFC 9457), with the field, its value, and the way out."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    field: str = ""
    value: Any = None
    hint: str = ""
