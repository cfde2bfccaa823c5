"""The routes of a job's output: as text, and in parts with offsets."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from starlette.types import Message, Send

from koalapy.api import fields
from koalapy.api.access import Id
from koalapy.daemon.jobs.job_records import array_error
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.jobs.output import OutputEnd, OutputText
from koalapy.model.errors import NotFoundError, ProblemCode, reject
from koalapy.model.job import Job
from koalapy.model.job_spec import OutputStream
from koalapy.model.request import FlexibleRequest
from koalapy.model.wording import format_list

Component = Annotated[int | None, Query(ge=0, lt=2**31, description="the output of this component only")]
STREAM_HELP = (
    "only this stream of a job with --error or --label, or of koala run; marked: both, in which byte 14 begins a part "
    "of the error stream, 15 or the end of the line ends it, and 16 precedes such a byte of the program itself"
)
Stream = Annotated[OutputStream | None, Query(description=STREAM_HELP)]
Tail = Annotated[
    int | None, Query(ge=0, le=fields.MAX_ID, description="begin with so many last lines of each component")
]
OfAttempt = Annotated[int, Query(ge=0, lt=2**31, description="with offsets: the attempt of the broken download")]
Offsets = Annotated[
    fields.Text,
    Query(
        max_length=48_000,
        pattern=r"^([0-9]{1,9}:[0-9]{1,18}(,[0-9]{1,9}:[0-9]{1,18})*)?$",
        description="begin after these numbers of bytes, such as 0:1200,1:88 for components 0 and 1",
    ),
]
NDJSON = "application/x-ndjson"


def add_output(router: APIRouter, service: Jobs) -> None:
    """Add the routes that read the output of a job."""

    @router.get(
        "/{job}/logs",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/plain": {}}, "description": "the program's output"}},
    )
    async def read_logs(
        job: Id, follow: bool = False, component: Component = None, stream: Stream = None, tail: Tail = None
    ) -> StreamingResponse:
        """Download the output of the job's last attempt; with ``follow``, stream it until the job ends.

        If a component writes more than ``output_limit`` bytes, its output is cut in the middle, where a line shows how
        much is missing. If the daemon ends before the job, the response stays without its end.
        """
        await _check_output_exists(service, job, component, stream, follow=follow)
        output = service.follow_output(job, follow, component, stream, tail)
        return CutStreamingResponse(output)

    @router.get(
        "/{job}/output",
        response_class=StreamingResponse,
        responses={200: {"content": {NDJSON: {}}, "description": "an object for each part of the output, and its end"}},
    )
    async def follow_output(
        job: Id,
        follow: bool = False,
        component: Component = None,
        stream: Stream = None,
        tail: Tail = None,
        attempt: OfAttempt = 0,
        offsets: Offsets = "",
    ) -> StreamingResponse:
        """Download the output of the job's last attempt in parts with offsets, so that a broken download can go on.

        A part is `{"attempt": 1, "component": 0, "offset": 120, "missing": 0, "data": "…"}`: `data` in Base64 ends at
        byte `offset` of the component; `missing` bytes before it are not stored. The last object is
        `{"state": "succeeded", "is_complete": true}`. Without it the response broke off: send `attempt` and the last
        offset of each component. Empty lines show that the daemon is there.
        """
        await _check_output_exists(service, job, component, stream, follow=follow)
        beginnings = {
            int(index): int(offset) for index, offset in (pair.split(":") for pair in offsets.split(",") if pair)
        }
        parts = service.follow_output(job, follow, component, stream, tail, attempt, beginnings)
        return StreamingResponse((_encode_part(part) async for part in parts), media_type=NDJSON)


async def _check_output_exists(
    service: Jobs, job: int, component: int | None, stream: OutputStream | None, *, follow: bool
) -> None:
    """Raise ``KoalaError`` if there is no such output."""
    stored_job = (await service.get(job)).job
    if stored_job.tasks is not None:
        raise array_error(stored_job, "each of its tasks has an output", "logs")
    _check_component(stored_job, component, follow=follow)
    if stream not in (None, OutputStream.MARKED):
        _check_streams(stored_job)


def _encode_part(part: OutputText | OutputEnd | None) -> bytes:
    """Return a part of an output, or its end, as one line of JSON; an empty line without one."""
    if part is None:
        return b"\n"
    fields = asdict(part)
    if isinstance(part, OutputText):
        fields["data"] = b64encode(part.data).decode()
    return json.dumps(fields).encode() + b"\n"


class CutStreamingResponse(StreamingResponse):
    """The text of an output. It stays without its end if the output has none, so that the client notices."""

    def __init__(self, parts: AsyncIterator[OutputText | OutputEnd | None]) -> None:
        self._has_end = False
        super().__init__(self._read_texts(parts), media_type="text/plain; charset=utf-8")

    async def _read_texts(self, parts: AsyncIterator[OutputText | OutputEnd | None]) -> AsyncIterator[bytes]:
        async for part in parts:
            self._has_end = isinstance(part, OutputEnd)
            if isinstance(part, OutputText) and part.data:
                yield part.data

    async def stream_response(self, send: Send) -> None:
        """Send the response, without its last message if the output has no end."""

        async def send_unless_cut(message: Message) -> None:
            if message["type"] == "http.response.start" or message.get("more_body") or self._has_end:
                await send(message)

        await super().stream_response(send_unless_cut)


def _check_streams(job: Job) -> None:
    """Raise ``UsageError`` if no component keeps its error stream apart from its output."""
    request = job.spec.request
    indices = [None] if isinstance(request, FlexibleRequest) else range(len(request.components))
    if not any(job.spec.separates_streams(index) for index in indices):
        hint = "leave it out; submit with --error FILE or --label, or use koala run, to divide them"
        reject("stream", job.id, f"cannot be chosen: job {job.id} writes output and errors into one stream", hint)


def _check_component(job: Job, component: int | None, *, follow: bool) -> None:
    """Raise ``NotFoundError`` if neither the last attempt nor a later one can have this component."""
    if component is None or job.attempt is None or (follow and not job.state.is_final):
        return
    indices = sorted(component.index for component in job.attempt.components)
    if component not in indices:
        raise NotFoundError(
            f"job {job.id} has no component {component}",
            field="component",
            value=component,
            code=ProblemCode.COMPONENT_NOT_FOUND,
            hint=f"give one of {format_list([str(index) for index in indices])}",
        )
