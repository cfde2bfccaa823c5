"""What runners leave in files when the key that seals these is lost: agent and resource manager were killed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from koalapy.agent.components.component import Component, lrm_name
from koalapy.agent.components.outputlog import OutputLog
from koalapy.agent.core.spool import Folder
from koalapy.runner.output import Output
from koalapy.runner.session import seal_file
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import claim, secret_of

T = "7.1.0"
PLAN = {"launcher": "processes", "head": T}
SUCCESS = {"code": 0, "error": "", "infrastructure": False, "stopped": False, "warned": False}
HOST = {"host": "10.0.0.1", "name": "n1"}


def recall(path: Path, key: bytes) -> Component:
    """Return the component as an agent recalls it whose resource manager has that key."""
    return Component.recall("test", T, Folder(path, secret_of=lambda node: key))


def kept_output(component: Component) -> bytes:
    pieces = []
    while (piece := component.output.next_piece()) is not None:
        component.output.acknowledge(component.output.sent)
        pieces.append(piece.data)
    return b"".join(pieces)


def leave_result(path: Path, node: int, output: Output, key: bytes) -> None:
    """End a node's runner: it leaves what it did not send, and its result."""
    output.save()
    name = f"result.{node}.json"
    result = json.dumps(SUCCESS | HOST | {"output": output.total}).encode()
    (path / name).write_bytes(seal_file(key, name, result))


@pytest.fixture
def start(tmp_path: Path) -> Callable[[int], list[Output]]:
    """Let go a component of so many nodes; return what its runners have of their programs' output."""

    def _start(nodes: int) -> list[Output]:
        Folder(tmp_path).write(submit={"size": nodes, "lease": None}, lrm="1", open=PLAN)
        return [Output(str(tmp_path / f"output.{node}"), b"old", block=8) for node in range(nodes)]

    return _start


@pytest.mark.parametrize("nodes", [1, 2])
def test_result_file_after_lost_key_has_all_out(
    tmp_path: Path, start: Callable[[int], list[Output]], nodes: int
) -> None:
    for node, output in enumerate(start(nodes)):
        for line in range(5):
            output.append(f"node {node} line {line}\n".encode())
        output.append(b"no end")
        leave_result(tmp_path, node, output, b"old")
    assert recall(tmp_path, b"old").exit_code == 0
    component = recall(tmp_path, b"new")
    component.lrm_ended(None)
    assert (component.exit_code, component.error, component.output.missing) == (0, "", "")
    output_text = kept_output(component)
    for node in range(nodes):
        assert output_text.count(f"node {node} line ".encode()) == 5
    assert output_text.count(b"no end") == nodes


def test_reported_result_is_recalled_after_lost_key(tmp_path: Path, start: Callable[[int], list[Output]]) -> None:
    start(1)
    first = recall(tmp_path, b"old")
    first.output.take(0, 0, b"all\n")
    first.node_ended(0, SUCCESS | HOST)
    component = recall(tmp_path, b"new")
    component.lrm_ended(None)
    assert (component.exit_code, component.error, component.output.missing) == (0, "", "")
    assert component.status().hosts == ("10.0.0.1",)


def test_unverified_output_is_reported_missing(tmp_path: Path, start: Callable[[int], list[Output]]) -> None:
    (output,) = start(1)
    output.append(b"some line\n" * 5)
    leave_result(tmp_path, 0, output, b"old")
    component = recall(tmp_path, b"new")
    component.lrm_ended(None)
    assert component.exit_code is None
    assert "no longer knows it" in component.error
    assert "node 0" in component.output.missing


def test_result_without_all_output_says_what_is_missing(tmp_path: Path, start: Callable[[int], list[Output]]) -> None:
    """There was no room for the rest, and its runner has not come back."""
    (output,) = start(1)
    for line in range(3):
        output.append(f"line {line}\n".encode())
    leave_result(tmp_path, 0, output, b"old")
    (tmp_path / "output.0.14").unlink()
    first = recall(tmp_path, b"old")
    assert first.output.missing == "", "its runner may still come back"
    component = recall(tmp_path, b"new")
    component.lrm_ended(None)
    assert component.exit_code == 0
    assert component.output.missing.startswith("7 bytes of node 0")


@pytest.mark.parametrize("lost", [0, 8, 16])
def test_runner_that_comes_back_after_its_files_were_copied_sends_the_rest(tmp_path: Path, lost: int) -> None:
    """A file that is not there is still in the runner's memory."""
    spool = tmp_path / "spool"
    spool.mkdir()
    output = Output(str(spool / "output.0"), b"old", block=8)
    for line in range(3):
        output.append(f"line {line}\n"[:8].ljust(8).encode())
    output.save()
    folder, log = Folder(spool, secret_of=lambda node: b"old"), OutputLog(spool, 1)
    unsent = [(start, path) for start, path in folder.unsent()[0] if start != lost]
    log.copy_unsent(0, unsent, output.total, folder.left)
    assert log.received(0) == lost
    output.acknowledge(log.greet(0, output.start))
    for offset, data in output.chunks():
        log.take(0, offset, data)
    assert log.received(0) == output.total
    assert log.missing == ""


async def test_agent_sends_saved_output_of_runner_that_does_not_come_back(daemon: FakeDaemon, tmp_path: Path) -> None:
    """The resource manager has not ended the job: the daemon has the success and all of the output before that."""
    async with serving(MemoryLrm(), daemon, tmp_path):
        runner = await claim(daemon, tmp_path)
        await daemon.open(["true"], T)
        await runner.hears("open")
        await runner.output(0, b"first\n")
        name = lrm_name(daemon.instance, T)
        spool = tmp_path / daemon.instance / T
        output = Output(str(spool / "output.0"), secret_of(name))
        output.append(b"first\nlast\n")
        leave_result(spool, 0, output, secret_of(name))
        runner.writer.transport.abort()
        await daemon.until(lambda: daemon.output.get(T) == b"first\nlast\n")
        assert daemon.status(T)["state"] == "claimed"
        await daemon.until(lambda: daemon.status(T).get("program_exit") == 0)
