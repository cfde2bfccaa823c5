"""``koala submit`` of a script: its ``#KOALA`` lines, and the translation of those of other systems."""

import getpass
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.client.errors import Exit
from koalapy.runner.foreign_scripts import AT_SUBMISSION, TRANSLATED
from tests.cli.conftest import Koala, Server
from tests.cli.foreign_scripts import SCRIPTS, ForeignScript

HEAD = "#!/bin/bash\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Serve all tests of this module: to start a server takes longer than most of them."""
    with Server() as server:
        yield server


@pytest.fixture(autouse=True)
def without_jobs(server: Server) -> None:
    server.service.records.clear()
    server.service.keys.clear()


@pytest.fixture
def write_script(tmp_path: Path) -> Any:
    def write(content: str | bytes) -> str:
        path = tmp_path / "job.sh"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def read_job(koala: Koala, *arguments: str) -> dict[str, Any]:
    """Submit a script and return the job."""
    ended = koala("submit", "--json", *arguments)
    assert ended.code == 0, ended.err
    job: dict[str, Any] = json.loads(ended.out)
    return job


def test_submit_of_script_sends_text_options_and_arguments(koala: Koala, write_script: Any) -> None:
    text = f"""{HEAD}
# a comment
#KOALA --nonfixed 2,1 --walltime 1h   # one hour
#KOALA --env A=1 --env B="x # y"
#KOALA --ppn=2
mpirun ./prog
"""
    job = read_job(koala, write_script(text), "-n", "a b", "--", "c")
    assert (job["script"], job["command"]) == (text, ["job.sh", "-n", "a b", "--", "c"])
    assert [component["size"] for component in job["request"]["components"]] == [2, 1]
    assert (job["walltime"], job["environment"], job["processes_per_node"]) == (3600, {"A": "1", "B": "x # y"}, 2)


def test_options_on_command_line_override_script(koala: Koala, write_script: Any) -> None:
    path = write_script(
        f"{HEAD}#KOALA --flexible 2 --max-components 2 --name a --env A=1 --env B=1\n#KOALA --walltime 1h\n"
    )
    job = read_job(koala, "--nonfixed", "1,1", "--name", "b", "--env", "B=2", path)
    assert [component["size"] for component in job["request"]["components"]] == [1, 1]
    assert (job["name"], job["environment"], job["walltime"]) == ("b", {"A": "1", "B": "2"}, 3600)
    job = read_job(koala, "--flexible", "3", path)
    assert (job["request"]["total_size"], job["request"]["max_components"]) == (3, 2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("#KOALA --nodse 2", "job.sh:2: No such option '--nodse'"),
        ("#KOALA --flexible two", "job.sh:2: Invalid value for '--flexible': 'two' is not a valid"),
        ("#KOALA --flexible 2\n#KOALA --flexible 3", "job.sh:3: it repeats job.sh:2; leave one out"),
        (
            "#KOALA --flexible 2\n#KOALA --walltime 90",
            "job.sh:3: --walltime is '90', which may mean seconds or minutes",
        ),
        ("#KOALA --flexible 2\n#KOALA --walltime soon", "job.sh:3: --walltime is 'soon', not a duration"),
        ("#KOALA --coallocation some", "job.sh:2: --coallocation is 'some'"),
        ("#KOALA --wait", "job.sh:2: --wait is an option of the command, not of the job; give it on the command line"),
        ("#KOALA --url=http://x", "job.sh:2: --url is an option of the command"),
        ("#KOALA --help", "job.sh:2: --help is"),
        ("#KOALA --name 'x", "job.sh:2: no closing quotation; close the quotes"),
        ("#KOALA word", "job.sh:2: Got unexpected extra argument"),
        ("#KOALA--flexible 2", "job.sh:2: '#KOALA--flexible 2' has no blank after #KOALA"),
        ("#KOALA --min-component 2", "--min-component, --max-components and --split are for flexible requests"),
        ("", "the request has no nodes"),
    ],
)
def test_wrong_line_of_script_is_named(koala: Koala, write_script: Any, line: str, says: str) -> None:
    ended = koala("submit", write_script(f"{HEAD}{line}\ntrue\n"))
    assert ended.code == Exit.USAGE
    assert says in ended.err


@pytest.mark.parametrize(
    ("line", "options", "says"),
    [
        ("#KOALA --fixed nowhere:2", (), "koala: job.sh:2: --fixed: cluster of component 0 "),
        ("#KOALA --flexible 2", ("--fixed", "nowhere:2"), "koala: --fixed: cluster of component 0 "),
    ],
)
def test_wrong_request_names_line_of_script_only_if_it_is_from_there(
    koala: Koala, write_script: Any, line: str, options: tuple[str, ...], says: str
) -> None:
    ended = koala("submit", *options, write_script(f"{HEAD}{line}\ntrue\n"))
    assert ended.code == Exit.USAGE
    assert ended.err.startswith(says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("true\n", "does not begin with #! and an interpreter; begin it with the line #!/bin/bash"),
        ("", "does not begin with #!"),
        ("#!\ntrue\n", "does not begin with #!"),
        ("#!bash\n", "names the interpreter bash without its path"),
        ("#!/bin/bash\r\ntrue\r\n", "has Windows line ends, which its interpreter cannot read; convert it"),
        (b"\x7fELF\0\0", "is a program, not a script; put -- before the command"),
        (b"#!/bin/sh\n# caf\xe9\n", "job.sh:2: the script is not in UTF-8; convert it"),
        (b"#!/bin/sh\n" + b"#" * 2**20, "is larger than 1048576 bytes; put data into files"),
    ],
)
def test_file_that_is_no_script_is_rejected(koala: Koala, write_script: Any, content: str | bytes, says: str) -> None:
    ended = koala("submit", "--flexible", "2", write_script(content))
    assert ended.code == Exit.USAGE
    assert says in ended.err


def test_path_without_script_is_rejected(koala: Koala, tmp_path: Path) -> None:
    ended = koala("submit", "--flexible", "2", str(tmp_path))
    assert f"{tmp_path} is a folder, not a script; name a file in it, or put -- before a command" in ended.err
    ended = koala("submit", "--flexible", "2", str(tmp_path / "none.sh"))
    assert f"there is no script {tmp_path}/none.sh; give a file that begins with #!" in ended.err
    ended = koala("submit", "--translate", "--flexible", "2", "--", "true")
    assert "--translate needs a script" in ended.err


def test_script_and_job_file_are_rejected(koala: Koala, write_script: Any) -> None:
    path = write_script(HEAD)
    ended = koala("submit", "-f", path, path)
    assert (ended.code, "cannot be given together" in ended.err) == (Exit.USAGE, True)


def test_options_after_script_are_noted_as_its_arguments(koala: Koala, write_script: Any) -> None:
    path = write_script(HEAD)
    note = "after the script is its argument; write koala's options before the script\n"
    ended = koala("submit", "--flexible", "1", path, "--dry-run", "-o", "--case=a")
    assert (ended.code, ended.err) == (0, f"koala: --dry-run {note}")
    ended = koala("submit", path, "--flexible=2")
    assert ended.code == Exit.USAGE
    assert ended.err.startswith(f"koala: --flexible {note}koala: the request has no nodes; give --flexible N")
    ended = koala("submit", "--flexible", "1", path, "--name", "--wait")
    assert "koala: --name, --wait after the script are its arguments; write" in ended.err
    assert koala("submit", "--flexible", "1", path, "--", "--wait").err == ""


def test_command_after_dashes_is_no_script(koala: Koala, write_script: Any) -> None:
    job = read_job(koala, "--flexible", "2", "--", write_script(HEAD))
    assert (job["script"], len(job["command"])) == ("", 1)


def test_lines_without_effect_are_reported(koala: Koala, write_script: Any) -> None:
    path = write_script(f"{HEAD}#SBATCH --nodes=2\n#SBATCH -t 1\n#$ -cwd\ntrue\n#KOALA --name late\n")
    ended = koala("submit", "--flexible", "1", path)
    assert ended.code == 0
    assert "job.sh has 2 lines #SBATCH for Slurm, which have no effect: add --translate to use them" in ended.err
    assert "job.sh has 1 line #$ for Grid Engine, which has no effect" in ended.err
    assert "job.sh:6: this #KOALA line has no effect, since it follows a command" in ended.err


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_translated_script(koala: Koala, write_script: Any, script: ForeignScript) -> None:
    ended = koala("submit", "--json", "--translate", write_script(script.text))
    for remark in script.remarks:
        assert remark in ended.err
    if script.unclear:
        assert ended.code == Exit.USAGE
        lines = ", ".join(map(str, script.unclear))
        is_one = len(script.unclear) == 1
        problem = (
            f"line {lines} is not understood; change it" if is_one else f"lines {lines} are not understood; change them"
        )
        assert f"job.sh: {problem}, or write" in ended.err
        assert koala("queue", "--all", "--json").out.count('"id"') == 0
        return
    assert ended.code == 0, ended.err
    job = json.loads(ended.out)
    own = (TRANSLATED, *(name for names in AT_SUBMISSION.values() for name in names))
    job["environment"] = {name: value for name, value in job["environment"].items() if name not in own}
    request = {name: job["request"][name] for name in script.fields["request"]}
    assert request == script.fields["request"]
    assert {name: job[name] for name in script.fields if name != "request"} == {
        name: value for name, value in script.fields.items() if name != "request"
    }


def test_translated_and_own_lines_that_differ_use_own(koala: Koala, write_script: Any) -> None:
    path = write_script(f"{HEAD}#SBATCH -N 4 --time=10\n#KOALA --flexible 2\ntrue\n")
    job = read_job(koala, "--translate", path)
    assert (job["request"]["total_size"], job["walltime"]) == (2, 600)


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("#SBATCH --mincpus=4", "--cores 4"),
        ("#SBATCH -p large", "--partition large"),
        ("#SBATCH --switches=1", "--coallocation never (or --policy communication-aware)"),
        ("#SBATCH --kill-on-invalid-dep=yes", "koalapy always does so"),
        ("#SBATCH --open-mode=append", "koalapy always does so"),
        ("#SBATCH --gpus-per-node=a100", "--gpus a100:1 (on each node)"),
        ("#SBATCH --gpus-per-node=2", "--gpus 2 (on each node)"),
        ("#SBATCH --gres=gpu", "--gpus 1 (on each node)"),
        ("#SBATCH --gres=gpu:a100:2", "--gpus a100:2 (on each node)"),
        ("#SBATCH --export=NONE", "koalapy does so by default"),
        ("#SBATCH --export=A=1,ALL", "--export ALL,A=1"),
        ("#SBATCH --export=A=1,B=2", "--export A=1,B=2"),
        ("#SBATCH -c 4", "--cpus-per-rank 4"),
        ("#SBATCH --mem=0", "jobs have all memory of their nodes"),
        ("#SBATCH -n 8 --ntasks-per-node=4 --gpus-per-task=a100:2", "--gpus a100:8 (on each node)"),
        ("#SBATCH -N 2 --gpus=h100:4", "--gpus h100:2 (on each node)"),
        ("#SBATCH -N 2 -n 8 -c 2 --mem-per-cpu=1G", "--memory 8GiB (on each node)"),
        ("#SBATCH -n 1", "--flexible 1 --ppn 1"),
        ("#SBATCH -N 2", "--flexible 2 --ppn 1"),
        ("#SBATCH --mail-type=END", "no mail without an address: give --mail-user and --mail-type"),
        ("#PBS -m ae", "no mail without an address: give --mail-user and --mail-type"),
        ("#SBATCH -n 2 --ntasks-per-node=4", "--flexible 1 --ppn 2"),
        ("#SBATCH -n1 --mail-type=all --mail-user=a@b.org", "--mail-type begin --mail-type end --mail-type fail"),
        ("#$ -P climate", "--account climate"),
        ("#$-N name", "--name name"),
        ("#$ -S /bin/bash", "the script's first line names its interpreter"),
        (
            "#$ -cwd -o logs/$JOB_NAME.${JOB_ID}.$TASK_ID.log",
            "--output logs/%x.%A.%a.log (on the cluster of the script)",
        ),
        ("#$ -t 1-9 -tc 3", "--array 1-9%3"),
        ("#$ -tc 3 -t 1-9", "--array 1-9%3"),
        ("#$ -t 1-100:2 -tc 10", "--array 1-100:2%10"),
        ("#$ -pe smp 4 -l h_vmem=2G", "--flexible 1 --ppn 4 (smp is an environment of one node)"),
        ("#$ -pe smp 4 -l h_vmem=2G", "--memory 8GiB (on each node)"),
        ("#$ -t 1-9 -o /tmp/", "--output /tmp/%x.o%A.%a (on the cluster of the script)"),
        ("#$ -e /tmp", "--error /tmp/%x.e%A (on the cluster of the script)"),
        ("#$ -cwd -j y -o a -e b", "errors are in the output, by -j"),
        ("#$ -S '/bin/bash -l'", "the script's first line names its interpreter"),
        ("#SBATCH --err=a", "--error a (on the cluster of the script)"),
        ("#SBATCH -o %J-%x", "--output %j-%x (on the cluster of the script)"),
        ("#SBATCH --reservation=days", "--reservation days"),
        ("#SBATCH -N 2-2", "--flexible 2 --ppn 1"),
        ("#PBS -l nodes=2:ppn=8:gpus=1:ib", "--flexible 2 --gpus 1 --feature ib --ppn 8"),
        ("#PBS -l nodes=2:ppn=2,mem=8gb", "--memory 4GiB (on each node)"),
        (
            "#PBS -l select=2:ncpus=8:mem=16gb:ngpus=1",
            "--flexible 2 --ppn 1 --cpus-per-rank 8 --memory 16GiB --gpus 1 (a node for each chunk)",
        ),
        ("#PBS -l ncpus=4", "--flexible 1 --ppn 1 --cpus-per-rank 4"),
        ("#PBS -J 1-10:2", "--array 1-10:2"),
        ("#PBS -t 1-10%2", "--array 1-10%2"),
        ("#PBS -lwalltime=90", "--walltime 90s"),
        ('#BSUB -n 8 -R "span[ptile=4]"', "--flexible 2 --ppn 4"),
        ("#BSUB -n 2 -R span[ptile=4]", "--flexible 1 --ppn 2"),
        ("#BSUB -W30", "--walltime 30m"),
        ("#BSUB -oo log.%J", "--output log.%A (on the cluster of the script)"),
        ('#BSUB -gpu "num=2:mode=shared"', "--gpus 2 (on each node)"),
        ("#$ -l s_rt=50,h_rt=60", "--walltime 1m"),
        ("#$ -l h_rt=1:0:0,h_vmem=4G", "--memory 4GiB (on each node)"),
        ("#$ -pe smp 2 -l h_vmem=4g", "--memory 8GB (on each node)"),
        ("#$ -pe smp 4 -l h_vmem=4000000k", "--memory 16000000kB (on each node)"),
        ("#SBATCH --begin=now+60", "--begin now+60s"),
        ("#$ -l h_vmem=4000000000", "--memory 4000000000B (on each node)"),
        ("#$ -l gpu=1", "--gpus 1 (on each node)"),
        ("#$ -cwd -o log", "--output log (on the cluster of the script)"),
        ("true\n#$ -t 1-4", "--array 1-4"),
        ("#SBATCH--mincpus=4", "--cores 4"),
        ("#SBATCH\t--mincpus=4\t# why", "--cores 4"),
        ("#SBATCH -vn1", "--flexible 1 --ppn 1"),
        ("#SBATCH --exclusive=user", "jobs get whole nodes"),
        ("#PBS -l nodes=2,mem=8000000000", "--memory 4000000000B (on each node)"),
        ("  #PBS -N name", "--name name"),
        ("#PBS -VN name", "--name name"),
        ("#PBS -joe", "errors are in the output without -e"),
        ("#PBS -J 1-4 -o out.^array_index^", "--output out.%a (on the cluster of the script)"),
        ("#PBS -d /tmp", "--chdir /tmp"),
        ("#PBS -l procs=1", "--flexible 1 --ppn 1"),
        ('#BSUB -env "all, A=1"', "--export ALL,A=1"),
        ('#BSUB -Jd "two words" -ul', "koalapy ignores it"),
        ("#BSUB -Ne -u a@b.org", "--mail-type fail"),
        ("#BSUB -nnodes 2", "--ppn 1 --flexible 2"),
        ("#BSUB -n1", "--flexible 1 --ppn 1"),
        ("#SBATCH -o %N.out", "--output %N.out (on the cluster of the script)"),
        ("#SBATCH -N 2 -n 2 --ntasks-per-node=16", "--ppn 1"),
        ("#SBATCH -m block --ntasks-per-socket=1", "koalapy ignores it: mpirun binds no ranks"),
        ("#SBATCH --array=[1-9]%3", "--array 1-9%3"),
        ("#$ -pe smp 2 -l m_mem_free=4G", "--memory 8GiB (on each node)"),
        ("#$ -p -1", "koalapy ignores it, since there are two priorities only"),
        ("#PBS -l nodes=1:ppn=2,pmem=1gb", "--memory 2GiB (on each node)"),
        ("#PBS -l select=1:ncpus=1 -l ngpus=2", "--gpus 2 (on each node)"),
        ("#$ -l mem_free=9G,h_vmem=9G", "another line says so"),
        ("#SBATCH --gres=gpu:2 --gpus-per-node=2", "another line says so"),
    ],
)
def test_translated_line_with_meaning_is_listed(koala: Koala, write_script: Any, line: str, meaning: str) -> None:
    ended = koala("submit", "--translate", write_script(f"{HEAD}{line}\n"))
    assert f"→ {meaning}\n" in ended.err
    assert "NOT UNDERSTOOD" not in ended.err


def test_translated_option_is_listed_under_its_own_name(koala: Koala, write_script: Any) -> None:
    ended = koala("submit", "--translate", write_script(f"{HEAD}#SBATCH -N 1 --ntasks-per-socket=1\n"))
    assert "#SBATCH --ntasks-per-socket 1 →" in ended.err


@pytest.mark.parametrize(
    ("lines", "options", "memory"),
    [
        ("#PBS -l pmem=2gb", (), "2GiB"),
        ("#KOALA --flexible 4 --ppn 8\n#PBS -l pmem=2gb", (), "16GiB"),
        ("#$ -l h_vmem=1G", ("--ppn", "4"), "4GiB"),
        ("#$ -pe smp 2 -l h_vmem=1G", ("--flexible", "2"), "2GiB"),
        ("#PBS -l nodes=2,mem=8gb", ("--nonfixed", "1,3"), "2GiB"),
        ("#KOALA --fixed north:1\n#PBS -l nodes=2,mem=8gb", (), "8GiB"),
        ("#KOALA --fixed north:1\n#PBS -l nodes=2,mem=8gb", ("--flexible", "4"), "2GiB"),
        ("#KOALA --min-component 2\n#PBS -l nodes=2,mem=8gb", (), "4GiB"),
        ("#SBATCH -N 2 --ntasks-per-node 4 --mem-per-cpu 1G", ("--ppn", "8"), "8GiB"),
        ("#KOALA --ppn 2\n#SBATCH -N 2 --mem-per-cpu 1G", ("--ppn", "3"), "3GiB"),
    ],
)
def test_amounts_of_processes_count_for_the_size_that_the_job_has(
    koala: Koala, write_script: Any, lines: str, options: tuple[str, ...], memory: str
) -> None:
    ended = koala("submit", "--translate", "--dry-run", *options, write_script(f"{HEAD}{lines}\n"))
    assert f"→ --memory {memory} (on each node)\n" in ended.err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("#SBATCH --input=in.txt", "jobs have no standard input: use koala run < file"),
        ("#SBATCH -i in.txt", "jobs have no standard input: use koala run < file"),
        ("#SBATCH --policy=worst-fit", "koalapy has no such option"),
        ("#SBATCH --switches=2", "koalapy counts no switches"),
        ("#SBATCH --kill-on-invalid-dep=no", "a job that waits for an end that cannot come always fails"),
        ("#SBATCH --open-mode=truncate", "koalapy appends to files for output"),
        ("#SBATCH --gres=tmp:2", "koalapy has no such resource"),
        ("#SBATCH --dependency=singleton", "use --after JOB, or --after JOB:any, with a number of koalapy's jobs"),
        ("#SBATCH -N 3 --gpus=4", "it counts GPUs of all nodes: use --gpus with those of each node"),
        ("#SBATCH -N 3 -n 64", "64 ranks are not the same number on each of 3 nodes: use --ppn"),
        ("#SBATCH -n 64 --gpus=1", "it counts GPUs of all nodes"),
        ("#SBATCH --gpus=lots:many", "it counts GPUs of all nodes"),
        ("#SBATCH --mem-per-cpu=0", "use --memory with the memory of each node"),
        ("#SBATCH -N 0", "give one number"),
        ("#SBATCH --begin=010120", "koalapy does not know this form: give 2026-12-01T16:00, 16:00"),
        ("#SBATCH --deadline=soon", "koalapy does not know this form"),
        ("#SBATCH --time", "it is no time of Slurm"),
        ("#SBATCH words", "koalapy has no such option"),
        ("#$ -A text", "it is a text for Grid Engine's records"),
        ("#$ -tc 3", "write it after the indices: --array 1-200%16"),
        ("#OAR -l nodes=2", "koalapy translates no lines of OAR; write #KOALA lines instead"),
        ("#SBATCH -p a,b", "koalapy takes one partition: use --partition a, or leave it out"),
        ("#SBATCH -p large --partition=small", "it repeats job.sh:3; leave one out"),
        ("#SBATCH hetjob", "a script runs on the nodes of all parts: write #KOALA --nonfixed 1,1 in place"),
        ("#SBATCH -o %n.out", "koalapy does not replace %n in --output"),
        ("#SBATCH -L matlab", "koalapy counts no licenses"),
        ("#PBS -l nodes=2,ngpus=2", "sites count it for a slot or for the job"),
        ("#$ -pe smp 2-4", "name the environment and one number of slots"),
        ("#$ -pe mpi 4", "4 slots do not say how many nodes: write #KOALA --flexible 4 --ppn 1"),
        ("#$ -l scratch=1G", "koalapy has no resource scratch=1G"),
        ("#PBS -l nodes=2:ppn=8+1:ppn=4", "koalapy has one number of ranks on each node: use --nonfixed"),
        ("#PBS -l select=1:ncpus=2+2:ncpus=4", "koalapy has one number of ranks on each node: use --nonfixed"),
        ("#PBS -l select=2:ncpus=4:scratch=1gb", "koalapy has no resource scratch=1gb"),
        ("#PBS -l nodes=node7", "the cluster chooses the nodes: use nodes=NUMBER"),
        ("#PBS -l place=pack", "chunks are on nodes of their own: use one chunk"),
        ("#PBS -l nodes=3,mem=8gb", "use --memory with the memory of each node"),
        ("#PBS -W depend=afterok:7", "use --after with numbers of koalapy's jobs"),
        ("#PBS -I", "koalapy has no such option"),
        ("#PBS -S /bin/csh", "the script's first line names /bin/bash: write #!/bin/csh there"),
        ("#BSUB -n 6", "6 slots do not say how many nodes: write #KOALA --flexible 6 --ppn 1"),
        ("#BSUB -n 6 -R span[ptile=4]", "6 slots are not the same number on each node"),
        ('#BSUB -R "rusage[mem=4000]"', "its meaning differs between sites: use --memory"),
        ("#BSUB -oo log", "koalapy appends to files for output: use %J in names"),
        ("#BSUB -J a[i]", "give indices, as 1-10, 1-10:2 or 1,4,7"),
        ("#BSUB -a mpich2", "MPI is Open MPI"),
        ("#$ -S /bin/sh", "the script's first line names /bin/bash: write #!/bin/sh there, or leave out -S"),
        ("#$ -o $HOME/logs/", "name a file for --output with %x for the job's name"),
        ("#SBATCH --array=[1-3", "give indices, as 1-10"),
        ("#BSUB -o logs/", "it is a folder: name a file"),
        ("#$ -o log", "it is relative to the home folder: add #$ -cwd, or write the whole path"),
        ("#$ -pe smp 4 -l gpu=1", "sites count it for a slot or for the job: use --gpus"),
        ("#$ -q a.q,b.q", "koalapy takes one partition: use --partition a.q"),
        ("#$ -q a.q@n1", "koalapy takes the name of one partition"),
        ("#$ -cwd folder", "it has no value: write what follows as an option of its own"),
        (" #$ -N name", "it counts only without blanks before it"),
        (" #SBATCH -c 4", "it counts only without blanks before it"),
        ("#$ -v \"A=1,B='x,C=y'\"", "systems read quotes in a list differently: write #KOALA --env NAME=VALUE"),
        ('#PBS -v A=1,B="x,C=y"', "systems read quotes in a list differently"),
        ('#SBATCH --export=ALL,B="x,C=y"', "systems read quotes in a list differently"),
        ("#PBS -o host:/tmp/out", "the file is on the cluster of the script: leave out the host"),
        ("#PBS -q a,b", "koalapy takes one partition: use --partition a"),
        ("#PBS -l select=1:ncpus=1:mem=4gw", "it is no amount of memory"),
        ("#PBS -V word", "it has no value"),
        ("#BSUB -outdir logs", "write the folder in the names of -o and -e"),
        ("#BSUB -onames", "koalapy has no such option"),
        ("#BSUB -W 1:30:00", "it is no time of LSF: use --walltime, as 90m or 1:30:00"),
        ("#BSUB -M 4000", "its unit and its processes differ between sites: use --memory"),
        ("#BSUB -n 8,16", "give one number"),
        ('#BSUB -q "a b"', "koalapy takes one partition: use --partition a"),
        ("#BSUB -L /bin/bash", "the script's first line names /bin/bash: write #!/bin/bash -l there, or leave out -L"),
    ],
)
def test_translated_line_without_meaning_is_rejected(koala: Koala, write_script: Any, line: str, reason: str) -> None:
    ended = koala("submit", "--translate", write_script(f"{HEAD}\n{line}\n"))
    assert ended.code == Exit.USAGE
    assert f"→ NOT UNDERSTOOD: {reason}" in ended.err
    assert "job.sh: line 3 is not understood; change it, or write what it means as a #KOALA line\n" in ended.err


def test_export_of_script_passes_variables_of_submission(
    koala: Koala, write_script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEED", "7")
    slurm = write_script(f"{HEAD}#SBATCH --export=ALL,A=1\n")
    assert (
        read_job(koala, "--translate", "--flexible", "1", slurm)["environment"].items()
        >= {"SEED": "7", "A": "1"}.items()
    )
    environment = read_job(koala, "--translate", "--flexible", "1", "--export", "NONE", slurm)["environment"]
    assert not environment.keys() & {"SEED", "A"}
    own = write_script(f"{HEAD}#KOALA --export SEED --env A=2\n#SBATCH --export=ALL\n")
    assert read_job(koala, "--translate", "--flexible", "1", own)["environment"].items() >= {("SEED", "7"), ("A", "2")}
    ended = koala("submit", "--flexible", "1", write_script(f"{HEAD}#KOALA --export MISSING_HERE\n"))
    assert "job.sh:2: --export is 'MISSING_HERE': 'MISSING_HERE' is not set" in ended.err


def test_lines_of_untranslated_systems_are_reported(koala: Koala, write_script: Any) -> None:
    ended = koala("submit", "--flexible", "1", write_script(f"{HEAD}#PBS -N a\n#OAR -n a\n"))
    assert "job.sh has 1 line #PBS for PBS, which has no effect: add --translate to use them" in ended.err
    assert "job.sh has 1 line #OAR for OAR, which has no effect: koalapy translates no lines of OAR" in ended.err


def test_translated_line_after_a_command_counts_as_its_system_reads_it(koala: Koala, write_script: Any) -> None:
    slurm = write_script(f"{HEAD}#SBATCH -N 1\ncat >next.sh <<END\n#$ -t 1-4\n#PBS -N other\nEND\n")
    ended = koala("submit", "--json", "--translate", slurm)
    assert "line 4: it has no effect, since it follows a command" in ended.err
    assert "line 5: it has no effect, since it follows a command" in ended.err
    assert json.loads(ended.out)["tasks"] is None
    ended = koala("submit", "--translate", write_script(f"{HEAD}#BSUB -n 1\ntrue\n#BSUB -W 10\n"))
    assert "line 4: #BSUB -W 10 → NOT UNDERSTOOD: it follows a command: move it before, or remove it" in ended.err
    assert ended.code == Exit.USAGE


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("#PBS -N name", "pbs home"),
        ("#$ -N name", "grid-engine home"),
        ("#$ -N name -cwd", "grid-engine"),
        ("#$ -N name -wd /tmp", "grid-engine"),
        ("#PBS -N name -d /tmp", "pbs"),
        ("#PBS -N name\n#KOALA --chdir /tmp", "pbs"),
        ("#PBS -N name\n#SBATCH -N 1", "slurm pbs"),
        ("#BSUB -J name", "lsf"),
    ],
)
def test_translated_script_starts_in_the_home_folder_if_no_line_names_one(
    koala: Koala, write_script: Any, lines: str, words: str
) -> None:
    path = write_script(f"{HEAD}{lines}\n")
    assert read_job(koala, "--translate", path)["environment"]["KOALA_TRANSLATED"] == words
    chosen = read_job(koala, "--translate", "--chdir", "/tmp", path)["environment"]["KOALA_TRANSLATED"]
    assert chosen == words.removesuffix(" home")


@pytest.mark.parametrize(("line", "is_noted"), [("#SBATCH -N 1", 1), ("#BSUB -n 1", 1), ("#SBATCH --export=NONE", 0)])
def test_translated_script_notes_that_variables_are_not_passed(
    koala: Koala, write_script: Any, line: str, is_noted: int
) -> None:
    ended = koala("submit", "--translate", "--flexible", "1", write_script(f"{HEAD}{line}\n"))
    assert ended.err.count("no line says which variables are passed → none") == is_noted


@pytest.mark.parametrize("line", ["#SBATCH -n 4", "#$ -pe mpi 4", "#BSUB -n 4"])
@pytest.mark.parametrize(("choice", "shape"), [("one-node", (1, 4)), ("each-node", (4, 1))])
def test_ranks_without_nodes_go_where_the_user_chooses(
    koala: Koala, write_script: Any, monkeypatch: pytest.MonkeyPatch, line: str, choice: str, shape: tuple[int, int]
) -> None:
    path = write_script(f"{HEAD}{line}\n")
    job = read_job(koala, "--translate", "--ranks-on", choice, path)
    assert (job["request"]["total_size"], job["processes_per_node"]) == shape
    monkeypatch.setenv("KOALA_RANKS_ON", choice)
    assert read_job(koala, "--translate", path)["request"] == job["request"]
    ended = koala("submit", "--translate", "--ranks-on", "moon", path)
    assert (ended.code, "use each-node or one-node" in ended.err) == (Exit.USAGE, True)


def test_translated_array_has_the_variables_that_are_known_at_submission(koala: Koala, write_script: Any) -> None:
    path = write_script(f"{HEAD}#SBATCH -J sweep --array=1-9:2%3 -c 2\n#$ -cwd\n#PBS -r y\n#BSUB -r\necho\n")
    environment = read_job(koala, "--translate", "--name", "mine", path)["environment"]
    assert environment == {
        "KOALA_TRANSLATED": "slurm grid-engine pbs lsf",
        "SLURM_JOB_NAME": "mine",
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        "SLURM_SUBMIT_HOST": socket.gethostname(),
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_ARRAY_TASK_MIN": "1",
        "SLURM_ARRAY_TASK_MAX": "9",
        "SLURM_ARRAY_TASK_STEP": "2",
        "JOB_NAME": "mine",
        "SGE_O_WORKDIR": str(Path.cwd()),
        "SGE_O_HOST": socket.gethostname(),
        "SGE_TASK_FIRST": "1",
        "SGE_TASK_LAST": "9",
        "SGE_TASK_STEPSIZE": "2",
        "PBS_JOBNAME": "mine",
        "PBS_O_WORKDIR": str(Path.cwd()),
        "PBS_O_HOST": socket.gethostname(),
        "LS_SUBCWD": str(Path.cwd()),
        "LSB_SUB_HOST": socket.gethostname(),
        "LSB_JOBINDEX_END": "9",
        "LSB_JOBINDEX_STEP": "2",
    }


@pytest.mark.parametrize(
    ("system", "line", "reason"),
    [
        (
            "#SBATCH",
            "echo $SLURM_JOB_PARTITION",
            "$SLURM_JOB_PARTITION is not set, since it describes one cluster only",
        ),
        ("#SBATCH", "python -c 'import os; os.environ[\"SLURM_TOPOLOGY_ADDR\"]'", "$SLURM_TOPOLOGY_ADDR is not set"),
        ("#SBATCH", "mkdir run-$SLURM_JOB_PARTITION-1", "$SLURM_JOB_PARTITION is not set"),
        ("#$", "echo ${QUEUE}", "$QUEUE is not set, since it describes one cluster only: remove it"),
        (
            "#SBATCH",
            "[ -f done ] || sbatch $0",
            "sbatch does not know the job's other clusters: use koala where you submit",
        ),
        ("#SBATCH", "x=$(squeue -h)", "squeue does not know"),
        ("#SBATCH", "if true; then (squeue -h); fi", "squeue does not know"),
        ("#SBATCH", "if (squeue -h); then :; fi", "squeue does not know"),
        ("#SBATCH", "while(squeue -h); do :; done", "squeue does not know"),
        ("#SBATCH", 'echo "$( squeue -h)"', "squeue does not know"),
        ("#SBATCH", "if true; then sbcast a /tmp/a; fi", "sbcast does not know the job's other clusters: use --stage"),
        ("#$", "qsub next.sh", "qsub does not know"),
        ("#SBATCH", "srun -n 1 -l --multi-prog file", "srun has no --multi-prog in a translated script"),
        ("#SBATCH", "srun --export=NONE x", "srun has only --export=ALL in a translated script: use that"),
        ("#SBATCH", "srun --export A=1 x", "srun has only --export=ALL in a translated script: use that"),
        ("#SBATCH", "time srun --het-group=1 x", "srun has no --het-group in a translated script: use koala mpirun"),
        ("#PBS", "echo $PBS_QUEUE", "$PBS_QUEUE is not set, since it describes one cluster only: remove it"),
        ("#PBS", "pbsdsh hostname", "pbsdsh does not know the job's other clusters"),
        ("#BSUB", "echo $LSB_JOBNAME", "$LSB_JOBNAME is not set, since it describes one cluster only: use the name"),
        ("#BSUB", "bsub < next.sh", "bsub does not know"),
        ("#SBATCH", "A=1 B=2 /usr/bin/sbatch next.sh", "/usr/bin/sbatch does not know"),
        ("#SBATCH", "/usr/bin/srun ./x", "/usr/bin/srun does not know the job's other clusters: use srun"),
        ("#SBATCH", 'export RUN="/opt/mpi/bin/mpirun"', 'export RUN="/opt/mpi/bin/mpirun" does not know'),
        ("#SBATCH", "timeout 60 mpiexec.hydra ./x", "mpiexec.hydra does not know the job's other clusters: use mpirun"),
        ("#PBS", "$MPI/bin/mpirun ./x", "$MPI/bin/mpirun does not know the job's other clusters: use mpirun"),
    ],
)
def test_translated_script_that_needs_what_it_does_not_get_is_rejected(
    koala: Koala, write_script: Any, system: str, line: str, reason: str
) -> None:
    option = {"#SBATCH": "-N 1", "#BSUB": "-J name"}.get(system, "-N name")
    ended = koala("submit", "--translate", write_script(f"{HEAD}{system} {option}\n{line}\n"))
    assert (ended.code, f"line 3: NOT UNDERSTOOD: {reason}" in ended.err) == (Exit.USAGE, True), ended.err
    assert "job.sh: line 3 is not understood" in ended.err
    assert koala("queue", "--all", "--json").out.count('"id"') == 0


@pytest.mark.parametrize(
    "line",
    [
        "echo ${SLURM_RESTART_COUNT:-0} ${SLURM_JOB_GPUS-none}",
        "SLURM_JOB_PARTITION=x; echo $SLURM_JOB_PARTITION",
        "echo run sbatch later; srun hostname; scontrol show hostnames",
        "srun -n1 -N 1 --mpi=pmi2 -l x --multi-prog; srun --pty -n 1 sh; srun -m cyclic -i 0 x <y",
        "srun --export ALL,A=1 x; srun --export='ALL' x",
        "# sbatch $SLURM_JOB_PARTITION",
        """echo "(sbatch x)"; echo see '(sbatch x)'; echo "next (sbatch x)" """,
        "RUN=$(which mpirun); which /usr/bin/mpirun; ls /opt/mpi/bin/mpirun; A=1 mpirun ./x; timeout 5 srun -n 1 ./x",
        "echo $NSLOTS $QUEUE",
    ],
)
def test_translated_script_with_defaults_and_own_variables_is_taken(koala: Koala, write_script: Any, line: str) -> None:
    read_job(koala, "--translate", write_script(f"{HEAD}#SBATCH -N 1\n{line}\n"))


def test_user_pattern_of_account_without_name_is_rejected(
    koala: Koala, write_script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", find_no_name)
    ended = koala("submit", "--translate", write_script(f"{HEAD}#SBATCH -N 1 -o %u.out\ntrue\n"))
    assert (ended.code, "this account has no name: set USER" in ended.err) == (Exit.USAGE, True), ended.err
