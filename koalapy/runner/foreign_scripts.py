"""Give a translated script the variables and commands of the batch system that it was written for.

``koala submit --translate`` names the systems in ``KOALA_TRANSLATED``, and sets the variables that are known when a job
is submitted. The runner adds those here. All of them describe the whole job, on all of its clusters.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TRANSLATED = "KOALA_TRANSLATED"
"""Systems of a translated script, separated by blanks: keys of ``COUNTERPARTS``; and ``HOME``."""
HOME = "home"
"""Word of ``TRANSLATED`` for a script that starts in the home folder, as in Grid Engine and PBS."""
SLURM, GRID_ENGINE, PBS, LSF = "slurm", "grid-engine", "pbs", "lsf"
COUNTERPARTS: Mapping[str, Mapping[str, str]] = {
    SLURM: {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "KOALA_JOB_ID"),
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), "KOALA_NODES"),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), "KOALA_SLOTS"),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "KOALA_NODELIST"),
        "SLURMD_NODENAME": "KOALA_HOST",
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
    PBS: {
        "PBS_JOBID": "KOALA_JOB_ID",
        "PBS_NUM_NODES": "KOALA_NODES",
        "PBS_NUM_PPN": "KOALA_PPN",
        "PBS_NP": "KOALA_SLOTS",
        **dict.fromkeys(("PBS_ARRAY_INDEX", "PBS_ARRAYID"), "KOALA_ARRAY_INDEX"),
        "PBS_ARRAY_ID": "KOALA_ARRAY_JOB",
    },
    LSF: {
        "LSB_JOBID": "KOALA_JOB_ID",
        "LSB_JOBINDEX": "KOALA_ARRAY_INDEX",
        **dict.fromkeys(("LSB_DJOB_NUMPROC", "LSB_MAX_NUM_PROCESSORS"), "KOALA_SLOTS"),
    },
}
"""By system: its variables, and the variable of koalapy with the same value."""
CONSTANT: Mapping[str, Mapping[str, str]] = {
    SLURM: {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    GRID_ENGINE: {},
    PBS: {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_VNODENUM": "0"},
    LSF: {},
}
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
    PBS: ("PBS_JOBNAME", "PBS_O_WORKDIR", "PBS_O_HOST"),
    LSF: ("LS_SUBCWD", "LSB_SUB_HOST", "LSB_JOBINDEX_END", "LSB_JOBINDEX_STEP"),
}
"""By system: variables that ``koala submit`` sets."""
SUBMISSION_FOLDERS = ("SLURM_SUBMIT_DIR", "SGE_O_WORKDIR", "PBS_O_WORKDIR", "LS_SUBCWD")
"""Variables with the folder of the submission; where that is missing, the folder in which the job starts."""
HOST_FILES = {GRID_ENGINE: "PE_HOSTFILE", PBS: "PBS_NODEFILE", LSF: "LSB_DJOB_HOSTFILE"}
"""By system: the variable with the name of a file of the job's hosts."""
OF_HOSTS = {LSF: ("LSB_HOSTS", "LSB_MCPU_HOSTS")}
"""By system: variables with the host of each slot, and with each host and its slots."""
PREFIXES = {
    SLURM: ("SLURM_", "SLURMD_"),
    GRID_ENGINE: ("SGE_", "JOB_ID", "JOB_NAME", "NSLOTS", "NHOSTS", "PE_"),
    PBS: ("PBS_",),
    LSF: ("LSB_", "LS_"),
}
"""By system: prefixes of the variables that a site's own resource manager sets, for one component only."""
COMMANDS = (
    *("sbatch", "salloc", "scancel", "squeue", "sacct", "sinfo"),
    *("qsub", "qstat", "qdel", "qrsh", "qalter", "pbsdsh"),
    *("bsub", "bjobs", "bkill", "blaunch", "jsrun"),
)
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
    of_hosts = {*OF_HOSTS.get(system, ()), *([HOST_FILES[system]] if system in HOST_FILES else [])}
    return {*COUNTERPARTS[system], *CONSTANT[system], *AT_SUBMISSION[system]} | of_hosts


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
        of_slots = [host for host, slots in nodes for _ in range(slots)]
        of_nodes = [f"{host} {slots}" for host, slots in nodes]
        result.update(zip(OF_HOSTS.get(system, ()), (" ".join(of_slots), " ".join(of_nodes))))
        if system in HOST_FILES:
            lines = [f"{text} koala@{text.split()[0]} <NULL>" for text in of_nodes]
            result[HOST_FILES[system]] = path = f"{folder}/{system}-hosts"
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in (lines if system == GRID_ENGINE else of_slots))
        if "KOALA_ARRAY_JOB" in environment:
            counterparts.update({name: "KOALA_ARRAY_JOB" for name in ("JOB_ID", "LSB_JOBID") if name in counterparts})
        elif system == GRID_ENGINE:
            names = ("SGE_TASK_ID", "SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE")
            result.update(dict.fromkeys(names, "undefined"))
        elif system == LSF:
            result["LSB_JOBINDEX"] = "0"
        values = {name: environment[own] for name, own in counterparts.items() if own in environment}
        result.update({**values, **CONSTANT[system]})
    missing = [name for name in SUBMISSION_FOLDERS if name in result and not os.path.isdir(result[name])]
    result.update(dict.fromkeys(missing, os.getcwd()))
    return result


def translated_commands(client: str) -> dict[str, str]:
    """Return the shell scripts of ``srun``, ``scontrol`` and other names of ``mpirun``, and of commands that say why
    they are not available.

    ``client``: the shell's words that start ``mpirun``.
    """
    unavailable = {name: UNAVAILABLE.format(name=name) for name in COMMANDS}
    aliases = dict.fromkeys(("mpirun.lsf", "ibrun"), f'#!/bin/sh\nexec {client} "$@"\n')
    return {**unavailable, **aliases, "srun": f'#!/bin/sh\nexec {client} --srun "$@"\n', "scontrol": SCONTROL}
