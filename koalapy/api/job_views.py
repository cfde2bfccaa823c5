"""Jobs as clients submit them, and as responses show them to owners, operators and other users."""

from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from koalapy.api.derived import body_model, view_model
from koalapy.api.fields import Output, Timestamp
from koalapy.daemon.jobs.jobs import JobRecord
from koalapy.model.application import summarize_job
from koalapy.model.identity import Identity
from koalapy.model.job import Attempt, Component, Job, JobSpec, JobState, TimelineEntry
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.validation.permissions import may_see_all_of

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
"""By kind the fields that are shown of others' jobs. Whatever is not listed, a field of tomorrow too, is shown as if
nothing had been said; what has no default must be listed."""


def redact_job(record: JobRecord) -> JobRecord:
    """A job of somebody else's: also the reason is left out, since it may be words of its program."""
    return JobRecord(_reduced(record.job), "")


def _reduced(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_reduced(each) for each in value)
    if not is_dataclass(value):
        return value
    kind: Any = type(value)
    seen = PUBLIC_FIELDS[kind]
    told = {each.name: getattr(value, each.name) for each in fields_of(value) if each.name in seen}
    return kind(**{name: _reduced(one) for name, one in told.items()})


LISTED = {"application", "home_site", "launcher", "name", "owner", "policy", "priority", "request", "walltime"}
"""Fields of a job's specification that lists show."""


JobInputView = view_model("JobInputView", InputFile, "An input of every component.", without={"part"})
ComponentInputView = view_model(
    "ComponentInputView",
    InputFile,
    "An input of one component; only what was given.",
    without={"distribution"},
    only_given=True,
)
RequestedComponentView = view_model(
    "RequestedComponentView",
    ComponentRequest,
    "A component as it was asked for; only what was given.",
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
        "replaces",
        "superseded",
    },
)
_AttemptComponent = view_model(
    "_AttemptComponent",
    Component,
    without={"request_index", "lrm_job", "unknown_since", "lease", "lost_at", "replaces"},
)


class AttemptComponentView(_AttemptComponent):  # type: ignore[misc, valid-type]
    """A component of an attempt, with its own times.

    ``rank`` is its place in the placement. One whose claim failed is ``superseded`` by another of the same rank.
    """

    rank: int
    file_site: str | None


TimelineView = view_model("TimelineView", TimelineEntry, without={"job"})


class _Spans(Output):
    """In seconds, as semantics 12 has them."""

    queue_time: float | None
    wait_time: float | None
    startup_overhead: float | None
    response_time: float | None
    start_delay: float | None
    """How much later than first estimated the last attempt was to start."""


class _Head(Output):
    id: int
    redacted: bool
    """Whether it is somebody else's, so that most of it is left out."""
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


class _Standing(_Spans):
    """Where a job stands; times are ISO 8601 in UTC, spans are in seconds."""

    submitted_at: Timestamp
    placed_at: Timestamp | None
    started_at: Timestamp | None
    ended_at: Timestamp | None
    generation: int
    restarts: int
    retry_at: Timestamp | None
    """When a queued job whose attempts kept failing is tried again; null while it is in its placement queue."""
    placement_tries: int
    claiming_tries: int


class JobView(_Standing, _Spec):  # type: ignore[misc, valid-type]
    """A job and where it stands; times are ISO 8601 in UTC, spans are in seconds."""

    components: list[ComponentView]  # type: ignore[valid-type]


_Listed = view_model("ListedJob", JobSpec, "", only=LISTED, elements={"request": _requests}, base=_Head)


class ListedJobView(_Standing, _Listed):  # type: ignore[misc, valid-type]
    """A job as lists show it, without its commands, variables and files: ``GET /jobs/{job}`` shows those."""

    program: str
    """The beginning of the first word of its command."""
    components: list[ListedComponentView]  # type: ignore[valid-type]


class JobWithTimeline(JobView):
    timeline: list[TimelineView]  # type: ignore[valid-type]


class JobPage(Output):
    jobs: list[ListedJobView]
    """As many as asked for, or fewer where they are large or many had to be looked at for them."""
    next: str | None
    """Where the next page is; null on the last."""


class Timeline(Output):
    timeline: list[TimelineView]  # type: ignore[valid-type]


_Attempt = view_model("_Attempt", Attempt, without={"nonce", "components"}, base=_Spans)


class AttemptView(_Attempt):  # type: ignore[misc, valid-type]
    """One try to run a job; spans are measured as those of the job."""

    components: list[AttemptComponentView]


class AttemptList(Output):
    attempts: list[AttemptView]
    """In order; ``generation`` counts them from 1."""


def job_view(record: JobRecord) -> JobView:
    """All of it, for those who may see that."""
    view: JobView = JobView.model_validate(_told_of(record))
    return view


def view_for(caller: Identity, record: JobRecord) -> JobView:
    """As much of it as somebody may see."""
    told = _told_of(record) if may_see_all_of(caller, record.job) else _told_of_others(record)
    view: JobView = JobView.model_validate(told)
    return view


def job_with_timeline(record: JobRecord, timeline: Sequence[TimelineEntry] | None) -> JobWithTimeline:
    """Return a job with its timeline; without one, as other users see it."""
    told = _told_of_others(record) if timeline is None else _told_of(record)
    view: JobWithTimeline = JobWithTimeline.model_validate(told | {"timeline": timeline or ()})
    return view


def summary_for(caller: Identity, record: JobRecord) -> ListedJobView:
    """Return a job as the caller may see it in a list."""
    is_theirs = may_see_all_of(caller, record.job)
    seen = record if is_theirs else redact_job(record)
    job = summarize_job(seen.job)
    told = _told_of(JobRecord(job, seen.reason), ListedJobView)
    view: ListedJobView = ListedJobView.model_validate(
        told | {"redacted": not is_theirs, "program": job.spec.command[0]}
    )
    return view


def _told_of_others(record: JobRecord) -> dict[str, Any]:
    return _told_of(redact_job(record)) | {"redacted": True}


def _told_of(record: JobRecord, view: type[Output] = JobView) -> dict[str, Any]:
    job, attempt = record.job, record.job.attempt
    return (
        _attributes(view, job.spec)
        | _attributes(view, job)
        | {
            "redacted": False,
            "reason": record.reason,
            "components": attempt.gang if attempt else (),
            **_spans(job, job.placed_at, job.started_at, job.ended_at, attempt),
        }
    )


def attempt_view(job: Job, attempt: Attempt) -> AttemptView:
    """Its spans are what the job's would be had it been the last."""
    spans = _spans(job, attempt.placed_at, attempt.barrier_at, attempt.ended_at, attempt)
    view: AttemptView = AttemptView.model_validate(_attributes(AttemptView, attempt) | spans)
    return view


def _attributes(view: type[Output], value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _names_in_both(view, value.__class__)}


@cache
def _names_in_both(view: type[Output], kind: type[Any]) -> tuple[str, ...]:
    return tuple(name for name in view.model_fields if hasattr(kind, name))


def _spans(
    job: Job, placed: float | None, ready: float | None, ended: float | None, attempt: Attempt | None
) -> dict[str, float | None]:
    return {
        "queue_time": _span(job.submitted_at, placed),
        "wait_time": _span(job.submitted_at, ready),
        "startup_overhead": _span(placed, ready),
        "response_time": _span(job.submitted_at, ended),
        "start_delay": _span(job.first_start_estimate, attempt.start_estimate) if attempt else None,
    }


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 6)


JobInput = body_model(
    "JobInput",
    InputFile,
    "A logical file of the replica catalogue for every component: the whole, or of a folder one entry for each.",
    without={"part"},
)
_OwnInput = body_model("ComponentInput", InputFile, "", without={"distribution"})


class ComponentInput(_OwnInput):  # type: ignore[misc, valid-type]
    """A logical file of the replica catalogue for one component, or one entry of it."""

    def to_model(self) -> InputFile:
        file: InputFile = super().to_model()
        return replace(file, distribution="whole" if file.part is None else "partitioned")


_own = {"inputs": ComponentInput}
FixedComponent = body_model(
    "FixedComponent", ComponentRequest, "A component with its cluster.", needs={"cluster"}, elements=_own
)
NonFixedComponent = body_model(
    "NonFixedComponent",
    ComponentRequest,
    "A component whose cluster the scheduler chooses.",
    without={"cluster"},
    elements=_own,
)
Fixed = body_model(
    "Fixed", FixedRequest, "Sizes and clusters are given.", needs={"type"}, elements={"components": FixedComponent}
)
NonFixed = body_model(
    "NonFixed", NonFixedRequest, "Sizes are given.", needs={"type"}, elements={"components": NonFixedComponent}
)
Flexible = body_model(
    "Flexible",
    FlexibleRequest,
    "The total is given; the scheduler chooses components and clusters within the bounds.",
    needs={"type"},
)
_submitted_requests: Any = Annotated[Fixed | NonFixed | Flexible, Field(discriminator="type")]
_Submission = body_model("JobSubmission", JobSpec, "", elements={"inputs": JobInput, "request": _submitted_requests})


class JobSubmission(_Submission):  # type: ignore[misc, valid-type]
    """A parallel job: what to run, and on how many nodes of which clusters."""

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
