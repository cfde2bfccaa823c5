"""Paths of replicas: nothing outside the replica directories can be reached."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.transfers.replicas import ReplicaRequest, Replicas
from koalapy.agent.transfers.roots import Roots, is_plain_name, measure_content
from koalapy.model.errors import SiteRejected
from koalapy.validation.inputs import name_problem

SECRET, OPEN = b"secret\n", b"open\n"
NAMES = [
    "..",
    ".",
    "",
    "data",
    "sub",
    "deep",
    "out",
    "out-file",
    "in",
    "loop",
    "pipe",
    "-rf",
    "a b",
    "*",
    "\n",
    "x" * 300,
]


@pytest.fixture(scope="module")
def replica_world() -> Iterator[Path]:
    """A replica directory with links to forbidden folders around it."""
    top = Path(tempfile.mkdtemp())
    root = top / "root"
    for place in (root / "sub" / "deep", root / "-rf", root / "a b", root / "*", root / "\n"):
        place.mkdir(parents=True)
        (place / "data").write_bytes(OPEN)
    (root / "data").write_bytes(OPEN)
    (top / "outside").mkdir()
    for secret in (top / "outside" / "data", top / "data", top / "root-too"):
        secret.write_bytes(SECRET)
    (root / "out").symlink_to(top / "outside")
    (root / "sub" / "out-file").symlink_to(top / "data")
    (root / "sub" / "in").symlink_to("../a b")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    yield top
    shutil.rmtree(top)


def read_path(roots: Roots, path: str) -> bytes:
    found = roots.resolve_path(path)
    with roots.open_path(found) as opened:
        if opened.is_folder:
            measure_content(opened.descriptor, checksum=True)
            return b""
        return os.read(opened.descriptor, 100)


@pytest.mark.evidence("U6")
@given(
    st.lists(st.sampled_from(NAMES), max_size=6),
    st.sampled_from(["", "/", "TOP/", "TOP/root/", "TOP/root/../", "//"]),
    st.text(max_size=3),
)
def test_path_resolves_below_root_or_is_rejected(replica_world: Path, names: list[str], start: str, odd: str) -> None:
    roots = Roots("north", [replica_world / "root"])
    path = start.replace("TOP", str(replica_world)) + "/".join([*names, *([odd] if odd else [])])
    try:
        content = read_path(roots, path)
    except SiteRejected:
        return
    assert content in (OPEN, b"")


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5), st.sampled_from([None, *NAMES]))
def test_replica_path_outside_root_is_rejected(replica_world: Path, names: list[str], part: str | None) -> None:
    replicas = Replicas(Roots("north", [replica_world / "root"]))
    request = ReplicaRequest(path=str(replica_world / "root" / Path(*names)), part=part, size=len(SECRET))
    with pytest.raises(SiteRejected):
        replicas.check_replica(request)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/etc/passwd", "outside"),
        ("../data", "outside"),
        ("sub/../../data", "outside"),
        ("out/data", "outside"),
        ("sub/out-file", "outside"),
        ("", "outside"),
        (".", "outside"),
        ("a\0b", "outside"),
        ("\udcff", "outside"),
        ("nothing", "missing"),
        ("data/x", "missing"),
        ("pipe", "irregular"),
        ("loop", "irregular"),
        ("sub", "irregular"),
        ("x" * 300, "unreadable"),
    ],
)
def test_resolve_path_rejects_with_fault(replica_world: Path, path: str, fault: str) -> None:
    with pytest.raises(SiteRejected) as caught:
        read_path(Roots("north", [replica_world / "root"]), path)
    assert caught.value.fault == fault


def test_links_within_are_resolved_once(replica_world: Path) -> None:
    roots = Roots("north", [replica_world / "root"])
    assert roots.resolve_path("sub/in/data") == replica_world / "root" / "a b" / "data"
    assert roots.resolve_path(str(replica_world / "root" / "sub" / "in")) == replica_world / "root" / "a b"


def test_root_may_be_link(replica_world: Path, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(replica_world / "root")
    roots = Roots("north", [tmp_path / "way"])
    assert (
        roots.resolve_path("data")
        == roots.resolve_path(str(tmp_path / "way" / "data"))
        == replica_world / "root" / "data"
    )
    assert read_path(roots, "data") == OPEN


@pytest.mark.evidence("U6")
def test_folder_replaced_by_link_after_check_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "root" / "sub" / "data").write_bytes(OPEN)
    (tmp_path / "data").write_bytes(SECRET)
    roots = Roots("north", [tmp_path / "root"])
    path = roots.resolve_path("sub/data")
    shutil.rmtree(tmp_path / "root" / "sub")
    (tmp_path / "root" / "sub").symlink_to(tmp_path)
    with pytest.raises(SiteRejected) as caught, roots.open_path(path):
        pass
    assert caught.value.fault == "missing"


def test_roots_without_directory_name_setting() -> None:
    with pytest.raises(SiteRejected) as caught:
        Roots("north", []).resolve_path("data")
    assert caught.value.fault == "unconfigured"
    assert caught.value.hint == "set clusters.north.replica_directories"


@given(st.text(max_size=300))
def test_plain_names_stay_within_folder(name: str) -> None:
    if is_plain_name(name):
        assert os.path.normpath(f"/a/{name}") == f"/a/{name}"
        assert len(os.fsencode(name)) <= 255


@given(st.text(max_size=300))
def test_submission_names_are_valid_for_agents(name: str) -> None:
    assert name_problem(name) or is_plain_name(name)
