"""The applications under a real mpirun, with one rank and several."""

import json
import os
import subprocess
import sys

import pytest

from tests.needs import MPI, MPIRUN, needs

PATIENCE = 540.0
"""Seconds. Ranks in lockstep cost a time slice at each of thousands of steps where others want the processors, too."""
YIELDING = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"}
"""As in embedded clusters: a rank that waits gives its processor away."""
pytestmark = [pytest.mark.mpi, needs(MPI), pytest.mark.processes]


def run(ranks: int, name: str, *options: str) -> "subprocess.CompletedProcess[str]":
    flags = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
    command = [MPIRUN, *flags, "-np", str(ranks), sys.executable, "-m", f"koalapy.apps.{name}", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, start_new_session=True, env=YIELDING
    )


@pytest.mark.parametrize("ranks", [1, 3, 6])
@pytest.mark.parametrize("name", ["prime", "poisson", "wave", "allgather"])
def test_the_check_passes(name: str, ranks: int) -> None:
    done = run(ranks, name)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("check: ")
    assert lines[-1].endswith(": passed")
    assert sorted(int(line.split()[1]) for line in lines if line.startswith("rank ")) == list(range(ranks))


def test_pingpong_tells_programs_each_way_of_a_pair_in_one_line() -> None:
    done = run(2, "pingpong", "--json", "--repeats", "5")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert (told["program"], told["passed"], told["latency_bytes"], told["repeats"]) == ("pingpong", True, 65536, 5)
    (pair,) = told["pairs"]
    there, back = pair["ways"]
    assert (pair["ranks"], there["from"], there["to"], back["from"], back["to"]) == ([0, 1], 0, 1, 1, 0)
    assert pair["latency"] == pytest.approx((there["latency"] + back["latency"]) / 2)
    assert 2 / pair["bandwidth"] == pytest.approx(1 / there["bandwidth"] + 1 / back["bandwidth"])
    assert all(1 <= way["repeats"] <= 5 and way["latency"] > 0 for way in (there, back))


def test_pingpong_asks_for_sense() -> None:
    for options in (("--repeats", "0"), ("--budget", "0"), ("--budget", "nan")):
        assert run(2, "pingpong", *options).returncode == 2


def test_pingpong_measures_every_pair() -> None:
    done = run(3, "pingpong", "--no-where")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[1:3]] == ["0 - 1", "0 - 2"]
    assert done.stdout.endswith("passed\n")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("poisson", ("--tolerance", "0", "--grid", "16")),
        ("poisson", ("--iterations", "3")),
        ("wave", ("--tolerance", "0", "--steps", "50")),
        ("prime", ("--limit", "1000", "--expect", "167")),
    ],
)
def test_a_wrong_result_is_exit_code_1(name: str, options: tuple[str, ...]) -> None:
    done = run(2, name, *options)
    assert done.returncode == 1
    assert done.stdout.rstrip().endswith("FAILED")


def test_a_limit_without_a_known_count_is_counted_in_another_way() -> None:
    assert "check: 1001 = 1001: passed" in run(2, "prime", "--limit", "7927").stdout


@pytest.mark.parametrize(
    ("name", "options"),
    [("prime", ("--limit", "0")), ("poisson", ("--grid", "1")), ("wave", ("--steps", "0")), ("allgather", ("--x",))],
)
def test_bad_options_are_exit_code_2_and_told_once(name: str, options: tuple[str, ...]) -> None:
    done = run(2, name, *options)
    assert done.returncode == 2
    assert done.stderr.count(options[0]) == 1


def test_pingpong_needs_two_ranks() -> None:
    done = run(1, "pingpong")
    assert done.returncode == 2
    assert "needs 2 ranks" in done.stderr
