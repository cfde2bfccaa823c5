"""Job scripts of the kinds that are common in public repositories, and what ``--translate`` makes of each."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ForeignScript:
    """A script for Slurm or Grid Engine, the options that it becomes, and the numbers of lines without a meaning."""

    name: str
    text: str
    options: tuple[str, ...] = ()
    """Options on the command line with which the translated script is submitted."""
    fields: dict[str, Any] = field(default_factory=dict)
    unclear: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    """Parts of the message about other lines."""


SCRIPTS = [
    ForeignScript(
        "hybrid",
        """\
#!/bin/bash -l
#SBATCH --job-name=shallow-water
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2 --cpus-per-task=2   # one on each socket
#SBATCH --time=02:30:00
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=ada@example.org
module load openmpi
export OMP_NUM_THREADS=4
srun ./shallow --input case.nml
""",
        fields={
            "name": "shallow-water",
            "request": {"type": "flexible", "total_size": 4},
            "processes_per_node": 2,
            "cores": 4,
            "walltime": 9000,
            "mail_type": ["end", "fail"],
            "mail_user": "ada@example.org",
        },
        remarks=("line 10: srun does not reach the nodes of other clusters: use mpirun",),
    ),
    ForeignScript(
        "short options",
        """\
#!/bin/sh
#SBATCH -J bench -N 2 -n 8
#SBATCH -t 90 -o bench-%j.out
#SBATCH -D /tmp
mpirun -np $SLURM_NTASKS ./bench
""",
        fields={
            "name": "bench",
            "request": {"type": "flexible", "total_size": 2},
            "processes_per_node": 4,
            "walltime": 5400,
            "output": "bench-%j.out",
            "workdir": "/tmp",
        },
        remarks=("line 5: $SLURM_NTASKS does not describe the whole job: use KOALA_SLOTS",),
    ),
    ForeignScript(
        "training on GPUs",
        """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --gpus-per-task=4
#SBATCH --cpus-per-task=32
#SBATCH --time=1-00:00
torchrun --nproc-per-node 4 train.py --epochs 90
""",
        unclear=(4,),
        remarks=("line 3: #SBATCH --nodes 1 → --flexible 1 --cores 32", "line 4: #SBATCH --gpus-per-task 4 → NOT"),
    ),
    ForeignScript(
        "dependent step",
        """\
#!/bin/bash
#SBATCH --dependency=afterok:4711
#SBATCH --nodes=1
#SBATCH --export=ALL
python merge.py
""",
        unclear=(2,),
        remarks=("numbers of Slurm's jobs mean nothing here", "line 4: #SBATCH --export ALL → --export ALL\n"),
    ),
    ForeignScript(
        "serial",
        """\
#!/usr/bin/env python3
#SBATCH --ntasks=1
#SBATCH --time=15:30
#SBATCH --requeue
#SBATCH --exclusive

print("one task")
#SBATCH --nodes=9
""",
        fields={"request": {"type": "flexible", "total_size": 1}, "walltime": 930},
        remarks=("line 8: it has no effect, since it follows a command",),
    ),
    ForeignScript(
        "checkpointing",
        """\
#!/bin/bash
#SBATCH --nodes=8 --ntasks-per-node=1
#SBATCH --signal=USR1@120
#SBATCH --no-requeue
#SBATCH --export=NONE,SEED=7
#SBATCH -t 2-12
cd $SLURM_SUBMIT_DIR
mpirun ./model
""",
        fields={
            "request": {"type": "flexible", "total_size": 8},
            "processes_per_node": 1,
            "warning": "USR1@120",
            "max_restarts": 0,
            "environment": {"SEED": "7"},
            "walltime": 216000,
        },
        remarks=("line 7: $SLURM_SUBMIT_DIR does not describe the whole job: use nothing: the script starts",),
    ),
    ForeignScript(
        "only tasks",
        """\
#!/bin/bash
#SBATCH --ntasks=64
#SBATCH --signal=B:TERM@60
#SBATCH --time=soon
mpirun ./lattice
""",
        unclear=(2, 3, 4),
        remarks=("it says no number of nodes: add #KOALA --flexible NODES --ppn RANKS",),
    ),
    ForeignScript(
        "Grid Engine, serial",
        """\
#!/bin/bash
#$ -N align
#$ -cwd -j y
#$ -l h_rt=4:00:00
#$ -m ea -M ada@example.org
#$ -v THREADS=4
#$ -S /bin/bash
echo "job $JOB_ID"
""",
        options=("--flexible", "1"),
        fields={
            "name": "align",
            "request": {"type": "flexible", "total_size": 1},
            "walltime": 14400,
            "mail_type": ["end", "fail"],
            "mail_user": "ada@example.org",
            "environment": {"THREADS": "4"},
        },
        remarks=("line 8: $JOB_ID does not describe the whole job: use KOALA_JOB_ID",),
    ),
    ForeignScript(
        "Grid Engine, parallel",
        """\
#!/bin/sh
#$ -pe openmpi 32
#$ -V
#$ -l h_rt=3600,mem_free=4G
mpirun -np $NSLOTS -machinefile $PE_HOSTFILE ./solve
""",
        unclear=(2, 4),
        remarks=(
            "slots do not say how many nodes",
            "line 3: #$ -V → --export ALL\n",
            "line 4: #$ -l h_rt=3600 → --walltime 1h\n",
            "line 4: #$ -l mem_free=4G → NOT UNDERSTOOD: koalapy has no resource mem_free=4G",
            "use KOALA_HOSTFILE",
        ),
    ),
    ForeignScript(
        "Grid Engine, for both systems",
        """\
#!/bin/bash
#$ -l h_rt=1800
#$ -r n
#KOALA --nonfixed 2,2 --walltime 20m
#KOALA --env MODE=fast
mpirun ./solve
""",
        fields={
            "request": {"type": "nonfixed", "components": [{"size": 2}, {"size": 2}]},
            "walltime": 1200,
            "max_restarts": 0,
            "environment": {"MODE": "fast"},
        },
    ),
]
