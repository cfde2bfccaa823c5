"""Environment and daemon parameters of Open MPI."""

import re
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner.parameters import (
    REQUIRED,
    SHARED,
    Installation,
    check_parameters,
    prepare,
    rank_ports,
    select_parameters,
)
from koalapy.runner.plan import Plan
from koalapy.runner.settings import Failure
from tests.runner.conftest import FakeNode, make_plan

PROFILE = {
    "KOALA_MPI_INTERFACE": "198.18.0.0/24",
    "KOALA_MPI_PORTS": "20000-20399",
    "KOALA_MPI_PARAMETERS": '{"btl_tcp_links": 2, "oob_tcp_peer_retries": "5", "ptl_base_max_retries": "3"}',
}


def make_installation(
    tmp_path: Path, starter: str, script: str = "", *, host: str = "198.18.0.5", clusters: int = 1
) -> tuple[dict[str, str], Plan]:
    """Write the inspected files of an Open MPI installation; return the environment that names it, and a plan."""
    folder = tmp_path / "mpi" / "bin"
    folder.mkdir(parents=True)
    (folder.parent / "lib").mkdir()
    for name in ("mpirun", starter):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    agent: Any = None
    nodes = [FakeNode(agent, f"7.1.{i}", 0, host) for i in range(clusters)]
    message = make_plan(nodes, ["true"], launcher="openmpi")
    return {"KOALA_MPI_PREFIX": str(folder.parent)}, Plan(message, "7.1.0", 0)


def prepare_environment(
    tmp_path: Path, starter: str, host: str = "198.18.0.5", clusters: int = 1, **settings: str
) -> dict[str, str]:
    base, node_plan = make_installation(tmp_path, starter, host=host, clusters=clusters)
    environment = {**base, **settings}
    prepare(environment, Installation(environment, "n1", node_plan), node_plan)
    return {k: v for k, v in environment.items() if "_MCA_" in k}


OF_RANKS = {
    "OMPI_MCA_btl_tcp_if_include": "198.18.0.0/24",
    "OMPI_MCA_btl_tcp_disable_family": "6",
    "OMPI_MCA_btl_tcp_port_min_v4": "20064",
    "OMPI_MCA_btl_tcp_port_range_v4": "336",
    "OMPI_MCA_btl_tcp_links": "2",
}


@pytest.mark.parametrize(
    ("starter", "control", "include", "pmix"),
    [("prterun", "PRTE", "prte_if_include", "PMIX"), ("orterun", "OMPI", "oob_tcp_if_include", "OMPI")],
)
def test_prepare_of_each_series_sets_network_parameters(
    tmp_path: Path, starter: str, control: str, include: str, pmix: str
) -> None:
    assert prepare_environment(tmp_path, starter, **PROFILE) == OF_RANKS | {
        f"{control}_MCA_{include}": "198.18.0.0/24",
        f"{control}_MCA_oob_tcp_disable_ipv6_family": "1",
        f"{control}_MCA_oob_tcp_dynamic_ipv4_ports": "20000-20063",
        f"{control}_MCA_oob_tcp_peer_retries": "5",
        f"{pmix}_MCA_ptl_base_max_retries": "3",
    }


def test_prepare_without_profile_keeps_known_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = [("lo", "127.0.0.1"), ("eth0", "192.0.2.5"), ("ib0", "198.18.0.5")]
    monkeypatch.setattr("koalapy.runner.parameters.own_addresses", lambda: networks)
    names = prepare_environment(tmp_path, "prterun", clusters=2)
    assert names["OMPI_MCA_btl_tcp_if_include"] == names["PRTE_MCA_prte_if_include"] == "ib0"


def test_prepare_on_loopback_keeps_control_channel(tmp_path: Path) -> None:
    names = prepare_environment(tmp_path, "prterun", "127.0.1.1", **PROFILE | {"KOALA_MPI_PARAMETERS": "{}"})
    assert names.keys() == OF_RANKS.keys() - {"OMPI_MCA_btl_tcp_links"}


def test_prepare_prefers_environment_and_configured_parameters(tmp_path: Path) -> None:
    settings = {"KOALA_MPI_PARAMETERS": '{"btl_tcp_if_include": "ib0", "btl_tcp_port_min_v4": "30000"}'}
    names = prepare_environment(tmp_path, "prterun", **PROFILE | settings, OMPI_MCA_btl_tcp_if_include="lo")
    assert names["OMPI_MCA_btl_tcp_if_include"] == "lo"
    assert names["OMPI_MCA_btl_tcp_port_min_v4"] == "30000"


@pytest.mark.parametrize("text", ["[1]", "{", "7"])
def test_prepare_with_invalid_parameters_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(Failure, match="KOALA_MPI_PARAMETERS must be a JSON object"):
        prepare_environment(tmp_path, "prterun", KOALA_MPI_PARAMETERS=text)


@pytest.mark.parametrize(("ports", "ranks"), [("2000-2001", (2001, 2001)), ("2000-2099", (2025, 2099)), ("", None)])
def test_rank_ports_are_most_of_the_range(ports: str, ranks: tuple[int, int] | None) -> None:
    assert rank_ports({"KOALA_MPI_PORTS": ports}) == ranks


def test_prepare_removes_resource_manager_variables(tmp_path: Path) -> None:
    environment, node_plan = make_installation(tmp_path, "prterun")
    foreign = ["SLURM_NODELIST", "SLURMD_NODENAME", "PMI_RANK", "PMIX_NAMESPACE", "PE_HOSTFILE"]
    kept_variables = {"PMIX_MCA_gds": "hash", "SGE_ROOT": "/sge", "PEACE": "1"}
    environment |= dict.fromkeys(foreign, "x") | kept_variables
    prepare(environment, Installation(environment, "n1", node_plan), node_plan)
    assert environment.keys().isdisjoint(foreign)
    assert environment.items() >= kept_variables.items()


@pytest.mark.processes
def test_installation_of_other_series_fails(tmp_path: Path) -> None:
    environment, node_plan = make_installation(tmp_path, "orterun", "echo 'mpirun (Open MPI) 4.1.4'")
    with pytest.raises(Failure) as failure:
        Installation(environment | {"KOALA_MPI_SERIES": "5"}, "n1", node_plan)
    prefix = environment["KOALA_MPI_PREFIX"]
    assert failure.value.message == (
        f"node n1 has Open MPI 4.1.4 at {prefix}, but clusters.north.mpi.series is 5: "
        "correct it or clusters.north.mpi.prefix"
    )
    assert failure.value.code is None


def test_installation_of_other_mpi_fails(tmp_path: Path) -> None:
    environment, node_plan = make_installation(tmp_path, "hydra")
    with pytest.raises(Failure, match=r"mpirun on node n1 is not Open MPI's: correct clusters.north.mpi.prefix"):
        Installation(environment, "n1", node_plan)


def test_prepare_for_several_clusters_prefers_romio(tmp_path: Path) -> None:
    assert prepare_environment(tmp_path / "a", "prterun", "127.0.1.1", 2) == {"OMPI_MCA_io_ompio_priority": "1"}
    settings = {"KOALA_MPI_PARAMETERS": '{"io_ompio_priority": "50"}'}
    assert prepare_environment(tmp_path / "b", "prterun", "127.0.1.1", 2, **settings) == {
        "OMPI_MCA_io_ompio_priority": "50"
    }
    assert prepare_environment(tmp_path / "c", "prterun", "127.0.1.1", 1) == {}


SECTION = "clusters.south.mpi"
COMMAND_5 = (
    "PRTE_PREFIX=/opt/a;export PRTE_PREFIX;LD_LIBRARY_PATH=/opt/a/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;"
    '/opt/a/bin/prted --leave-session-attached --allow-run-as-root --prtemca ess "env" --prtemca ess_base_nspace '
    '"prterun-vm-10624@0" --prtemca ess_base_vpid 1 --prtemca ess_base_num_procs "3" --prtemca prte_hnp_uri '
    '"prterun-vm-10624@0.0;tcp://192.0.2.2\\,198.18.255.1:45187:64\\,24;tcp6://[fd00::2]:44749:64" --prtemca PREFIXES '
    '"errmgr\\,ess" --prtemca plm "ssh" --prtemca plm_ssh_agent "/bin/sh /x/koala-launch" --pmixmca gds "hash" '
    '--prtemca routed_radix "16"'
)
SELECTED_5 = {
    "ess_base_nspace": "prterun-vm-10624@0",
    "ess_base_vpid": "1",
    "ess_base_num_procs": "3",
    "prte_hnp_uri": "prterun-vm-10624@0.0;tcp://192.0.2.2,198.18.255.1:45187:64,24;tcp6://[fd00::2]:44749:64",
    "routed_radix": "16",
}
COMMAND_4 = (
    '          PATH=/usr/bin:$PATH ; export PATH ;   /usr/bin/orted -mca orte_leave_session_attached "1" -mca ess '
    '"env" -mca ess_base_jobid "1164902400" -mca ess_base_vpid 2 -mca ess_base_num_procs "3" -mca orte_node_regex '
    '"vm,[3:127].0.1.1,[3:127].0.2.1@0(3)" -mca orte_hnp_uri "1164902400.0;tcp://192.0.2.2:56683" --mca plm_rsh_agent '
    '"/bin/sh /x/koala-launch" --mca routed "direct"'
)
SELECTED_4 = {
    "ess_base_jobid": "1164902400",
    "ess_base_vpid": "2",
    "ess_base_num_procs": "3",
    "orte_node_regex": "vm,[3:127].0.1.1,[3:127].0.2.1@0(3)",
    "orte_hnp_uri": "1164902400.0;tcp://192.0.2.2:56683",
    "routed": "direct",
}
BY_SERIES = [(5, SELECTED_5), (4, SELECTED_4)]


@pytest.mark.parametrize(("series", "command", "selected"), [(5, COMMAND_5, SELECTED_5), (4, COMMAND_4, SELECTED_4)])
def test_select_parameters_returns_allowed_parameters(series: int, command: str, selected: dict[str, str]) -> None:
    assert select_parameters(series, command) == selected
    assert check_parameters(series, selected, SECTION) == selected


def test_select_parameters_of_other_command_fails() -> None:
    with pytest.raises(Failure, match=r"not start its daemon \(orted or prted\): rm -rf"):
        select_parameters(5, "rm -rf /opt/prted-stuff")


@pytest.mark.evidence("P1")
@pytest.mark.parametrize(
    "name",
    [
        *("plm", "plm_ssh_agent", "plm_rsh_agent", "prte_launch_agent", "orte_launch_agent", "odls_base_exec_agent"),
        *("orte_fork_agent", "mca_base_component_path", "mca_base_param_files", "mca_base_env_list", "filem", "ess"),
        *("prte_parent_uri", "orte_parent_uri", "prte_tmpdir_base", "oob_tcp_if_include", "prte_daemon_cores", ""),
        "ess_base_vpid\n",
    ],
)
@pytest.mark.parametrize(("series", "selected"), BY_SERIES)
def test_check_parameters_rejects_other_parameter(series: int, selected: dict[str, str], name: str) -> None:
    with pytest.raises(Failure) as failure:
        check_parameters(series, {**selected, name: "1"}, SECTION)
    assert failure.value.message == (
        f"the job's head node may not set the parameter {name!a} of this node's MPI daemon: "
        "leave it out there, or set it here in clusters.south.mpi.parameters"
    )


@pytest.mark.parametrize(
    "more", ["; id", "$(id)", "`id`", "\n", " --prtemca plm ssh", "|id", "&", "'", '"', "\\", "\0"]
)
@pytest.mark.parametrize(("series", "selected"), BY_SERIES)
def test_check_parameters_rejects_shell_syntax(series: int, selected: dict[str, str], more: str) -> None:
    for name, value in selected.items():
        with pytest.raises(Failure, match=rf"as the parameter {name}, which is not a value of it"):
            check_parameters(series, {**selected, name: value + more}, SECTION)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        *(({**SELECTED_5, "ess_base_vpid": value}, "as the parameter ess_base_vpid") for value in (1, None, "-1", "٣")),
        ({**SELECTED_5, "ess_base_vpid": "0"}, "which cannot be"),
        ({**SELECTED_5, "ess_base_vpid": "3"}, "which cannot be"),
        ({**SELECTED_5, "ess_base_num_procs": "9999999999"}, "which cannot be"),
        *(({k: v for k, v in SELECTED_5.items() if k != name}, f"sent no parameter {name} ") for name in REQUIRED[5]),
        *((value, "launch request without parameters") for value in (None, [], "id; prted")),
    ],
)
def test_check_parameters_rejects_wrong_and_missing_values(parameters: object, message: str) -> None:
    with pytest.raises(Failure, match=message):
        check_parameters(5, parameters, SECTION)


TEXTS = st.text(max_size=30) | st.sampled_from([*SELECTED_5, *SELECTED_4, *SELECTED_5.values(), *SELECTED_4.values()])


@pytest.mark.evidence("P1")
@given(
    series=st.sampled_from([4, 5]),
    parameters=st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=8),
    keeps_required=st.booleans(),
)
def test_check_parameters_accepts_plain_values(
    series: int, parameters: dict[str, object], keeps_required: bool
) -> None:
    valid = dict(BY_SERIES)[series] if keeps_required else {}
    try:
        checked = check_parameters(series, {**valid, **parameters}, SECTION)
    except Failure:
        return
    assert checked.keys() <= REQUIRED[series].keys() | SHARED[series].keys()
    for value in checked.values():
        assert not set(value) & set(string.whitespace + "'\"\\$`|&<>*?!#~{}=")
        assert not re.match("[-+]", value)
