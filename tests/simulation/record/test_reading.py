"""Reading of records: complete ones are replayed, and errors name the defect of other ones."""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from koalapy.model.errors import UsageError
from koalapy.model.job import Job
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import Registry, builtin_policies
from koalapy.simulation.record.format import FOR_PEOPLE, job_to_json
from koalapy.simulation.record.replay import History, RecordFile, replay
from tests.simulation.record.days import export_lines, record_day, write_export

DAY = record_day(jobs=6)
WHOLE = export_lines(DAY.lives)


def replay_file(path: Path, policies: Registry | None = None) -> list[History]:
    return list(replay(path, policies or builtin_policies()))


def read_error(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        replay_file(path)
    assert raised.value.field == "file"
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_replay_of_daemon_runs_is_separate(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "day"
    path.write_bytes(pack(WHOLE))
    lives = replay_file(path)
    assert len(lives) == len(DAY.lives) == 2
    assert [life.divergence for life in lives] == [None, None]
    assert sum(life.placements for life in lives) == sum(entry.event == "placed" for entry in DAY.timeline)
    assert lives[0].jobs | lives[1].jobs == DAY.jobs.keys()


def test_record_contains_no_environment_variables() -> None:
    assert b"of-the-environment" not in WHOLE


def test_record_contains_no_private_field_of_a_job() -> None:
    """A new field with a text is exported only once it is added here, and kept back once it is in ``FOR_PEOPLE``."""
    exported_texts = {"command", "policy", "policy_options", "name", "owner", "home_site", "application"}
    exported_texts |= {
        "output",
        "error",
        "container",
        "workdir",
        "inputs",
        "collect",
        "script",
        "features",
        "partition",
        "exclude",
        "reservation",
    }
    types = {field.name: str(field.type) for field in fields(JobSpec)}
    texts = {name for name, annotation in types.items() if re.search(r"\bstr\b|InputFile", annotation)}
    assert texts == exported_texts | {*FOR_PEOPLE} - {"mail_type"}
    job = Job(1, JobSpec(FlexibleRequest(1), ("job.sh",), script="#!/bin/sh\nsecret\n"), 0.0)
    assert job_to_json(job)["spec"]["script"] == "#!", "clusters accept scripts or not, whatever their text"


def test_replay_of_truncated_record_is_rejected(tmp_path: Path) -> None:
    """Truncate around the ends of lines, and at some positions in between."""
    ends = {position + offset for position, byte in enumerate(WHOLE) if byte == 10 for offset in (0, 1, 2)}
    for position in sorted({0, 1, *list(ends)[:: max(1, len(ends) // 40)], *range(7, len(WHOLE), len(WHOLE) // 40)}):
        if position < len(WHOLE) - 1:
            message = read_error(tmp_path / "day", WHOLE[:position])
            assert "is cut off after line" in message or "is not a record" in message


def test_replay_of_damaged_gzip_is_rejected(tmp_path: Path) -> None:
    packed = gzip.compress(WHOLE)
    for position in (len(packed) // 3, len(packed) - 4):
        assert "is damaged" in read_error(tmp_path / "day.gz", packed[:position])
        damaged = packed[:position] + bytes([packed[position] ^ 0xFF]) + packed[position + 1 :]
        assert "is damaged" in read_error(tmp_path / "day.gz", damaged)


def test_replay_of_record_with_gap_is_rejected(tmp_path: Path) -> None:
    lines = WHOLE.splitlines(keepends=True)
    for missing in (4, 9):
        assert "has a gap before line" in read_error(tmp_path / "day", b"".join(lines[:missing] + lines[missing + 1 :]))
    assert "has a gap" in read_error(tmp_path / "day", b"".join([*lines[:5], lines[4], *lines[5:]]))


@pytest.mark.parametrize(
    ("number", "instead", "message"),
    [
        (0, b"a text\n", "is not a record of koala's"),
        (0, b"[]\n", "is damaged in line 1"),
        (0, b'{"koala_export":3}\n', "is of format 3, and this version of koala reads formats up to 2"),
        (1, b'{"koala_record":7,"part":1}\n', "is of format 7"),
        (1, b'{"koala_record":1,"version":"1","life":"1","part":2}\n', "lacks the first part"),
        (2, b'{"begin":{"rules":{}}}\n', "the initial state of the daemon run cannot be read"),
        (1, b'{"koala_record":1,"part":1}\n', "it does not say whose life begins there"),
        (2, b'{"begin":[]}\n', "the initial state of the daemon run cannot be read"),
        (0, b"[" * 100_000 + b"\n", "is not a record of koala's"),
        (5, b"[" * 100_000 + b"\n", "is damaged in line 6"),
        (5, b"{\n", "is damaged in line 6"),
        (5, b'{"n":3,"at":NaN}\n', "that is not a step"),
        (5, b'{"n":3,"at":Infinity}\n', "that is not a step"),
        (5, b'{"n":3,"at":1e300}\n', "that is not a step"),
        (5, b'{"n":3,"at":"now"}\n', "that is not a step"),
        (5, b'{"n":3,"at":null}\n', "that is not a step"),
        (5, b'{"n":3,"at":9.0,"looks":[["a",1]]}\n', "that is not a step"),
        (5, b'{"n":3,"at":9.0,"looks":[[1,1' + b"0" * 400 + b"]]}\n", "that is not a step"),
        (5, b'{"n":3,"at":9.0,"nonces":[1]}\n', "that is not a step"),
        (
            5,
            b'{"n":3,"at":9.0,"events":[["Reported","nowhere","ClusterReport",{"total":1,"idle":1}]]}\n',
            "tells after step 2 of what there is not: KeyError('nowhere')",
        ),
        (5, b'{"n":3,"at":1.0,"events":[["NoSuchEvent",{}]]}\n', "that is not a step"),
        (5, b'{"n":3,"at":1.0,"events":[["Reported","north"]]}\n', "that is not a step"),
        (5, b'{"n":3,"at":1.0,"done":[1]}\n', "that is not a step"),
    ],
)
def test_replay_of_invalid_line_is_rejected(tmp_path: Path, number: int, instead: bytes, message: str) -> None:
    lines = WHOLE.splitlines(keepends=True)
    assert message in read_error(tmp_path / "day", b"".join([*lines[:number], instead, *lines[number + 1 :]]))


@pytest.mark.parametrize("changed", [{"now": 1e300}, {"now": float("nan")}, {"clusters": []}])
def test_replay_of_invalid_beginning_is_rejected(tmp_path: Path, changed: dict[str, Any]) -> None:
    lines = WHOLE.splitlines(keepends=True)
    beginning = json.dumps({"begin": json.loads(lines[2])["begin"] | changed}).encode() + b"\n"
    message = "of what there is not" if "clusters" in changed else "the initial state of the daemon run cannot be read"
    assert message in read_error(tmp_path / "day", b"".join([*lines[:2], beginning, *lines[3:]]))


def test_record_file_with_too_long_line_is_rejected(tmp_path: Path) -> None:
    """A small packed file may contain a line of any length."""
    longest = max(map(len, WHOLE.splitlines(keepends=True)))
    path = tmp_path / "day"
    path.write_bytes(WHOLE)
    assert len(list(RecordFile(path, max_line=longest + 1).lives())) == 2
    path.write_bytes(gzip.compress(WHOLE.splitlines(keepends=True)[0] + b" " * 10**7))
    with pytest.raises(UsageError, match=f"has more than {longest + 1} bytes"):
        list(RecordFile(path, max_line=longest + 1).lives())


def test_replay_with_missing_policy_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"was written with policies that there are not here: .*worst-fit"):
        replay_file(write_export(tmp_path / "day", DAY.lives), Registry())


def test_replay_of_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        replay_file(tmp_path / "none")


def test_replay_of_changed_record_finds_first_divergence(tmp_path: Path) -> None:
    """Change the nodes of the first placement."""
    lines = WHOLE.splitlines(keepends=True)
    index = next(number for number, line in enumerate(lines) if b'"placed"' in line)
    step = json.loads(lines[index])
    step["done"][0][0][3][0][1] += 1
    path = tmp_path / "day"
    path.write_bytes(b"".join([*lines[:index], json.dumps(step).encode() + b"\n", *lines[index + 1 :]]))
    first = replay_file(path)[0].divergence
    assert first is not None
    assert (first.step, first.at) == (step["n"], step["at"])
    assert first.recorded != first.replayed
