"""Give a translated script the variables and commands of the batch system that it was written for.

``koala submit --translate`` names the systems in ``KOALA_TRANSLATED``, and sets the variables that are known when a job
is submitted. The runner adds those here. All of them describe the whole job, on all of its clusters.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TRANSLATED = "KOALA_TRANSLATED"
"""Systems of a translated script, separated by blanks: keys of ``COUNTERPARTS``."""
SLURM, GRID_ENGINE = "slurm", "grid-engine"
COUNTERPARTS: Mapping[str, Mapping[str, str]] = {
    SLURM: {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "KOALA_JOB_ID"),
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), "KOALA_NODES"),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), "KOALA_SLOTS"),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "KOALA_NODELIST"),
        "SLURM_ARRAY_JOB_ID": "KOALA_ARRAY_JOB",
        "SLURM_ARRAY_TASK_ID": "KOALA_ARRAY_INDEX",
        "SLURM_ARRAY_TASK_COUNT": "KOALA_ARRAY_COUNT",
    },
    GRID_ENGINE: {
        "JOB_ID": "KOALA_JOB_ID",
        "NSLOTS": "KOALA_SLOTS",
        "NHOSTS": "KOALA_NODES",
        "SGE_TASK_ID": "KOALA_ARRAY_INDEX",
    },
}
"""By system: its variables, and the variable of koalapy with the same value."""
CONSTANT = {SLURM: {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, GRID_ENGINE: {}}
"""By system: variables that every script has, with their values."""
AT_SUBMISSION = {
    SLURM: (
        "SLURM_JOB_NAME",
        "SLURM_SUBMIT_DIR",
        "SLURM_SUBMIT_HOST",
        "SLURM_CPUS_PER_TASK",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_ARRAY_TASK_MIN",
        "SLURM_ARRAY_TASK_MAX",
        "SLURM_ARRAY_TASK_STEP",
    ),
    GRID_ENGINE: ("JOB_NAME", "SGE_O_WORKDIR", "SGE_O_HOST", "SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE"),
}
"""By system: variables that ``koala submit`` sets."""
HOST_FILE = "PE_HOSTFILE"
PREFIXES = {SLURM: ("SLURM_", "SLURMD_"), GRID_ENGINE: ("SGE_", "JOB_ID", "JOB_NAME", "NSLOTS", "NHOSTS", "PE_")}
"""By system: prefixes of the variables that a site's own resource manager sets, for one component only."""
COMMANDS = ("sbatch", "salloc", "scancel", "squeue", "sacct", "sinfo", "qsub", "qstat", "qdel", "qrsh", "qalter")
"""Commands that have no counterpart in a script."""
UNAVAILABLE = """\
#!/bin/sh
echo "koala: {name} is not available in a translated script: a site's own {name} knows one component only;\
 use koala on the machine where you submit" >&2
exit 127
"""
SCONTROL = """\
#!/bin/sh
if [ "$1" = show ] && [ "${2%s}" = hostname ]; then
    IFS=,
    for host in ${3-$KOALA_NODELIST}; do
        case $host in *[*) echo "koala: scontrol show hostnames takes \\$SLURM_JOB_NODELIST only" >&2; exit 2;; esac
        echo "$host"
    done
    exit 0
fi
echo "koala: scontrol $* is not available in a translated script, only scontrol show hostnames" >&2
exit 127
"""


def systems_of(environment: Mapping[str, str]) -> list[str]:
    """Return the systems of a translated script; none for a script of koalapy."""
    return [system for system in COUNTERPARTS if system in environment.get(TRANSLATED, "").split()]


def settable_variables(system: str) -> set[str]:
    """Return the names of all variables of a system that a translated script gets if its job has them."""
    host_file = {HOST_FILE} if system == GRID_ENGINE else set()
    return {*COUNTERPARTS[system], *CONSTANT[system], *AT_SUBMISSION[system]} | host_file


def translate_environment(
    environment: Mapping[str, str], given: Mapping[str, str], nodes: Sequence[tuple[str, int]], folder: str
) -> dict[str, str]:
    """Return the environment of a script with the variables of its systems, without those of a site for a component.

    ``environment``: with the variables of koalapy. ``given``: variables of the job. ``nodes``: host and slots of each
    node; a file with them is written into ``folder`` for Grid Engine.
    """
    result = dict(environment)
    for system in systems_of(environment):
        result = {n: v for n, v in result.items() if n in given or not n.startswith(PREFIXES[system])}
        counterparts = dict(COUNTERPARTS[system])
        if system == GRID_ENGINE:
            result[HOST_FILE] = f"{folder}/pe-hosts"
            with open(result[HOST_FILE], "w", encoding="utf-8") as file:
                file.writelines(f"{host} {slots} koala@{host} <NULL>\n" for host, slots in nodes)
            if "KOALA_ARRAY_JOB" in environment:
                counterparts["JOB_ID"] = "KOALA_ARRAY_JOB"
            else:
                names = ("SGE_TASK_ID", "SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE")
                result.update(dict.fromkeys(names, "undefined"))
        values = {name: environment[own] for name, own in counterparts.items() if own in environment}
        result.update({**values, **CONSTANT[system]})
    return result


def translated_commands(client: str) -> dict[str, str]:
    """Return the shell scripts of ``srun`` and ``scontrol``, and of commands that say why they are not available.

    ``client``: the shell's words that start ``mpirun``.
    """
    unavailable = {name: UNAVAILABLE.format(name=name) for name in COMMANDS}
    return {**unavailable, "srun": f'#!/bin/sh\nexec {client} --srun "$@"\n', "scontrol": SCONTROL}
