"""Open MPI as this node has it."""

from __future__ import annotations

import os
import re
import shlex

from koalapy.runtime.processes import find_program
from koalapy.runtime.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from koalapy.runtime.plan import Plan

STARTERS = {"prterun": (5, "prted"), "orterun": (4, "orted")}
"""What lies beside mpirun tells Open MPI's series, and its daemon's name."""
DAEMON = re.compile(r"(?:^|(?<=[\s;]))(?:[^\s;]*/)?(?:prted|orted)(?=\s|$)")
PARAMETER = re.compile(r"\s--?(prtemca|pmixmca|mca)\s+(\S+)\s+(?:\"[^\"]*\"|\S+)")
CALLED = {"SLURM_JOBID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": ""}
"""By these an MPI daemon takes the name it is given, as it would from Slurm, and not its host's."""
NAMING = "ess_slurm"
"""The part of Open MPI that does so: a file of its own, or within the daemons' library."""
LIBRARIES = ("libprrte.so", "libopen-rte.so")
FOLDERS = ("", "openmpi/", "prte/", "*/", "*/openmpi/lib/openmpi*/")
"""Below ``lib`` or ``lib64``: where either may be."""
OF_ONE_NODE = ("prte_if_", "oob_tcp_", "btl_tcp_if_", "btl_tcp_port_")
"""Parameters that say which networks and ports a node has: another node's are never its own."""


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
        return [*(word for k, v in options.items() for word in (flag, k, v)), *more, "--bind-to", "none"]

    def daemon_command(self, command: str, environment: dict[str, str], name: str = "") -> str:
        """What the head node's mpirun would have an ssh start, for this node's own daemon, folders and networks.

        ``name`` is what the node is to be called instead of by its host name.
        """
        named = DAEMON.search(command)
        if named is None:
            raise Failure(f"mpirun asks for something that is not its daemon: {command[:200]}")
        before, after = command[: named.start()], command[named.end() :]
        if theirs := os.path.dirname(os.path.dirname(named[0])):
            before = re.sub(rf"(?<=[=:]){re.escape(theirs)}(?=[/:;\s]|$)", lambda _: shlex.quote(self.prefix), before)

        def keep(parameter: re.Match[str]) -> str:
            scope = parameter[1]
            variable = {"prtemca": "PRTE_MCA_", "pmixmca": "PMIX_MCA_", "mca": "OMPI_MCA_"}[scope] + parameter[2]
            own = variable in environment or parameter[2].startswith(OF_ONE_NODE)
            return "" if own or (name and parameter[2] == "ess") else parameter[0]

        called = "".join(f"{k}={v or shlex.quote(name)} " for k, v in CALLED.items()) if name else ""
        return before + called + shlex.quote(self.daemon) + PARAMETER.sub(keep, after)

    def can_name(self) -> bool:
        """Whether its daemons can be given names; taken for granted where its parts are not found."""
        from glob import glob

        places = [f"{self.prefix}/lib{more}/{folder}" for more in ("", "64") for folder in FOLDERS]
        if any(glob(f"{place}*mca_{NAMING}.so") for place in places):
            return True
        libraries = [path for place in places for name in LIBRARIES for path in glob(f"{place}{name}*")]
        return not libraries or any(_contains(path, NAMING.encode()) for path in libraries)


def _contains(path: str, word: bytes) -> bool:
    with open(path, "rb") as file:
        return word in file.read()
