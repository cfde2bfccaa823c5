"""Forms of public job scripts, translated, with programs that print their variables, ranks and input."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.grid.testbed import WEST, Testbed

SHOW = """\
#!/bin/sh
for name; do eval "printf '%s ' \\"$name=\\${$name-none}\\""; done
[ -t 0 ] || printf '%s' "$(cat)"
echo
"""
"""A program that prints variables by name, and its input."""
CLUSTERS = ("north", "south", "east", WEST)


@dataclass(frozen=True)
class Form:
    """A script, the requests with which it is played, and each line of its output with its count.

    ``<job>`` is the number of the job.
    """

    name: str
    text: str
    printed: dict[str, int]
    played: tuple[str, ...] = ("north", "east")
    """Clusters, each for a separate job, or a fixed request over several clusters."""
    options: tuple[str, ...] = field(default=())

    def options_for(self, cluster: str) -> list[str]:
        if ":" in cluster:
            return [*self.options, "--fixed", cluster]
        return [*self.options, *(word for name in CLUSTERS if name != cluster for word in ("--exclude", name))]


FORMS = [
    Form(
        "Slurm, array",
        """\
#!/bin/bash
#SBATCH --array=1-5:2%2
#SBATCH --ntasks=1 --cpus-per-task=2 --time=10 --job-name=sweep
./show SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_COUNT SLURM_ARRAY_TASK_MIN SLURM_ARRAY_TASK_MAX SLURM_ARRAY_TASK_STEP \\
    SLURM_ARRAY_JOB_ID SLURM_JOB_NAME SLURM_CPUS_PER_TASK OMP_NUM_THREADS SLURM_NTASKS
""",
        {
            f"SLURM_ARRAY_TASK_ID={index} SLURM_ARRAY_TASK_COUNT=3 SLURM_ARRAY_TASK_MIN=1 SLURM_ARRAY_TASK_MAX=5 "
            "SLURM_ARRAY_TASK_STEP=2 SLURM_ARRAY_JOB_ID=<job> SLURM_JOB_NAME=sweep SLURM_CPUS_PER_TASK=2 "
            "OMP_NUM_THREADS=2 SLURM_NTASKS=1 ": 1
            for index in (1, 3, 5)
        },
    ),
    Form(
        "Slurm, tasks by srun",
        """\
#!/bin/bash -l
#SBATCH -N 4 --ntasks-per-node=1
#SBATCH -t 0-00:10:00 --exclusive
hosts=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)
export HOSTS=$hosts
cd "$SLURM_SUBMIT_DIR"
srun --ntasks=4 ./show SLURM_PROCID SLURM_NTASKS SLURM_NNODES SLURM_JOB_ID HOSTS
""",
        {f"SLURM_PROCID={rank} SLURM_NTASKS=4 SLURM_NNODES=4 SLURM_JOB_ID=<job> HOSTS=4 ": 1 for rank in range(4)},
        ("north:2,east:2", "south:2,west:2"),
    ),
    Form(
        "Slurm, two steps side by side",
        """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks=2
srun -N1 -n1 ./show SLURM_PROCID SLURM_NTASKS &
srun -N1 -n1 ./show SLURM_PROCID SLURM_NTASKS &
wait
""",
        {"SLURM_PROCID=0 SLURM_NTASKS=1 ": 2},
        ("north", "east", "north:1,east:1"),
    ),
    Form(
        "Slurm, input of rank 0",
        """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2
#SBATCH --get-user-env --comment="a course" --no-requeue
echo "units metal" >in.txt
mpirun -np $SLURM_NTASKS ./show OMPI_COMM_WORLD_RANK SLURM_NTASKS <in.txt
""",
        {"OMPI_COMM_WORLD_RANK=0 SLURM_NTASKS=4 units metal": 1}
        | {f"OMPI_COMM_WORLD_RANK={rank} SLURM_NTASKS=4 ": 1 for rank in (1, 2, 3)},
        ("north", "east", "south:1,east:1"),
    ),
    Form(
        "Slurm, program in Python",
        """\
#!/usr/bin/env python3
#SBATCH --ntasks=1
#SBATCH --mem=200M
import os

print(os.environ["SLURM_JOB_ID"], os.environ["SLURM_NTASKS"], os.environ["SLURM_SUBMIT_DIR"] == os.getcwd())
""",
        {"<job> 1 True": 1},
    ),
    Form(
        "Slurm, ranks without nodes",
        """\
#!/bin/bash
#SBATCH -n 2
#SBATCH -J few -o few-%j.txt
srun ./show SLURM_PROCID SLURM_NNODES
""",
        {f"SLURM_PROCID={rank} SLURM_NNODES=1 ": 1 for rank in range(2)},
        options=("--ranks-on", "one-node"),
    ),
    Form(
        "Grid Engine, slots of a node",
        """\
#!/bin/bash
#$ -S /bin/bash
#$ -cwd -V
#$ -N merge
#$ -pe smp 2
#$ -l h_vmem=100M,h_rt=0:10:00
./show NSLOTS NHOSTS JOB_ID JOB_NAME SGE_TASK_ID
wc -l <$PE_HOSTFILE
""",
        {"NSLOTS=2 NHOSTS=1 JOB_ID=<job> JOB_NAME=merge SGE_TASK_ID=undefined ": 1, "1": 1},
    ),
    Form(
        "Grid Engine, ranks",
        """\
#!/bin/sh
#$ -cwd -pe openmpi 4
#$-l h_rt=600
mpirun -np $NSLOTS ./show OMPI_COMM_WORLD_RANK NSLOTS NHOSTS JOB_ID
awk '{slots += $2} END {print NR, slots}' $PE_HOSTFILE
""",
        {f"OMPI_COMM_WORLD_RANK={rank} NSLOTS=4 NHOSTS=4 JOB_ID=<job> ": 1 for rank in range(4)} | {"4 4": 1},
        ("north:2,east:2",),
        ("--ranks-on", "each-node"),
    ),
    Form(
        "Grid Engine, array",
        """\
#!/bin/bash
#$ -t 1-4:3 -tc 1
#$ -j y -r n -cwd
./show SGE_TASK_ID SGE_TASK_FIRST SGE_TASK_LAST SGE_TASK_STEPSIZE JOB_ID
""",
        {
            f"SGE_TASK_ID={index} SGE_TASK_FIRST=1 SGE_TASK_LAST=4 SGE_TASK_STEPSIZE=3 JOB_ID=<job> ": 1
            for index in (1, 4)
        },
    ),
    Form(
        "PBS, ranks of nodes",
        """\
#!/bin/bash
#PBS -l nodes=2:ppn=2,walltime=0:10:00
#PBS -N flow -j oe
cd $PBS_O_WORKDIR
mpirun --hostfile $PBS_NODEFILE -np $PBS_NP ./show OMPI_COMM_WORLD_RANK PBS_NUM_NODES PBS_NUM_PPN PBS_JOBNAME PBS_JOBID
wc -l <$PBS_NODEFILE
""",
        {
            f"OMPI_COMM_WORLD_RANK={rank} PBS_NUM_NODES=2 PBS_NUM_PPN=2 PBS_JOBNAME=flow PBS_JOBID=<job> ": 1
            for rank in range(4)
        }
        | {"4": 1},
        ("north", "east", "south:1,east:1"),
    ),
    Form(
        "PBS, array",
        """\
#!/bin/bash
#PBS -t 0-1
#PBS -l nodes=1:ppn=1
cd $PBS_O_WORKDIR
./show PBS_ARRAYID PBS_ARRAY_INDEX PBS_ARRAY_ID
""",
        {f"PBS_ARRAYID={index} PBS_ARRAY_INDEX={index} PBS_ARRAY_ID=<job> ": 1 for index in (0, 1)},
    ),
    Form(
        "LSF, slots by node",
        """\
#!/usr/bin/env bash
#BSUB -J mesher
#BSUB -n 4 -W 10
#BSUB -R "span[ptile=2]"
set -euo pipefail
cd "${LS_SUBCWD:-$PWD}"
mpirun -np "${LSB_DJOB_NUMPROC:-384}" ./show OMPI_COMM_WORLD_RANK LSB_DJOB_NUMPROC LSB_JOBID LSB_JOBINDEX
""",
        {f"OMPI_COMM_WORLD_RANK={rank} LSB_DJOB_NUMPROC=4 LSB_JOBID=<job> LSB_JOBINDEX=0 ": 1 for rank in range(4)},
        ("north:1,east:1",),
    ),
]
REFUSED = [
    ("#!/bin/sh\n#SBATCH -N 1\nsrun ./show\nsbatch again.sh\n", "line 4: NOT UNDERSTOOD: sbatch does not know"),
    ("#!/bin/sh\n#$ -pe smp 2\nqsub -hold_jid $JOB_ID next.sh\n", "line 3: NOT UNDERSTOOD: qsub does not know"),
    ("#!/bin/sh\n#SBATCH -N 1\n#SBATCH hetjob\n#SBATCH -N 2\nsrun ./show\n", "write #KOALA --nonfixed 1,2"),
    (
        "#!/bin/sh\n#SBATCH -N 1\nsrun ./show $SLURM_CPUS_ON_NODE\n",
        "line 3: NOT UNDERSTOOD: $SLURM_CPUS_ON_NODE is not",
    ),
    ("#!/bin/sh\n#SBATCH -n 4\nsrun ./show\n", "write #KOALA --flexible 4 --ppn 1"),
    ("#!/bin/sh\n#PBS -l nodes=1\npbsdsh ./show\n", "line 3: NOT UNDERSTOOD: pbsdsh does not know"),
]
"""Scripts that start nothing, and a part of the message."""


def test_script_of_each_form_on_each_resource_manager_gets_what_it_asks_for(testbed: Testbed, tmp_path: Path) -> None:
    (tmp_path / "show").write_text(SHOW)
    (tmp_path / "show").chmod(0o755)
    with testbed.open_west():
        jobs = {}
        for form in FORMS:
            (tmp_path / "job.sh").write_text(form.text)
            for cluster in form.played:
                options = ["-q", "--stage", "show", *form.options_for(cluster)]
                submitted = testbed.run_koala("submit", "--translate", *options, "job.sh", cwd=tmp_path)
                assert submitted.returncode == 0, (form.name, submitted.stderr)
                jobs[int(submitted.stdout)] = form, cluster
        wrong = [
            problem for ident, (form, cluster) in jobs.items() if (problem := check(testbed, ident, form, cluster))
        ]
        assert not wrong, "\n".join(wrong)


def check(testbed: Testbed, ident: int, form: Form, cluster: str) -> str:
    """Return how a job's result differs from what its script asks for; empty if it does not."""
    job = testbed.wait_for_end(ident, 120.0)
    tasks = testbed.http.get("/api/v1/jobs", params={"array": ident}).json()["jobs"] if job["tasks"] else [job]
    output = "".join(testbed.read_output(task["id"]) for task in tasks)
    expected = Counter({line.replace("<job>", str(ident)): count for line, count in form.printed.items()})
    lines = Counter(output.splitlines())
    if job["state"] == "succeeded" and lines == expected:
        return ""
    return f"{form.name} on {cluster}: {job['state']} {job['reason']}, more {lines - expected}, less {expected - lines}"


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_script_that_needs_a_batch_system_starts_nothing(
    testbed: Testbed, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "job.sh").write_text(text)
    refused = testbed.run_koala("submit", "--translate", "-q", "job.sh", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert message in refused.stderr
    assert testbed.http.get("/api/v1/jobs", params={"active": True}).json()["jobs"] == []
