"""Job scripts of the kinds that are common in public repositories, their translation, and their output."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ForeignScript:
    """A script for another system, the options that it becomes, and the numbers of lines without a meaning."""

    name: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    unclear: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    """Parts of the message about other lines."""
    changes: tuple[tuple[str, str], ...] = ()
    """The changes that messages ask for, with which the script runs on a testbed without mail."""
    printed: dict[str, int] = field(default_factory=dict)
    """Each line of the output of the changed script, and how often it is printed. JOB is the job's number."""

    @property
    def changed_text(self) -> str:
        text = self.text
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


PROGRAMS = ("bench", "fit.sh", "lattice", "merge.sh", "model", "shallow", "solve", "train.sh")
PROGRAM_TEXT = '#!/bin/sh\necho "${0##*/} $* ${OMP_NUM_THREADS:-$SEED}"\n'
"""Programs that take the places of those of the scripts, and print their arguments, and a variable."""
SCRIPTS = [
    ForeignScript(
        "hybrid",
        """\
#!/bin/bash -l
#SBATCH --job-name=shallow-water
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1 --cpus-per-task=2   # threads on all cores
#SBATCH --time=02:30:00
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=ada@example.org
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun ./shallow --input case.nml
""",
        fields={
            "name": "shallow-water",
            "request": {"type": "flexible", "total_size": 2},
            "processes_per_node": 1,
            "cpus_per_rank": 2,
            "walltime": 9000,
            "mail_type": ["end", "fail"],
            "mail_user": "ada@example.org",
        },
        changes=(
            ("#SBATCH --mail-type=END,FAIL\n#SBATCH --mail-user=ada@example.org\n", ""),
            ("export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\n", ""),
            ("srun", "mpirun"),
        ),
        printed={"shallow --input case.nml 2": 2},
    ),
    ForeignScript(
        "short options",
        """\
#!/bin/sh
#SBATCH -J bench -N 2 -n 4
#SBATCH -t 90 -o bench-%j.out
#SBATCH -D /tmp
mpirun -np $SLURM_NTASKS ./bench
""",
        fields={
            "name": "bench",
            "request": {"type": "flexible", "total_size": 2},
            "processes_per_node": 2,
            "walltime": 5400,
            "output": "bench-%j.out",
            "workdir": "/tmp",
        },
        changes=(("#SBATCH -D /tmp\n", ""),),
        printed={"bench  ": 4},
    ),
    ForeignScript(
        "training on GPUs",
        """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --gres=gpu:a100:2
#SBATCH --cpus-per-task=2
#SBATCH --mem=2G
#SBATCH --time=1-00:00
#SBATCH --output=%x-%j.log
./train.sh --epochs 90
""",
        fields={
            "request": {"type": "flexible", "total_size": 1},
            "gpus": "a100:2",
            "memory": 2**31,
            "cpus_per_rank": 2,
            "output": "%x-%j.log",
            "walltime": 86400,
        },
        remarks=("no line says how many nodes → --flexible 1 --ppn 1",),
        printed={"train.sh --epochs 90 2": 1},
    ),
    ForeignScript(
        "sweep",
        """\
#!/bin/bash
#SBATCH --array=0-3%2
#SBATCH --ntasks=1 --cpus-per-task=2 --mem-per-cpu=500M
#SBATCH --output=sweep-%A_%a.out
#SBATCH --spread-job
#SBATCH --time=00:20:00
./fit.sh --case $SLURM_ARRAY_TASK_ID
""",
        unclear=(5,),
        remarks=(
            "line 3: #SBATCH --ntasks 1 → --flexible 1 --ppn 1\n",
            "line 3: #SBATCH --mem-per-cpu 500M → --memory 1000MiB (on each node)\n",
            "line 5: #SBATCH --spread-job → NOT UNDERSTOOD: koalapy has no such option",
        ),
        changes=(("#SBATCH --spread-job\n", ""),),
        printed={f"fit.sh --case {index} 2": 1 for index in range(4)},
    ),
    ForeignScript(
        "dependent step",
        """\
#!/bin/bash
#SBATCH --dependency=afterok:4711
#SBATCH --nodes=1
#SBATCH --export=ALL
./merge.sh a b
""",
        unclear=(2,),
        remarks=("with a number of koalapy's jobs", "line 4: #SBATCH --export ALL → --export ALL\n"),
        changes=(("#SBATCH --dependency=afterok:4711\n", ""),),
        printed={"merge.sh a b ": 1},
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
        printed={"one task": 1},
    ),
    ForeignScript(
        "checkpointing",
        """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --signal=USR1@120
#SBATCH --no-requeue --open-mode=append
#SBATCH --export=NONE,SEED=7
#SBATCH -t 2-12
cd $SLURM_SUBMIT_DIR
mpirun ./model
""",
        fields={
            "request": {"type": "flexible", "total_size": 2},
            "processes_per_node": 1,
            "warning": "USR1@120",
            "max_restarts": 0,
            "environment": {"SEED": "7"},
            "walltime": 216000,
        },
        changes=(("cd $SLURM_SUBMIT_DIR\n", ""),),
        printed={"model  7": 2},
    ),
    ForeignScript(
        "only tasks",
        """\
#!/bin/bash
#SBATCH --ntasks=4
#SBATCH --signal=B:TERM@60
#SBATCH --time=soon
module load openmpi
mpirun ./lattice
""",
        unclear=(2, 3, 4),
        remarks=(
            "write #KOALA --flexible 4 --ppn 1 for a node for each rank, or --flexible 1 --ppn 4 for one node",
            "line 5: a module may put its own mpirun first in PATH: use koala mpirun",
        ),
        changes=(
            ("#SBATCH --ntasks=4\n", "#KOALA --flexible 2 --ppn 2\n"),
            ("B:TERM@60", "TERM@60"),
            ("#SBATCH --time=soon", "#KOALA --walltime 10m"),
            ("module load openmpi\n", ""),
        ),
        printed={"lattice  ": 4},
    ),
    ForeignScript(
        "Grid Engine, array",
        """\
#!/bin/bash
#$ -N align
#$ -cwd -j y
#$ -l h_rt=4:00:00
#$ -t 1-3 -tc 2
#$ -m ea -M ada@example.org
#$ -v SEED=4
#$ -S /bin/bash -r n
./fit.sh "chunk $SGE_TASK_ID"
""",
        fields={
            "name": "align",
            "request": {"type": "flexible", "total_size": 1},
            "walltime": 14400,
            "mail_type": ["end", "fail"],
            "mail_user": "ada@example.org",
            "environment": {"SEED": "4"},
            "max_restarts": 0,
        },
        remarks=("line 5: #$ -t 1-3 → --array 1-3%2\n",),
        changes=(("#$ -m ea -M ada@example.org\n", ""),),
        printed={f"fit.sh chunk {index} 4": 1 for index in (1, 2, 3)},
    ),
    ForeignScript(
        "Grid Engine, parallel",
        """\
#!/bin/sh
#$ -pe openmpi 4
#$ -V
#$ -l h_rt=3600,mem_free=4G
mpirun -np $NSLOTS -machinefile $PE_HOSTFILE ./solve
echo "job $JOB_ID"
""",
        unclear=(2, 4),
        remarks=(
            "4 slots do not say how many nodes: write #KOALA --flexible 4 --ppn 1 for a node for each rank",
            "line 3: #$ -V → --export ALL\n",
            "line 4: #$ -l h_rt=3600 → --walltime 1h\n",
            "line 4: #$ -l mem_free=4G → NOT UNDERSTOOD: it is the memory of a slot",
        ),
        changes=(
            ("#$ -pe openmpi 4\n", "#KOALA --flexible 2 --ppn 2\n"),
            ("#$ -V\n", "#$ -V -cwd\n"),
            (",mem_free=4G", ""),
            ("$NSLOTS -machinefile $PE_HOSTFILE", "$KOALA_SLOTS -hostfile $KOALA_HOSTFILE"),
            ("$JOB_ID", "$KOALA_JOB_ID"),
        ),
        printed={"solve  ": 4, "job JOB": 1},
    ),
    ForeignScript(
        "PBS, chunks",
        """\
#!/bin/bash
#PBS -N flow -j oe
#PBS -l select=2:ncpus=2:mpiprocs=2
#PBS -lwalltime=02:00:00,place=scatter:excl
#PBS -W depend=afterok:7
#PBS -o logs/$PBS_JOBID.out -e unused
cd $PBS_O_WORKDIR
mpirun -machinefile $PBS_NODEFILE ./solve $(wc -l <$PBS_NODEFILE) $PBS_ARRAYID
""",
        fields={
            "name": "flow",
            "request": {"type": "flexible", "total_size": 2},
            "processes_per_node": 2,
            "walltime": 7200,
        },
        unclear=(5,),
        remarks=(
            "line 3: #PBS -l select=2:ncpus=2:mpiprocs=2 → --flexible 2 --ppn 2 (a node for each chunk)\n",
            "line 6: #PBS -o logs/$PBS_JOBID.out → --output logs/%j.out",
            "line 6: #PBS -e unused → errors are in the output, by -j\n",
        ),
        changes=(("#PBS -W depend=afterok:7\n", ""), ("#PBS -o logs/$PBS_JOBID.out -e unused\n", "")),
        printed={"solve 4 ": 4},
    ),
    ForeignScript(
        "LSF, array",
        """\
#!/bin/sh
#BSUB -J align[1-3:2]%1
#BSUB -n 2 -W 1:30 -M4000
#BSUB -R "select[type==any] span[hosts=1]"
#BSUB -o align-%J-%I.out
./fit.sh $LSB_JOBINDEX of $LSB_DJOB_NUMPROC
""",
        unclear=(3, 4),
        remarks=(
            "line 2: #BSUB -J align[1-3:2]%1 → --name align --array 1-3:2%1\n",
            "line 3: #BSUB -n 2 → --flexible 1 --ppn 2\n",
            "line 3: #BSUB -W 1:30 → --walltime 90m\n",
            "line 3: #BSUB -M 4000 → NOT UNDERSTOOD: its unit and its processes differ between sites: use --memory",
            "line 4: #BSUB -R span[hosts=1] → together with -n\n",
        ),
        changes=((" -M4000", ""), ("select[type==any] ", ""), ("#BSUB -o align-%J-%I.out\n", "")),
        printed={"fit.sh 1 of 2 ": 1, "fit.sh 3 of 2 ": 1},
    ),
]
