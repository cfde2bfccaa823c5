"""Checksums of files and folders, and of files that are still growing."""

import asyncio
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.transfers.replicas import Replicas
from koalapy.agent.transfers.roots import Content, GrowingDigest, Roots, measure_content
from koalapy.model.errors import SiteRejected, SiteUnavailable


def measure(path: Path, *, checksum: bool = True) -> Content:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return measure_content(descriptor, checksum=checksum)
    finally:
        os.close(descriptor)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "b").mkdir(parents=True)
    (top / "a").write_bytes(b"1")
    (top / "b" / "c").write_bytes(b"22")
    return top


def test_checksum_of_file_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc" * 1_000_000)
    assert measure(tmp_path / "f") == Content(3_000_000, hashlib.sha256(b"abc" * 1_000_000).hexdigest())
    assert measure(tmp_path / "f", checksum=False) == Content(3_000_000, "")


def test_checksum_of_folder_covers_its_parts(tree: Path) -> None:
    first, second = (hashlib.sha256(data).hexdigest() for data in (b"1", b"22"))
    inner = hashlib.sha256(f"file {second} c\0".encode()).hexdigest()
    content = measure(tree)
    assert content.size == 3
    assert content.checksum == hashlib.sha256(f"file {first} a\0folder {inner} b\0".encode()).hexdigest()
    assert [(p.name, p.size, p.checksum) for p in content.parts or ()] == [("a", 1, first), ("b", 2, inner)]
    assert [(p.name, p.size) for p in measure(tree, checksum=False).parts or ()] == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("odd", ["link", "pipe", "no-utf8", "deep"])
def test_replica_with_odd_entry_is_irregular(tree: Path, odd: str, checksum: bool) -> None:
    match odd:
        case "link":
            (tree / "b" / "odd").symlink_to("/etc/passwd")
        case "pipe":
            os.mkfifo(tree / "b" / "odd")
        case "no-utf8":
            (tree / "b" / os.fsdecode(b"\xff")).touch()
        case "deep":
            (tree / "/".join(["d"] * 101)).mkdir(parents=True)
    with pytest.raises(SiteRejected) as caught:
        measure(tree, checksum=checksum)
    assert caught.value.fault == "irregular"


async def test_repeated_stat_shares_one_computation(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, computations, waiters = Replicas(Roots("north", [tree.parent])), 0, 0
    all_waiting = threading.Event()
    measure_replica, shield = replicas.measure_replica, asyncio.shield

    def counting(path: Path, *, checksum: bool) -> Content:
        nonlocal computations
        computations += 1
        assert all_waiting.wait(30)
        return measure_replica(path, checksum=checksum)

    def shielded(looking: asyncio.Future[Content]) -> asyncio.Future[Content]:
        nonlocal waiters
        waiters += 1
        if waiters == 3:
            all_waiting.set()
        return shield(looking)

    monkeypatch.setattr(replicas, "measure_replica", counting)
    monkeypatch.setattr(asyncio, "shield", shielded)
    answers = await asyncio.gather(*(replicas.stat_replica({"path": "tree"}) for _ in range(3)))
    assert computations == 1
    assert answers[0] == answers[1] == answers[2]
    assert (await replicas.stat_replica({"path": "tree"}))["size"] == 3
    assert computations == 2


async def test_growing_digest_without_file_raises(tmp_path: Path) -> None:
    digest = GrowingDigest(tmp_path / "f")
    digest.mark_complete()
    with pytest.raises(FileNotFoundError):
        digest.compute_content()


def test_growing_digest_of_file_created_after_check_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    digest = GrowingDigest(path)
    open_file = os.open

    def open_after_failure(*args: Any) -> int:
        try:
            return open_file(*args)
        except FileNotFoundError:
            path.write_bytes(b"whole")
            digest.mark_complete()
            raise

    monkeypatch.setattr(os, "open", open_after_failure)
    assert digest.compute_content() == Content(5, hashlib.sha256(b"whole").hexdigest())


def test_cancelled_digest_stops_reading(tree: Path) -> None:
    for path in (tree, tree / "a"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with pytest.raises(SiteUnavailable):
                measure_content(descriptor, checksum=True, given_up=lambda: True)
        finally:
            os.close(descriptor)


async def test_stat_of_too_many_entries_is_rejected(tree: Path) -> None:
    with pytest.raises(SiteRejected, match="has 2 entries; their list is longer") as caught:
        await Replicas(Roots("north", [tree.parent]), max_answer_size=100).stat_replica({"path": "tree"})
    assert caught.value.fault == "irregular"
