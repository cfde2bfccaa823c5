"""Jobs as clients submit them, and as responses show them to owners, operators and other users."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, create_model

from koalapy.api.derived import body_model, view_model
from koalapy.api.fields import Output, Timestamp
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.daemon.jobs.submissions import RelatedJob, RelatedJobs
from koalapy.model.application import summarize_job
from koalapy.model.dependency import format_clause
from koalapy.model.identity import Identity
from koalapy.model.job import Attempt, Component, Job, JobState, PlannedStart, TimelineEntry
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.validation.permissions import may_see_all_of

V = TypeVar("V", bound=Output)

PUBLIC_FIELDS: Mapping[type[Any], frozenset[str]] = {
    Job: frozenset({"id", "spec", "state", "attempt", "submitted_at", "placed_at", "started_at", "ended_at"}),
    JobSpec: frozenset({"request", "priority", "home_site", "walltime"}),
    FixedRequest: frozenset({"components"}),
    NonFixedRequest: frozenset({"components"}),
    FlexibleRequest: frozenset({"total_size", "min_component_size", "max_components", "split_options"}),
    ComponentRequest: frozenset({"size", "cluster"}),
    Attempt: frozenset({"generation", "components", "placed_at"}),
    Component: frozenset({"index", "cluster", "size", "state", "replaces", "superseded"}),
}
"""Fields of other users' jobs that every user may see, by type. All other fields, including new ones, are shown with
their defaults; fields without a default must be listed here."""


def redact_job(record: JobRecord) -> JobRecord:
    """Return a job as other users may see it, without its reason, which may quote the job's program."""
    return JobRecord(_redact(record.job), "")


def _redact(value: Any) -> Any:
    """Return a copy of a value with its public fields only; the other fields have their defaults."""
    if isinstance(value, tuple):
        return tuple(_redact(entry) for entry in value)
    if not is_dataclass(value):
        return value
    kind: Any = type(value)
    names = [field.name for field in fields_of(value) if field.name in PUBLIC_FIELDS[kind]]
    return kind(**{name: _redact(getattr(value, name)) for name in names})


LISTED_FIELDS = {
    "application",
    "array",
    "home_site",
    "launcher",
    "name",
    "owner",
    "policy",
    "priority",
    "request",
    "walltime",
}
"""Fields of a job's specification in lists."""


JobInputView = view_model("JobInputView", InputFile, "An input of every component.", without={"part"})
ComponentInputView = view_model(
    "ComponentInputView",
    InputFile,
    "An input of one component, without fields that were not set.",
    without={"distribution"},
    only_given=True,
)
RequestedComponentView = view_model(
    "RequestedComponentView",
    ComponentRequest,
    "A component of the request, without fields that were not set.",
    only_given=True,
    elements={"inputs": ComponentInputView},
)
FlexibleView = view_model("FlexibleView", FlexibleRequest, "A flexible request.")


class ComponentsView(Output):
    """A fixed or non-fixed request."""

    type: Literal["fixed", "nonfixed"]
    components: list[RequestedComponentView]  # type: ignore[valid-type]


ComponentView = view_model(
    "ComponentView",
    Component,
    without={
        "request_index",
        "infrastructure",
        "submitted_at",
        "claimed_at",
        "warned_at",
        "ended_at",
        "transfer_time",
        "node_part",
        "replaces",
        "superseded",
    },
)
_AttemptComponent = view_model(
    "_AttemptComponent",
    Component,
    without={"request_index", "lrm_job", "unknown_since", "lease", "lost_at", "replaces", "node_part"},
)


class AttemptComponentView(_AttemptComponent):  # type: ignore[misc, valid-type]
    """A component of an attempt, with its times.

    ``rank`` is its position in the placement. A component with a failed claim is ``superseded`` by another of the same
    rank.
    """

    rank: int
    file_site: str | None


TimelineView = view_model("TimelineView", TimelineEntry, without={"job"})


SPANS = ("queue_time", "wait_time", "startup_overhead", "response_time", "start_delay")
"""Times of a job in seconds, as defined in section 12 of the scheduling semantics; null until they are known."""
_Spans = create_model("_Spans", __base__=Output, **dict.fromkeys(SPANS, (float | None, ...)))  # type: ignore[call-overload]


class _Head(Output):
    id: int
    redacted: bool
    """Whether the job belongs to another user, so that most fields are left out."""
    state: JobState
    reason: str
    exit_code: int | None


ListedComponentView = view_model(
    "ListedComponentView",
    Component,
    "A component of the last attempt, as lists show it.",
    only={"index", "cluster", "size", "node_class", "state", "exit_code"},
)
_requests: Any = Annotated[ComponentsView | FlexibleView, Field(discriminator="type")]
_Spec = view_model("JobView", JobSpec, "", elements={"inputs": JobInputView, "request": _requests}, base=_Head)


class TasksView(Output):
    """The numbers of an array's tasks by state."""

    size: int
    waiting: int
    """Tasks that were never started."""
    running: int = Field(validation_alias="live")
    """Tasks that were started and have not ended."""
    succeeded: int
    failed: int
    cancelled: int


PlannedStartView = view_model(
    "PlannedStartView",
    PlannedStart,
    "When a job is planned to start, unless local users or jobs of higher priority come first.",
    without={"made_at", "delay", "late"},
    elements={"first": Timestamp},
)
STANDING = {
    "submitted_at",
    "placed_at",
    "started_at",
    "ended_at",
    "generation",
    "restarts",
    "retry_at",
    "placement_tries",
    "claiming_tries",
    "tasks",
    "array_job",
    "array_index",
    "planned_start",
}
"""Fields of a job that show its progress."""
_standing_elements = {"tasks": TasksView, "planned_start": PlannedStartView}
_Standing = view_model("_Standing", Job, "", only=STANDING, elements=_standing_elements, base=_Spans)


class JobView(_Standing, _Spec):  # type: ignore[misc, valid-type]
    """A job and its progress; times are ISO 8601 in UTC, durations are in seconds."""

    components: list[ComponentView]  # type: ignore[valid-type]
    awaits: list[Annotated[str, BeforeValidator(format_clause)]]
    """The entries of ``after`` that do not hold yet."""
    eligible_at: Timestamp | None
    """The time at which ``after`` and ``begin`` allowed its start; null before, and for a job without them."""


_Listed = view_model("ListedJob", JobSpec, "", only=LISTED_FIELDS, elements={"request": _requests}, base=_Head)


class ListedJobView(_Standing, _Listed):  # type: ignore[misc, valid-type]
    """A job in a list, without its commands, variables and files, which ``GET /jobs/{job}`` shows."""

    program: str
    """The first word of its command, shortened."""
    components: list[ListedComponentView]  # type: ignore[valid-type]


RelatedJobView = view_model("RelatedJobView", RelatedJob)


class JobWithTimeline(JobView):
    timeline: list[TimelineView]  # type: ignore[valid-type]
    dependencies: list[RelatedJobView]  # type: ignore[valid-type]
    """The jobs that it names in ``after``."""
    dependents: list[RelatedJobView]  # type: ignore[valid-type]
    """The unfinished jobs that name it in ``after``, as long as it is unfinished."""


class JobPage(Output):
    jobs: list[ListedJobView]
    """At most ``limit`` jobs; fewer if the jobs are large or the search examined many jobs."""
    next: str | None
    """Path of the next page; null on the last page."""
    count: int | None
    """Number of matching jobs; null if it was not requested."""
    count_is_whole: bool
    """False: at least ``count`` jobs match, since no more were counted."""


class Timeline(Output):
    timeline: list[TimelineView]  # type: ignore[valid-type]


_Attempt = view_model("_Attempt", Attempt, without={"nonce", "components"}, base=_Spans)


class AttemptView(_Attempt):  # type: ignore[misc, valid-type]
    """An attempt to run a job, with durations as defined for the job."""

    components: list[AttemptComponentView]


class AttemptList(Output):
    attempts: list[AttemptView]
    """In order; ``generation`` is 1 for the first attempt."""


def job_view(record: JobRecord) -> JobView:
    """Return all of a job, for its owner and operators."""
    return show_job(JobView, record)


def show_job(view: type[V], record: JobRecord, *, may_see_all: bool = True, **extra: Any) -> V:
    """Return a job in one of its views, with only the public fields unless ``may_see_all``."""
    visible = record if may_see_all else redact_job(record)
    job, attempt = visible.job, visible.job.attempt
    return view.model_validate(
        _attributes(view, job.spec)
        | _attributes(view, job)
        | {"redacted": not may_see_all, "reason": visible.reason, "components": attempt.gang if attempt else ()}
        | _spans(job, job.placed_at, job.started_at, job.ended_at, attempt)
        | extra
    )


def view_for(caller: Identity, record: JobRecord) -> JobView:
    """Return a job as the caller may see it."""
    return show_job(JobView, record, may_see_all=may_see_all_of(caller, record.job))


def job_with_timeline(
    record: JobRecord, timeline: Sequence[TimelineEntry] | None, related: RelatedJobs = ((), ())
) -> JobWithTimeline:
    """Return a job with its timeline and related jobs; without a timeline, the job as other users may see it."""
    extra = {"timeline": timeline or (), "dependencies": related[0], "dependents": related[1]}
    return show_job(JobWithTimeline, record, may_see_all=timeline is not None, **extra)


def summary_for(caller: Identity, record: JobRecord) -> ListedJobView:
    """Return a job as the caller may see it in a list."""
    may_see_all = may_see_all_of(caller, record.job)
    visible = record if may_see_all else redact_job(record)
    job = summarize_job(visible.job)
    program = job.spec.command[0]
    return show_job(ListedJobView, JobRecord(job, visible.reason), redacted=not may_see_all, program=program)


def attempt_view(job: Job, attempt: Attempt) -> AttemptView:
    """Return an attempt, with durations as if it were the job's last attempt."""
    spans = _spans(job, attempt.placed_at, attempt.barrier_at, attempt.ended_at, attempt)
    view: AttemptView = AttemptView.model_validate(_attributes(AttemptView, attempt) | spans)
    return view


def _attributes(view: type[Output], value: Any) -> dict[str, Any]:
    """Return the attributes of a value that the view has as fields."""
    names, values_of = _shared_attributes(view, value.__class__)
    return dict(zip(names, values_of(value), strict=True))


@cache
def _shared_attributes(view: type[Output], kind: type[Any]) -> tuple[list[str], Callable[[Any], Any]]:
    """Return the attributes of a dataclass that the view has as fields, and the function that reads all of them."""
    names = [name for name in view.model_fields if hasattr(kind, name)]
    return names, attrgetter(*names)


def _spans(
    job: Job, placed: float | None, ready: float | None, ended: float | None, attempt: Attempt | None
) -> dict[str, float | None]:
    """Return the durations of a job in seconds; None for a span that has not ended.

    ``ready`` is the time at which all nodes of the job had reported, so that its program could start.
    """
    estimate = attempt.start_estimate if attempt else None
    submitted, first_estimate = job.submitted_at, job.first_start_estimate
    starts = (submitted, submitted, placed, submitted, first_estimate)
    ends = (placed, ready, ready, ended, estimate)
    return dict(zip(SPANS, map(_span, starts, ends), strict=True))


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 6)


JobInput = body_model(
    "JobInput",
    InputFile,
    "A logical file for all components: the whole file or folder for each, or one entry of a folder for each.",
    without={"part"},
)
_ComponentInput = body_model("ComponentInput", InputFile, "", without={"distribution"})


class ComponentInput(_ComponentInput):  # type: ignore[misc, valid-type]
    """A logical file, or one entry of a logical folder, for one component."""

    def to_model(self) -> InputFile:
        file: InputFile = super().to_model()
        return replace(file, distribution="whole" if file.part is None else "partitioned")


_component_inputs = {"inputs": ComponentInput}
FixedComponent = body_model(
    "FixedComponent", ComponentRequest, "A component with its cluster.", needs={"cluster"}, elements=_component_inputs
)
NonFixedComponent = body_model(
    "NonFixedComponent",
    ComponentRequest,
    "A component whose cluster the scheduler chooses.",
    without={"cluster"},
    elements=_component_inputs,
)
Fixed = body_model(
    "Fixed",
    FixedRequest,
    "A request with the size and cluster of each component.",
    needs={"type"},
    elements={"components": FixedComponent},
)
NonFixed = body_model(
    "NonFixed",
    NonFixedRequest,
    "A request with the size of each component.",
    needs={"type"},
    elements={"components": NonFixedComponent},
)
Flexible = body_model(
    "Flexible",
    FlexibleRequest,
    "A request with a total size; the scheduler chooses components and clusters within the limits.",
    needs={"type"},
)
SubmittedRequest: Any = Annotated[Fixed | NonFixed | Flexible, Field(discriminator="type")]
_Submission = body_model("JobSubmission", JobSpec, "", elements={"inputs": JobInput, "request": SubmittedRequest})


class JobSubmission(_Submission):  # type: ignore[misc, valid-type]
    """A parallel job: its command, the requested nodes, and optional settings."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "request": {"type": "flexible", "total_size": 6},
                    "command": ["python", "-m", "koalapy.apps.poisson"],
                    "name": "poisson",
                }
            ]
        }
    )
