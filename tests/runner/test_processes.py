"""The runner as a real process: start, output, end and clean-up of programs without MPI."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from koalapy.runner.output_streams import StreamSplitter
from tests.needs import ROOT, needs
from tests.runner.conftest import FakeAgent, FakeNode, living_pids, make_plan, read_left_file

pytestmark = pytest.mark.processes

TOKEN = "7.1.0"


async def run_program(agent: FakeAgent, command: list[str], **context: object) -> FakeNode:
    node = await agent.start(TOKEN, 0, "127.0.1.1")
    node.send(**make_plan([node], command, **context))
    return node


async def run_to_result(agent: FakeAgent, command: list[str], **context: object) -> tuple[FakeNode, dict[str, object]]:
    node = await run_program(agent, command, **context)
    end = await node.expect("exit")
    assert await node.ended() == 0
    return node, end


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
async def test_exit_code_is_that_of_program(agent: FakeAgent, script: str, code: int) -> None:
    node, end = await run_to_result(agent, ["sh", "-c", script])
    assert (end["code"], end["infrastructure"]) == (code, False)
    assert node.said("running")


@pytest.mark.parametrize(
    ("command", "context", "code", "message"),
    [
        (["no-such-program"], {}, 127, "command not found: no-such-program"),
        (["{folder}"], {}, 126, "it is a folder; name a file in it"),
        (["{folder}/data"], {}, 126, "cannot run {folder}/data: permission denied, it is not executable; chmod +x"),
        (["data"], {"environment": {"PATH": "/bin:{folder}"}}, 126, "it is not executable; chmod +x {folder}/data"),
        (["pwd"], {"workdir": "/no/such/folder"}, 126, "cannot run in /no/such/folder on node-127.0.1.1: No such file"),
        (["ls"], {"output": "/no/such/log"}, 126, "cannot write /no/such/log on node-127.0.1.1: No such file"),
        (["ls"], {"output": "{folder}/log"}, 126, "log on node-127.0.1.1: it is a symbolic link; name the file itself"),
    ],
)
async def test_program_that_cannot_start_names_the_fault(
    agent: FakeAgent, tmp_path: Path, command: list[str], context: dict[str, Any], code: int, message: str
) -> None:
    (tmp_path / "data").write_text("x")
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    here = json.loads(json.dumps([command, context, message]).replace("{folder}", str(tmp_path)))
    node, end = await run_to_result(agent, here[0], **here[1])
    assert (end["code"], end["infrastructure"]) == (code, False)
    assert here[2] in node.output.decode()
    assert not node.said("running")
    assert not (tmp_path / "elsewhere").exists()


async def test_output_file_gets_output_and_errors_in_order(agent: FakeAgent, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    script = ["sh", "-c", "echo one; echo two >&2; echo three"]
    node, _ = await run_to_result(agent, script, workdir=str(tmp_path), output="log")
    assert node.output == b"one\ntwo\nthree\n"
    assert (tmp_path / "log").read_text() == "before\none\ntwo\nthree\n"


def streams_of(node: FakeNode) -> tuple[bytes, bytes]:
    """Return the output and the error stream that a runner has sent."""
    parts = StreamSplitter().split(node.output)
    output, errors = (b"".join(text for is_error, text in parts if is_error is wanted) for wanted in (False, True))
    return output, errors


async def test_error_file_divides_streams_in_files_and_output(agent: FakeAgent, tmp_path: Path) -> None:
    script = ["sh", "-c", r"printf 'one\n\016bytes\017\020\n'; echo two >&2; printf unfinished"]
    node, _ = await run_to_result(agent, script, workdir=str(tmp_path), output="out", error="err")
    assert streams_of(node) == (b"one\n\x0ebytes\x0f\x10\nunfinished", b"two\n")
    assert ((tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()) == streams_of(node)


async def test_label_begins_lines_and_files_of_ranks_have_none(agent: FakeAgent, tmp_path: Path) -> None:
    nodes = [await agent.start(TOKEN, i, f"127.0.1.{i + 1}") for i in range(2)]
    script = ["sh", "-c", "echo one; echo two >&2; printf three"]
    for node in nodes:
        node.send(**make_plan(nodes, script, workdir=str(tmp_path), output="out.%r", error="err", label=True))
    for node in nodes:
        await node.expect("exit")
        assert await node.ended() == 0
    for rank, node in enumerate(nodes):
        assert streams_of(node) == (f"{rank}: one\n{rank}: three\n".encode(), f"{rank}: two\n".encode())
        assert (tmp_path / f"out.{rank}").read_text() == "one\nthree"
    assert sorted((tmp_path / "err").read_text().splitlines()) == ["0: two", "1: two"]


@pytest.mark.evidence("J2")
async def test_program_environment_has_job_but_no_secrets(agent: FakeAgent) -> None:
    nodes = [await agent.start(TOKEN, i, f"127.0.1.{i + 1}") for i in range(2)]
    for node in nodes:
        node.send(**make_plan(nodes, ["env"], environment={"USER_VALUE": "x=y"}))
    for node in nodes:
        await node.expect("exit")
        assert await node.ended() == 0
    variables = dict(line.split("=", 1) for line in nodes[1].output.decode().splitlines() if "=" in line)
    expected = {
        "KOALA_JOB": "7",
        "KOALA_GENERATION": "1",
        "KOALA_COMPONENT": "0",
        "KOALA_CLUSTER": "north",
        "KOALA_NODE": "node-127.0.1.2",
        "KOALA_HOST": "127.0.1.2",
        "KOALA_NODE_INDEX": "1",
        "KOALA_NODES": "2",
        "KOALA_COMPONENT_NODES": "2",
        "KOALA_HOSTS": "127.0.1.1,127.0.1.2",
        "USER_VALUE": "x=y",
    }
    assert {k: variables.get(k) for k in expected} == expected
    assert not [name for name in variables if "SECRET" in name]


async def test_too_many_nodes_for_a_variable_are_named(agent: FakeAgent) -> None:
    hosts = ",".join(["127.0.1.1"] * 14_000)
    node, end = await run_to_result(agent, ["true"], environment={"KOALA_HOSTS": hosts})
    assert (end["code"], end["infrastructure"]) == (126, False)
    assert b"cannot run true: Argument list too long: ask for fewer nodes, KOALA_HOSTS lists all 14000" in node.output


async def test_missing_optional_workdir_falls_back_to_home(agent: FakeAgent) -> None:
    node, end = await run_to_result(agent, ["pwd"], workdir="/no/such/folder", workdir_optional=True)
    assert end["code"] == 0
    message, workdir = node.output.decode().splitlines()
    assert "/no/such/folder" in message
    assert workdir == str(Path.home())


@pytest.mark.evidence("J9")
async def test_remaining_processes_of_program_are_ended(agent: FakeAgent) -> None:
    node, end = await run_to_result(agent, ["sh", "-c", "setsid sh -c 'echo $$; exec sleep 1000' & sleep 0.3; exit 5"])
    assert end["code"] == 5
    assert not living_pids(node.output)


STUBBORN = "trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 1; done' & echo $$; wait; sleep 1000"


@pytest.mark.evidence("J9", "C16")
@pytest.mark.parametrize("by_signal", [None, signal.SIGTERM, signal.SIGHUP])
async def test_stop_ends_detached_and_stubborn_processes(agent: FakeAgent, by_signal: signal.Signals | None) -> None:
    node = await run_program(agent, ["sh", "-c", STUBBORN])
    await agent.until(lambda: node.output.count(b"\n") == 2, "both pids")
    if by_signal is not None:
        assert node.process is not None
        node.process.send_signal(by_signal)
    else:
        node.send(t="stop")
    end = await node.expect("exit")
    assert end["stopped"]
    assert living_pids(node.output) == []
    assert await node.ended() == 0


@needs(ROOT)
async def test_process_of_other_account_does_not_end_runner(agent: FakeAgent, tmp_path: Path) -> None:
    """A process that ``sudo`` started cannot be signalled: its node stays in use until it ends by itself."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    without_right = ["setpriv", "--bounding-set=-kill", "--inh-caps=-kill"]
    node = await agent.start(TOKEN, 0, "127.0.1.1", without_right)
    program = f"import os; gate = open({str(gate)!r}); os.setresuid(65534, 65534, 65534); print('other', flush=True); "
    node.send(**make_plan([node], [sys.executable, "-c", program + "gate.read()"]))
    writer = await asyncio.to_thread(gate.open, "w")
    await agent.until(lambda: b"other" in node.output, "the change of account")
    node.send(t="stop")
    await node.expect("ending")
    writer.close()
    assert (await node.expect("exit"))["stopped"]
    assert await node.ended() == 0


async def test_traced_program_does_not_end_runner(agent: FakeAgent) -> None:
    """The parent of a traced program, the runner, receives its stops although it does not trace it."""
    trace_me = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print('asked', flush=True); "
    trace_me += "os.kill(os.getpid(), 10)"
    node = await run_program(agent, [sys.executable, "-c", trace_me])
    await agent.until(lambda: b"asked" in node.output, "the program")
    node.send(t="stop")
    end = await node.expect("exit")
    assert (end["stopped"], end["error"]) == (True, "")
    assert await node.ended() == 0


async def test_stop_before_start_ends_runner(agent: FakeAgent) -> None:
    node = await agent.start(TOKEN, 0, "127.0.1.1")
    node.send(t="stop")
    assert (await node.expect("exit"))["stopped"]
    assert await node.ended() == 0


async def test_runner_without_agent_ends_after_timeout(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path)
    await agent.listen()
    node = await agent.start(TOKEN, 0, "127.0.1.1")
    node.ack_output = False
    node.send(**make_plan([node], ["sh", "-c", "echo $$; exec sleep 1000"]))
    await agent.until(lambda: node.output.endswith(b"\n"), "pid")
    output_count = len(node.said("out"))
    node.send(t="welcome", lease=1.0, output=0)
    await agent.until(lambda: len(node.said("out")) > output_count, "its output again")
    await agent.leave()
    assert await node.ended() == 1
    assert not living_pids(node.output)
    stored_result = json.loads(read_left_file(node, "result.0.json"))
    assert stored_result["infrastructure"]
    assert "its lease is over, the daemon was silent" in stored_result["error"]


async def test_output_after_reconnection_continues_at_acknowledged_byte(agent: FakeAgent) -> None:
    node = await agent.start(TOKEN, 0, "127.0.1.1")
    node.ack_output = False
    node.send(**make_plan([node], ["sh", "-c", "seq 100000; read line < go; seq 100000"]))
    fifo = agent.directory / TOKEN / "go"
    os.mkfifo(fifo)
    await agent.until(lambda: len(node.output) > 200_000, "first output")
    node.output = node.output[:123_457]
    await agent.leave()
    fifo.write_text("go on\n")
    node.ack_output = True
    await agent.listen()
    await node.expect("exit")
    assert await node.ended() == 0
    numbers = b"".join(b"%d\n" % i for i in range(1, 100_001))
    assert node.output == numbers + numbers
    assert node.hellos[0]["phase"] == "waiting"
    assert node.hellos[-1]["phase"] in ("running", "ended")


async def test_unacknowledged_output_is_spilled(agent: FakeAgent) -> None:
    node = await agent.start(TOKEN, 0, "127.0.1.1")
    node.ack_output = False
    node.send(**make_plan([node], ["seq", "600000"]))
    result_file = agent.directory / TOKEN / "result.0.json"
    await agent.until(lambda: len(node.output) >= 200_000, "a window's worth")
    await agent.until(result_file.exists, "the result file")
    spilled = list((agent.directory / TOKEN).glob("output.0.*"))
    assert sum(path.stat().st_size for path in spilled) > 1_000_000
    node.ack_output = True
    node.send(t="output", offset=len(node.output))
    await node.expect("exit")
    assert await node.ended() == 0
    assert node.output == b"".join(b"%d\n" % i for i in range(1, 600_001))
    assert not list((agent.directory / TOKEN).glob("output.*"))


async def test_result_is_repeated_until_acknowledged(agent: FakeAgent) -> None:
    node = await agent.start(TOKEN, 0, "127.0.1.1")
    node.ack_exit = False
    node.send(**make_plan([node], ["sh", "-c", "exit 4"]))
    await node.expect("exit")
    await agent.leave()
    node.ack_exit = True
    await agent.listen()
    assert await node.ended() == 0
    assert [m["code"] for m in node.said("exit")] == [4, 4]
    assert json.loads(read_left_file(node, "result.0.json"))["code"] == 4


async def test_end_of_program_is_reported_before_output(agent: FakeAgent) -> None:
    """Delivery of the output may take long, and the exit code follows it."""
    node = await agent.start("7.1.0", 0, "127.0.1.1")
    node.ack_output = False
    node.send(**make_plan([node], ["sh", "-c", "head -c 1000000 /dev/zero"]))
    await node.expect("ending")
    assert not node.said("exit")
    node.ack_output = True
    node.send(t="output", offset=len(node.output))
    assert (await node.expect("exit"))["code"] == 0
