"""``koala replicas`` against a real daemon with fake agents."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from koalapy.model.replica import Replica
from tests.cli.conftest import Koala
from tests.daemon.sites import Sites, sha256_hex
from tests.daemon_in_process import ServedDaemon, daemon_in_thread

MESH = b"mesh"


@pytest.fixture
def sites() -> Sites:
    return Sites(
        {
            ("north", "/data/a b:c.nc"): MESH,
            ("south", "/mesh.nc"): MESH,
            ("north", "/other"): b"another file",
            ("north", "/folder"): {},
        }
    )


@pytest.fixture
def server(tmp_path: Path, sites: Sites) -> Iterator[ServedDaemon]:
    with daemon_in_thread(tmp_path / "koala.db", sites) as daemon:
        yield daemon


@pytest.fixture
def replicated_mesh(koala: Koala) -> None:
    """Add the mesh on both clusters."""
    for place in ("north:/data/a b:c.nc", "south:/mesh.nc"):
        assert koala("replicas", "add", "climate/mesh.nc", place).code == 0


def add_replicas(server: ServedDaemon, *places: tuple[str, str]) -> None:
    """Add replicas by name and cluster to the catalogue, without an agent."""
    for name, cluster in places:
        server.engine.catalogue.put(Replica(name, cluster, "/mesh.nc", len(MESH), sha256_hex(MESH)))


def test_replicas_add_prints_size_and_checksum(koala: Koala) -> None:
    added = koala("replicas", "add", "climate/mesh.nc", "north:/data/a b:c.nc")
    assert (added.code, added.err) == (0, "")
    assert added.out == f"north has climate/mesh.nc: 4 bytes, SHA-256 {sha256_hex(MESH)}\n"
    assert "a folder of 0 entries" in koala("replicas", "add", "fields", "north:/folder").out
    header, first, _ = koala("replicas", "list").out.splitlines()
    assert header.split() == ["NAME", "CLUSTER", "STATE", "SIZE", "PARTS", "SHA-256", "PATH", "REASON"]
    cells = ["climate/mesh.nc", "north", "good", "4", "bytes", "-", sha256_hex(MESH)[:8], "/data/a", "b:c.nc", "-"]
    assert first.split() == cells
    assert len(koala("replicas", "list", "fields").out.splitlines()) == 2
    assert json.loads(koala("replicas", "list", "fields", "--json").out)["replicas"][0]["parts"] == 0


def test_replicas_list_of_several_pages_is_complete(koala: Koala, server: ServedDaemon) -> None:
    expected = [(f"m{i:04}", cluster) for i in range(501) for cluster in ("north", "south")]
    add_replicas(server, *expected)
    assert len(koala("replicas", "list").out.splitlines()) == 1 + len(expected)
    listed = json.loads(koala("replicas", "list", "--json").out)
    assert [(replica["name"], replica["cluster"]) for replica in listed["replicas"]] == expected
    assert len(json.loads(koala("replicas", "list", "m0007", "--json").out)["replicas"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("add", "m", "north"), 2, "koala: 'north' is not CLUSTER:PATH; write it as north:/data/m\n"),
        (("add", "m", ":/data"), 2, "is not CLUSTER:PATH"),
        (("add", "m", "north:/no-such-file"), 2, "koala: path: /no-such-file is not there; give a file or folder"),
        (
            ("add", "climate/mesh.nc", "north:/other"),
            4,
            "koala: north:/other is another file than the climate/mesh.nc on south",
        ),
        (("list", "n"), 3, "koala: the replica catalogue has no n; "),
        (("verify", "n"), 3, "has no n"),
        (("remove", "n"), 3, "has no n"),
    ],
)
@pytest.mark.usefixtures("replicated_mesh")
def test_replicas_with_wrong_argument_prints_one_line(
    koala: Koala, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ended = koala("replicas", *arguments)
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
    assert message in ended.err


def test_replicas_list_with_wide_names_has_aligned_columns(koala: Koala, server: ServedDaemon) -> None:
    add_replicas(server, *((name, "north") for name in ("climate", "気候/2026", "cafe\u0301", "ünï")))
    lines = koala("replicas", "list").out.splitlines()
    assert {
        cell_len(line[: line.index(cell)]) for line, cell in zip(lines, ["CLUSTER", *["north"] * 4], strict=True)
    } == {11}


@pytest.mark.usefixtures("replicated_mesh")
def test_replicas_verify_fails_unless_all_are_good(koala: Koala, sites: Sites) -> None:
    assert koala("replicas", "verify").code == 0
    del sites.content["north", "/data/a b:c.nc"]
    sites.away.add("south")
    ended = koala("replicas", "verify", "climate/mesh.nc")
    assert ended.code == 1
    assert [line.split("  ")[-1] for line in ended.out.splitlines()[1:]] == [
        "/data/a b:c.nc is not there",
        "south is out of reach",
    ]
    assert "some replicas are not good: climate/mesh.nc on north, climate/mesh.nc on south" in ended.err
    sites.away.clear()
    assert koala("replicas", "verify", "--cluster", "south").code == 0


@pytest.mark.usefixtures("replicated_mesh")
def test_replicas_remove_says_that_the_file_stays(koala: Koala) -> None:
    ended = koala("replicas", "remove", "climate/mesh.nc", "--cluster", "south")
    assert ended.out == "climate/mesh.nc on south is forgotten; nothing was done to the file itself, /mesh.nc\n"
    (remaining,) = json.loads(koala("replicas", "list", "--json").out)["replicas"]
    assert remaining["cluster"] == "north"
