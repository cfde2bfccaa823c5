"""Hosts with slots of several queues: Grid Engine takes a node's slots from one or several queues."""

import os
import subprocess
from pathlib import Path

import pytest

from koalapy.agent.lrm.port import LrmSubmission
from koalapy.agent.lrm.script import write_script
from koalapy.agent.lrm.sge.adapter import make_snapshot
from koalapy.agent.lrm.sge.answers import Listing, QueueInstance
from koalapy.agent.lrm.sge.commands import Layout

QUEUES = ("long.q", "short.q")


@pytest.mark.parametrize(
    ("long", "short", "expected"),
    [
        ((2, 0, ""), (2, 0, ""), "idle"),
        ((1, 0, ""), (1, 0, ""), "idle"),  # a free slot in each queue
        ((2, 1, ""), (2, 0, ""), "background"),  # free slots, but not the whole node
        ((2, 0, "d"), (2, 0, ""), "idle"),
        ((1, 0, "d"), (1, 0, ""), "down"),  # one free slot, and a node has two
        ((1, 0, "a"), (1, 0, ""), "background"),
        ((2, 0, "d"), (2, 0, "u"), "down"),
    ],
)
def test_host_in_two_queues_counts_once(long: tuple[int, int, str], short: tuple[int, int, str], expected: str) -> None:
    instances = [
        QueueInstance(queue, "h1", states, used, 0, total)
        for queue, (total, used, states) in zip(QUEUES, (long, short), strict=True)
    ]
    layout = Layout(2, frozenset((queue, "h1") for queue in QUEUES))
    snapshot = make_snapshot(Listing(tuple(instances), ()), layout, (), ())
    assert (snapshot.total, {name for name in ("idle", "background", "down") if getattr(snapshot, name)}) == (
        1,
        {expected},
    )


@pytest.mark.processes
def test_host_in_two_queues_gets_one_runner(tmp_path: Path) -> None:
    """Such a host has a line for each queue in the host file."""
    hosts, starts = tmp_path / "hosts", tmp_path / "starts"
    hosts.write_text("h1 1 long.q@h1 <NULL>\nh1 1 short.q@h1 <NULL>\nh2 1 short.q@h2 <NULL>\nh2 1 long.q@h2 <NULL>\n")
    qrsh = tmp_path / "qrsh"
    qrsh.write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
    qrsh.chmod(0o700)
    started = ["/bin/sh", "-c", f'echo "$KOALA_NODE_INDEX $KOALA_NODE" >>{starts}']
    script = write_script(LrmSubmission("koala-x", 2, started, {}, tmp_path, tmp_path / "out"), "qrsh")
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PE_HOSTFILE": str(hosts)}
    subprocess.run(["/bin/sh", str(script)], env=environment, check=True, timeout=30)
    assert sorted(starts.read_text().splitlines()) == ["0 h1", "1 h2"]
