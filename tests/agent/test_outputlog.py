"""The output of a component: its stream, and its delivery to the daemon."""

import asyncio
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components.outputlog import OutputLog, Piece, Segments
from koalapy.agent.core.reporter import DELIVERY_TIMEOUT
from koalapy.model.bounds import MAX_TEXT_LENGTH
from koalapy.protocol.messages import MAX_START, Output
from tests.agent.conftest import FakeDaemon
from tests.agent.fake_runner import claim_component, run_program
from tests.agent.memory_agent import running_agent
from tests.agent.memory_lrm import MemoryLrm
from tests.signals import pass_time
from tests.virtual_time import VirtualTimeLoop

SEGMENT = 64


class Node:
    """A runner that keeps unacknowledged output and sends it again when necessary."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.written = b""
        self.start = self.sent = 0

    def write(self, data: bytes) -> None:
        self.written += data

    def greet(self, log: OutputLog) -> None:
        self.start = self.sent = log.accept_stream(self.index, self.start)

    def send(self, log: OutputLog, size: int) -> None:
        data = self.written[self.sent : self.sent + size]
        acknowledged = log.add_bytes(self.index, self.sent, data)
        self.sent += len(data)
        self.start = max(self.start, acknowledged)


class DaemonOutput:
    """A daemon that stores received bytes by offset and counts the gaps."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.end = 0
        self.missed = 0

    def receive_piece(self, piece: Piece) -> bool:
        if piece.offset - piece.gap > self.end:
            return False
        self.missed += max(0, piece.offset - self.end)
        for place, byte in enumerate(piece.data, piece.offset):
            assert self.bytes.setdefault(place, byte) == byte, f"another byte at {place}"
        self.end = max(self.end, piece.offset + len(piece.data))
        return True

    def read_bytes(self, start: int, end: int) -> bytes:
        assert all(place in self.bytes for place in range(start, end)), f"not all from {start} to {end}"
        return bytes(self.bytes[place] for place in range(start, end))


def deliver_all(log: OutputLog, output: DaemonOutput) -> None:
    while piece := log.next_piece():
        assert output.receive_piece(piece)
        log.acknowledge_to(output.end)


@given(st.integers(0, 600), st.integers(0, 2**32))
def test_head_and_tail_of_output_always_arrive(limit: int, seed: int) -> None:
    """The first and the last half of the limit arrive. With one node, its stream is the component's."""
    chance = random.Random(seed)
    with TemporaryDirectory() as folder:
        log, node, output = OutputLog(Path(folder), 1, limit, SEGMENT), Node(0), DaemonOutput()
        node.greet(log)
        for _ in range(chance.randrange(1, 60)):
            match chance.randrange(6):
                case 0 | 1:
                    node.write(bytes(chance.randrange(256) for _ in range(chance.randrange(120))))
                case 2:
                    node.send(log, chance.randrange(1, 200))
                case 3:
                    for _ in range(chance.randrange(4)):
                        arrives, is_heard_of = chance.random() < 0.8, chance.random() < 0.8
                        if (piece := log.next_piece()) and arrives and output.receive_piece(piece) and is_heard_of:
                            log.acknowledge_to(output.end)
                case 4:
                    log = OutputLog(Path(folder), 1, limit, SEGMENT)
                    log.recover()
                    node.greet(log)
                case 5:
                    log.restart_sending()
        node.greet(log)
        while node.sent < len(node.written):
            node.send(log, 50)
        assert log.finish_node(0)
        log.restart_sending()
        deliver_all(log, output)
        total = len(node.written)
        assert (log.total, log.is_pending, log.missing, output.end) == (total, False, "", total)
        is_complete = total <= limit
        head, tail = (total, 0) if is_complete else (limit // 2, total - (limit - limit // 2))
        assert output.read_bytes(0, head) == node.written[:head]
        if not is_complete:
            assert output.read_bytes(tail, total) == node.written[tail:]
        assert folder_size(Path(folder)) <= limit + 4 * (SEGMENT + 200)


@given(st.integers(1, 4), st.integers(0, 2**32))
def test_lines_of_several_nodes_survive_restarts(nodes: int, seed: int) -> None:
    chance = random.Random(seed)
    with TemporaryDirectory() as folder:
        log, output = OutputLog(Path(folder), nodes, 10**6, SEGMENT), DaemonOutput()
        sources = [Node(index) for index in range(nodes)]
        for source in sources:
            source.greet(log)
        for number in range(chance.randrange(1, 40)):
            source = chance.choice(sources)
            source.write(b"%d says %d\n" % (source.index, number))
            source.send(log, chance.randrange(1, 30))
            if chance.random() < 0.1:
                log = OutputLog(Path(folder), nodes, 10**6, SEGMENT)
                log.recover()
                for restarted_source in sources:
                    restarted_source.greet(log)
            if chance.random() < 0.3:
                deliver_all(log, output)
        for source in sources:
            source.greet(log)
            source.write(b"%d ends without a line's end" % source.index)
            while source.sent < len(source.written):
                source.send(log, 50)
        for source in sources:
            assert log.finish_node(source.index)
        log.restart_sending()
        deliver_all(log, output)
        text = output.read_bytes(0, output.end)
        assert len(text) == sum(len(source.written) for source in sources)
        for source in sources:
            written_lines = [line for line in source.written.splitlines(keepends=True) if line.endswith(b"\n")]
            delivered_lines = [
                line for line in text.splitlines(keepends=True) if line.startswith(b"%d says" % source.index)
            ]
            assert [line for line in delivered_lines if line.endswith(b"\n")] == written_lines


@given(st.integers(1, 3), st.integers(0, 2**32))
def test_output_recovers_from_every_torn_state(nodes: int, seed: int) -> None:
    """After files are cut, removed or overwritten, later output is right and lost output is reported."""
    chance = random.Random(seed)
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        log, output = OutputLog(folder, nodes, 10**6, SEGMENT), DaemonOutput()
        sources = [Node(index) for index in range(nodes)]
        for source in sources:
            source.greet(log)
            source.write(bytes(chance.randrange(256) for _ in range(chance.randrange(300))))
        for _ in range(12):
            chance.choice(sources).send(log, chance.randrange(1, 80))
            if chance.random() < 0.2:
                deliver_all(log, output)
        total = log.total
        for path in sorted(folder.iterdir()):
            damage_file(path, chance)
        log = OutputLog(folder, nodes, 10**6, SEGMENT)
        log.recover()
        assert log.total <= total
        for source in sources:
            source.greet(log)
            source.write(b"%d: the end\n" % source.index)
            while source.sent < len(source.written):
                source.send(log, 50)
            assert log.finish_node(source.index)
            assert log.kept_bytes(source.index) == len(source.written)
        log.restart_sending()
        log.acknowledge_to(output.end)
        deliver_all(log, output)
        assert not log.is_pending
        delivered = bytes(output.bytes[position] for position in sorted(output.bytes))
        is_reported = log.missing or output.missed
        assert len(delivered) == sum(len(s.written) for s in sources) or is_reported, "lost output is reported"
        assert delivered.endswith(b"%d: the end\n" % sources[-1].index) or is_reported


def damage_file(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    match chance.randrange(5):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(data[: chance.randrange(len(data) + 1)])
        case 2:
            path.write_bytes(bytes(chance.randrange(256) for _ in range(chance.randrange(200))))
        case 3 if data:
            position = chance.randrange(len(data))
            path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])


def test_output_on_full_disk_waits_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, node, output = OutputLog(tmp_path, 2), Node(0), DaemonOutput()
    node.greet(log)
    node.write(b"one\ntwo\nthr")
    node.send(log, 4)
    free = 7
    pwrite = os.pwrite

    def write_until_full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal free
        if not free:
            raise OSError(28, "No space left on device")
        data, free = data[:free], free - len(data[:free])
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write_until_full)
    node.send(log, 100)
    assert (log.kept_bytes(0), log.total) == (4, 4), "unsaved output is not acknowledged"
    assert log.error == f"cannot write below {tmp_path}: No space left on device"
    assert not log.finish_node(0)
    recovered = OutputLog(tmp_path, 2)
    recovered.recover()
    assert (recovered.total, recovered.missing) == (4, ""), "a killed agent leaves no torn frame"
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert log.retry_write(0) == 8
    assert (log.finish_node(0), log.error, log.missing) == (True, "", "")
    deliver_all(log, output)
    assert output.read_bytes(0, output.end) == b"one\ntwo\nthr"


def test_output_that_runner_no_longer_holds_is_reported(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add_bytes(0, 0, b"abc")
    assert log.accept_stream(0, 5) == 5
    assert (log.total, log.missing) == (5, f"2 bytes of node 0: they are not in {tmp_path} any more")


def test_description_of_lost_output_is_bounded(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    for start in range(1, 2000):
        log.accept_stream(0, start)
    assert len(log.missing) < MAX_TEXT_LENGTH + 1000


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_skipped_output_leaves_later_offsets_valid(tmp_path: Path, nodes: int, is_acknowledged: bool) -> None:
    log = OutputLog(tmp_path, nodes)
    for node in range(nodes):
        log.accept_stream(node, 2**53)
    if is_acknowledged:
        log.acknowledge_to(2**53)
    for node in range(nodes):
        log.add_bytes(node, log.kept_bytes(node), b"hi\n")
    later_log = OutputLog(tmp_path, nodes)
    later_log.recover()
    for sender in (log, later_log):
        while piece := sender.next_piece():
            Output(token=T, offset=piece.offset, data="", gap=piece.gap)
    assert MAX_START < later_log.total == log.total


def test_stored_output_at_invalid_offset_is_reported_missing(tmp_path: Path) -> None:
    """Earlier versions stored such output, and every later agent failed at it."""
    stored = Segments(tmp_path, 1)
    stored.received, stored.total = [2**53, 0], 2**53
    stored.append_bytes(0, b"hi\n")
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    log = OutputLog(tmp_path, 1)
    log.recover()
    assert (log.total, log.next_piece(), list(tmp_path.iterdir())) == (0, None, [])
    assert log.missing == f"up to {size} bytes: files below {tmp_path} were damaged"


def test_output_lost_at_end_is_reported(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add_bytes(0, 0, b"abc")
    log.give_up("the daemon took nothing for 300 s")
    assert (log.is_pending, log.missing) == (False, "the last 3 bytes: the daemon took nothing for 300 s")


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


T = "7.1.0"


async def test_unacknowledged_output_is_sent_again(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.takes_output = False
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        await run_program(daemon, lrm, await claim_component(daemon, tmp_path), b"one\n")
        await daemon.wait_until(lambda: len(daemon.received("output", T)) > 2)
        assert daemon.status(T)["state"] == "delivering"
        daemon.takes_output = True
        await daemon.wait_for_state(T, "ended")
    assert daemon.output[T] == b"one\n"


async def test_output_never_acknowledged_is_given_up(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.takes_output = False
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        await run_program(daemon, lrm, await claim_component(daemon, tmp_path), b"one\n")
        end = await daemon.wait_for_state(T, "ended")
    missing = f"the last 4 bytes: the daemon took nothing for {DELIVERY_TIMEOUT:g} s"
    assert (end["program_exit"], end["missing"]) == (0, missing)


async def test_output_is_kept_over_stop_of_agent(daemon: FakeDaemon, tmp_path: Path) -> None:
    """As after SIGSTOP: the daemon has closed the connection meanwhile."""
    daemon.takes_output = False
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        await run_program(daemon, lrm, await claim_component(daemon, tmp_path), b"one\n")
        await daemon.wait_for_state(T, "delivering")
        daemon.takes_output = True
        daemon._sockets["north"].transport.abort()
        loop.jump(2 * DELIVERY_TIMEOUT)
        end = await daemon.wait_for_state(T, "ended")
    assert (daemon.output[T], end["missing"]) == (b"one\n", "")


async def test_output_for_full_daemon_is_kept(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim_component(daemon, tmp_path)
        await runner.send_output(0, b"zero\n")
        await daemon.wait_until(lambda: daemon.output.get(T) == b"zero\n")
        daemon.is_full = True
        await daemon.open_barrier(["true"], T)
        await runner.receive("open")
        await runner.send_output(5, b"one\n")
        await runner.report_exit()
        runner.writer.close()
        lrm.end_job("1")
        lrm.changed.set()
        await daemon.wait_for_state(T, "delivering")
        await pass_time(3 * DELIVERY_TIMEOUT)
        assert daemon.status(T)["state"] == "delivering"
        daemon.is_full = False
        end = await daemon.wait_for_state(T, "ended")
    assert (daemon.output[T], end["missing"]) == (b"zero\none\n", "")


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("is_name_lost", [False, True])
async def test_output_that_power_loss_forgot_after_its_result_is_reported_missing(
    daemon: FakeDaemon, tmp_path: Path, has_ended: bool, is_name_lost: bool
) -> None:
    daemon.takes_output = False
    lrm, stream = MemoryLrm(), tmp_path / daemon.instance / T / "stream.0"
    async with running_agent(lrm, daemon, tmp_path):
        runner = await claim_component(daemon, tmp_path)
        await daemon.open_barrier(["false"], T)
        await runner.receive("open")
        await runner.send_output(0, b"one\n")
        await runner.report_exit(3)
        if has_ended:
            runner.writer.close()
            lrm.end_job("1")
            await daemon.wait_for_state(T, "delivering")
    lrm.end_job("1")
    stream.unlink() if is_name_lost else stream.write_bytes(b"")
    async with running_agent(lrm, daemon, tmp_path):
        end = await daemon.wait_for_state(T, "ended")
    what = "up to 4 bytes: they are not in {} any more" if has_ended else "4 bytes of node 0: they are not in {}"
    assert (end["program_exit"], end["missing"]) == (3, what.format(stream.parent))


async def test_result_is_flushed_after_its_output(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def note_flush(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim_component(daemon, tmp_path)
        monkeypatch.setattr(os, "fsync", note_flush)
        await run_program(daemon, lrm, runner, b"one\n")
    assert flushed[flushed.index("stream.0") :][:3] == ["stream.0", T, "journal"]


async def test_output_is_acknowledged_once_disk_has_space(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the runner keeps its output, and its program waits."""
    attempts = 0

    def raise_no_space(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal attempts
        attempts += 1
        raise OSError(28, "No space left on device")

    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim_component(daemon, tmp_path)
        with monkeypatch.context() as disk:
            disk.setattr(os, "pwrite", raise_no_space)
            playing = asyncio.create_task(run_program(daemon, lrm, runner, b"one\n"))
            await daemon.wait_until(lambda: attempts > 1)
            assert not playing.done()
            assert daemon.status(T)["program_exit"] is None
        end = await daemon.wait_for_state(T, "ended")
        await playing
    assert (end["program_exit"], end["error"], end["missing"]) == (0, "", "")
    assert daemon.output[T] == b"one\n"
