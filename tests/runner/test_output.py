"""The runner's output until the agent acknowledges it."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner import program_output
from koalapy.runner.program_output import FILE_SIZE, MAX_KEPT, WINDOW, Output
from koalapy.runner.session import open_file

SECRET = b"secret"


@given(st.integers(0, 2**32))
def test_output_sends_each_byte_once_within_its_window(seed: int) -> None:
    chance = random.Random(seed)
    store, written, heard, acknowledged = Output("/nowhere/output.0", SECRET), b"", b"", 0
    for _ in range(60):
        match chance.randrange(4):
            case 0 | 1:
                data = chance.randbytes(chance.randrange(100_000))
                written += data
                store.append(data)
            case 2:
                for offset, data in store.chunks():
                    heard = heard[:offset] + data
                assert len(heard) - acknowledged <= WINDOW + program_output.CHUNK
                acknowledged = chance.randrange(acknowledged, len(heard) + 1)
                store.acknowledge(acknowledged)
            case 3:  # a new connection
                store.sent, heard = store.start, heard[: store.start]
    while len(heard) < len(written):
        for offset, data in store.chunks():
            heard = heard[:offset] + data
        store.acknowledge(len(heard))
    assert heard == written
    assert store.total == len(written)


def test_output_of_slow_agent_is_full_until_acknowledged() -> None:
    store = Output("/nowhere/output.0", SECRET)
    while not store.full:
        store.append(b"x" * 65536)
    assert MAX_KEPT < store.total <= MAX_KEPT + 65536
    store.acknowledge(65536)
    assert not store.full


def test_saved_output_is_sealed_in_files_until_acknowledged(tmp_path: Path) -> None:
    store, written = Output(f"{tmp_path}/output.0", SECRET), random.Random(1).randbytes(3 * FILE_SIZE)
    store.append(written)
    store.acknowledge(1000)
    store.save()
    for path in tmp_path.iterdir():
        start = int(path.name.split(".")[2])
        assert open_file(SECRET, path.name, path.read_bytes()) == written[start : start + FILE_SIZE]
    assert len(list(tmp_path.iterdir())) == 3
    store.acknowledge(len(written) - 1)
    assert len(list(tmp_path.iterdir())) == 3
    store.acknowledge(len(written))
    assert not list(tmp_path.iterdir())


def test_output_with_full_disk_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: os.stat("/nowhere"))
    store = Output(f"{tmp_path}/output.0", SECRET)
    store.append(b"text")
    store.save()
    assert not list(tmp_path.iterdir())
    assert list(store.chunks()) == [(0, b"text")]
