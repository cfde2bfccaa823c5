"""Output in files, with restarts, gaps and full disks."""

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.store.output import BLOCK, OutputStore
from koalapy.store.records import OutputPiece

TOKEN = "7.1.0.abc"
SEGMENT = 32


@pytest.fixture(scope="module", autouse=True)
def _skip_sync() -> Iterator[None]:
    """Skip syncing of thousands of small pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def read_all(
    output: OutputStore, token: str = TOKEN, start: int = 0, *, to_the_end: bool = True
) -> list[tuple[int, int, bytes]]:
    """Return the stored ranges as (bytes missing before, offset, data); adjacent pieces are joined."""
    ranges: list[tuple[int, int, bytes]] = []
    while pieces := output.read(token, start, to_the_end=to_the_end):
        for piece in pieces:
            start = piece.offset + len(piece.data)
            if ranges and not piece.missing:
                ranges[-1] = (*ranges[-1][:2], ranges[-1][2] + piece.data)
            else:
                ranges.append((piece.missing, piece.offset, piece.data))
    return ranges


@given(st.integers(0, 300), st.integers(0, 2**32))
def test_output_keeps_head_and_tail_exactly(limit: int, seed: int) -> None:
    """Chunks have any size, some arrive twice, and the store is reopened in between."""
    chance = random.Random(seed)
    # Without zeros, which a reopened store takes for a loss of power until they are sent again.
    written = bytes(chance.randrange(1, 256) for _ in range(chance.randrange(900)))
    with TemporaryDirectory() as folder:
        output = OutputStore(Path(folder), limit, SEGMENT)
        end = 0
        while end < len(written):
            offset = max(0, end - chance.choice((0, 0, 0, 7, 200)))
            pieces = []
            for _ in range(chance.randrange(1, 4)):
                size = chance.randrange(80)
                pieces.append(OutputPiece(offset, written[offset : offset + size]))
                offset += len(pieces[-1].data)
            end = max(end, offset)
            assert output.append(TOKEN, pieces) == end
            if chance.random() < 0.2:
                output = OutputStore(Path(folder), limit, SEGMENT)
                assert output.size(TOKEN) == end, "the size is read from the files"
        head, tail = limit // 2, limit - limit // 2
        if len(written) <= limit:
            assert read_all(output) == ([(0, 0, written)] if written else [])
        else:
            tail_start = len(written) - tail
            assert read_all(output) == [
                *([(0, 0, written[:head])] if head else []),
                (tail_start - head, tail_start, written[tail_start:]),
            ]
        assert sum(path.stat().st_size for path in Path(folder).rglob("*@*")) <= limit + 2 * SEGMENT


@given(st.integers(0, 2**32))
def test_output_follower_gets_all_bytes_or_gaps(seed: int) -> None:
    chance = random.Random(seed)
    written = bytes(chance.randrange(256) for _ in range(chance.randrange(600)))
    received: dict[int, int] = {}
    missing = position = end = 0
    with TemporaryDirectory() as folder:
        output = OutputStore(Path(folder), 100, SEGMENT)
        while end < len(written):
            size = chance.randrange(1, 60)
            end = output.append(TOKEN, [OutputPiece(end, written[end : end + size])])
            is_complete = end == len(written)
            while (is_complete or chance.random() < 0.3) and (
                pieces := output.read(TOKEN, position, to_the_end=is_complete)
            ):
                for piece in pieces:
                    assert piece.offset == position + piece.missing
                    missing += piece.missing
                    received |= dict(enumerate(piece.data, piece.offset))
                    position = piece.offset + len(piece.data)
        assert (position, len(received) + missing) == (len(written), len(written))
        assert all(written[place] == byte for place, byte in received.items())


def test_output_with_missing_bytes_reports_gap(tmp_path: Path) -> None:
    output = OutputStore(tmp_path, 1000)
    assert output.append(TOKEN, [OutputPiece(0, b"one")]) == 3
    assert output.append(TOKEN, [OutputPiece(10, b"late")]) == 3, "the bytes in between must arrive first"
    assert output.append(TOKEN, [OutputPiece(10, b"late", missing=5)]) == 3
    assert output.append(TOKEN, [OutputPiece(10, b"late", missing=10)]) == 14
    assert read_all(output) == [(0, 0, b"one"), (7, 10, b"late")]
    assert read_all(OutputStore(tmp_path, 1000)) == read_all(output)


def test_output_is_stored_by_token(tmp_path: Path) -> None:
    output = OutputStore(tmp_path, 1000)
    for token in ("7.1.0", "7.1.0.abc", "7.1.1.abc", "7.11.0.abc", "71.1.0.abc"):
        output.append(token, [OutputPiece(0, token.encode())])
    reopened = OutputStore(tmp_path, 1000)
    for token in ("7.1.0", "7.1.0.abc", "7.1.1.abc", "7.11.0.abc", "71.1.0.abc"):
        assert read_all(reopened, token) == [(0, 0, token.encode())]
    assert read_all(reopened, "7.2.0") == []


def test_append_with_full_disk_acknowledges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = OutputStore(tmp_path, 10_000, SEGMENT)
    output.append(TOKEN, [OutputPiece(0, b"x" * 40)])
    text = bytes(range(100))
    real = os.pwrite
    for free in (0, 10, 24, 30, 99):
        capacity = free

        def full(descriptor: int, data: bytes, offset: int) -> int:
            nonlocal capacity
            if not capacity:
                raise OSError(28, "No space left on device")
            data, capacity = data[:capacity], capacity - len(data[:capacity])
            return real(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            output.append(TOKEN, [OutputPiece(40, text)])
        monkeypatch.setattr(os, "pwrite", real)
        assert output.size(TOKEN) == 40
    assert output.append(TOKEN, [OutputPiece(40, text)]) == 140
    assert read_all(output) == [(0, 0, b"x" * 40 + text)]


@pytest.mark.parametrize("begun", [b"", b"begun"])
def test_failed_append_of_replaced_daemon_leaves_files_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    replaced, successor = OutputStore(tmp_path, 1000), OutputStore(tmp_path, 1000)
    if begun:
        replaced.append(TOKEN, [OutputPiece(0, begun)])
    real, text = os.pwrite, begun + b"the output"

    def fail_late(descriptor: int, data: bytes, offset: int) -> int:
        monkeypatch.setattr(os, "pwrite", real)
        successor.append(TOKEN, [OutputPiece(0, text)])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail_late)
    with pytest.raises(OSError, match="No space"):
        replaced.append(TOKEN, [OutputPiece(len(begun), text[len(begun) :])])
    assert read_all(OutputStore(tmp_path, 1000)) == read_all(successor) == [(0, 0, text)]


def test_bytes_that_are_sent_again_replace_those_a_loss_of_power_has_cut(tmp_path: Path) -> None:
    text = bytes(range(1, 129))
    OutputStore(tmp_path, 1024, segment=50).append(TOKEN, [OutputPiece(0, text[:104])])
    for start, size in ((50, 20), (100, 0)):  # sizes are kept, their last bytes are not
        path = next(tmp_path.rglob(f"*@{start}"))
        path.write_bytes(path.read_bytes()[:size].ljust(path.stat().st_size, b"\0"))
    store = OutputStore(tmp_path, 1024, segment=50)
    assert b"".join(piece.data for piece in store.read(TOKEN, 0, to_the_end=False)) == text[:70]
    assert store.append(TOKEN, [OutputPiece(40, text[40:60])]) == 70, "what is true is known without sending it again"
    assert store.append(TOKEN, [OutputPiece(70, text[70:90])]) == 90
    assert store.append(TOKEN, [OutputPiece(90, text[90:])]) == 128
    assert b"".join(piece.data for piece in store.read(TOKEN, 0, to_the_end=True)) == text


def lose_power(folder: Path, synced: int, chance: random.Random) -> None:
    """Spoil some of the blocks of files with the bytes from ``synced`` on, as a loss of power may leave them."""
    for path in folder.rglob("*@*"):
        start = int(path.name.partition("@")[2])
        size = path.stat().st_size
        with path.open("r+b") as file:
            for block in range(0, size, BLOCK):
                if chance.random() < 0.5:
                    first, last = max(block, synced - start), min(block + BLOCK, size)
                    file.seek(first)
                    file.write(bytes(max(0, last - first)))
            if chance.random() < 0.5:  # its size is that before, or one in between
                file.truncate(chance.randint(min(size, max(0, synced - start)), size))


@given(seed=st.integers(0, 2**32))
def test_output_after_a_loss_of_power_becomes_whole(seed: int) -> None:
    """Whatever part of the last bytes, which were not acknowledged, was flushed."""
    chance = random.Random(seed)
    letters = range(chance.randint(0, 1), chance.choice((2, 256)))
    text = bytes(chance.choices(letters, k=chance.randint(1, 12 * BLOCK)))
    synced = chance.randrange(len(text))
    with TemporaryDirectory() as folder:
        store = OutputStore(Path(folder), 14 * BLOCK, 5 * BLOCK)
        store.append(TOKEN, [OutputPiece(0, text[:synced])])
        store.append(TOKEN, [OutputPiece(synced, text[synced:])])
        lose_power(Path(folder), synced, chance)
        store, position = OutputStore(Path(folder), 14 * BLOCK, 5 * BLOCK), synced
        while position < len(text):
            assert all(text.startswith(data) for _, _, data in read_all(store, to_the_end=False))
            data = text[position : position + chance.randint(1, 4 * BLOCK)]
            position = max(store.append(TOKEN, [OutputPiece(position, data)]), position + len(data))
        assert read_all(store) == [(0, 0, text)]


@pytest.mark.parametrize("again", [True, False])
def test_output_that_ends_with_zeros_is_known_again_after_the_next_piece(tmp_path: Path, again: bool) -> None:
    text = b"data" + bytes(60)
    OutputStore(tmp_path, 1024, segment=50).append(TOKEN, [OutputPiece(0, text)])
    store, last = OutputStore(tmp_path, 1024, segment=50), b"" if again else b"more"
    piece = OutputPiece(0, text) if again else OutputPiece(64, last)
    assert store.append(TOKEN, [piece]) == len(text + last)
    assert b"".join(piece.data for piece in store.read(TOKEN, 0, to_the_end=False)) == text + last


def test_append_syncs_file_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda d: synced.append(os.readlink(f"/proc/self/fd/{d}")))
    output = OutputStore(tmp_path, 1000)
    assert synced == [str(tmp_path.parent), str(tmp_path)]
    synced.clear()
    output.append(TOKEN, [OutputPiece(0, b"one")])
    assert synced == [str(tmp_path), str(tmp_path / "7" / f"{TOKEN}@0"), str(tmp_path / "7")]
    output.append(TOKEN, [OutputPiece(3, b"two")])
    assert synced[3:] == [str(tmp_path / "7" / f"{TOKEN}@0")]


def test_output_read_during_writes_is_consistent(tmp_path: Path) -> None:
    output = OutputStore(tmp_path, 4000, 64)
    written = bytes(i * 7 % 256 for i in range(40_000))
    is_written = threading.Event()

    def write() -> None:
        for start in range(0, len(written), 100):
            output.append(TOKEN, [OutputPiece(start, written[start : start + 100])])
        is_written.set()

    writer = threading.Thread(target=write)
    writer.start()
    position, last = 0, False
    while not last:
        last = is_written.is_set()
        for missing, offset, data in read_all(output, start=position, to_the_end=last):
            assert offset == position + missing
            assert data == written[offset : offset + len(data)]
            position = offset + len(data)
    writer.join()
    assert position == len(written)


def test_output_of_evicted_stream_is_found_again(tmp_path: Path) -> None:
    output = OutputStore(tmp_path, 100, SEGMENT, max_streams=3)
    tokens = [f"{job}.1.0.abc" for job in range(10)]
    for end in range(0, 300, 50):
        for token in tokens:
            assert output.append(token, [OutputPiece(end, token[0].encode() * 50)]) == end + 50
    for token in tokens:
        expected = token[0].encode() * 50
        assert read_all(output, token) == [(0, 0, expected), (200, 250, expected)]
