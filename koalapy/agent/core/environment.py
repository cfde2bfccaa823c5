"""What is inherited of the environment of whoever started us: named here, and nothing else."""

import os
from collections.abc import Iterable

PROGRAMS = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "MODULEPATH",
        "MODULESHOME",
    }
)
"""By every program on a cluster, and ``LC_`` with its categories; what a cluster's programs need besides is set in the
cluster's ``environment``."""
OPEN_MPI = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
"""How the parameters of Open MPI begin: programs on embedded clusters have them as the daemon does."""
RESOURCE_MANAGERS = frozenset({"PYTHONPATH", "SLURM_CONF", "GLIBC_TUNABLES"})
RESOURCE_MANAGERS_BEGIN = ("DRMAA_", "LSF_", "PBS_", "SGE_")
"""What the commands and libraries of resource managers go by."""


def inherited(names: Iterable[str] = (), prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """What programs inherit, and what is named besides."""
    kept, begin = PROGRAMS.union(names), ("LC_", *prefixes)
    return {name: value for name, value in os.environ.items() if name in kept or name.startswith(begin)}


def of_agents() -> dict[str, str]:
    """The environment of an agent that the daemon starts."""
    return inherited(RESOURCE_MANAGERS, (*OPEN_MPI, *RESOURCE_MANAGERS_BEGIN))
