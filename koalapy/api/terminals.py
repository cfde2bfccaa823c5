"""The WebSocket by which a client opens a terminal on a node of a job, or sends standard input to the job's program.

Binary frames are bytes of the stream. Text frames are JSON: from the client its terminal's size, credit for output that
it has used, and the end of its input; from the daemon the opened node, credit for input, and the end of the stream.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, WebSocket, WebSocketDisconnect
from pydantic import Field, ValidationError
from starlette.types import Message

from koalapy.api import fields
from koalapy.api.access import Caller, Id
from koalapy.api.fields import Input
from koalapy.api.middleware import client_address
from koalapy.daemon.agents.streams import Attendance, Stream, Streams, StreamViolation
from koalapy.daemon.jobs.jobs import MAX_LINE_NUMBER, Jobs
from koalapy.daemon.observability.audit import Audit
from koalapy.model.bounds import MAX_TERMINAL_SIZE
from koalapy.model.errors import ConflictError, ForbiddenError, KoalaError, ProblemCode
from koalapy.model.identity import Identity
from koalapy.model.job import Job, JobId, JobState
from koalapy.protocol.messages import StreamCredit, StreamEnd

CLOSE_CODE = 4000
MAX_WORDS = 1000
OnCluster = Annotated[fields.Text, Query(max_length=100, description="cluster of the node; default: that of rank 0")]
OnNode = Annotated[fields.Text, Query(max_length=255, description="name, address or index of the node on its cluster")]
Word = Annotated[fields.Text, Field(max_length=65_536)]
Words = Annotated[list[Word], Query(max_length=MAX_WORDS, description="command of the terminal; default: a shell")]
Size = Annotated[int, Query(ge=0, le=MAX_TERMINAL_SIZE, description="of the client's terminal; 0: unknown")]
Term = Annotated[str, Query(pattern=r"^[A-Za-z0-9+._-]{0,64}$", description="type of the client's terminal")]


class ClientFrame(Input):
    """A text frame of a client. A frame sets the fields that it contains."""

    rows: Annotated[int, Field(ge=0, le=MAX_TERMINAL_SIZE)] | None = None
    columns: Annotated[int, Field(ge=0, le=MAX_TERMINAL_SIZE)] | None = None
    credit: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Bytes of output that the client has used."""
    end_of_input: bool = False


def terminals_router(
    streams: Streams, jobs: Jobs, attendance: Attendance, audit: Audit, clock: Callable[[], float] = time.monotonic
) -> APIRouter:
    """Return the WebSockets of terminals and of standard input, which are not part of the OpenAPI document."""
    router = APIRouter(prefix="/api/v1/jobs")

    @router.websocket("/{job}/terminal")
    async def open_terminal(
        socket: WebSocket,
        job: Id,
        caller: Caller,
        cluster: OnCluster = "",
        node: OnNode = "",
        command: Words = [],  # noqa: B006
        rows: Size = 0,
        columns: Size = 0,
        term: Term = "",
    ) -> None:
        """Open a terminal and serve it until one side ends it. Record it in the audit log, without its bytes."""
        terminal = {"command": command, "rows": rows, "columns": columns, "term": term}
        await jobs.get(job)
        with streams.count_client(caller.user):
            stream = await streams.open_stream(job, caller, "terminal", cluster, node, **terminal)
            opened_at, reason = clock(), "the daemon failed"

            async def record(detail: str) -> None:
                origin, detail = client_address(socket.scope), f"node {stream.node} of {stream.cluster}, {detail}"
                await audit.record("open_terminal", caller, origin=origin, target=f"job {job}", detail=detail)

            try:
                await record("opened")
                await socket.accept()
                reason = await _serve_stream(socket, stream)
            except asyncio.CancelledError:
                reason = "the login of the client has expired"
                await _end(socket, None, reason)
                raise
            finally:
                streams.close_stream(stream)
                await record(f"ended after {clock() - opened_at:.1f} s: {reason}")

    @router.websocket("/{job}/input")
    async def send_input(socket: WebSocket, job: Id, caller: Caller) -> None:
        """Attend an interactive job, which is cancelled without a client, and pass input to its running program."""
        record = await jobs.get(job)
        _check_reads_input(record.job, caller)
        with streams.count_client(caller.user), attendance.attend(job):
            await socket.accept()
            try:
                await _attend_job(socket, streams, jobs, job, caller)
            except asyncio.CancelledError:
                await _end(socket, None, "the login of the client has expired")
                raise
            except KoalaError as error:
                await _end(socket, None, error.message)

    return router


def _check_reads_input(job: Job, caller: Identity) -> None:
    """Raise ``ForbiddenError`` or ``ConflictError`` if a caller cannot send input to the program of a job."""
    if not caller.owns(job.spec.owner):
        raise ForbiddenError(
            f"job {job.id} is not yours, and only its owner may send it input",
            field="job",
            value=job.id,
            code=ProblemCode.NOT_OWNER,
        )
    if not job.spec.interactive:
        hint = "submit it with koala run, or with interactive set"
        raise ConflictError(f"job {job.id} reads no input of clients", field="job", value=job.id, hint=hint)
    if job.state.is_final:
        raise ConflictError(f"job {job.id} is already {job.state}", field="job", value=job.id)


async def _attend_job(socket: WebSocket, streams: Streams, jobs: Jobs, job: JobId, caller: Identity) -> None:
    """Serve the input of a job once its program runs, until one side ends it or the client disconnects."""
    first_frame = asyncio.create_task(socket.receive())
    opening = asyncio.create_task(_open_when_running(streams, jobs, job, caller))
    try:
        await asyncio.wait({first_frame, opening}, return_when=asyncio.FIRST_COMPLETED)
        if first_frame.done():  # it has disconnected, or sends input before it may
            await _end(socket, None, "input was sent before the stream was opened")
            return
        stream = await opening
        if stream is None:
            await _end(socket, None, f"job {job} has ended")
            return
        await _serve_stream(socket, stream, first_frame)
    finally:
        first_frame.cancel()
        opening.cancel()
        _, opened = await asyncio.gather(first_frame, opening, return_exceptions=True)
        if isinstance(opened, Stream):
            streams.close_stream(opened)


async def _open_when_running(streams: Streams, jobs: Jobs, job: JobId, caller: Identity) -> Stream | None:
    """Open the stream to a job's input when its program runs; return None if the job ends before."""
    async for change in jobs.follow_job(job, MAX_LINE_NUMBER):
        if change.record.job.state is JobState.RUNNING:
            return await streams.open_stream(job, caller, "input")
    return None


async def _serve_stream(socket: WebSocket, stream: Stream, first_frame: "asyncio.Task[Message] | None" = None) -> str:
    """Pass bytes both ways until the node or the client ends the stream; return why it ended.

    ``first_frame``: a task that already waits for the first frame of the client.
    """
    await _send(socket, opened=stream.node, cluster=stream.cluster, used=stream.input_sent)
    reading = _read_input(socket, stream, first_frame or asyncio.create_task(socket.receive()))
    directions = [asyncio.create_task(_send_output(socket, stream)), asyncio.create_task(reading)]
    try:
        ended, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
    return next(iter(ended)).result()


async def _send_output(socket: WebSocket, stream: Stream) -> str:
    """Send what the node sends until it ends the stream; return why it did."""
    while True:
        match await stream.next_item():
            case bytes() as output:
                with suppress(WebSocketDisconnect, RuntimeError):  # reading its frames notices that
                    await socket.send_bytes(output)
            case StreamCredit(offset=offset):
                await _send(socket, credit=offset)
            case StreamEnd(code=code, error=error):
                await _end(socket, code, error)
                return error or f"exit code {code}"


async def _read_input(socket: WebSocket, stream: Stream, first_frame: "asyncio.Task[Message]") -> str:
    """Pass the frames of the client on until it disconnects or breaks the rules; return how it ended the stream."""
    try:
        message = await first_frame
        while message["type"] == "websocket.receive":
            if (data := message.get("bytes")) is not None:
                stream.send_input(data)
            else:
                _apply_frame(stream, ClientFrame.model_validate_json(message["text"]))
            message = await socket.receive()
    except (StreamViolation, ValidationError) as error:
        reason = str(error) if isinstance(error, StreamViolation) else "a text frame is no message of a client"
        await _end(socket, None, f"{reason}: update the client")
        return reason
    return "the client has disconnected"


def _apply_frame(stream: Stream, frame: ClientFrame) -> None:
    """Act on a text frame of the client. Raise ``StreamViolation``."""
    if frame.rows is not None and frame.columns is not None:
        stream.resize(frame.rows, frame.columns)
    if frame.credit is not None:
        stream.confirm_output(frame.credit)
    if frame.end_of_input:
        stream.send_input(b"", is_last=True)


async def _end(socket: WebSocket, code: int | None, error: str) -> None:
    """Send the client the end of the stream, and close the connection."""
    await _send(socket, end={"code": code, "error": error})
    with suppress(WebSocketDisconnect, RuntimeError):
        await socket.close(CLOSE_CODE)


async def _send(socket: WebSocket, **fields: object) -> None:
    """Send a text frame; do nothing if the client has disconnected, which reading its frames notices."""
    with suppress(WebSocketDisconnect, RuntimeError):
        await socket.send_text(json.dumps(fields))
