"""The runner's store of output until the agent acknowledges it."""

import errno
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner.program_output import BLOCK, MEMORY, Output
from koalapy.runner.session import FILE_TAG_LENGTH

SECRET = b"secret"


@given(st.integers(0, 2**32))
def test_output_sends_each_byte_once_and_frees_acknowledged(seed: int) -> None:
    chance = random.Random(seed)
    with TemporaryDirectory() as folder:
        store = Output(f"{folder}/output.0", SECRET, block=64, memory=256, window=100, chunk=30)
        written, heard, acknowledged = b"", b"", 0
        for _ in range(60):
            match chance.randrange(4):
                case 0 | 1:
                    data = bytes(chance.randrange(256) for _ in range(chance.randrange(100)))
                    written += data
                    store.append(data)
                case 2:
                    for offset, data in store.chunks():
                        heard = heard[:offset] + data
                    acknowledged = chance.randrange(acknowledged, len(heard) + 1)
                    store.acknowledge(acknowledged)
                case 3:  # a new connection
                    store.sent, heard = store.start, heard[: store.start]
            on_disk = sum(path.stat().st_size - FILE_TAG_LENGTH for path in Path(folder).iterdir())
            assert on_disk <= len(written) - acknowledged + 2 * 164
        while len(heard) < len(written):
            for offset, data in store.chunks():
                heard = heard[:offset] + data
            store.acknowledge(len(heard))
        store.acknowledge(len(heard))  # everything may have been acknowledged before
        assert heard == written
        assert not list(Path(folder).iterdir())


def test_output_with_full_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    store, written = Output(f"{tmp_path}/output.0", SECRET), bytearray()
    while not store.full:
        written += b"%09d\n" % len(written) * 6000
        store.append(bytes(written[store.total :]))
    assert store.total <= MEMORY + BLOCK
    assert not list(tmp_path.iterdir())
    heard = b""
    while len(heard) < len(written):
        heard += b"".join(data for _, data in store.chunks())
        store.acknowledge(len(heard))
    assert heard == bytes(written)
    assert not store.full


def test_output_spills_at_most_the_limit(tmp_path: Path) -> None:
    limit = 4 * MEMORY
    store = Output(f"{tmp_path}/output.0", SECRET, spill_limit=limit)
    while not store.full:
        store.append(b"x" * 65536)
    assert MEMORY < sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit + BLOCK


def test_output_with_removed_spill_reports_lost_bytes(tmp_path: Path) -> None:
    store = Output(f"{tmp_path}/output.0", SECRET)
    for _ in range(4 * BLOCK // 65536):
        store.append(b"x" * 65536)
    (removed, *_) = sorted(tmp_path.iterdir())
    removed.unlink()
    heard = b""
    while len(heard) < store.total:
        heard += b"".join(data for _, data in store.chunks())
        store.acknowledge(len(heard))
    assert len(heard) == store.total
    assert f"koala: {BLOCK} bytes of output are lost: cannot read {removed}".encode() in heard
