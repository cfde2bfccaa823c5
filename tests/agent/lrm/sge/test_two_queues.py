"""Hosts with slots of several queues: Grid Engine takes a node's slots from one or several queues."""

import os
import subprocess
from pathlib import Path

import pytest

from koalapy.agent.lrm.port import LrmSubmission
from koalapy.agent.lrm.script import write_script


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
