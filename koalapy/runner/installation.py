"""Find this node's Open MPI, and build the command lines of its mpirun and MPI daemon."""

from __future__ import annotations

import os
import re

from koalapy.runner.exec_guard import SHELL
from koalapy.runner.processes import find_program
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from koalapy.runner.plan import Plan

STARTERS = {"prterun": (5, "prted"), "orterun": (4, "orted")}
"""Programs in mpirun's folder that show Open MPI's series (major version) and the name of its MPI daemon."""
MPIRUN_NAMES = {5: ("prterun", "prte"), 4: ("orterun",)}
"""By Open MPI's major version: other names of mpirun, or of the program that it executes."""
NAME_VARIABLES = {"SLURM_JOBID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": ""}
"""Variables that give an MPI daemon another name than its host's, as Slurm would."""
NAMING = "ess_slurm"
"""The component of Open MPI that reads them: a file, or a part of the daemons' library."""
LIBRARIES = ("libprrte.so", "libopen-rte.so")
FOLDERS = ("", "openmpi/", "prte/", "*/", "*/openmpi/lib/openmpi*/")
"""Folders below ``lib`` or ``lib64`` that may contain them."""
TAG_SEPARATORS = {5: b" ", 4: b""}
"""By Open MPI's major version: the text between the tag of ``mpirun`` and the line that it tags."""
LAUNCHES_NOTHING = {
    5: {"odls_base_max_threads": "0", "filem": "^raw"},
    4: {
        "hwloc_base_binding_policy": "none",
        "orte_leave_session_attached": "1",
        "filem": "^raw",
        "pmix": "^s1,s2,cray",
    },
}
"""By Open MPI's major version: parameters of every MPI daemon. It launches no others and takes no files from mpirun."""


class Installation:
    """The Open MPI of the cluster's profile, or of the first mpirun on the path. Raise ``Failure`` without one."""

    def __init__(self, environment: dict[str, str], name: str, plan: Plan) -> None:
        section = f"clusters.{plan.me['cluster']}.mpi"
        prefix = environment.get("KOALA_MPI_PREFIX")
        mpirun = find_program(f"{prefix}/bin/mpirun" if prefix else "mpirun", environment)
        if mpirun is None:
            location = f" below {prefix}" if prefix else ""
            raise Failure(f"mpirun not found on node {name}: install Open MPI{location}, or correct {section}.prefix")
        self.mpirun = mpirun
        folder = os.path.dirname(os.path.realpath(mpirun))
        starter = next((s for s in STARTERS if os.access(f"{folder}/{s}", os.X_OK)), None)
        if starter is None:
            raise Failure(f"{mpirun} on node {name} is not Open MPI's: correct {section}.prefix")
        self.series, daemon = STARTERS[starter]
        self.daemon = f"{folder}/{daemon}"
        self.mpirun_names = (os.path.basename(os.path.realpath(mpirun)), *MPIRUN_NAMES[self.series])
        self.prefix = os.path.dirname(folder)
        expected = environment.get("KOALA_MPI_SERIES", str(self.series))
        if expected != str(self.series):
            raise Failure(
                f"node {name} has Open MPI {self.version()} at {self.prefix}, but {section}.series is {expected}: "
                f"correct it or {section}.prefix"
            )

    def version(self) -> str:
        """Return the version that mpirun prints, or the series (major version) if it prints none."""
        import subprocess

        try:
            answer = subprocess.run([self.mpirun, "--version"], capture_output=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return str(self.series)
        match = re.search(r"\d+\.\d+\.\S+", answer.stdout.decode(errors="replace"))
        return match[0] if match else str(self.series)

    def mpirun_options(self, launch_agent: str, nodes: int, *, tags_output: bool = False) -> list[str]:
        """Return options that let mpirun start its MPI daemons through our launch agent, a script.

        ``tags_output``: it writes the rank before each line of output.

        Daemons that stay attached must all be launched at once, which mpirun must be allowed for that many nodes.
        """
        if self.series >= 5:
            options = {
                "plm": "ssh",
                "ras": "^slurm,gridengine",
                "plm_ssh_agent": launch_agent,
                "plm_ssh_no_tree_spawn": "1",
                "plm_ssh_num_concurrent": str(nodes),
            }
            # Its launch threads lose track of a process that ends at once, and mpirun then hangs (seen in 5.0.11).
            options["odls_base_max_threads"] = "0"
            flag, attached = "--prtemca", ["--leave-session-attached"]
        else:
            options = {
                "plm": "rsh",
                "ras": "^slurm,gridengine",
                "plm_rsh_agent": launch_agent,
                "plm_rsh_no_tree_spawn": "1",
                "plm_rsh_num_concurrent": str(nodes),
            }
            flag, attached = "--mca", ["--mca", "orte_leave_session_attached", "1"]
        always = ["--bind-to", "none", "--stdin", "none"]
        if tags_output:
            always += ["--output", "tag"] if self.series >= 5 else ["--tag-output"]
        return [*(argument for k, v in options.items() for argument in (flag, k, v)), *attached, *always]

    def relayed_options(self, nodes: int) -> list[str]:
        """Return options of mpirun for relayed links: all daemons connect to it, and no name of a node is resolved."""
        if self.series >= 5:
            options = {"rml_base_radix": str(nodes), "prte_do_not_resolve": "1"}
        else:
            options = {"routed": "radix", "routed_radix": str(nodes), "orte_do_not_resolve": "1"}
        flag = "--prtemca" if self.series >= 5 else "--mca"
        return [argument for name, value in options.items() for argument in (flag, name, value)]

    def daemon_arguments(self, parameters: Mapping[str, str], rank_script: str, *, is_named: bool) -> list[str]:
        """Return the command line of this node's MPI daemon; ``parameters`` are those that the head node has chosen.

        It starts ranks by the script. ``is_named``: the daemon takes its name from the environment.
        """
        fixed = LAUNCHES_NOTHING[self.series] | ({} if is_named else {"ess": "env"})
        fixed["odls_base_exec_agent" if self.series >= 5 else "orte_fork_agent"] = f"{SHELL} {rank_script}"
        flag = "--prtemca" if self.series >= 5 else "-mca"
        arguments = [argument for name, value in {**parameters, **fixed}.items() for argument in (flag, name, value)]
        if self.series < 5:
            return [self.daemon, *arguments]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [self.daemon, "--leave-session-attached", *root, *arguments]

    def daemon_environment(self, environment: Mapping[str, str], name: str = "") -> dict[str, str]:
        """Return the environment of this node's MPI daemon, which is called ``name`` instead of by its host name."""
        prefixes = dict.fromkeys(("PRTE_PREFIX", "PMIX_PREFIX"), self.prefix) if self.series >= 5 else {}
        name_variables = {variable: value or name for variable, value in NAME_VARIABLES.items()} if name else {}
        return {**environment, **prefixes, **name_variables}

    def can_name(self) -> bool:
        """Return whether its MPI daemons can be given names; assume so if its libraries are not found."""
        from glob import glob

        folders = [f"{self.prefix}/lib{suffix}/{folder}" for suffix in ("", "64") for folder in FOLDERS]
        if any(glob(f"{folder}*mca_{NAMING}.so") for folder in folders):
            return True
        libraries = [path for folder in folders for name in LIBRARIES for path in glob(f"{folder}{name}*")]
        for path in libraries:
            with open(path, "rb") as file:
                if NAMING.encode() in file.read():
                    return True
        return not libraries
