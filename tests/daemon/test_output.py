"""Output from agents to files and readers; the daemon's limit here is 1000 bytes."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from koalapy.daemon.jobs.output import OutputEnd, Outputs, OutputText
from koalapy.model.job_spec import OutputStream
from koalapy.runner.output_streams import StreamSplitter, mark_stream
from koalapy.store.output import OutputStore
from koalapy.store.records import OutputPiece
from tests.daemon.test_hub import Daemon
from tests.daemon.test_trust import COUPLED, ON_NORTH, Grid, make_output, open_grid, received_messages, wait_for_job


async def read_logs(daemon: Daemon, job: int, **options: Any) -> bytes:
    return b"".join([part.data for part in await read_parts(daemon, job, **options)])


async def read_parts(daemon: Daemon, job: int, **options: Any) -> list[OutputText]:
    parts = [part async for part in daemon.jobs.follow_output(job, follow=False, **options)]
    assert isinstance(parts[-1], OutputEnd)
    return [part for part in parts if isinstance(part, OutputText)]


async def send_output(grid: Grid, token: str, offset: int, text: bytes, gap: int = 0) -> None:
    """Send output as north's agent, and wait for its acknowledgement."""
    grid.north.say_to_daemon(make_output(token, offset, text).model_copy(update={"gap": gap}))
    await wait_for_job(lambda: received_messages(grid.north, "output_ack", token=token, offset=offset + len(text)))


def start_anew(grid: Grid, path: Path) -> None:
    """Replace the daemon's output store by a new one that knows only the files."""
    daemon = grid.daemon
    outputs = Outputs(daemon.engine, daemon.queries, daemon.store, OutputStore(path / "output", 1000))
    daemon.outputs = daemon.messages._outputs = daemon.jobs._outputs = outputs


@pytest.mark.evidence("U9")
async def test_output_limit_continues_after_restart(tmp_path: Path) -> None:
    """The files tell how much output was stored, so a daemon notes every gap after a restart."""
    async with open_grid(tmp_path / "koala.db") as grid:
        assert received_messages(grid.north, "welcome")[0]["output_limit"] == 1000
        (token,) = await grid.submit_job(1, ON_NORTH)
        await send_output(grid, token, 0, b"x" * 3000)
        start_anew(grid, tmp_path)
        await send_output(grid, token, 3000, b"y" * 600)
        await send_output(grid, token, 3600, b"the end\n")
        content = b"x" * 3000 + b"y" * 600 + b"the end\n"
        line = (
            b"\nkoala: 2608 bytes are left out here (output_limit is 1000); "
            b"a file given with --output would have all of it\n"
        )
        assert await read_logs(grid.daemon, 1) == content[:500] + line + content[-500:]


async def test_missing_output_is_replaced_by_note(tmp_path: Path) -> None:
    """After files were restored from a copy, the agent no longer has the output that it got acknowledged."""
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)
        await send_output(grid, token, 0, b"one\n")
        shutil.rmtree(tmp_path / "output" / "1")
        start_anew(grid, tmp_path)
        grid.north.say_to_daemon(make_output(token, 8, b"not yet"))
        await send_output(grid, token, 4, b"two\n", gap=4)
        assert (
            await read_logs(grid.daemon, 1) == b"koala: 4 bytes are missing here: they did not reach the daemon\ntwo\n"
        )


@pytest.mark.parametrize("stream", [None, *OutputStream])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 10**6])
async def test_tail_is_the_end_of_each_stream(tmp_path: Path, stream: OutputStream | None, count: int) -> None:
    writes = [(number % 3 == 0, b"%d \x0e\r\n" % number) for number in range(40)] + [(True, b"unfinished")]
    wanted = {OutputStream.OUTPUT: (False,), OutputStream.ERROR: (True,)}.get(stream, (False, True))
    lines = [text for is_error, text in writes if is_error in wanted]
    if stream is OutputStream.MARKED:
        lines = [mark_stream(text, is_error=is_error) for is_error, text in writes]
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH, label=True)
        await send_output(grid, token, 0, b"".join(mark_stream(text, is_error=error) for error, text in writes))
        tail = await read_logs(grid.daemon, 1, stream=stream, last_lines=count)
        assert tail == b"".join(lines[max(0, len(lines) - count) :])
        assert await read_logs(grid.daemon, 1, stream=stream) == b"".join(lines)
        job = grid.daemon.queries.job(1)
        assert job is not None
        (shown,) = await grid.daemon.outputs.read_tails(job, 10_000)
        assert shown.data == b"".join(text for _, text in writes)


async def test_tail_of_long_output_is_in_its_stored_end(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)
        content = b"".join(b"line %d\n" % number for number in range(500))
        await send_output(grid, token, 0, content)
        assert await read_logs(grid.daemon, 1, last_lines=2) == b"line 498\nline 499\n"
        everything = await read_logs(grid.daemon, 1, last_lines=400)
        assert everything.endswith(content[-500:])


@pytest.mark.parametrize(
    ("content", "tail"), [(b"one\n" + b"x" * 200, b"x" * 64), (b"x" * 200 + b"\r50 %\ntwo\n", b"two\n")]
)
async def test_tail_of_a_line_longer_than_what_is_searched_is_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, tail: bytes
) -> None:
    monkeypatch.setattr("koalapy.daemon.jobs.output.MIN_TAIL_BYTES", 16)
    monkeypatch.setattr("koalapy.daemon.jobs.output.MAX_TAIL_BYTES", 64)
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)
        await send_output(grid, token, 0, content)
        assert await read_logs(grid.daemon, 1, last_lines=3) == tail


async def test_output_is_acknowledged_only_if_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(grid.daemon.kept, "append", full)
            grid.north.say_to_daemon(make_output(token, 0, b"one\n"))
            await wait_for_job(lambda: received_messages(grid.north, "output_ack", token=token, offset=0))
        assert len(received_messages(grid.north, "output_ack")) == 1
        assert not grid.north.closed
        await send_output(grid, token, 0, b"one\n")
        assert await read_logs(grid.daemon, 1) == b"one\n"


async def test_output_of_deleted_job_is_not_reused(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        grid.daemon.kept.append("1.1.0.0f", [OutputPiece(0, b"of another life\n")])
        (token,) = await grid.submit_job(1, ON_NORTH)
        assert token != "1.1.0.0f"
        assert await read_logs(grid.daemon, 1) == b""


async def test_follow_output_reads_changed_component_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither stored output nor silent components are read again."""
    async with open_grid(tmp_path / "koala.db") as grid:
        tokens = await grid.submit_job(1, COUPLED)
        read: list[tuple[str, int]] = []
        whole = grid.daemon.kept.read

        def counted(token: str, start: int, *, to_the_end: bool) -> list[OutputPiece]:
            pieces = whole(token, start, to_the_end=to_the_end)
            read.append((token, sum(len(piece.data) for piece in pieces)))
            return pieces

        monkeypatch.setattr(grid.daemon.kept, "read", counted)
        jobs = grid.daemon.jobs
        following = jobs.follow_output(1, follow=True)

        async def next_data() -> bytes:
            part = await anext(following)
            assert isinstance(part, OutputText)
            return part.data

        await send_output(grid, tokens[0], 0, b"x" * 900)
        assert await next_data() + await next_data() == b"x" * 900
        for number in range(20):
            coming = asyncio.ensure_future(next_data())
            await send_output(grid, tokens[0], 900 + number, b"y")
            assert await coming == b"y"
        await following.aclose()  # type: ignore[attr-defined]
        assert sum(size for _, size in read) == 920
        assert {token for token, _ in read} == set(tokens)
        assert len([token for token, _ in read if token == tokens[1]]) == 1, "of the silent one nothing was new"


@pytest.mark.parametrize("stream", [None, *OutputStream])
async def test_output_continues_at_the_offset_of_each_part(tmp_path: Path, stream: OutputStream | None) -> None:
    writes = [(False, b"out \x0e\n"), (True, b"an error without its end"), (True, b" here\n"), (False, b"\x10end")]
    data = b"".join(mark_stream(text, is_error=is_error) for is_error, text in writes)
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH, label=True)
        whole = b""
        for offset in range(len(data)):  # each part is one byte, which divides marks from their text
            parts = await read_parts(grid.daemon, 1, stream=stream, attempt=1, offsets={0: offset} if offset else {})
            assert b"".join(part.data for part in parts) == b""
            await send_output(grid, token, offset, data[offset : offset + 1])
            (part,) = await read_parts(grid.daemon, 1, stream=stream, attempt=1, offsets={0: offset} if offset else {})
            assert part.offset == offset + 1
            whole += part.data
        if stream is OutputStream.MARKED:
            splitter = StreamSplitter()
            for wanted in (False, True):
                text = b"".join(text for is_error, text in splitter.split(whole) if is_error is wanted)
                assert text == b"".join(text for is_error, text in writes if is_error is wanted)
        else:
            assert whole == await read_logs(grid.daemon, 1, stream=stream)


async def test_output_of_new_attempt_begins_at_its_first_byte(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)
        await send_output(grid, token, 0, b"one\n")
        assert await read_logs(grid.daemon, 1, attempt=7, offsets={0: 2}, last_lines=0) == b"one\n"
        assert await read_logs(grid.daemon, 1, attempt=1, offsets={0: 2}, last_lines=0) == b"e\n"
        assert await read_logs(grid.daemon, 1, attempt=1, offsets={0: 10**18}) == b""


async def test_tail_yields_its_position_without_output(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        await grid.submit_job(1, COUPLED)
        parts = await read_parts(grid.daemon, 1, last_lines=3)
        assert [(part.component, part.offset, part.data) for part in parts] == [(0, 0, b""), (1, 0, b"")]


async def test_followed_output_of_ending_daemon_has_no_end(tmp_path: Path) -> None:
    async with open_grid(tmp_path / "koala.db") as grid:
        (token,) = await grid.submit_job(1, ON_NORTH)
        await send_output(grid, token, 0, b"one\n")
        following = grid.daemon.jobs.follow_output(1, follow=True)
        assert await anext(following) == OutputText(1, 0, 4, 0, b"one\n")
        assert await anext(following) is None, "nothing has come for a while"
        grid.daemon.engine.drain()
        assert [part async for part in following] == []
