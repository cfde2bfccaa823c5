"""A job's script on its head node, and the programs that it starts by mpirun."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runner.conftest import MPI_ENVIRONMENT, FakeAgent, FakeNode, living_pids, make_plan

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

PROGRAM = "sh -c 'echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $KOALA_HOST \"$@\"' x"


async def start_script(
    agent: FakeAgent, text: str, *arguments: str, north: int = 1, south: int = 1, slots: int = 1, **environment: str
) -> list[FakeNode]:
    """Start a script on the first of these nodes, which have so many slots each."""
    nodes = [
        await agent.start(f"7.1.{c}", i, f"127.0.{c + 1}.{i + 1}", **{**MPI_ENVIRONMENT, **environment})
        for c, size in enumerate((north, south))
        for i in range(size)
    ]
    opening = make_plan(nodes, ["job.sh", *arguments], launcher="openmpi")
    for place in opening["nodes"]:
        place["slots"] = slots
    for node in nodes:
        script = {"script": f"#!/bin/bash\n{text}"} if node is nodes[0] else {}
        node.send(**opening, is_script=True, **script)
    return nodes


async def end_of(nodes: list[FakeNode]) -> dict[str, Any]:
    """Return the result of the script, and stop the other nodes as an agent does."""
    end = await nodes[0].expect("exit")
    for node in nodes[1:]:
        node.send(t="stop")
        await node.ended()
    return end


def output_of(nodes: list[FakeNode]) -> list[str]:
    """Return the lines of the job's output, without the zero bytes that end messages of mpirun."""
    return nodes[0].output.decode().replace("\0", "").splitlines()


async def test_script_runs_once_and_starts_programs_on_all_nodes(agent: FakeAgent) -> None:
    text = f'echo "$0 $1 on $KOALA_HOST"; mpirun {PROGRAM} first; koala mpirun -np 2 {PROGRAM} second; echo end; exit 7'
    nodes = await start_script(agent, text, "a b", north=2, south=2)
    end = await end_of(nodes)
    assert (end["code"], end["error"], end["infrastructure"]) == (7, "", False), output_of(nodes)
    first, *lines, last = output_of(nodes)
    assert first.endswith("/job.sh a b on 127.0.1.1")
    assert sorted(lines[:4]) == [
        "0 of 4 on 127.0.1.1 first",
        "1 of 4 on 127.0.1.2 first",
        "2 of 4 on 127.0.2.1 first",
        "3 of 4 on 127.0.2.2 first",
    ]
    assert (sorted(lines[4:]), last) == (["0 of 2 on 127.0.1.1 second", "1 of 2 on 127.0.1.2 second"], "end")
    assert all(node.said("running") for node in nodes)


async def test_allocation_is_in_the_environment_of_the_script(agent: FakeAgent) -> None:
    names = "JOB_ID NODELIST NODES PPN SLOTS CLUSTER_LIST CLUSTER_NODES CLUSTER"
    text = f'for name in {names}; do v=KOALA_$name; echo "$name=${{!v}}"; done; cat "$KOALA_HOSTFILE"'
    nodes = await start_script(agent, text, north=1, south=2, slots=3)
    await end_of(nodes)
    assert output_of(nodes) == [
        "JOB_ID=7",
        "NODELIST=127.0.1.1,127.0.2.1,127.0.2.2",
        "NODES=3",
        "PPN=3",
        "SLOTS=9",
        "CLUSTER_LIST=north,south",
        "CLUSTER_NODES=1,2",
        "CLUSTER=north",
        "127.0.1.1 slots=3",
        "127.0.2.1 slots=3",
        "127.0.2.2 slots=3",
    ]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ("-n 3", ["0 of 3 on 127.0.1.1", "1 of 3 on 127.0.1.1", "2 of 3 on 127.0.2.1"]),
        ("--ppn 1", ["0 of 2 on 127.0.1.1", "1 of 2 on 127.0.2.1"]),
        ("--map-by ppr:1:node", ["0 of 2 on 127.0.1.1", "1 of 2 on 127.0.2.1"]),
        ("--cluster south", ["0 of 2 on 127.0.2.1", "1 of 2 on 127.0.2.1"]),
        ("--host 127.0.2.1:1", ["0 of 1 on 127.0.2.1"]),
        ('--hostfile "$KOALA_HOSTFILE" -N 1 -np 1', ["0 of 1 on 127.0.1.1"]),
        ("--oversubscribe -np 5", [f"{rank} of 5 on 127.0.{1 + (rank > 2)}.1" for rank in range(5)]),
    ],
)
async def test_mpirun_options_choose_the_ranks_of_nodes(agent: FakeAgent, options: str, lines: list[str]) -> None:
    nodes = await start_script(agent, f"mpirun {options} {PROGRAM}", slots=2)
    assert (await end_of(nodes))["code"] == 0, output_of(nodes)
    assert sorted(line.strip() for line in output_of(nodes)) == lines


@pytest.mark.parametrize("variables", [{}, {"BASH_ENV": "own.sh"}])
async def test_login_shell_of_the_script_finds_mpirun(
    agent: FakeAgent, tmp_path: Path, variables: dict[str, str]
) -> None:
    (tmp_path / ".bash_profile").write_text("PATH=/usr/bin:/bin PROFILE=read\n")
    (tmp_path / "own.sh").write_text("OWN=read\n")
    variables = {name: str(tmp_path / value) for name, value in variables.items()}
    node = await agent.start("7.1.0", 0, "127.0.1.1", **MPI_ENVIRONMENT, HOME=str(tmp_path), **variables)
    script = "#!/bin/bash -l\nmpirun echo rank\nkoala mpirun echo rank\necho $PROFILE $OWN ${BASH_ENV##*/}\n"
    node.send(**make_plan([node], ["job"], launcher="openmpi"), is_script=True, script=script)
    assert (await node.expect("exit"))["code"] == 0, node.output
    assert output_of([node]) == ["rank", "rank", "read read own.sh" if variables else "read"]


@pytest.mark.evidence("P8")
@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("--host evil.example true", "asks for host evil.example, which is not a node of this job"),
        ("--host 127.0.2.1:2 true", "asks for 2 ranks on 127.0.2.1, which has 1 slots: ask for fewer"),
        ("-np 3 true", "asks for 3 ranks, but its nodes have 2 slots: ask for fewer"),
        ("--oversubscribe -np 99999999 true", "ranks on one node: ask for at most 8192"),
        ("--cluster east true", "asks for cluster east, where this job has no nodes: name one of north, south"),
        ("--hostfile /dev/null true", "asks for no node"),
        ("-np x true", "-np is 'x': give a number of ranks from 1"),
        ("-np", "-np has no value"),
        ("-np 1", "no program is given"),
        ("true : true", "several programs with : are not supported"),
        ("--prtemca a b true", "--prtemca is not supported in a job's script"),
        ("-x NOT_SET true", "-x NOT_SET: this variable is not set"),
        ("-x KOALA_HOST=1 true", "koalapy sets the variables KOALA_"),
    ],
)
async def test_mpirun_with_wrong_options_names_the_remedy(agent: FakeAgent, call: str, says: str) -> None:
    nodes = await start_script(agent, f"mpirun {call}")
    assert (await end_of(nodes))["code"] == 2
    assert says in nodes[0].output.decode()


async def test_program_fails_and_the_script_goes_on(agent: FakeAgent) -> None:
    text = """
mpirun sh -c 'exit 3'; echo code $?
mpirun no-such-program; echo code $?
mpirun sh -c '[ $KOALA_CLUSTER = north ] || kill -9 $PPID; sleep 1000'; echo code $?
mpirun sh -c 'echo still here'"""
    nodes = await start_script(agent, text)
    assert (await end_of(nodes))["code"] == 0
    lines = output_of(nodes)
    assert [line for line in lines if line.startswith(("code", "still"))] == [
        "code 3",
        "code 127",
        "code 1",
        "still here",
        "still here",
    ]
    assert "koala: command not found: no-such-program" in lines
    assert re.search("koala: the MPI daemon on .*127.0.2.1 was killed by signal 9", "\n".join(lines)), lines


async def test_variables_and_folders_reach_the_ranks(agent: FakeAgent) -> None:
    text = """
export A=1 B=2; mkdir -p sub/dir; cd sub/dir
export OMPI_MCA_koala_test=4
mpirun -x A -x C=3 --mca some_name 5 sh -c 'echo ${PWD##*/7.1.?} $A-$B-$C-$OMPI_MCA_koala_test-$OMPI_MCA_some_name'
mpirun --wdir / pwd > both; cat both"""
    nodes = await start_script(agent, text)
    assert (await end_of(nodes))["code"] == 0
    assert output_of(nodes) == ["/sub/dir 1--3-4-5"] * 2 + ["/", "/"]
    assert (agent.directory / "7.1.1" / "sub" / "dir").is_dir()


async def test_programs_run_at_once(agent: FakeAgent) -> None:
    """Each of two programs waits for the other one."""
    text = """
program='touch $0; while [ ! -e $1 ]; do sleep 0.05; done; echo met'
mpirun sh -c "$program" "$PWD/one" "$PWD/two" & mpirun sh -c "$program" "$PWD/two" "$PWD/one" & wait"""
    nodes = await start_script(agent, text)
    assert (await end_of(nodes))["code"] == 0
    assert output_of(nodes) == ["met"] * 4


async def test_many_calls_at_once_wait_or_are_rejected(agent: FakeAgent) -> None:
    text = "for i in $(seq 40); do mpirun -np 1 echo run & done; wait"
    nodes = await start_script(agent, text)
    assert (await end_of(nodes))["code"] == 0
    assert output_of(nodes) == ["run"] * 40


async def test_signal_to_mpirun_ends_its_program_only(agent: FakeAgent) -> None:
    text = "timeout 2 mpirun sleep 1000; echo code $?; mpirun -np 1 echo next"
    nodes = await start_script(agent, text)
    assert (await end_of(nodes))["code"] == 0
    lines = output_of(nodes)
    assert "code 124" in lines
    assert lines[-1] == "next"


async def test_killed_mpirun_leaves_no_process_of_its_program(agent: FakeAgent) -> None:
    text = """
mpirun sh -c 'echo rank $$; exec sleep 1000' > ranks & call=$!
until [ $(wc -l < ranks) = 2 ]; do sleep 0.05; done
kill -9 $call; wait $call; echo code $?
for pid in $(sed 's/rank //' ranks); do while kill -0 $pid 2>/dev/null; do sleep 0.05; done; done
mpirun -np 2 echo next"""
    nodes = await start_script(agent, text)
    assert (await end_of(nodes))["code"] == 0
    assert "code 137" in output_of(nodes)
    assert output_of(nodes)[-2:] == ["next", "next"]


async def test_end_of_script_ends_programs_that_still_run(agent: FakeAgent) -> None:
    text = "mpirun sh -c 'echo $$ >> pids; exec sleep 1000' & until [ -s pids ]; do sleep 0.05; done; exit 4"
    nodes = await start_script(agent, text, south=1)
    assert (await end_of(nodes))["code"] == 4
    for node in nodes:
        assert await node.ended() == 0
    assert not living_pids((agent.directory / "7.1.0" / "pids").read_text())


async def test_mpirun_after_the_end_of_the_job_says_so(agent: FakeAgent, tmp_path: Any) -> None:
    nodes = await start_script(agent, f'echo "$KOALA_MPIRUN" > {tmp_path}/path; cp "$KOALA_MPIRUN" {tmp_path}/copy')
    assert (await end_of(nodes))["code"] == 0
    process = await asyncio.create_subprocess_exec(str(tmp_path / "copy"), "true", stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (
        1,
        b"mpirun: the job of this script has ended: its nodes are no longer available\n",
    )


@pytest.mark.evidence("J12")
async def test_mpirun_of_a_foreign_process_is_rejected(agent: FakeAgent, tmp_path: Any) -> None:
    text = f'echo "$KOALA_MPIRUN" > {tmp_path}/path.new; mv {tmp_path}/path.new {tmp_path}/path; sleep 1000'
    nodes = await start_script(agent, text)
    await agent.until((tmp_path / "path").exists, "the path of mpirun")
    mpirun = (tmp_path / "path").read_text().strip()
    process = await asyncio.create_subprocess_exec(mpirun, "true", stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (1, b"koala: mpirun was called by a process that is not of this job\n")
    for node in nodes:
        node.send(t="stop")


async def test_mpirun_with_closed_output_runs_its_program(agent: FakeAgent) -> None:
    nodes = await start_script(agent, "mpirun -np 1 true <&- >&- 2>&-; echo over $?")
    assert (await end_of(nodes))["code"] == 0
    assert output_of(nodes) == ["over 0"]


async def test_lost_and_repeated_messages_delay_a_program_only(agent: FakeAgent) -> None:
    dropped: set[str] = set()

    def drop_first(sender: FakeNode, payload: dict[str, Any]) -> dict[str, Any] | None:
        kind = f"{payload['op']} {payload.get('payload', {}).get('op')}"
        if kind in dropped:
            return payload
        dropped.add(kind)
        return None

    agent.meddle = drop_first
    nodes = await start_script(agent, "mpirun echo run; mpirun echo run")
    assert (await end_of(nodes))["code"] == 0
    assert output_of(nodes) == ["run"] * 4
    assert {"begin None", "end None", "step ready", "step probe", "step launch", "step launched"} <= dropped


async def test_script_calls_mpirun_after_the_agent_has_returned(agent: FakeAgent, tmp_path: Any) -> None:
    text = f"touch {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.05; done; mpirun echo run"
    nodes = await start_script(agent, text)
    await agent.until((tmp_path / "begun").exists, "the start of the script")
    await agent.leave()
    (tmp_path / "go").touch()
    await agent.listen()
    assert (await end_of(nodes))["code"] == 0
    assert output_of(nodes) == ["run", "run"]


async def test_warning_reaches_ranks_and_not_the_script(agent: FakeAgent) -> None:
    text = """
mpirun sh -c 'trap "echo saved; exit 0" USR1; echo ready; while :; do sleep 0.05; done'
echo script goes on"""
    nodes = await start_script(agent, text)
    await agent.until(lambda: nodes[0].output.count(b"ready\n") == 2, "the ranks")
    for node in nodes:
        node.send(t="stop", signal="USR1", grace=50.0)
    end = await nodes[0].expect("exit")
    assert end["warned"]
    lines = [line for line in output_of(nodes) if "signal" not in line]
    assert sorted(lines) == ["ready", "ready", "saved", "saved", "script goes on"]


async def test_script_that_ends_its_runner_is_stopped(agent: FakeAgent) -> None:
    nodes = await start_script(agent, "echo $$ > pid; kill -TERM $PPID; sleep 1000", south=0)
    await nodes[0].ended()
    assert nodes[0].said("exit")[-1]["stopped"]
    assert not living_pids((agent.directory / "7.1.0" / "pid").read_text())


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("#!/no/such/shell\n", 127, "command not found: /no/such/shell"),
        ("#!/usr/bin/env no-such-shell\n", 127, "no-such-shell"),
        (f"#!{sys.executable} -u\nprint('python')\nraise SystemExit(5)\n", 5, "python"),
    ],
)
async def test_interpreter_of_the_script_runs_it(agent: FakeAgent, script: str, code: int, says: str) -> None:
    node = await agent.start("7.1.0", 0, "127.0.1.1", **MPI_ENVIRONMENT)
    node.send(**make_plan([node], ["job"], launcher="openmpi"), is_script=True, script=script)
    assert (await node.expect("exit"))["code"] == code
    assert says in node.output.decode()


@pytest.mark.evidence("P8")
@pytest.mark.parametrize(
    "change",
    [
        {"slots": [1]},
        {"slots": [1, -1]},
        {"slots": [1, True]},
        {"slots": [1, 0]},
        {"slots": [1, 10**9]},
        {"command": []},
        {"command": ["a\0b"]},
        {"command": "true"},
        {"environment": {"KOALA_MPI_PREFIX": "/evil"}},
        {"environment": {"A=B": "x"}},
        {"environment": {"A": 1}},
        {"folder": "../../etc"},
        {"folder": None},
        {"step": "x"},
        {"lane": 16},
        {"lane": "x"},
        {"sender": "7.1.1"},
    ],
)
async def test_hostile_head_begins_no_invalid_program(agent: FakeAgent, change: dict[str, Any]) -> None:
    """The last change is an order of a node that is not the head."""
    nodes = await start_script(agent, "sleep 1000")
    await nodes[1].expect("running")
    order = {"op": "begin", "step": 1, "slots": [1, 1], "command": ["true"], "environment": {}, "folder": ""}
    payload = {"sender": "7.1.0", **order, "must_exist": False, "lane": 0, **change}
    nodes[1].send(t="relay", sender=payload.pop("sender"), sender_node=0, payload=payload)
    nodes[1].send(t="relay", sender="7.1.0", sender_node=0, payload={"op": "end", "step": 99})
    await agent.until(lambda: bool(nodes[1].said("relay")), "the answer to the end")
    assert [message["payload"]["op"] for message in nodes[1].said("relay")] == ["ended"]
    for node in nodes:
        node.send(t="stop")


async def test_node_that_cannot_make_the_folder_of_a_program_says_so(agent: FakeAgent, tmp_path: Path) -> None:
    nodes = await start_script(agent, "sleep 1000", TMPDIR=str(tmp_path))
    await nodes[1].expect("running")
    (folder,) = tmp_path.glob("koala-7.1.1-0-*")  # noqa: ASYNC240
    (folder / "1").touch()
    order = {"op": "begin", "step": 1, "slots": [1, 1], "command": ["true"], "environment": {}, "folder": ""}
    payload = {**order, "must_exist": False, "lane": 0}
    nodes[1].send(t="relay", sender="7.1.0", sender_node=0, payload=payload)
    await agent.until(lambda: bool(nodes[1].said("relay")), "the error")
    answer = nodes[1].said("relay")[0]["payload"]["payload"]
    assert (answer["op"], "File exists" in answer["error"]) == ("unfit", True)
    for node in nodes:
        node.send(t="stop")


@pytest.mark.evidence("P8")
async def test_program_on_a_lane_in_use_is_rejected_until_the_other_ends(agent: FakeAgent) -> None:
    nodes = await start_script(agent, "sleep 1000")
    await nodes[1].expect("running")
    # The head node, whose script starts none of these programs, would end them.
    agent.meddle = lambda sender, payload: None if sender is nodes[0] else payload
    order = {"op": "begin", "slots": [1, 1], "command": ["true"], "environment": {}, "folder": "", "must_exist": False}

    def begin(step: int, lane: int) -> None:
        payload = {**order, "step": step, "lane": lane}
        nodes[1].send(t="relay", sender="7.1.0", sender_node=0, payload=payload)

    def answered() -> set[int]:
        return {message["payload"]["step"] for message in nodes[1].said("relay")}

    begin(1, lane=0)
    await agent.until(lambda: 1 in answered(), "the first program")
    begin(2, lane=0)
    begin(3, lane=1)
    await agent.until(lambda: 3 in answered(), "the program on the other lane")
    assert 2 not in answered()
    nodes[1].send(t="relay", sender="7.1.0", sender_node=0, payload={"op": "end", "step": 1})
    begin(2, lane=0)
    await agent.until(lambda: 2 in answered(), "the program on the lane that is free again")
    for node in nodes:
        node.send(t="stop")


@pytest.mark.parametrize(
    "call",
    [
        "mpirun {} <in.txt",
        "cat in.txt | mpirun {}",
        "mpirun {} <<'END'\na b\nc\nEND",
        "while read -r line; do [ \"$line\" = 'a b' ] || continue; mpirun {} <in.txt; done <in.txt",
    ],
)
async def test_first_rank_reads_standard_input_of_mpirun(agent: FakeAgent, call: str) -> None:
    program = "sh -c 'echo $OMPI_COMM_WORLD_RANK: $(cat)'"
    nodes = await start_script(agent, f"printf 'a b\\nc\\n' >in.txt; {call.format(program)}")
    assert (await end_of(nodes))["code"] == 0, output_of(nodes)
    assert sorted(line.strip() for line in output_of(nodes)) == ["0: a b c", "1:"]


async def test_standard_input_of_mpirun_needs_rank_0_on_the_node_of_the_script(agent: FakeAgent) -> None:
    nodes = await start_script(
        agent, "printf x >in.txt; mpirun --cluster south cat <in.txt; echo $?; mpirun cat </dev/null"
    )
    await end_of(nodes)
    assert output_of(nodes) == [
        "koala: standard input goes to rank 0, which is on another node: name the file as an argument",
        "2",
    ]


async def test_mpirun_on_several_clusters_leaves_out_networks_of_one(agent: FakeAgent) -> None:
    text = """export OMPI_MCA_oob_tcp_if_include=ib0
mpirun --mca btl_tcp_if_include ib0 --mca pml ob1 -n 1 sh -c 'echo $OMPI_MCA_btl_tcp_if_include $OMPI_MCA_pml'"""
    nodes = await start_script(agent, text)
    assert (await end_of(nodes))["code"] == 0, output_of(nodes)
    says = "koala: mpirun leaves out {}: the networks of the job's clusters differ"
    assert [line for line in output_of(nodes) if "ob1" not in line] == [
        says.format("btl_tcp_if_include"),
        says.format("oob_tcp_if_include"),
    ]
    assert not any("ib0" in line for line in output_of(nodes))


SLURM = {"KOALA_TRANSLATED": "slurm", "KOALA_ARRAY_INDEX": "3", "KOALA_ARRAY_JOB": "12", "KOALA_ARRAY_COUNT": "5"}


async def start_translated(agent: FakeAgent, text: str, slots: int = 1, **environment: str) -> list[FakeNode]:
    """Start a translated script on a node of each of two clusters."""
    nodes = [
        await agent.start(f"7.1.{c}", 0, f"127.0.{c + 1}.1", **MPI_ENVIRONMENT, SLURM_JOB_ID="site") for c in (0, 1)
    ]
    opening = make_plan(nodes, ["job.sh"], launcher="openmpi")
    for place in opening["nodes"]:
        place["slots"] = slots
    for context in opening["contexts"]:
        context["environment"] = {**context["environment"], **environment}
    for node in nodes:
        script = {"script": f"#!/bin/bash\n{text}"} if node is nodes[0] else {}
        node.send(**opening, is_script=True, **script)
    return nodes


async def test_translated_script_has_variables_of_slurm_for_the_whole_job(agent: FakeAgent) -> None:
    names = "JOB_ID NNODES NTASKS JOB_NODELIST ARRAY_TASK_ID ARRAY_JOB_ID ARRAY_TASK_COUNT PROCID NODEID"
    text = (
        f'for name in {names}; do v=SLURM_$name; echo "$name=${{!v}}"; done; scontrol show hostnames; squeue; echo $?'
    )
    nodes = await start_translated(agent, text, slots=2, **SLURM)
    await end_of(nodes)
    *lines, last = output_of(nodes)
    assert lines[:11] == [
        "JOB_ID=7",
        "NNODES=2",
        "NTASKS=4",
        "JOB_NODELIST=127.0.1.1,127.0.2.1",
        "ARRAY_TASK_ID=3",
        "ARRAY_JOB_ID=12",
        "ARRAY_TASK_COUNT=5",
        "PROCID=0",
        "NODEID=0",
        "127.0.1.1",
        "127.0.2.1",
    ]
    assert last == "127"


async def test_translated_script_has_variables_of_pbs_and_lsf_in_the_home_folder(
    agent: FakeAgent, tmp_path: Path
) -> None:
    text = """pwd >started; (cd $PBS_O_WORKDIR; pwd); cat started; sort $PBS_NODEFILE | uniq -c
echo $PBS_NP $PBS_ARRAY_INDEX $PBS_JOBID $PBS_ENVIRONMENT
echo $LSB_MCPU_HOSTS, $LSB_JOBID $LSB_JOBINDEX; cmp $LSB_DJOB_HOSTFILE $PBS_NODEFILE && bsub; echo $?"""
    systems = {**SLURM, "KOALA_TRANSLATED": "pbs lsf home", "HOME": str(tmp_path), "PBS_O_WORKDIR": "/missing"}
    nodes = await start_translated(agent, text, slots=2, **systems)
    await end_of(nodes)
    start, *lines = [" ".join(line.split()) for line in output_of(nodes)]
    assert start not in ("/missing", str(tmp_path))
    assert lines[:3] == [str(tmp_path), "2 127.0.1.1", "2 127.0.2.1"]
    assert lines[3:5] == ["4 3 7 PBS_BATCH", "127.0.1.1 2 127.0.2.1 2, 12 3"]
    assert "bsub is not available in a translated script" in lines[5]
    assert lines[6] == "127"


async def test_translated_script_without_home_starts_in_the_folder_of_the_job(agent: FakeAgent, tmp_path: Path) -> None:
    systems = {**SLURM, "KOALA_TRANSLATED": "pbs", "HOME": str(tmp_path)}
    nodes = await start_translated(agent, "pwd", **systems)
    await end_of(nodes)
    assert output_of(nodes) not in ([], [str(tmp_path)])


async def test_mpirun_of_translated_script_passes_its_variables(agent: FakeAgent) -> None:
    text = """export SEED=7
mpirun -n 1 sh -c 'echo "$SEED $SLURM_ARRAY_TASK_ID $SLURM_NTASKS ${SLURM_PROCID-none} ${SLURMD_NODENAME-none}"'
ibrun -n 1 echo ibrun
srun --pty echo two; srun --pty -n 1 echo one"""
    nodes = await start_translated(agent, text, slots=2, **SLURM)
    await end_of(nodes)
    assert output_of(nodes) == ["7 3 4 none 127.0.1.1", "ibrun", "srun: --pty is for one task: add -n 1", "one"]


async def test_steps_of_slurm_at_the_same_time_run_on_different_nodes(agent: FakeAgent) -> None:
    text = """export BOTH=$PWD/both; mkfifo $BOTH
srun -N 1 -n 1 sh -c 'echo $KOALA_HOST; read line <$BOTH' &
srun -N 1 -n 1 sh -c 'echo $KOALA_HOST; echo >$BOTH' & wait
srun -N 1 -n 1 sh -c 'echo $KOALA_HOST'"""
    nodes = await start_translated(agent, text, slots=2, **SLURM)
    await end_of(nodes)
    *steps, last = output_of(nodes)
    assert (sorted(steps), last) == (["127.0.1.1", "127.0.2.1"], "127.0.1.1")


async def test_srun_starts_tasks_with_their_variables_and_those_of_the_script(agent: FakeAgent) -> None:
    text = """export SEED=7 "WORDS=a  b"
srun -n 2 -c1 --mpi=pmix sh -c 'echo $SLURM_PROCID of $SLURM_NTASKS in $SLURM_JOB_ID: $SEED "$WORDS" $SLURMD_NODENAME'
srun -l sh -c 'echo $SLURM_NNODES'; srun -n 1 sh -c 'exit 5'; echo code $?
srun -N 1 -o one-%j echo ended && cat one-7
echo words >words; srun -m cyclic -n 1 cat <words; srun -n 2 --input=0 sort -u <words; srun -n 2 sort -u <words
srun --multi-prog file; echo code $?"""
    nodes = await start_translated(agent, text, slots=2, **SLURM)
    await end_of(nodes)
    lines = output_of(nodes)
    assert sorted(lines[:2]) == ["0 of 2 in 7: 7 a  b 127.0.1.1", "1 of 2 in 7: 7 a  b 127.0.1.1"]
    assert {"0: 2", "1: 2", "2: 2", "3: 2", "code 5"} <= set(lines)
    assert lines[-8:] == [
        "ended",
        "ended",
        *("words", "words"),
        "srun: only task 0 gets standard input, where Slurm gives it to all: if each reads it, name the file as an"
        " argument, or give --input=0",
        "words",
        "srun: --multi-prog is not supported in a translated script: leave it out, or use koala mpirun",
        "code 2",
    ]
