"""A record is read whole, or it is said what is the matter with it."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from koalapy.model.errors import UsageError
from koalapy.policies.registry import Registry, builtin_policies
from koalapy.record.reading import RecordFile
from koalapy.record.replay import History, replay
from tests.record.days import a_day, exported, written

DAY = a_day(jobs=6)
WHOLE = exported(DAY.lives)


def read(path: Path, policies: Registry | None = None) -> list[History]:
    return list(replay(path, policies or builtin_policies()))


def fault(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        read(path)
    assert raised.value.field == "file"
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_each_life_is_replayed_by_itself(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "day"
    path.write_bytes(pack(WHOLE))
    lives = read(path)
    assert len(lives) == len(DAY.lives) == 2
    assert [life.divergence for life in lives] == [None, None]
    assert sum(life.placements for life in lives) == sum(entry.event == "placed" for entry in DAY.timeline)
    assert lives[0].jobs | lives[1].jobs == DAY.jobs.keys()


def test_variables_of_programs_are_not_in_it() -> None:
    assert b"of-the-environment" not in WHOLE


def test_wherever_it_is_cut_off_it_says_so(tmp_path: Path) -> None:
    """All places around the ends of lines, and some between."""
    ends = {place + by for place, byte in enumerate(WHOLE) if byte == 10 for by in (0, 1, 2)}
    for place in sorted({0, 1, *list(ends)[:: max(1, len(ends) // 40)], *range(7, len(WHOLE), len(WHOLE) // 40)}):
        if place < len(WHOLE) - 1:
            told = fault(tmp_path / "day", WHOLE[:place])
            assert "is cut off after line" in told or "is no record" in told


def test_a_compressed_one_that_is_cut_off_or_damaged_says_so(tmp_path: Path) -> None:
    packed = gzip.compress(WHOLE)
    for place in (len(packed) // 3, len(packed) - 4):
        assert "is damaged" in fault(tmp_path / "day.gz", packed[:place])
        spoiled = packed[:place] + bytes([packed[place] ^ 0xFF]) + packed[place + 1 :]
        assert "is damaged" in fault(tmp_path / "day.gz", spoiled)


def test_what_is_missing_in_the_middle_is_a_gap(tmp_path: Path) -> None:
    lines = WHOLE.splitlines(keepends=True)
    for gone in (4, 9):
        assert "has a gap before line" in fault(tmp_path / "day", b"".join(lines[:gone] + lines[gone + 1 :]))
    assert "has a gap" in fault(tmp_path / "day", b"".join([*lines[:5], lines[4], *lines[5:]]))


@pytest.mark.parametrize(
    ("number", "instead", "said"),
    [
        (0, b"a text\n", "is no record of koala's"),
        (0, b"[]\n", "is damaged in line 1"),
        (0, b'{"koala_export":2}\n', "is of format 2, and this version of koala reads format 1"),
        (1, b'{"koala_record":7,"part":1}\n', "is of format 7"),
        (1, b'{"koala_record":1,"version":"1","life":"1","part":2}\n', "has no beginning"),
        (2, b'{"begin":{"rules":{}}}\n', "it begins with nothing that is known"),
        (1, b'{"koala_record":1,"part":1}\n', "it does not say whose life begins there"),
        (2, b'{"begin":[]}\n', "it begins with nothing that is known"),
        (0, b"[" * 100_000 + b"\n", "is no record of koala's"),
        (5, b"[" * 100_000 + b"\n", "is damaged in line 6"),
        (5, b"{\n", "is damaged in line 6"),
        (5, b'{"n":3,"at":NaN}\n', "that is no step"),
        (5, b'{"n":3,"at":Infinity}\n', "that is no step"),
        (5, b'{"n":3,"at":1e300}\n', "that is no step"),
        (5, b'{"n":3,"at":"now"}\n', "that is no step"),
        (5, b'{"n":3,"at":null}\n', "that is no step"),
        (5, b'{"n":3,"at":9.0,"looks":[["a",1]]}\n', "that is no step"),
        (5, b'{"n":3,"at":9.0,"looks":[[1,1' + b"0" * 400 + b"]]}\n", "that is no step"),
        (5, b'{"n":3,"at":9.0,"nonces":[1]}\n', "that is no step"),
        (
            5,
            b'{"n":3,"at":9.0,"events":[["Reported","nowhere","ClusterReport",{"total":1,"idle":1}]]}\n',
            "tells after step 2 of what there is not: KeyError('nowhere')",
        ),
        (5, b'{"n":3,"at":1.0,"events":[["NoSuchEvent",{}]]}\n', "that is no step"),
        (5, b'{"n":3,"at":1.0,"events":[["Reported","north"]]}\n', "that is no step"),
        (5, b'{"n":3,"at":1.0,"done":[1]}\n', "that is no step"),
    ],
)
def test_what_is_no_record_is_told(tmp_path: Path, number: int, instead: bytes, said: str) -> None:
    lines = WHOLE.splitlines(keepends=True)
    assert said in fault(tmp_path / "day", b"".join([*lines[:number], instead, *lines[number + 1 :]]))


@pytest.mark.parametrize("changed", [{"now": 1e300}, {"now": float("nan")}, {"clusters": []}])
def test_a_beginning_that_cannot_be_is_told(tmp_path: Path, changed: dict[str, Any]) -> None:
    lines = WHOLE.splitlines(keepends=True)
    begun = json.dumps({"begin": json.loads(lines[2])["begin"] | changed}).encode() + b"\n"
    said = "of what there is not" if "clusters" in changed else "it begins with nothing that is known"
    assert said in fault(tmp_path / "day", b"".join([*lines[:2], begun, *lines[3:]]))


def test_a_line_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    """A small packed file may hold one of any length."""
    longest = max(map(len, WHOLE.splitlines(keepends=True)))
    path = tmp_path / "day"
    path.write_bytes(WHOLE)
    assert len(list(RecordFile(path, max_line=longest + 1).lives())) == 2
    path.write_bytes(gzip.compress(WHOLE.splitlines(keepends=True)[0] + b" " * 10**7))
    with pytest.raises(UsageError, match=f"has more than {longest + 1} bytes"):
        list(RecordFile(path, max_line=longest + 1).lives())


def test_a_policy_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"was written with policies that there are not here: .*worst-fit"):
        read(written(tmp_path / "day", DAY.lives), Registry())


def test_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read(tmp_path / "none")


def test_what_was_changed_by_hand_is_found_where_it_begins(tmp_path: Path) -> None:
    """One node less is idle than was told: something else follows, and the replay ends there."""
    lines = WHOLE.splitlines(keepends=True)
    place = next(number for number, each in enumerate(lines) if b'"placed"' in each)
    step = json.loads(lines[place])
    step["done"][0][0][3][0][1] += 1
    path = tmp_path / "day"
    path.write_bytes(b"".join([*lines[:place], json.dumps(step).encode() + b"\n", *lines[place + 1 :]]))
    first = read(path)[0].divergence
    assert first is not None
    assert (first.step, first.at) == (step["n"], step["at"])
    assert first.recorded != first.replayed
