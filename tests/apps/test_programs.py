"""The applications under a real mpirun, with one rank and several."""

import json
import os
import subprocess
import sys

import pytest

from tests.needs import MPI, MPIRUN, needs

TIMEOUT_S = 540.0
"""On a busy machine, ranks in lockstep lose a time slice at each of thousands of steps."""
YIELDING = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"}
"""As in embedded clusters, a waiting rank yields its processor."""
pytestmark = [pytest.mark.mpi, needs(MPI), pytest.mark.processes]


def run_program(ranks: int, name: str, *options: str) -> "subprocess.CompletedProcess[str]":
    flags = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
    command = [MPIRUN, *flags, "-np", str(ranks), sys.executable, "-m", f"koalapy.apps.{name}", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, start_new_session=True, env=YIELDING
    )


@pytest.mark.parametrize("ranks", [1, 3, 6])
@pytest.mark.parametrize("name", ["prime", "poisson", "wave", "allgather"])
def test_program_verifies_its_result(name: str, ranks: int) -> None:
    result = run_program(ranks, name)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("check: ")
    assert lines[-1].endswith(": passed")
    assert sorted(int(line.split()[1]) for line in lines if line.startswith("rank ")) == list(range(ranks))


def test_pingpong_json_has_each_direction_in_one_line() -> None:
    result = run_program(2, "pingpong", "--json", "--repeats", "5")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert (report["program"], report["passed"], report["latency_bytes"], report["repeats"]) == (
        "pingpong",
        True,
        65536,
        5,
    )
    (pair,) = report["pairs"]
    forward, back = pair["ways"]
    assert (pair["ranks"], forward["from"], forward["to"], back["from"], back["to"]) == ([0, 1], 0, 1, 1, 0)
    assert pair["latency"] == pytest.approx((forward["latency"] + back["latency"]) / 2)
    assert 2 / pair["bandwidth"] == pytest.approx(1 / forward["bandwidth"] + 1 / back["bandwidth"])
    assert all(1 <= direction["repeats"] <= 5 and direction["latency"] > 0 for direction in (forward, back))


def test_pingpong_with_invalid_options_is_rejected() -> None:
    for options in (("--repeats", "0"), ("--budget", "0"), ("--budget", "nan")):
        assert run_program(2, "pingpong", *options).returncode == 2


def test_pingpong_measures_every_pair() -> None:
    result = run_program(3, "pingpong", "--no-where")
    assert result.returncode == 0, result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines()[1:3]] == ["0 - 1", "0 - 2"]
    assert result.stdout.endswith("passed\n")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("poisson", ("--tolerance", "0", "--grid", "16")),
        ("poisson", ("--iterations", "3")),
        ("wave", ("--tolerance", "0", "--steps", "50")),
        ("prime", ("--limit", "1000", "--expect", "167")),
    ],
)
def test_program_with_wrong_result_exits_with_1(name: str, options: tuple[str, ...]) -> None:
    result = run_program(2, name, *options)
    assert result.returncode == 1
    assert result.stdout.rstrip().endswith("FAILED")


def test_prime_with_unlisted_limit_counts_by_sums() -> None:
    assert "check: 1001 = 1001: passed" in run_program(2, "prime", "--limit", "7927").stdout


@pytest.mark.parametrize(
    ("name", "options"),
    [("prime", ("--limit", "0")), ("poisson", ("--grid", "1")), ("wave", ("--steps", "0")), ("allgather", ("--x",))],
)
def test_program_with_invalid_options_exits_with_2(name: str, options: tuple[str, ...]) -> None:
    result = run_program(2, name, *options)
    assert result.returncode == 2
    assert result.stderr.count(options[0]) == 1


def test_pingpong_needs_two_ranks() -> None:
    result = run_program(1, "pingpong")
    assert result.returncode == 2
    assert "needs 2 ranks" in result.stderr
