"""The routes of workloads: reports of runs, sent by who ran them."""

from itertools import pairwise
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import Field, WithJsonSchema

from koalapy.api.access import Caller
from koalapy.api.fields import Cluster, Count, Input, JobId, Moment, Name, Number, Output, Text
from koalapy.api.problems import declared
from koalapy.api.queries import refuse_unknown
from koalapy.daemon.observability.audit import about
from koalapy.daemon.workload_reports import WorkloadReports
from koalapy.model.errors import UsageError
from koalapy.model.request import MAX_CLUSTER_NAME_LENGTH

MAX_JOBS = 10_000
MAX_LOOKS = 100_000
MAX_CLUSTERS = 100
MAX_LISTED = 1000

ReportId = Annotated[Text, Path(max_length=100, description="the report's id")]
Called = Annotated[Name, Query(description="what it is called, as the file of the workload")]
Word = Annotated[Text, Field(max_length=200)]
Said = Annotated[Text, Field(max_length=10_000)]
Figure = Annotated[float, Field(strict=True, ge=-1e12, le=1e12, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
"""A fraction; jobs may for a while have more nodes than a cluster has left."""
Began = Annotated[Text, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)$")]
Flag = Annotated[bool, Field(strict=True)]
Looks = Annotated[list[Count], Field(max_length=MAX_LOOKS)]


def _by_cluster(one: dict[str, Any]) -> Any:
    """How OpenAPI tells of an object whose names are clusters."""
    name = {"pattern": r"^[^\x00]+$", "minLength": 1, "maxLength": MAX_CLUSTER_NAME_LENGTH}
    return WithJsonSchema(
        {"type": "object", "maxProperties": MAX_CLUSTERS, "propertyNames": name, "additionalProperties": one}
    )


_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_SHARE = {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1e6}, {"type": "null"}]}


def _object(**parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


class SentRun(Input):
    """How it was run; times in seconds."""

    began: Began
    seconds: Figure
    complete: Flag
    interrupted: Said
    background_target: Figure
    background_seconds: Figure | None
    interval: Figure
    late: Count
    latest: Figure
    daemon_away: Figure


class SentWorkload(Input):
    """What its header says, as far as it is kept."""

    preset: Word | None = None
    seed: JobId | None = None
    policy: Word | None = None
    request: Word | None = None
    arrivals: Word | None = None
    rate: Figure | None = None
    scale: Figure | None = None


class SentJob(Input):
    """A job of it; times in seconds, ``arrives`` and ``submitted`` from the beginning."""

    number: Count
    id: JobId | None
    application: Word
    nodes: Count
    components: Count | None
    priority: Word
    policy: Word
    state: Word
    reason: Said
    arrives: Figure
    submitted: Figure | None
    late: Figure | None
    exit_code: Number | None
    clusters: Annotated[dict[Cluster, Count], Field(max_length=MAX_CLUSTERS), _by_cluster(_COUNT)]
    coallocated: Flag | None
    queue_time: Figure | None
    startup_overhead: Figure | None
    wait_time: Figure | None
    execution_time: Figure | None
    response_time: Figure | None
    start_delay: Figure | None
    transfer_time: Figure | None
    placement_tries: Count | None
    claiming_tries: Count | None
    restarts: Count | None


class SentUse(Input):
    """Shares of nodes over the whole run."""

    nodes: Count
    ours: Share | None
    background: Share | None


class SentUtilisation(Input):
    clusters: Annotated[
        dict[Cluster, SentUse],
        Field(max_length=MAX_CLUSTERS),
        _by_cluster(_object(nodes=_COUNT, ours=_SHARE, background=_SHARE)),
    ]
    all: SentUse


class SentLooks(Input):
    """Nodes of a cluster at each look."""

    total: Looks
    used: Looks
    background: Looks
    idle: Looks


_LOOKS = {"type": "array", "items": _COUNT, "maxItems": MAX_LOOKS}


class SentSamples(Input):
    """``at``: seconds from the beginning, in order."""

    at: Annotated[list[Figure], Field(max_length=MAX_LOOKS)]
    clusters: Annotated[
        dict[Cluster, SentLooks],
        Field(max_length=MAX_CLUSTERS),
        _by_cluster(_object(total=_LOOKS, used=_LOOKS, background=_LOOKS, idle=_LOOKS)),
    ]


class SentReport(Input):
    """A report as ``koala workload run`` writes it, without what follows from its jobs."""

    koala_workload_report: Annotated[int, Field(strict=True, ge=1, le=1)]
    run: SentRun
    workload: SentWorkload
    utilisation: SentUtilisation
    jobs: Annotated[list[SentJob], Field(min_length=1, max_length=MAX_JOBS)]
    samples: SentSamples


class WorkloadLine(Output):
    """A report in short; times are means in seconds over the jobs that ``ran`` to an end of their own."""

    id: str
    owner: str
    name: str
    policy: str
    """That of all jobs; empty where there are several."""
    received_at: Moment
    began: str
    seconds: float
    interrupted: str
    """Why the run ended before its jobs, if it did."""
    jobs: int
    ran: int
    states: dict[str, int]
    queue_time: float | None
    wait_time: float | None
    response_time: float | None
    utilisation: float | None
    background: float | None


class WorkloadList(Output):
    workloads: list[WorkloadLine]
    """The newest first."""
    more: int
    """So many older ones are not told."""


class WorkloadView(WorkloadLine):
    report: dict[str, Any]
    """As ``koala workload run`` writes it."""


def workloads_router(reports: WorkloadReports) -> APIRouter:
    """Users have their own, operators all."""
    router = APIRouter(prefix="/api/v1/workloads", tags=["workloads"], dependencies=[Depends(refuse_unknown)])

    @router.post(
        "",
        status_code=201,
        response_model=WorkloadLine,
        operation_id="upload_workload",
        responses={
            200: {"model": WorkloadLine, "description": "it was there already"},
            **declared(400, 401, 413, 422, 503, 507),
        },
    )
    async def upload(report: SentReport, response: Response, caller: Caller, name: Called = "") -> Any:
        """Keep the report of a workload's run, as the caller's."""
        _check(report.samples)
        kept, created = await reports.keep(caller.user, name, report.model_dump())
        about(f"workload {kept.id}")
        response.status_code = 201 if created else 200
        return kept

    @router.get("", response_model=WorkloadList, operation_id="list_workloads", responses=declared(401, 422))
    async def workloads(caller: Caller) -> Any:
        """Reports of workload runs: one's own, operators all."""
        found = reports.seen_by(caller)
        return {"workloads": found[:MAX_LISTED], "more": max(0, len(found) - MAX_LISTED)}

    @router.get(
        "/{report}", response_model=WorkloadView, operation_id="show_workload", responses=declared(401, 404, 422, 503)
    )
    async def show(report: ReportId, caller: Caller) -> Any:
        """A report, whole; others' are as if they were not there."""
        kept, told = await reports.read(caller, report)
        return WorkloadLine.model_validate(kept).model_dump() | {"report": told}

    @router.delete(
        "/{report}", response_model=WorkloadLine, operation_id="remove_workload", responses=declared(401, 404, 422, 503)
    )
    async def remove(report: ReportId, caller: Caller) -> Any:
        """Forget one's own report, operators any; answers what was forgotten."""
        return await reports.remove(caller, report)

    return router


def _check(samples: SentSamples) -> None:
    """``UsageError`` for looks that fit no time."""
    at = samples.at
    if any(after < before for before, after in pairwise(at)):
        raise UsageError("samples.at goes back in time", field="samples.at", hint="send it as it was written")
    for name, columns in samples.clusters.items():
        for column, values in columns:
            if len(values) != len(at):
                raise UsageError(
                    f"samples has {len(values)} values of {column} for {len(at)} looks",
                    field=f"samples.clusters.{name}.{column}",
                    hint="send it as it was written",
                )
