"""Files for the output and for the error stream, as the user names them."""

import os
from pathlib import Path

import pytest

from koalapy.runner import program_output
from koalapy.runner.program_output import OutputFile
from koalapy.runner.settings import Failure


def test_node_and_rank_are_in_the_name_of_a_file(tmp_path: Path) -> None:
    assert make_file(tmp_path / "%N-%r.100%%").path(3) == str(tmp_path / "north-1-3.100%")


def make_file(path: Path, said: list[str] | None = None) -> OutputFile:
    return OutputFile(str(path), "north-1", [].append if said is None else said.append)


def test_common_file_gets_lines_of_all_ranks_and_koalapy(tmp_path: Path) -> None:
    (tmp_path / "log-100%").write_bytes(b"before\n")
    file = make_file(tmp_path / "log-100%%")
    for rank in (0, 3, None):
        file.write(rank, b"line\n")
    assert (tmp_path / "log-100%").read_bytes() == b"before\nline\nline\nline\n"


def test_file_of_each_rank_gets_its_output_with_few_files_open(tmp_path: Path) -> None:
    file, count = make_file(tmp_path / "log.%r"), program_output.MAX_OPEN_FILES + 10
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(2):
        for rank in range(count):
            file.write(rank, b"%d\n" % turn)
    file.write(None, b"koala: a line of no rank\n")
    assert len(os.listdir("/proc/self/fd")) - before <= program_output.MAX_OPEN_FILES
    assert sorted(os.listdir(tmp_path)) == sorted(f"log.{rank}" for rank in range(count))
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"0\n1\n"}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to("/etc/koala-elsewhere"), "it is a symbolic link; name the file itself"),
        (lambda path: os.mkfifo(path), "it is a pipe or device that nothing reads"),
        (lambda path: path.mkdir(), "Is a directory"),
    ],
)
def test_unsuited_file_is_not_opened(tmp_path: Path, make, reason: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "log.2")
    said: list[str] = []
    file = make_file(tmp_path / "log.%r", said)
    file.write(2, b"x")
    file.write(2, b"y")
    assert said == [f"{tmp_path}/log.2 on north-1 is incomplete: {reason}"]
    with pytest.raises(Failure) as failure:
        file.open(2)
    assert (failure.value.code, failure.value.message) == (126, f"cannot write {tmp_path}/log.2 on north-1: {reason}")
