"""The script by which every rank starts: it runs the job's command, and no other, in this node's own environment."""

from __future__ import annotations

import os
import shlex

from koalapy.runner.atomic_files import replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHELL = "/bin/sh"
SCRIPT_NAME = "koala-rank"
SCRIPT_VARIABLE = "KOALA_RANK_SCRIPT"
LAUNCHER = (SHELL, "-c", f'exec {SHELL} "${SCRIPT_VARIABLE}"')
"""All that ``mpirun`` starts, on every node: each node has a script of its own, with the command of its plan."""
PER_RANK = (
    *(f"PMIX_SERVER_URI{version}" for version in ("", 2, 21, 3, 31, 4, 41, 5, 51, 6, 61, 7, 71)),
    *("PMIX_BFROP_BUFFER_TYPE", "PMIX_DSTORE_21_BASE_PATH", "PMIX_DSTORE_ESH_BASE_PATH", "PMIX_GDS_MODULE"),
    *("PMIX_HOSTNAME", "PMIX_ID", "PMIX_KEEPALIVE_PIPE", "PMIX_NAMESPACE", "PMIX_PARAM_FILE_PASSED"),
    *("PMIX_PTL_MODULE", "PMIX_RANK", "PMIX_REINCARNATION", "PMIX_SECURITY_MODE", "PMIX_SERVER_TMPDIR"),
    *("PMIX_SYSTEM_TMPDIR", "PMIX_VERSION", "PRTE_LAUNCHED", "PRTE_SHARED_FS"),
    *("OMPI_APP_CTX_NUM_PROCS", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("OMPI_COMM_WORLD_NODE_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_FILE_LOCATION"),
    *("OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX", "OMPI_TOOL_NAME", "OMPI_UNIVERSE_SIZE", "OMPI_VERSION"),
    *("OMPI_WORLD_LOCAL_SIZE", "OMPI_WORLD_SIZE", "OPAL_USER_PARAMS_GIVEN", "OPAL_SYS_PARAMS_GIVEN"),
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_ess", "OMPI_MCA_ess_base_jobid"),
    *("OMPI_MCA_ess_base_num_procs", "OMPI_MCA_ess_base_vpid", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"),
    *("OMPI_MCA_hwloc_base_binding_policy", "OMPI_MCA_mpi_oversubscribe", "OMPI_MCA_orte_app_num"),
    *("OMPI_MCA_orte_ess_node_rank", "OMPI_MCA_orte_ess_num_procs", "OMPI_MCA_orte_hnp_uri"),
    *("OMPI_MCA_orte_jobfam_session_dir", "OMPI_MCA_orte_launch", "OMPI_MCA_orte_local_daemon_uri"),
    *("OMPI_MCA_orte_node_regex", "OMPI_MCA_orte_num_nodes", "OMPI_MCA_orte_precondition_transports"),
    *("OMPI_MCA_orte_tmpdir_base", "OMPI_MCA_orte_top_session_dir", "OMPI_MCA_pmix"),
    "OMPI_MCA_shmem_RUNTIME_QUERY_hint",
)
"""Variables that differ from rank to rank or from run to run: a rank takes these from its MPI daemon, and no others."""
NOT_PLAIN = "*[!]A-Za-z0-9_.,:;/@%+=^~()[-]*"
"""Shell pattern of the values that such variables never have."""
REFUSAL = "koala: this node starts only the command of the job: MPI_Comm_spawn and MPIPoolExecutor are not supported"


def write_rank_script(folder: str, command: Sequence[str], environment: Mapping[str, str], prefix: str) -> str:
    """Write the script into a folder of this run and return its path.

    ``prefix`` is where this node's Open MPI lies: ranks are told if the Open MPI of ``mpirun`` was moved from where it
    was installed. An MPI daemon that has to start ranks by the script adds what it was asked to start: the script
    refuses all but ``LAUNCHER``, and runs the command in the current folder.
    """
    path = f"{folder}/{SCRIPT_NAME}"
    replace_file(path, os.fsencode(_script(command, environment, prefix, os.getcwd())), sync=False)
    return path


def _script(command: Sequence[str], environment: Mapping[str, str], prefix: str, folder: str) -> str:
    opened = " && ".join(f'[ "${{{i}-}}" = {shlex.quote(word)} ]' for i, word in enumerate(LAUNCHER, 1))
    # env takes a word with = in it for a variable. Of two values for one variable it uses the last.
    words = [*((SHELL, "-c", 'exec "$0" "$@"') if "=" in command[0] else ()), *command]
    own = [f"{name}={value}" for name, value in environment.items() if name != SCRIPT_VARIABLE]
    lines = [
        f"[ $# -eq 0 ] || {{ [ $# -eq {len(LAUNCHER)} ] && {opened}; }} ||",
        f"{{ echo {shlex.quote(REFUSAL)} >&2; exit 126; }}",
        f"cd {shlex.quote(folder)} || exit 126",
        f"set -- {shlex.join([*own, *words])}",
        f"not_plain={shlex.quote(NOT_PLAIN)}",
        *(_keep(name) for name in PER_RANK),
    ]
    if "OPAL_PREFIX" not in environment:
        lines.append(f'[ -z "${{OPAL_PREFIX-}}" ] || set -- {shlex.quote(f"OPAL_PREFIX={prefix}")} "$@"')
    return "\n".join([*lines, 'exec /usr/bin/env -i "$@" </dev/null', ""])


def _keep(name: str) -> str:
    value = f"${{{name}-}}"
    return f'case "{value}" in ""|$not_plain) ;; *) set -- "{name}={value}" "$@";; esac'
