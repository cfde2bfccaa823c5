"""Output in files: exact to the byte within the limit, through restarts, gaps and full disks."""

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.ports import OutputPiece
from koalapy.store import output as output_module
from koalapy.store.output import FileOutput

T = "7.1.0.abc"
SEGMENT = 32


@pytest.fixture(scope="module", autouse=True)
def _quick_disk() -> Iterator[None]:
    """Thousands of small pieces need not reach the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_module.os, "fsync", lambda descriptor: None)
        yield


def whole(kept: FileOutput, token: str = T, after: int = 0, *, to_the_end: bool = True) -> list[tuple[int, int, bytes]]:
    """What there is, as (missing before, offset, bytes), pieces that follow on each other as one."""
    found: list[tuple[int, int, bytes]] = []
    while pieces := kept.read(token, after, to_the_end=to_the_end):
        for piece in pieces:
            after = piece.offset + len(piece.data)
            if found and not piece.missing:
                found[-1] = (*found[-1][:2], found[-1][2] + piece.data)
            else:
                found.append((piece.missing, piece.offset, piece.data))
    return found


@given(st.integers(0, 300), st.integers(0, 2**32))
def test_head_and_tail_are_kept_to_the_byte(limit: int, seed: int) -> None:
    """Chunks of any size, some twice, the store opened anew in between."""
    chance = random.Random(seed)
    written = bytes(chance.randrange(256) for _ in range(chance.randrange(900)))
    with TemporaryDirectory() as folder:
        kept = FileOutput(Path(folder), limit, SEGMENT)
        end = 0
        while end < len(written):
            offset = max(0, end - chance.choice((0, 0, 0, 7, 200)))
            pieces = []
            for _ in range(chance.randrange(1, 4)):
                size = chance.randrange(80)
                pieces.append(OutputPiece(offset, written[offset : offset + size]))
                offset += len(pieces[-1].data)
            end = max(end, offset)
            assert kept.append(T, pieces) == end
            if chance.random() < 0.2:
                kept = FileOutput(Path(folder), limit, SEGMENT)
                assert kept.size(T) == end, "the files know"
        head, tail = limit // 2, limit - limit // 2
        if len(written) <= limit:
            assert whole(kept) == ([(0, 0, written)] if written else [])
        else:
            after = len(written) - tail
            assert whole(kept) == [*([(0, 0, written[:head])] if head else []), (after - head, after, written[after:])]
        assert sum(path.stat().st_size for path in Path(folder).rglob("*@*")) <= limit + 2 * SEGMENT


@given(st.integers(0, 2**32))
def test_who_follows_sees_every_byte_once_or_is_told_how_many_are_missing(seed: int) -> None:
    chance = random.Random(seed)
    written = bytes(chance.randrange(256) for _ in range(chance.randrange(600)))
    seen: dict[int, int] = {}
    missing = at = end = 0
    with TemporaryDirectory() as folder:
        kept = FileOutput(Path(folder), 100, SEGMENT)
        while end < len(written):
            size = chance.randrange(1, 60)
            end = kept.append(T, [OutputPiece(end, written[end : end + size])])
            over = end == len(written)
            while (over or chance.random() < 0.3) and (pieces := kept.read(T, at, to_the_end=over)):
                for piece in pieces:
                    assert piece.offset == at + piece.missing
                    missing += piece.missing
                    seen |= dict(enumerate(piece.data, piece.offset))
                    at = piece.offset + len(piece.data)
        assert (at, len(seen) + missing) == (len(written), len(written))
        assert all(written[place] == byte for place, byte in seen.items())


def test_what_its_sender_has_not_any_more_is_skipped_and_told(tmp_path: Path) -> None:
    kept = FileOutput(tmp_path, 1000)
    assert kept.append(T, [OutputPiece(0, b"one")]) == 3
    assert kept.append(T, [OutputPiece(10, b"late")]) == 3, "what lies between will come first"
    assert kept.append(T, [OutputPiece(10, b"late", missing=5)]) == 3
    assert kept.append(T, [OutputPiece(10, b"late", missing=10)]) == 14
    assert whole(kept) == [(0, 0, b"one"), (7, 10, b"late")]
    assert whole(FileOutput(tmp_path, 1000)) == whole(kept)


def test_components_and_jobs_are_apart(tmp_path: Path) -> None:
    kept = FileOutput(tmp_path, 1000)
    for token in ("7.1.0", "7.1.0.abc", "7.1.1.abc", "7.11.0.abc", "71.1.0.abc"):
        kept.append(token, [OutputPiece(0, token.encode())])
    again = FileOutput(tmp_path, 1000)
    for token in ("7.1.0", "7.1.0.abc", "7.1.1.abc", "7.11.0.abc", "71.1.0.abc"):
        assert whole(again, token) == [(0, 0, token.encode())]
    assert whole(again, "7.2.0") == []


def test_nothing_is_acknowledged_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever could be written of it before the end of the room does no harm, now or after a restart."""
    kept = FileOutput(tmp_path, 10_000, SEGMENT)
    kept.append(T, [OutputPiece(0, b"x" * 40)])
    text = bytes(range(100))
    real = output_module.os.pwrite
    for room in (0, 10, 24, 30, 99):
        left = room

        def full(descriptor: int, data: bytes, offset: int) -> int:
            nonlocal left
            if not left:
                raise OSError(28, "No space left on device")
            data, left = data[:left], left - len(data[:left])
            return real(descriptor, data, offset)

        monkeypatch.setattr(output_module.os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            kept.append(T, [OutputPiece(40, text)])
        monkeypatch.setattr(output_module.os, "pwrite", real)
        assert kept.size(T) == FileOutput(tmp_path, 10_000, SEGMENT).size(T) == 40
    assert kept.append(T, [OutputPiece(40, text)]) == 140
    assert whole(kept) == [(0, 0, b"x" * 40 + text)]


def test_it_is_on_the_disk_before_it_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(output_module.os, "fsync", lambda d: synced.append(os.readlink(f"/proc/self/fd/{d}")))
    kept = FileOutput(tmp_path, 1000)
    kept.append(T, [OutputPiece(0, b"one")])
    assert synced == [str(tmp_path), str(tmp_path / "7" / f"{T}@0"), str(tmp_path / "7")]
    kept.append(T, [OutputPiece(3, b"two")])
    assert synced[3:] == [str(tmp_path / "7" / f"{T}@0")]


def test_a_reader_beside_a_writer_never_sees_wrong_bytes(tmp_path: Path) -> None:
    kept = FileOutput(tmp_path, 4000, 64)
    written = bytes(i * 7 % 256 for i in range(40_000))
    over = threading.Event()

    def write() -> None:
        for start in range(0, len(written), 100):
            kept.append(T, [OutputPiece(start, written[start : start + 100])])
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    at, last = 0, False
    while not last:
        last = over.is_set()
        for missing, offset, data in whole(kept, after=at, to_the_end=last):
            assert offset == at + missing
            assert data == written[offset : offset + len(data)]
            at = offset + len(data)
    writer.join()
    assert at == len(written)


def test_what_is_forgotten_for_lack_of_room_in_memory_is_found_again(tmp_path: Path) -> None:
    kept = FileOutput(tmp_path, 100, SEGMENT, max_streams=3)
    tokens = [f"{job}.1.0.abc" for job in range(10)]
    for end in range(0, 300, 50):
        for token in tokens:
            assert kept.append(token, [OutputPiece(end, token[0].encode() * 50)]) == end + 50
    for token in tokens:
        own = token[0].encode() * 50
        assert whole(kept, token) == [(0, 0, own), (200, 250, own)]
