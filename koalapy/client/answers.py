"""The fields of the daemon's responses about jobs and clusters that clients read. Times are strings in ISO 8601.

``tests/client/test_answers.py`` compares these types with the schema of the API.
"""

from typing import Any, TypedDict

Json = dict[str, Any]


class ListedComponent(TypedDict):
    index: int
    cluster: str
    size: int
    node_class: str
    state: str


class Component(ListedComponent):
    hosts: list[str]
    lrm_job: str | None
    error: str
    sources: list[str]
    staging_since: str | None
    stage_size: int
    staged: int
    staged_at: str | None
    measured_nodes: int
    accounted_nodes: int
    cpu_time: float | None
    cpu_available: float | None
    peak_memory: int | None


class AttemptComponent(ListedComponent):
    rank: int
    superseded: bool
    submitted_at: str | None
    claimed_at: str | None
    ended_at: str | None


class Attempt(TypedDict):
    generation: int
    placed_at: str
    barrier_at: str | None
    launched_at: str | None
    ended_at: str | None
    end_reason: str
    components: list[AttemptComponent]


class TimelineEntry(TypedDict):
    at: str
    event: str
    state: str
    reason: str
    cluster: str | None


class Tasks(TypedDict):
    size: int
    waiting: int
    running: int
    succeeded: int
    failed: int
    cancelled: int


class _JobState(TypedDict):
    id: int
    redacted: bool
    state: str
    reason: str
    exit_code: int | None
    request: Json
    policy: str
    priority: str
    name: str
    owner: str
    home_site: str
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    restarts: int
    array: str | None
    tasks: Tasks | None
    array_job: int | None
    array_index: int | None


class ListedJob(_JobState):
    program: str
    components: list[ListedComponent]


class RelatedJob(TypedDict):
    job: int
    condition: str
    clause: int
    state: str | None


class Job(_JobState):
    command: list[str]
    script: str
    inputs: list[Json]
    result_inputs: list[str]
    bundle: str | None
    queue_time: float | None
    startup_overhead: float | None
    start_delay: float | None
    response_time: float | None
    placement_tries: int
    claiming_tries: int
    memory: int | None
    cpus_per_rank: int | None
    share: bool
    container: str | None
    components: list[Component]
    begin: str | None
    deadline: str | None
    timeline: list[TimelineEntry]
    dependencies: list[RelatedJob]
    dependents: list[RelatedJob]


class Drain(TypedDict):
    at: str
    by: str
    reason: str


class Cluster(TypedDict):
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
    unusable: bool
    drained: Drain | None
    details: Json


class Alert(TypedDict):
    severity: str
    target: str
    kind: str
    summary: str
    cause: str
    remedy: str
    since: str
    mark: Json | None
    """Its acknowledgement or silence."""
