"""Open MPI as this node has it."""

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
"""What lies beside mpirun tells Open MPI's series, and its daemon's name."""
MPIRUN_NAMES = {5: ("prterun", "prte"), 4: ("orterun",)}
"""By series: other names of the program that mpirun is, or executes."""
CALLED = {"SLURM_JOBID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": ""}
"""By these an MPI daemon takes the name it is given, as it would from Slurm, and not its host's."""
NAMING = "ess_slurm"
"""The part of Open MPI that does so: a file of its own, or within the daemons' library."""
LIBRARIES = ("libprrte.so", "libopen-rte.so")
FOLDERS = ("", "openmpi/", "prte/", "*/", "*/openmpi/lib/openmpi*/")
"""Below ``lib`` or ``lib64``: where either may be."""
LAUNCHES_NOTHING = {
    5: {"odls_base_max_threads": "0", "filem": "^raw"},
    4: {
        "hwloc_base_binding_policy": "none",
        "orte_leave_session_attached": "1",
        "filem": "^raw",
        "pmix": "^s1,s2,cray",
    },
}
"""By series: parameters of every MPI daemon. It launches no other daemons and takes no files from mpirun."""


class Installation:
    """The Open MPI of the cluster's profile, else the one of the first mpirun on the path; ``Failure`` without one."""

    def __init__(self, environment: dict[str, str], name: str, plan: Plan) -> None:
        section = f"clusters.{plan.me['cluster']}.mpi"
        prefix = environment.get("KOALA_MPI_PREFIX")
        mpirun = find_program(f"{prefix}/bin/mpirun" if prefix else "mpirun", environment)
        if mpirun is None:
            where = f" below {prefix}" if prefix else ""
            raise Failure(f"mpirun not found on node {name}: install Open MPI{where}, or correct {section}.prefix")
        self.mpirun = mpirun
        folder = os.path.dirname(os.path.realpath(mpirun))
        starter = next((s for s in STARTERS if os.access(f"{folder}/{s}", os.X_OK)), None)
        if starter is None:
            raise Failure(f"{mpirun} on node {name} is not Open MPI's: correct {section}.prefix")
        self.series, daemon = STARTERS[starter]
        self.daemon = f"{folder}/{daemon}"
        self.mpirun_names = (os.path.basename(os.path.realpath(mpirun)), *MPIRUN_NAMES[self.series])
        self.prefix = os.path.dirname(folder)
        wanted = environment.get("KOALA_MPI_SERIES", str(self.series))
        if wanted != str(self.series):
            raise Failure(
                f"node {name} has Open MPI {self.version()} at {self.prefix}, but {section}.series is {wanted}: "
                f"correct it or {section}.prefix"
            )

    def version(self) -> str:
        """As it says itself; its series when it says nothing of use."""
        import subprocess

        try:
            asked = subprocess.run([self.mpirun, "--version"], capture_output=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return str(self.series)
        found = re.search(r"\d+\.\d+\.\S+", asked.stdout.decode(errors="replace"))
        return found[0] if found else str(self.series)

    def options(self, launch_agent: str, nodes: int) -> list[str]:
        """Options that make mpirun start its daemons, on so many nodes, by our launch agent; they depend on the series.

        Daemons that stay attached must all be launched at once: mpirun refuses more than are allowed to be.
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
            flag, more = "--prtemca", ["--leave-session-attached"]
        else:
            options = {
                "plm": "rsh",
                "ras": "^slurm,gridengine",
                "plm_rsh_agent": launch_agent,
                "plm_rsh_no_tree_spawn": "1",
                "plm_rsh_num_concurrent": str(nodes),
            }
            flag, more = "--mca", ["--mca", "orte_leave_session_attached", "1"]
        always = ["--bind-to", "none", "--stdin", "none"]
        return [*(word for k, v in options.items() for word in (flag, k, v)), *more, *always]

    def daemon_arguments(self, parameters: Mapping[str, str], rank_script: str, *, is_named: bool) -> list[str]:
        """Return the command line of this node's MPI daemon; ``parameters`` are those that the head node has chosen.

        It starts ranks by the script. ``is_named``: the daemon takes its name from the environment.
        """
        fixed = LAUNCHES_NOTHING[self.series] | ({} if is_named else {"ess": "env"})
        fixed["odls_base_exec_agent" if self.series >= 5 else "orte_fork_agent"] = f"{SHELL} {rank_script}"
        flag = "--prtemca" if self.series >= 5 else "-mca"
        words = [word for name, value in {**parameters, **fixed}.items() for word in (flag, name, value)]
        if self.series < 5:
            return [self.daemon, *words]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [self.daemon, "--leave-session-attached", *root, *words]

    def daemon_environment(self, environment: Mapping[str, str], name: str = "") -> dict[str, str]:
        """Return the environment of this node's MPI daemon, which is called ``name`` instead of by its host name."""
        prefixes = dict.fromkeys(("PRTE_PREFIX", "PMIX_PREFIX"), self.prefix) if self.series >= 5 else {}
        named = {variable: value or name for variable, value in CALLED.items()} if name else {}
        return {**environment, **prefixes, **named}

    def can_name(self) -> bool:
        """Whether its daemons can be given names; taken for granted where its parts are not found."""
        from glob import glob

        places = [f"{self.prefix}/lib{more}/{folder}" for more in ("", "64") for folder in FOLDERS]
        if any(glob(f"{place}*mca_{NAMING}.so") for place in places):
            return True
        libraries = [path for place in places for name in LIBRARIES for path in glob(f"{place}{name}*")]
        for path in libraries:
            with open(path, "rb") as file:
                if NAMING.encode() in file.read():
                    return True
        return not libraries
