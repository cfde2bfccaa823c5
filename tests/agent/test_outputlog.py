"""The output of a component: its stream, and its delivery to the daemon."""

import asyncio
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components.outputlog import OutputLog, Piece
from koalapy.agent.core import segments
from koalapy.agent.core.reporter import DELIVERY_TIMEOUT
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import claim, run_program

SEGMENT = 64


class Node:
    """A runner: remembers what was not acknowledged, and sends it again when it has to."""

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


class Keeper:
    """A daemon: keeps every byte it was ever sent by its offset; what is left out it knows by the gaps."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.end = 0
        self.missed = 0

    def take(self, piece: Piece) -> bool:
        if piece.offset - piece.gap > self.end:
            return False
        self.missed += max(0, piece.offset - self.end)
        for place, byte in enumerate(piece.data, piece.offset):
            assert self.bytes.setdefault(place, byte) == byte, f"another byte at {place}"
        self.end = max(self.end, piece.offset + len(piece.data))
        return True

    def text(self, start: int, end: int) -> bytes:
        assert all(place in self.bytes for place in range(start, end)), f"not all from {start} to {end}"
        return bytes(self.bytes[place] for place in range(start, end))


def drain(log: OutputLog, keeper: Keeper) -> None:
    while piece := log.next_piece():
        assert keeper.take(piece)
        log.acknowledge_to(keeper.end)


@given(st.integers(0, 600), st.integers(0, 2**32))
def test_head_and_tail_arrive_whatever_happens_on_the_way(limit: int, seed: int) -> None:
    """One node, so that its stream is the component's; every byte of the first and last halves of the limit arrives."""
    chance = random.Random(seed)
    with TemporaryDirectory() as folder:
        log, node, keeper = OutputLog(Path(folder), 1, limit, SEGMENT), Node(0), Keeper()
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
                        if (piece := log.next_piece()) and arrives and keeper.take(piece) and is_heard_of:
                            log.acknowledge_to(keeper.end)
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
        drain(log, keeper)
        total = len(node.written)
        assert (log.total, log.is_pending, log.missing, keeper.end) == (total, False, "", total)
        whole = total <= limit
        head, tail = (total, 0) if whole else (limit // 2, total - (limit - limit // 2))
        assert keeper.text(0, head) == node.written[:head]
        if not whole:
            assert keeper.text(tail, total) == node.written[tail:]
        assert _size(Path(folder)) <= limit + 4 * (SEGMENT + 200)


@given(st.integers(1, 4), st.integers(0, 2**32))
def test_lines_of_several_nodes_arrive_whole_through_restarts(nodes: int, seed: int) -> None:
    chance = random.Random(seed)
    with TemporaryDirectory() as folder:
        log, keeper = OutputLog(Path(folder), nodes, 10**6, SEGMENT), Keeper()
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
                for one in sources:
                    one.greet(log)
            if chance.random() < 0.3:
                drain(log, keeper)
        for source in sources:
            source.greet(log)
            source.write(b"%d ends without a line's end" % source.index)
            while source.sent < len(source.written):
                source.send(log, 50)
        for source in sources:
            assert log.finish_node(source.index)
        log.restart_sending()
        drain(log, keeper)
        text = keeper.text(0, keeper.end)
        assert len(text) == sum(len(source.written) for source in sources)
        for source in sources:
            own = [line for line in source.written.splitlines(keepends=True) if line.endswith(b"\n")]
            told = [line for line in text.splitlines(keepends=True) if line.startswith(b"%d says" % source.index)]
            assert [line for line in told if line.endswith(b"\n")] == own


@given(st.integers(1, 3), st.integers(0, 2**32))
def test_output_recovers_from_every_torn_state(nodes: int, seed: int) -> None:
    """Files cut, missing, or full of anything: what comes afterwards is right, and what is lost is said."""
    chance = random.Random(seed)
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        log, keeper = OutputLog(folder, nodes, 10**6, SEGMENT), Keeper()
        sources = [Node(index) for index in range(nodes)]
        for source in sources:
            source.greet(log)
            source.write(bytes(chance.randrange(256) for _ in range(chance.randrange(300))))
        for _ in range(12):
            chance.choice(sources).send(log, chance.randrange(1, 80))
            if chance.random() < 0.2:
                drain(log, keeper)
        before = log.total
        for path in sorted(folder.iterdir()):
            _damage(path, chance)
        log = OutputLog(folder, nodes, 10**6, SEGMENT)
        log.recover()
        assert log.total <= before
        for source in sources:
            source.greet(log)
            source.write(b"%d: the end\n" % source.index)
            while source.sent < len(source.written):
                source.send(log, 50)
            assert log.finish_node(source.index)
            assert log.kept_bytes(source.index) == len(source.written)
        log.restart_sending()
        log.acknowledge_to(keeper.end)
        drain(log, keeper)
        assert not log.is_pending
        kept = bytes(keeper.bytes[place] for place in sorted(keeper.bytes))
        said = log.missing or keeper.missed
        assert len(kept) == sum(len(s.written) for s in sources) or said, "what is lost is said to somebody"
        assert kept.endswith(b"%d: the end\n" % sources[-1].index) or said


def _damage(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    match chance.randrange(5):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(data[: chance.randrange(len(data) + 1)])
        case 2:
            path.write_bytes(bytes(chance.randrange(256) for _ in range(chance.randrange(200))))
        case 3 if data:
            at = chance.randrange(len(data))
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def test_output_on_full_disk_waits_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, node, keeper = OutputLog(tmp_path, 2), Node(0), Keeper()
    node.greet(log)
    node.write(b"one\ntwo\nthr")
    node.send(log, 4)
    room = 7
    real = segments.os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        data, room = data[:room], room - len(data[:room])
        return real(descriptor, data, offset)

    monkeypatch.setattr(segments.os, "pwrite", full)
    node.send(log, 100)
    assert (log.kept_bytes(0), log.total) == (4, 4), "what could not be kept is not acknowledged"
    assert log.error == f"cannot write below {tmp_path}: No space left on device"
    assert not log.finish_node(0)
    again = OutputLog(tmp_path, 2)
    again.recover()
    assert (again.total, again.missing) == (4, ""), "an agent that is killed now leaves no torn frame"
    monkeypatch.setattr(segments.os, "pwrite", real)
    assert log.retry_write(0) == 8
    assert (log.finish_node(0), log.error, log.missing) == (True, "", "")
    drain(log, keeper)
    assert keeper.text(0, keeper.end) == b"one\ntwo\nthr"


def test_output_lost_at_end_is_reported(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    log.add_bytes(0, 0, b"abc")
    log.give_up("the daemon took nothing for 300 s")
    assert (log.is_pending, log.missing) == (False, "the last 3 bytes: the daemon took nothing for 300 s")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


T = "7.1.0"


async def test_agent_whose_output_is_not_acknowledged_sends_it_again(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.takes_output = False
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        await run_program(daemon, lrm, await claim(daemon, tmp_path), b"one\n")
        await daemon.wait_until(lambda: len(daemon.received("output", T)) > 2)
        assert daemon.status(T)["state"] == "delivering"
        daemon.takes_output = True
        await daemon.reaches(T, "ended")
    assert daemon.output[T] == b"one\n"


async def test_agent_whose_output_is_never_acknowledged_gives_it_up(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.takes_output = False
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        await run_program(daemon, lrm, await claim(daemon, tmp_path), b"one\n")
        end = await daemon.reaches(T, "ended")
    lost = f"the last 4 bytes: the daemon took nothing for {DELIVERY_TIMEOUT:g} s"
    assert (end["program_exit"], end["missing"]) == (0, lost)


async def test_agent_without_room_for_output_acknowledges_it_when_there_is_room(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the runner keeps what it has sent, and its program waits."""
    tries = 0

    def refuse(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim(daemon, tmp_path)
        with monkeypatch.context() as disk:
            disk.setattr(segments.os, "pwrite", refuse)
            playing = asyncio.create_task(run_program(daemon, lrm, runner, b"one\n"))
            await daemon.wait_until(lambda: tries > 1)
            assert not playing.done()
            assert daemon.status(T)["program_exit"] is None
        end = await daemon.reaches(T, "ended")
        await playing
    assert (end["program_exit"], end["error"], end["missing"]) == (0, "", "")
    assert daemon.output[T] == b"one\n"
