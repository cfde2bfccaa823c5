"""A follower of a hostile head node starts only its own, guarded MPI daemon."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import strategies as st

from koalapy.agent.runners.runner_messages import Relay
from koalapy.runner.exec_guard import ExecGuard
from koalapy.runner.openmpi import MAX_REASON_LENGTH, Follower
from koalapy.runner.parameters import LAUNCHES_NOTHING, REQUIRED, SHARED
from koalapy.runner.plan import PLAIN, Plan
from koalapy.runner.processes import find_program
from koalapy.runner.settings import Failure
from tests.fuzz.campaign import Figures, run_campaign
from tests.fuzz.messages import ANYTHING, TEXTS
from tests.runner.conftest import FakeNode, make_plan
from tests.runner.test_parameters import BY_SERIES

pytestmark = pytest.mark.processes

EXAMPLES = 60
MAX_ACTS = 12
HEAD, OWN = ("7.1.0", 0), ("7.1.1", 0)
COMMAND = [sys.executable, "-c", "print('of the job')"]
VALID = dict(BY_SERIES)
HOSTILE_NAMES = (
    *("plm", "plm_ssh_agent", "plm_rsh_agent", "odls_base_exec_agent", "orte_fork_agent", "filem", "ess"),
    *("mca_base_component_path", "mca_base_env_list", "prte_launch_agent", "orte_launch_agent", "prte_parent_uri"),
    *("LD_PRELOAD", "--personality", "-x", "prte_tmpdir_base", "orte_prefix", "prte_prefix", "mca_base_param_files"),
)
HOSTILE_VALUES = (
    *("; id > MARK; prted", "$(touch MARK)", "`touch MARK`", "x --prtemca plm ssh", "/tmp/evil", "\n", "a\0b", "1\n"),
    *("--exec-agent", "../../evil.so", "'; touch MARK; '", "tcp://x", "1;tcp://127.0.0.1:1;touch MARK"),
)
names = st.sampled_from([*HOSTILE_NAMES, *VALID[4], *VALID[5]]) | TEXTS
values = st.sampled_from([*HOSTILE_VALUES, *VALID[4].values(), *VALID[5].values()]) | TEXTS | ANYTHING
hosts = st.lists(
    st.sampled_from(["127.0.1.1", "127.0.2.1", "127.0.3.1", "evil.example; id", "-x", "a b", ""]), max_size=3
)


@st.composite
def parameters(draw: st.DrawFn, series: int) -> Any:
    """Draw the parameters of an honest head node, mostly with changed or additional ones."""
    sent: dict[Any, Any] = dict(VALID[series])
    for name in draw(st.lists(st.sampled_from(sorted(sent)), max_size=1)):
        sent[name] = draw(values)
    sent.update(draw(st.dictionaries(names, values, max_size=draw(st.sampled_from([0, 0, 1, 2])))))
    return draw(st.sampled_from([sent] * 9 + [None])) if draw(st.booleans()) else sent


@st.composite
def payloads(draw: st.DrawFn, series: int) -> Any:
    route = st.integers(-1, 3) | ANYTHING
    ports = st.lists(st.tuples(st.integers(-1, 70_000), st.text(max_size=3)).map(list), max_size=3) | ANYTHING
    text = TEXTS | ANYTHING
    fields_by_op: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "launch": {"parameters": parameters(series), "namesakes": text, "command": st.sampled_from(HOSTILE_VALUES)},
        "probe": {"way": route, "doors": ports},
        "move": {"way": route, "hosts": hosts | ANYTHING},
        "unreached": {"error": text},
        "noted": {},
        "launched": {"index": route},
    }
    op = draw(st.sampled_from(["launch", "launch", "launch", *fields_by_op]))
    payload = {name: draw(strategy) for name, strategy in fields_by_op[op].items()}
    for name in (
        draw(st.lists(st.sampled_from(sorted(payload)), max_size=1)) if payload and not draw(st.integers(0, 4)) else []
    ):
        del payload[name]
    return {**payload, "op": draw(st.just(op) | TEXTS) if not draw(st.integers(0, 9)) else op}


@dataclass(frozen=True)
class Attack:
    series: int
    acts: tuple[tuple[tuple[str, int], Any], ...]


@st.composite
def attacks(draw: st.DrawFn) -> Attack:
    series = draw(st.sampled_from([5, 4]))
    senders = st.sampled_from([HEAD, HEAD, HEAD, HEAD, ("7.1.1", 0), ("", 0), ("8.1.0", 0)])
    return Attack(series, tuple(draw(st.lists(st.tuples(senders, payloads(series)), min_size=1, max_size=MAX_ACTS))))


class AttackedNode:
    """A fake runner of the follower, which records the programs that it should start and its ends."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.settings = SimpleNamespace(name="n1", program_environment=environment, lease=60.0)
        self.alarms: dict[str, Callable[[], None]] = {}
        self.loop = SimpleNamespace(
            time=lambda: 0.0,
            set_alarm=lambda name, _, call: self.alarms.update({name: call}),
            cancel_alarm=lambda name: self.alarms.pop(name, None),
            watch=lambda *_: None,
            forget=lambda *_: None,
        )
        self.spawned: list[tuple[list[str], dict[str, str], ExecGuard | None]] = []
        self.ends: list[tuple[int | None, str]] = []

    def spawn(self, command: list[str], environment: dict[str, str], guard: ExecGuard | None = None) -> int:
        assert find_program(command[0], environment) == command[0]
        self.spawned.append((command, environment, guard))
        return 4711

    def make_folder(self) -> str:
        return str(self.folder)

    def report_running(self) -> None: ...

    def relay(self, token: str, node: int, payload: dict[str, Any]) -> None:
        """Check that the agent would accept the message."""
        Relay(t="relay", token=token, node=node, payload=payload)

    def say(self, line: str) -> None: ...

    def conclude_part(self) -> None:
        self.conclude(None)

    def conclude(self, code: int | None, error: str = "", *, infrastructure: bool = False) -> None:
        assert isinstance(error, str)
        assert len(error) <= MAX_REASON_LENGTH
        self.ends.append((code, error))


def make_installation(folder: Path, series: int) -> Path:
    (folder / "bin").mkdir(parents=True)
    for name in ("mpirun", *(("prterun", "prted") if series == 5 else ("orterun", "orted"))):
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def attack_follower(folder: Path, attack: Attack, figures: Figures) -> None:
    prefix = make_installation(folder / "mpi", attack.series)
    (folder / "run").mkdir()
    environment = {"KOALA_MPI_PREFIX": str(prefix), "PATH": os.defpath, "LD_LIBRARY_PATH": "/own/lib"}
    nodes = [FakeNode(cast(Any, None), *place, host) for place, host in ((HEAD, "127.0.1.1"), (OWN, "127.0.2.1"))]
    node = AttackedNode(folder / "run", environment)
    gang = Plan(make_plan(nodes, COMMAND, launcher="openmpi"), *OWN)
    node.environment = gang.environment(cast(Any, node.settings))
    follower = Follower(cast(Any, node), gang)
    follower.start()
    script = (folder / "run" / "koala-rank").read_text().replace("127.0.3.1", "127.0.2.1")
    try:
        for sender, payload in attack.acts:
            figures.counts["relays"] += 1
            try:
                follower.relayed(sender, payload)
            except Failure as failure:
                figures.counts["refused"] += 1
                node.conclude(failure.code, failure.message[:MAX_REASON_LENGTH], infrastructure=True)
            except (KeyError, TypeError, ValueError, IndexError):
                figures.counts["invalid"] += 1  # as the runner counts it
            check_spawned(node, attack.series, prefix)
        for alarm in list(node.alarms.values()):
            alarm()
    finally:
        follower.close()
    figures.counts["daemons"] += len(node.spawned)
    final_script = (
        (folder / "run" / "koala-rank").read_text().replace("127.0.1.1", "127.0.2.1").replace("127.0.3.1", "127.0.2.1")
    )
    assert final_script == script.replace("127.0.1.1", "127.0.2.1"), (
        "ranks run the job's command in this node's environment"
    )
    assert sorted(os.listdir(folder)) == ["mpi", "run"]
    assert os.listdir(folder / "run") == ["koala-rank"]


def check_spawned(node: AttackedNode, series: int, prefix: Path) -> None:
    assert len(node.spawned) <= 1
    for command, environment, guard in node.spawned:
        assert command[0] == f"{prefix}/bin/{'prted' if series == 5 else 'orted'}"
        assert isinstance(guard, ExecGuard)
        flags = [
            argument for argument in command[1:] if argument.startswith("-") and argument not in ("--prtemca", "--mca")
        ]
        assert set(flags) <= {"--leave-session-attached", "--allow-run-as-root"}
        parameter_names = [b for a, b in pairwise(command) if a in ("--prtemca", "--mca")]
        own_parameters = {
            *LAUNCHES_NOTHING[series],
            "ess",
            "odls_base_exec_agent" if series == 5 else "orte_fork_agent",
        }
        assert set(parameter_names) <= REQUIRED[series].keys() | SHARED[series].keys() | own_parameters
        assert len(parameter_names) == len(set(parameter_names))
        assert not any(
            set(argument) & set(" \t\n\0'\"$`|&<>\\") for argument in command if not argument.startswith("/bin/sh ")
        )
        assert environment["LD_LIBRARY_PATH"] == "/own/lib"
        assert "MARK" not in repr((command, environment))
        assert all(PLAIN.fullmatch(host) for host in environment["KOALA_HOSTS"].split(","))


@pytest.mark.evidence("P5")
def test_follower_of_hostile_head_starts_only_its_daemon(tmp_path: Path) -> None:
    numbers = count(1)

    def body(attack: Attack, figures: Figures) -> None:
        attack_follower(tmp_path / f"{next(numbers)}", attack, figures)

    figures = run_campaign("hostile head node", EXAMPLES, attacks(), body)
    assert figures.counts["daemons"] > 0
    assert figures.counts["refused"] > 0
