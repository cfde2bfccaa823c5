"""Streams of the daemon: permissions, limits, and the credit of both sides."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from koalapy.daemon.agents.streams import MAX_RESIZES, MAX_USER_STREAMS, StreamViolation
from koalapy.model.array import TaskIndices
from koalapy.model.errors import (
    BusyError,
    ConflictError,
    ForbiddenError,
    KoalaError,
    NotFoundError,
    SiteRejected,
    SiteUnavailable,
)
from koalapy.model.identity import Identity
from koalapy.model.job import ArrayTasks, Attempt, ComponentState, Job, JobState
from koalapy.protocol import messages as wire
from koalapy.runner.streams import STREAM_WINDOW
from tests.daemon.fake_streams import ADA, ADMIN, BOB, GANG, OPERATOR, RUNNING, Grid, output


@pytest.mark.evidence("U18")
@pytest.mark.parametrize("kind", ["terminal", "input"])
@pytest.mark.parametrize("interactive", ["owner", "administrators", "none", ""])
@pytest.mark.parametrize("caller", [ADA, BOB, OPERATOR, ADMIN])
async def test_stream_is_opened_for_allowed_callers_only(caller: Identity, interactive: str, kind: Any) -> None:
    grid = Grid(interactive=interactive)
    may_at_all = interactive and caller in (ADA, ADMIN)
    is_allowed = may_at_all and (
        kind == "input" or interactive == "administrators" or (interactive == "owner" and caller is ADA)
    )
    if is_allowed:
        assert (await grid.open(caller, kind=kind)).node == "n1"
        assert grid.sent[0].is_owner is (caller is ADA)
    else:
        with pytest.raises((ForbiddenError, ConflictError)):
            await grid.open(caller, kind=kind)
        assert grid.sent == []


@pytest.mark.parametrize(
    ("job", "request_", "error", "message"),
    [
        (None, {}, ConflictError, "has ended"),
        (replace(RUNNING, attempt=None, state=JobState.QUEUED), {}, ConflictError, "it has no nodes"),
        (
            replace(RUNNING, attempt=Attempt(1, (replace(GANG[0], state=ComponentState.CLAIMED),), 0.0)),
            {},
            ConflictError,
            "its component is claimed",
        ),
        (
            replace(
                RUNNING,
                attempt=None,
                spec=replace(RUNNING.spec, array=TaskIndices.parse("3-4")),
                tasks=ArrayTasks(2, ((1, 1),), 0.0, 1),
            ),
            {},
            ConflictError,
            r"job 7 is an array: each of its tasks has nodes",
        ),
        (RUNNING, {"cluster": "west"}, NotFoundError, "has no nodes on west"),
    ],
)
async def test_stream_of_a_job_that_does_not_run_there_is_rejected(
    job: Job | None, request_: dict[str, str], error: type[KoalaError], message: str
) -> None:
    with pytest.raises(error, match=message):
        await Grid(job).open(**request_)


@pytest.mark.parametrize(
    ("request_", "index"),
    [({}, 0), ({"cluster": "south"}, 1), ({"node": "10.0.1.1"}, 1), ({"node": "10.0.0.2"}, 0), ({"node": "1"}, 0)],
)
async def test_stream_leads_to_the_requested_component(request_: dict[str, str], index: int) -> None:
    grid = Grid()
    await grid.open(**request_)
    assert grid.sent[0].token == RUNNING.token(index)


async def test_stream_of_a_node_that_refuses_or_is_silent_is_rejected() -> None:
    grid = Grid(answers=False)
    opening = asyncio.create_task(grid.streams.open_stream(7, ADA))
    await asyncio.sleep(0)
    grid.receive("north", wire.StreamEnd(stream=grid.sent[0].stream, error="command not found: x"))
    with pytest.raises(SiteRejected, match="command not found: x"):
        await opening
    grid.streams._open_timeout = 0.0
    with pytest.raises(SiteUnavailable, match="has not opened the stream"):
        await grid.streams.open_stream(7, ADA)
    assert isinstance(grid.sent[-1], wire.StreamEnd), "its node is told"
    grid.reads = False
    with pytest.raises(SiteUnavailable, match="does not answer"):
        await grid.streams.open_stream(7, ADA)


@pytest.mark.evidence("U19")
async def test_stream_ends_when_a_side_exceeds_its_credit() -> None:
    grid = Grid()
    stream = await grid.open()
    stream.send_input(bytes(STREAM_WINDOW))
    with pytest.raises(StreamViolation):
        stream.send_input(b"x")
    grid.receive("north", wire.StreamCredit(stream=stream.name, offset=10))
    stream.send_input(bytes(10))
    with pytest.raises(StreamViolation):
        stream.confirm_output(1)
    grid.receive("north", output(stream, 0, bytes(STREAM_WINDOW)))
    stream.confirm_output(5)
    grid.receive("north", output(stream, STREAM_WINDOW, bytes(5)))
    assert stream.end is None
    grid.receive("north", output(stream, STREAM_WINDOW + 5, b"x"))
    assert stream.end is not None
    assert "broke the rules" in stream.end.error
    assert isinstance(grid.sent[-1], wire.StreamEnd)


@pytest.mark.parametrize(
    "forged", [wire.StreamData(stream="?", offset=1, data=""), wire.StreamCredit(stream="?", offset=1)]
)
async def test_stream_with_invalid_message_of_the_agent_ends(forged: Any) -> None:
    grid = Grid()
    stream = await grid.open()
    grid.receive("south", forged.model_copy(update={"stream": stream.name}))
    assert stream.end is None, "only the agent of its cluster may send"
    grid.receive("north", forged.model_copy(update={"stream": stream.name}))
    assert stream.end is not None


async def test_stream_ends_with_its_agent_and_with_the_daemon() -> None:
    grid = Grid()
    lost, stays = await grid.open(), await grid.open(cluster="south")
    grid.streams.end_streams_of("north", "it was killed")
    end = await lost.next_item()
    assert isinstance(end, wire.StreamEnd)
    assert end.error == "the connection to cluster north was lost: it was killed"
    assert stays.end is None
    grid.streams.shut_down()
    assert stays.end is not None
    with pytest.raises(BusyError, match="shutting down"), grid.streams.count_client("ada"):
        pass


@pytest.mark.evidence("U19")
async def test_clients_of_a_user_are_limited() -> None:
    grid = Grid()
    clients = [grid.streams.count_client("ada") for _ in range(MAX_USER_STREAMS)]
    for client in clients:
        client.__enter__()
    with pytest.raises(BusyError, match="ada has 256"), grid.streams.count_client("ada"):
        pass
    with grid.streams.count_client("bob"):
        clients[0].__exit__(None, None, None)
    with grid.streams.count_client("ada"):
        pass


async def test_stream_to_an_agent_that_does_not_read_ends() -> None:
    grid = Grid()
    stream = await grid.open()
    grid.reads = False
    stream.send_input(b"x")
    assert stream.end is not None
    assert "does not answer" in stream.end.error


FLOOD = 10_000
"""Messages of a flood."""


@pytest.mark.evidence("U19")
async def test_flood_of_a_client_that_changes_nothing_is_not_sent_on() -> None:
    grid = Grid()
    stream = await grid.open()
    grid.receive("north", output(stream, 0, b"output"))
    stream.confirm_output(6)
    stream.resize(24, 80)
    for _ in range(FLOOD):
        stream.send_input(b"")
    stream.send_input(b"input", is_last=True)
    expected = ["stream_open", "stream_credit", "stream_resize", "stream_data"]
    for _ in range(FLOOD):
        stream.confirm_output(6)
        stream.resize(24, 80)
        stream.send_input(b"")
        stream.send_input(b"more")
        stream.send_input(b"", is_last=True)
    assert [message.type for message in grid.sent] == expected
    assert stream.input_sent == 5


@pytest.mark.evidence("U19")
async def test_resizes_of_a_client_are_limited_in_each_second() -> None:
    grid = Grid()
    stream = await grid.open()
    for second in range(3):
        grid.now = float(second)
        for rows in range(MAX_RESIZES):
            stream.resize(rows, 80)
    with pytest.raises(StreamViolation, match="more than 100 times in a second"):
        stream.resize(1, 1)
    assert len(grid.sent) == 1 + 3 * MAX_RESIZES


@pytest.mark.evidence("U19")
@pytest.mark.parametrize(
    "message",
    [
        wire.StreamData(stream="?", offset=0, data=""),
        wire.StreamData(stream="?", offset=0, data="", is_last=True),
        wire.StreamOpened(stream="?", node="n1"),
    ],
)
async def test_flood_of_an_agent_ends_the_stream(message: Any) -> None:
    grid = Grid()
    stream = await grid.open()
    for _ in range(FLOOD):
        grid.receive("north", message.model_copy(update={"stream": stream.name}))
    assert stream.end is not None
    assert "broke the rules" in stream.end.error
    assert len(stream._queue) <= 2


@pytest.mark.evidence("U19")
async def test_stream_keeps_only_the_newest_credit_of_an_agent() -> None:
    grid = Grid()
    stream = await grid.open()
    stream.send_input(bytes(FLOOD))
    for offset in range(1, FLOOD + 1):
        grid.receive("north", wire.StreamCredit(stream=stream.name, offset=offset))
        grid.receive("north", wire.StreamCredit(stream=stream.name, offset=offset - 1))
    assert len(stream._queue) == 0
    grid.receive("north", output(stream, 0, b"x"))
    credit = await stream.next_item()
    assert isinstance(credit, wire.StreamCredit)
    assert credit.offset == FLOOD
    assert await stream.next_item() == b"x"
    stream.send_input(bytes(STREAM_WINDOW))
    with pytest.raises(StreamViolation):
        stream.send_input(b"x")
