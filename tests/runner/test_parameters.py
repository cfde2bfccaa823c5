"""What a cluster's profile becomes in the environment of its Open MPI."""

from pathlib import Path
from typing import Any

import pytest

from koalapy.runner.installation import Installation
from koalapy.runner.parameters import prepare, rank_ports
from koalapy.runner.plan import Plan
from koalapy.runner.settings import Failure
from tests.runner.conftest import FakeNode, plan

PROFILE = {
    "KOALA_MPI_INTERFACE": "198.18.0.0/24",
    "KOALA_MPI_PORTS": "20000-20399",
    "KOALA_MPI_PARAMETERS": '{"btl_tcp_links": 2, "oob_tcp_peer_retries": "5", "ptl_base_max_retries": "3"}',
}


def installation(
    tmp_path: Path, starter: str, script: str = "", *, host: str = "198.18.0.5", clusters: int = 1
) -> tuple[dict[str, str], Plan]:
    """A tree with as much of Open MPI in it as is looked at, the environment that names it, and a plan with a node."""
    folder = tmp_path / "mpi" / "bin"
    folder.mkdir(parents=True)
    (folder.parent / "lib").mkdir()
    for name in ("mpirun", starter):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    agent: Any = None
    nodes = [FakeNode(agent, f"7.1.{i}", 0, host) for i in range(clusters)]
    message = plan(nodes, ["true"], launcher="openmpi")
    return {"KOALA_MPI_PREFIX": str(folder.parent)}, Plan(message, "7.1.0", 0)


def prepared(tmp_path: Path, starter: str, host: str = "198.18.0.5", clusters: int = 1, **more: str) -> dict[str, str]:
    where, own = installation(tmp_path, starter, host=host, clusters=clusters)
    environment = {**where, **more}
    prepare(environment, Installation(environment, "n1", own), own)
    return {k: v for k, v in environment.items() if "_MCA_" in k}


OF_RANKS = {
    "OMPI_MCA_btl_tcp_if_include": "198.18.0.0/24",
    "OMPI_MCA_btl_tcp_disable_family": "6",
    "OMPI_MCA_btl_tcp_port_min_v4": "20064",
    "OMPI_MCA_btl_tcp_port_range_v4": "336",
    "OMPI_MCA_btl_tcp_links": "2",
}


def test_series_5(tmp_path: Path) -> None:
    assert prepared(tmp_path, "prterun", **PROFILE) == OF_RANKS | {
        "PRTE_MCA_prte_if_include": "198.18.0.0/24",
        "PRTE_MCA_oob_tcp_disable_ipv6_family": "1",
        "PRTE_MCA_oob_tcp_dynamic_ipv4_ports": "20000-20063",
        "PRTE_MCA_oob_tcp_peer_retries": "5",
        "PMIX_MCA_ptl_base_max_retries": "3",
    }


def test_series_4(tmp_path: Path) -> None:
    assert prepared(tmp_path, "orterun", **PROFILE) == OF_RANKS | {
        "OMPI_MCA_oob_tcp_if_include": "198.18.0.0/24",
        "OMPI_MCA_oob_tcp_disable_ipv6_family": "1",
        "OMPI_MCA_oob_tcp_dynamic_ipv4_ports": "20000-20063",
        "OMPI_MCA_oob_tcp_peer_retries": "5",
        "OMPI_MCA_ptl_base_max_retries": "3",
    }


def test_without_a_profile_nothing_is_said(tmp_path: Path) -> None:
    assert prepared(tmp_path, "prterun") == {}


def test_node_without_profile_keeps_to_its_known_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [("lo", "127.0.0.1"), ("eth0", "192.0.2.5"), ("ib0", "198.18.0.5")]
    monkeypatch.setattr("koalapy.runner.parameters.own_addresses", lambda: own)
    names = prepared(tmp_path, "prterun", clusters=2)
    assert names["OMPI_MCA_btl_tcp_if_include"] == names["PRTE_MCA_prte_if_include"] == "ib0"


def test_the_control_channel_is_left_alone_on_loopback(tmp_path: Path) -> None:
    names = prepared(tmp_path, "prterun", "127.0.1.1", **PROFILE | {"KOALA_MPI_PARAMETERS": "{}"})
    assert names.keys() == OF_RANKS.keys() - {"OMPI_MCA_btl_tcp_links"}


def test_what_the_environment_says_already_is_kept_and_parameters_go_before_what_is_derived(tmp_path: Path) -> None:
    own = {"KOALA_MPI_PARAMETERS": '{"btl_tcp_if_include": "ib0", "btl_tcp_port_min_v4": "30000"}'}
    names = prepared(tmp_path, "prterun", **PROFILE | own, OMPI_MCA_btl_tcp_if_include="lo")
    assert names["OMPI_MCA_btl_tcp_if_include"] == "lo"
    assert names["OMPI_MCA_btl_tcp_port_min_v4"] == "30000"


@pytest.mark.parametrize("text", ["[1]", "{", "7"])
def test_parameters_that_are_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(Failure, match="KOALA_MPI_PARAMETERS must be a JSON object"):
        prepared(tmp_path, "prterun", KOALA_MPI_PARAMETERS=text)


@pytest.mark.parametrize(("ports", "ranks"), [("2000-2001", (2001, 2001)), ("2000-2099", (2025, 2099)), ("", None)])
def test_ranks_have_most_of_the_ports(ports: str, ranks: tuple[int, int] | None) -> None:
    assert rank_ports({"KOALA_MPI_PORTS": ports}) == ranks


def test_traces_of_the_resource_manager_are_removed(tmp_path: Path) -> None:
    environment, own = installation(tmp_path, "prterun")
    foreign = ["SLURM_NODELIST", "SLURMD_NODENAME", "PMI_RANK", "PMIX_NAMESPACE", "PE_HOSTFILE"]
    kept = {"PMIX_MCA_gds": "hash", "SGE_ROOT": "/sge", "PEACE": "1"}
    environment |= dict.fromkeys(foreign, "x") | kept
    prepare(environment, Installation(environment, "n1", own), own)
    assert environment.keys().isdisjoint(foreign)
    assert environment.items() >= kept.items()


@pytest.mark.processes
def test_another_series_than_the_clusters_is_named(tmp_path: Path) -> None:
    environment, own = installation(tmp_path, "orterun", "echo 'mpirun (Open MPI) 4.1.4'")
    with pytest.raises(Failure) as failure:
        Installation(environment | {"KOALA_MPI_SERIES": "5"}, "n1", own)
    prefix = environment["KOALA_MPI_PREFIX"]
    assert failure.value.message == (
        f"node n1 has Open MPI 4.1.4 at {prefix}, but clusters.north.mpi.series is 5: "
        "correct it or clusters.north.mpi.prefix"
    )
    assert failure.value.code is None


def test_an_mpirun_that_is_not_open_mpis(tmp_path: Path) -> None:
    environment, own = installation(tmp_path, "hydra")
    with pytest.raises(Failure, match=r"mpirun on node n1 is not Open MPI's: correct clusters.north.mpi.prefix"):
        Installation(environment, "n1", own)


def test_ranks_of_several_clusters_prefer_romio_unless_the_profile_says_otherwise(tmp_path: Path) -> None:
    assert prepared(tmp_path / "a", "prterun", "127.0.1.1", 2) == {"OMPI_MCA_io_ompio_priority": "1"}
    own = {"KOALA_MPI_PARAMETERS": '{"io_ompio_priority": "50"}'}
    assert prepared(tmp_path / "b", "prterun", "127.0.1.1", 2, **own) == {"OMPI_MCA_io_ompio_priority": "50"}
    assert prepared(tmp_path / "c", "prterun", "127.0.1.1", 1) == {}
