"""The parameters that a head node sends to other nodes' MPI daemons, and those that it may not."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner.parameters import REQUIRED, SHARED, check_parameters, select_parameters
from koalapy.runner.settings import Failure

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
def test_select_parameters_returns_the_allowed_ones(series: int, command: str, selected: dict[str, str]) -> None:
    assert select_parameters(series, command) == selected
    assert check_parameters(series, selected, SECTION) == selected


def test_select_parameters_of_another_command_raises_failure() -> None:
    with pytest.raises(Failure, match="not its daemon: rm -rf"):
        select_parameters(5, "rm -rf /opt/prted-stuff")


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
def test_check_parameters_with_another_parameter_names_it(series: int, selected: dict[str, str], name: str) -> None:
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
def test_check_parameters_names_a_value_for_a_shell(series: int, selected: dict[str, str], more: str) -> None:
    for name, value in selected.items():
        with pytest.raises(Failure, match=rf"as the parameter {name}, which is no value of it"):
            check_parameters(series, {**selected, name: value + more}, SECTION)


@pytest.mark.parametrize("value", [1, None, ["1"], "٣", "-1", "1" * 100])
def test_check_parameters_with_a_number_that_is_none_raises_failure(value: object) -> None:
    with pytest.raises(Failure, match="as the parameter ess_base_vpid"):
        check_parameters(5, {**SELECTED_5, "ess_base_vpid": value}, SECTION)


@pytest.mark.parametrize(("vpid", "count"), [("0", "3"), ("3", "3"), ("1", "9999999999")])
def test_check_parameters_with_an_impossible_number_raises_failure(vpid: str, count: str) -> None:
    with pytest.raises(Failure, match="which cannot be"):
        check_parameters(5, {**SELECTED_5, "ess_base_vpid": vpid, "ess_base_num_procs": count}, SECTION)


@pytest.mark.parametrize(("series", "selected"), BY_SERIES)
def test_check_parameters_without_a_required_one_names_it(series: int, selected: dict[str, str]) -> None:
    for name in REQUIRED[series]:
        with pytest.raises(Failure, match=f"sent no parameter {name} "):
            check_parameters(series, {k: v for k, v in selected.items() if k != name}, SECTION)


@pytest.mark.parametrize("parameters", [None, [], "id; prted", 5])
def test_check_parameters_of_another_type_raises_failure(parameters: object) -> None:
    with pytest.raises(Failure, match="launch request without parameters"):
        check_parameters(5, parameters, SECTION)


TEXTS = st.text(max_size=30) | st.sampled_from([*SELECTED_5, *SELECTED_4, *SELECTED_5.values(), *SELECTED_4.values()])


@given(
    series=st.sampled_from([4, 5]),
    parameters=st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=8),
    keeps_required=st.booleans(),
)
def test_check_parameters_passes_plain_words(series: int, parameters: dict[str, object], keeps_required: bool) -> None:
    valid = dict(BY_SERIES)[series] if keeps_required else {}
    try:
        checked = check_parameters(series, {**valid, **parameters}, SECTION)
    except Failure:
        return
    assert checked.keys() <= REQUIRED[series].keys() | SHARED[series].keys()
    for value in checked.values():
        assert not set(value) & set(string.whitespace + "'\"\\$`|&<>*?!#~{}=")
        assert not re.match("[-+]", value)
