"""Which files are results, and how they are sent."""

import io
import os
import tarfile
import threading
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agents.files.depot import Depot
from koalapy.agents.files.patterns import Patterns
from koalapy.agents.files.results import write_archive
from koalapy.model.errors import SiteRejected, SiteUnavailable
from tests.agents.files.depots import FakeDepot


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*.txt", "a.txt", True), ("*.txt", "sub/a.txt", False), ("*", ".hidden", True), ("**/*.txt", "a.txt", True),
        ("**/*.txt", "a/b/c.txt", True), ("a/**", "a/b/c", True), ("a/**", "b/a", False), ("a/**/c", "a/c", True),
        ("a/**/c", "a/x/y/c", True), ("out", "out", True), ("out", "out/a/b", True), ("out/", "out/a", True),
        ("o?t", "out", True), ("[ab]", "a", True), ("[ab]", "[ab]", False), ("[[]ab]", "[ab]", True),
        ("./a", "a", True), ("", "a", False), ("/", "a", False), ("../a", "a", False), ("**", "a/b", True),
        ("a\nb*", "a\nbc", True), ("a*", "a\nb", True), ("A", "a", False), ("*/c", "a/b/c", False),
    ],
)  # fmt: skip
def test_patterns(pattern: str, path: str, matches: bool) -> None:
    assert Patterns([pattern]).matches(path.split("/")) is matches


NAME = st.text("ab*?.", min_size=1, max_size=3).filter(lambda name: set(name) != {"."})


@given(st.lists(NAME, min_size=1, max_size=3), st.lists(NAME, min_size=1, max_size=3))
def test_without_folders_patterns_are_those_of_pathlib(pattern: list[str], path: list[str]) -> None:
    if len(pattern) == len(path) and "**" not in "/".join(pattern):
        same = PurePosixPath("/" + "/".join(path)).match("/" + "/".join(pattern))
        assert Patterns(["/".join(pattern)]).matches(path) is same


def archived(folder: Path, *patterns: str, without: tuple[str, ...] = ()) -> dict[str, tarfile.TarInfo]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w|") as opened:
        write_archive(opened, folder, Patterns(patterns), without)
    out.seek(0)
    with tarfile.open(fileobj=out) as opened:
        return {member.name: member for member in opened}


def test_only_regular_files_below_the_folder_are_results(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("secret")
    (folder / "sub" / "a b\nü").write_text("1")
    (folder / "run").write_text("2")
    (folder / "run").chmod(0o750)
    (folder / "input").write_text("3")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "way").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe")
    found = archived(folder, "**", without=("input",))
    assert sorted(found) == ["run", "sub/a b\nü"]
    assert (found["run"].mode, found["sub/a b\nü"].mode) == (0o755, 0o644)
    assert archived(folder, "../elsewhere/*", "way/*", "/etc/*") == {}


def test_sending_and_what_may_go_wrong() -> None:
    fake = FakeDepot()
    depot = Depot(fake.url, "nörth/1", "s3cret")
    try:
        depot.put_results("7.1.0", lambda archive: archive.addfile(tarfile.TarInfo("empty")))
        assert list(fake.results) == ["7.1.0"]
        assert fake.requests == ["PUT /api/v1/agents/n%C3%B6rth%2F1/results/7.1.0 Bearer s3cret"]
        fake.refuse = (413, "more than 1 GB")
        with pytest.raises(SiteRejected, match="more than 1 GB"):
            depot.put_results("7.1.0", lambda archive: None)
        fake.refuse = (503, "later")
        with pytest.raises(SiteUnavailable, match="later"):
            depot.put_results("7.1.0", lambda archive: None)
    finally:
        fake.close()
    with pytest.raises(SiteUnavailable):
        depot.put_results("7.1.0", lambda archive: None)
    with pytest.raises(SiteUnavailable):
        depot.fetch("0" * 64, Path(os.devnull), threading.Event(), lambda there: None)
