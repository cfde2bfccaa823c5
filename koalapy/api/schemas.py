"""What goes over the wire: the JSON of submissions, jobs, clusters and problems."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from koalapy.api.fields import (
    MOST_ENTRIES,
    MOST_JOBS,
    MOST_OPTIONS,
    Cluster,
    Coallocation,
    Command,
    Environment,
    ExitCode,
    FileName,
    Input,
    JobId,
    LogicalName,
    Name,
    NotNegative,
    Number,
    Options,
    Output,
    OwnCommand,
    Pattern,
    Positive,
    Problem,
    Ratio,
    Reason,
    Seconds,
    Share,
    _number,
)
from koalapy.model.job import MAX_PROCESSES_PER_NODE, ClaimingMode, ComponentState, JobState, Launcher, Priority
from koalapy.model.request import MAX_COMPONENTS, Distribution

# Submissions


class JobInput(Input):
    """A logical file of the replica catalogue for every component: the whole, or of a folder one entry for each."""

    file: LogicalName
    distribution: Distribution = "whole"
    as_: Name = Field("", alias="as")
    """What it is called in the component's folder; by default the last part of its logical name."""


class ComponentInput(Input):
    """A logical file of the replica catalogue for one component, or one entry of it."""

    file: LogicalName
    part: FileName | None = None
    as_: Name = Field("", alias="as")


class FixedComponent(Input):
    """A component with its cluster."""

    size: Positive
    cluster: Cluster
    command: OwnCommand | None = None
    environment: Environment = {}
    output: FileName | None = None
    inputs: Annotated[list[ComponentInput], Field(max_length=MOST_ENTRIES)] = []


class NonFixedComponent(Input):
    """A component whose cluster the scheduler chooses."""

    size: Positive
    command: OwnCommand | None = None
    environment: Environment = {}
    output: FileName | None = None
    inputs: Annotated[list[ComponentInput], Field(max_length=MOST_ENTRIES)] = []


class Fixed(Input):
    """Sizes and clusters are given."""

    type: Literal["fixed"]
    components: Annotated[list[FixedComponent], Field(max_length=MAX_COMPONENTS, json_schema_extra={"minItems": 1})]


class NonFixed(Input):
    """Sizes are given."""

    type: Literal["nonfixed"]
    components: Annotated[list[NonFixedComponent], Field(max_length=MAX_COMPONENTS, json_schema_extra={"minItems": 1})]


Split = Annotated[list[Positive], Field(max_length=MAX_COMPONENTS, json_schema_extra={"minItems": 1})]


class Flexible(Input):
    """The total is given; the scheduler chooses components and clusters within the bounds."""

    type: Literal["flexible"]
    total_size: Positive
    min_component_size: Positive = 1
    max_components: Annotated[Number, _number(1, MAX_COMPONENTS)] | None = None
    split_options: Annotated[list[Split], Field(max_length=MOST_OPTIONS)] = []


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
    command: Command = []
    name: Name = ""
    owner: Name = ""
    environment: Environment = {}
    priority: Priority = Priority.LOW
    policy: Name = ""
    policy_options: Options = {}
    coallocation: Coallocation = None
    speed_ratio_min: Ratio | None = None
    claiming: ClaimingMode | None = None
    claim_threshold: Share | None = None
    launcher: Launcher = Launcher.OPENMPI
    processes_per_node: Annotated[Number, _number(1, MAX_PROCESSES_PER_NODE)] | None = None
    workdir: FileName | None = None
    workdir_optional: bool = False
    """Whether the program runs elsewhere, and says so, where that folder is not there; else it fails."""
    output: FileName | None = None
    walltime: Seconds | None = None
    max_restarts: NotNegative | None = None
    max_placement_tries: Positive | None = None
    max_claiming_tries: Positive | None = None
    retry_on_exit: Annotated[list[ExitCode], Field(max_length=255)] = []
    inputs: Annotated[list[JobInput], Field(max_length=MOST_ENTRIES)] = []
    bundle: Name | None = None
    """The id of a bundle, whose files every component finds in its folder."""
    collect: Annotated[list[Pattern], Field(max_length=MOST_ENTRIES)] = []
    """Patterns of the files that are brought together when the program has ended."""
    application: Name = ""
    """What the program is known as, so that its runs can be compared; by default its own name."""
    communication: Share | None = None
    """The share of communication in its run time, from 0 to 1."""


class Why(Input):
    """Why somebody acts on a job."""

    reason: Reason = ""


class CancelOrder(Why):
    """Which jobs are to end, and why."""

    jobs: Annotated[list[JobId], Field(min_length=1, max_length=MOST_JOBS)]


# Answers


class JobInputView(Output):
    """An input of every component."""

    file: str
    distribution: Distribution
    as_: str = Field(alias="as")


class ComponentInputView(Output):
    """An input of one component; only what was given."""

    file: str
    part: str | None = None
    as_: str | None = Field(None, alias="as")


class RequestedComponentView(Output):
    """A component as it was asked for; only what was given."""

    size: int
    cluster: str | None = None
    command: list[str] | None = None
    environment: dict[str, str] | None = None
    output: str | None = None
    inputs: list[ComponentInputView] | None = None


class ComponentsView(Output):
    """A fixed or non-fixed request."""

    type: Literal["fixed", "nonfixed"]
    components: list[RequestedComponentView]


class FlexibleView(Output):
    """A flexible request."""

    type: Literal["flexible"]
    total_size: int
    min_component_size: int
    max_components: int | None
    split_options: list[list[int]]


RequestView = Annotated[ComponentsView | FlexibleView, Field(discriminator="type")]


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
    sources: list[str]
    """Where each of its inputs comes from, in their order."""
    staging_since: str | None
    """When its files were ordered to its cluster; null when none must be brought before it can start."""
    stage_size: int
    """Bytes that must be brought, as far as known."""
    staged: int
    """Of these, bytes that are there."""
    staged_at: str | None


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
    request: RequestView
    command: list[str]
    environment: dict[str, str]
    priority: Priority
    policy: str
    policy_options: dict[str, str]
    coallocation: Literal["allowed", "never"] | int
    speed_ratio_min: float | None
    claiming: ClaimingMode | None
    claim_threshold: float | None
    launcher: Launcher
    processes_per_node: int | None
    workdir: str | None
    workdir_optional: bool
    output: str | None
    walltime: float | None
    max_restarts: int | None
    max_placement_tries: int | None
    max_claiming_tries: int | None
    retry_on_exit: list[int]
    inputs: list[JobInputView]
    """Of a flexible request; the components of the others have their own."""
    bundle: str | None
    collect: list[str]
    application: str
    communication: float | None
    submitted_at: str
    placed_at: str | None
    started_at: str | None
    ended_at: str | None
    queue_time: float | None
    wait_time: float | None
    startup_overhead: float | None
    response_time: float | None
    start_delay: float | None
    """How much later than first estimated the last attempt was to start."""
    generation: int
    restarts: int
    retry_at: str | None
    """When a queued job whose attempts kept failing is tried again; null while it is in its placement queue."""
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


class AttemptComponentView(Output):
    """A component of an attempt, with its own times.

    ``rank`` is its place in the placement. One whose claim failed is ``superseded`` by another of the same rank.
    """

    index: int
    rank: int
    cluster: str
    size: int
    state: ComponentState
    hosts: list[str]
    exit_code: int | None
    error: str
    infrastructure: bool
    submitted_at: str | None
    claimed_at: str | None
    ended_at: str | None
    file_site: str | None
    transfer_time: float
    sources: list[str]
    staging_since: str | None
    stage_size: int
    staged: int
    staged_at: str | None
    superseded: bool


class AttemptView(Output):
    """One try to run a job; spans are measured as those of the job."""

    generation: int
    placed_at: str
    start_estimate: str | None
    claim_at: str | None
    barrier_at: str | None
    launched_at: str | None
    ended_at: str | None
    end_reason: str
    exit_code: int | None
    queue_time: float | None
    wait_time: float | None
    startup_overhead: float | None
    response_time: float | None
    start_delay: float | None
    components: list[AttemptComponentView]


class AttemptList(Output):
    attempts: list[AttemptView]
    """In order; ``generation`` counts them from 1."""


class CancelledJob(Output):
    """What became of one job: its state now, or what stood against it."""

    job: int
    state: JobState | None
    """``cancelled``, or what it is until all its nodes are given back; null where there is a problem."""
    problem: Problem | None


class CancelledJobs(Output):
    jobs: list[CancelledJob]
    """Each job once, in the order that they were given in."""
