"""Replay of the record of a live daemon that was stopped or killed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import Grid

pytestmark = pytest.mark.processes

FIXED: list[dict[str, Any]] = [
    {"type": "nonfixed", "components": [{"size": 2}, {"size": 1}]},
    {"type": "fixed", "components": [{"cluster": "south", "size": 2}]},
]


def submit_jobs(grid: Grid, draw: Random, count: int) -> list[int]:
    """Submit jobs of all kinds, and cancel some."""
    idents = []
    for _ in range(count):
        request = draw.choice([{"type": "flexible", "total_size": draw.randint(1, 7)}, *FIXED])
        command = ("sleep", str(draw.choice([0.1, 0.5, 1.0])))
        idents.append(grid.submit(request, *command, priority=draw.choice(["high", "low"]), launcher="processes"))
        if draw.random() < 0.2:
            grid.run_koala("cancel", str(draw.choice(idents)))
    return idents


def replay_record(grid: Grid, file: Path) -> list[dict[str, Any]]:
    result = grid.run_koala("replay", str(file), "--json")
    assert result.returncode == 0, result.stderr
    lives: list[dict[str, Any]] = json.loads(result.stdout)["lives"]
    return lives


def test_replay_reproduces_two_daemon_runs(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    grid, draw = make_grid(KOALA_RULES__UNREACHABLE_AFTER="1"), Random(7)
    ended = submit_jobs(grid, draw, 6)
    for ident in ended:
        grid.wait_for_end(ident)
    assert grid.run_koala("export", "-o", str(tmp_path / "before.gz")).returncode == 0, "which also is on the disk then"
    submit_jobs(grid, draw, 4)
    grid.kill_daemon()
    grid.start()
    for ident in submit_jobs(grid, draw, 5):
        grid.wait_for_end(ident)
    grid.wait_until_idle()
    file = tmp_path / "day.gz"
    leftover = tmp_path / ".day.gz.incoming"
    leftover.symlink_to(tmp_path / "of-somebody-else")
    assert grid.run_koala("export", "-o", str(file)).returncode == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert not leftover.is_symlink()
    assert not (tmp_path / "of-somebody-else").exists()
    link, fifo = tmp_path / "latest", tmp_path / "fifo"
    link.symlink_to(file)
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    for path in (link, fifo):
        assert grid.run_koala("export", "-o", str(path), "--until", "1e8").returncode == 0
    assert link.is_symlink()
    assert fifo.is_fifo()
    for written in (os.read(reader, 65_536), file.read_bytes()):
        assert [next(iter(json.loads(line))) for line in written.splitlines()] == ["koala_export", "end"]
    os.close(reader)
    assert grid.run_koala("export", "-o", str(file)).returncode == 0
    for folder in (".", str(tmp_path), "/"):
        result = grid.run_koala("export", "-o", folder)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert "is a folder" in result.stderr
    first, second = replay_record(grid, file)
    assert (first["divergence"], second["divergence"]) == (None, None)
    assert first["jobs"] >= 6
    assert first["placements"] >= 4
    assert second["placements"] > 0


def test_export_without_recording_fails(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    grid = make_grid(KOALA_RECORD__ENABLED="false")
    result = grid.run_koala("export", "-o", str(tmp_path / "day.gz"))
    assert result.returncode != 0
    assert "this daemon records nothing" in result.stderr
    assert not list(tmp_path.glob("*day.gz*"))
    assert not (grid.directory / "record").exists()
